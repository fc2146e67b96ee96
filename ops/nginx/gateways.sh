#!/usr/bin/env bash
# The addresses of a run's gateways as nginx reads them, beside midflight.conf:
#
#     ops/nginx/gateways.sh /shared/runs/demo > /etc/nginx/conf.d/midflight-gateways.conf
#
# They are in the endpoint.json of each gateway, which only the run's user may read. Where a gateway has moved to another machine it is
# asked again, and nginx reloaded.
set -euo pipefail
run=${1:?usage: ops/nginx/gateways.sh RUN}

address() {
    if [ ! -r "$1/endpoint.json" ]; then
        echo "$1/endpoint.json is not there, or not to be read: give the folder of a run that goes on, as its user" >&2
        exit 2
    fi
    sed 's|.*"url":"http://\([^"/]*\).*|\1|' "$1/endpoint.json"
}

found=("$(address "$run")")
while [ -d "$run/shards/${#found[@]}" ]; do
    found+=("$(address "$run/shards/${#found[@]}")")
done

upstream() {
    echo "upstream $1 {"
    shift
    printf '    server %s max_fails=0;\n' "$@"
    # Shorter than a gateway keeps a connection on which nothing is asked.
    printf '    keepalive 64;\n    keepalive_timeout 60s;\n}\n'
}

for shard in "${!found[@]}"; do
    upstream "midflight_gateway_$shard" "${found[$shard]}"
done
upstream midflight_any "${found[@]}"
# nginx reads these two names, not the shell.
# shellcheck disable=SC2016
echo 'map $midflight_shard $midflight_gateway {'
echo '    default midflight_gateway_0;'
for shard in "${!found[@]}"; do
    echo "    $shard midflight_gateway_$shard;"
done
echo '}'
