"""The files of `ops`, run as far as a machine without Docker, Slurm, systemd and Kubernetes can. `make lint-ops` runs these."""
