#!/usr/bin/env bash
# A run as a Slurm job on one node, which goes on in a new job when its time is up:
#
#     sbatch --export=ALL,MIDFLIGHT=/path/to/venv/bin/midflight ops/slurm.sh run.toml /shared/runs/NAME
#
# The folder must lie on a disk that every node sees. It is read by `midflight view`, `trace` and `report` from anywhere.
#SBATCH --job-name=midflight
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=midflight-%j.log
# Three minutes before the time is up, to the shell alone.
#SBATCH --signal=B:USR1@180
# GPUs, where the configuration names them:
##SBATCH --gpus=2

set -euo pipefail
config=${1:?usage: sbatch ops/slurm.sh CONFIG FOLDER}
folder=${2:?usage: sbatch ops/slurm.sh CONFIG FOLDER}
midflight=${MIDFLIGHT:-midflight}

ulimit -n "$(ulimit -H -n)"
export OMP_NUM_THREADS=1

going_on=()
if [ -e "$folder/checkpoints/latest" ]; then
    going_on=(--resume)
fi

asked=no

"$midflight" train "$config" --folder "$folder" "${going_on[@]}" &
run=$!
trap 'asked=yes; kill -TERM "$run"' USR1

# A trap ends the first wait; the second is for the run to end in order.
status=0
wait "$run" || status=$?
if [ "$asked" = yes ]; then
    status=0
    wait "$run" || status=$?
    if [ "$status" -ne 0 ]; then
        scontrol requeue "$SLURM_JOB_ID"
        status=0
    fi
fi
exit "$status"
