#!/usr/bin/env bash
# One machine of a Ray cluster, as Midflight wants it, until it is stopped. The first says at which address the others join:
#
#     ops/cluster/machine.sh head
#     ops/cluster/machine.sh 10.0.0.5:6379
#
# What follows is given to `ray start`: --num-gpus=8, --resources='{"trainer": 2}'. The same token must lie on every machine, in
# ~/.ray/auth_token or where RAY_AUTH_TOKEN_PATH says; `ray get-auth-token --generate` makes one. MIDFLIGHT_ADDRESS is the address by which
# the others reach this machine, where it has several; RAY the command, where it is not on the path.
set -euo pipefail
head=${1:?usage: ops/cluster/machine.sh head|HOST:PORT [options of ray start]}
shift

token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "$token" ]; then
    echo "there is no token in $token: copy it from another machine of the cluster, or make one: ray get-auth-token --generate" >&2
    exit 2
fi

# Whoever reaches a cluster without a token can run anything on it.
export RAY_AUTH_MODE=token
# Else Ray ends processes of ours when somebody else fills the machine.
export RAY_memory_monitor_refresh_ms=0
export RAY_USAGE_STATS_ENABLED=0
ulimit -n "$(ulimit -H -n)"

if [ "$head" = head ]; then
    place=(--head "--port=${PORT:-6379}" --include-dashboard=false)
else
    place=("--address=$head")
fi
if [ -n "${MIDFLIGHT_ADDRESS:-}" ]; then
    place+=("--node-ip-address=$MIDFLIGHT_ADDRESS")
fi

# The object store is not used: it gets what it takes at least.
exec "${RAY:-ray}" start --block --disable-usage-stats --object-store-memory=80000000 "${place[@]}" "$@"
