"""The distributions that `make dist` makes, installed as a user installs them. `make test-package` runs these."""
