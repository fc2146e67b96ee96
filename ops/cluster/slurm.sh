#!/usr/bin/env bash
# A run over several nodes as a Slurm job, which goes on in a new job when its time is up:
#
#     sbatch --nodes=4 --export=ALL,MIDFLIGHT=/shared/venv/bin/midflight ops/cluster/slurm.sh run.toml /shared/runs/NAME
#
# Environment, these files and the run's folder must lie on a disk that every node sees. The first node has Ray's head, the launcher and
# what else fits; where the parts go is for [cluster] to say.
#SBATCH --job-name=midflight
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=midflight-%j.log
# Three minutes before the time is up, to the shell alone.
#SBATCH --signal=B:USR1@180
# GPUs, where the configuration names them:
##SBATCH --gpus-per-node=8

set -euo pipefail
config=${1:?usage: sbatch ops/cluster/slurm.sh CONFIG FOLDER}
folder=${2:?usage: sbatch ops/cluster/slurm.sh CONFIG FOLDER}
midflight=${MIDFLIGHT:-midflight}
machine=${MACHINE:-${SLURM_SUBMIT_DIR:-.}/ops/cluster/machine.sh}
RAY=${RAY:-$(dirname "$(command -v "$midflight")")/ray}
export RAY OMP_NUM_THREADS=1 RAY_AUTH_MODE=token

# A token of this job's own. It must be read by every node, and by nobody else.
RAY_AUTH_TOKEN_PATH=$(dirname "$folder")/.ray-token-$SLURM_JOB_ID
export RAY_AUTH_TOKEN_PATH
(umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$RAY_AUTH_TOKEN_PATH")
trap 'rm -f "$RAY_AUTH_TOKEN_PATH"' EXIT

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes[0]}
# Two jobs may share a node: each has a port of its own.
export PORT=$((20000 + SLURM_JOB_ID % 10000))
address=$(srun --nodes=1 --ntasks=1 -w "$first" hostname --ip-address | tr ' ' '\n' | grep -v '^127\.' | head -n 1)
cpus=--num-cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=--num-gpus=${SLURM_GPUS_ON_NODE:-0}

MIDFLIGHT_ADDRESS=$address srun --nodes=1 --ntasks=1 --overlap -w "$first" "$machine" head "$cpus" "$gpus" &
# One after the other: many that join at once make Ray's head slow to answer any.
for ((node = 1; node < ${#nodes[@]}; node++)); do
    sleep "${JOIN_SECONDS:-10}"
    srun --nodes=1 --ntasks=1 --overlap -w "${nodes[node]}" "$machine" "$address:$PORT" "$cpus" "$gpus" &
done
sleep "${JOIN_SECONDS:-10}"

going_on=()
if [ -e "$folder/checkpoints/latest" ]; then
    going_on=(--resume)
fi

asked=no
"$midflight" train "$config" --folder "$folder" --set cluster.kind=ray --set "cluster.address=$address:$PORT" \
    --set "cluster.token_file=$RAY_AUTH_TOKEN_PATH" "${going_on[@]}" &
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
