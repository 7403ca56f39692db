#!/bin/bash
# Runs a program on this host and on others that it reaches by ssh, as one Ray cluster that ends with the program.
#
#     examples/deploy/ssh.sh host-b host-c -- python examples/rlhf/grpo.py --backend ray --nodes 3 --train dp=3
#
# Run it in the folder of the checkout, which the others have at the same path. See docs/deploy/ssh.md.
set -euo pipefail

others=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    others+=("$1")
    shift
done
if [ ${#others[@]} -eq 0 ] || [ $# -lt 2 ]; then
    echo "usage: $0 HOST... -- PROGRAM ARGUMENT..." >&2
    exit 2
fi
shift

VENV=${VENV:-$PWD/.venv}                             # the same path on all hosts
HEAD=${HEAD:-$(hostname -I | cut -d ' ' -f 1)}       # this host, as the others reach it
PORT=${PORT:-6379}                                   # of Ray
read -r -a ssh <<< "${SSH:-ssh -o BatchMode=yes}"
read -r -a start <<< "--disable-usage-stats ${RAY_START_OPTIONS:-}"   # such as --num-cpus=16

if [ ! -x "$VENV/bin/ray" ]; then
    echo "there is no Ray in $VENV: install one there, as docs/deploy/ says, or name another environment by VENV=" >&2
    exit 1
fi
export PATH="$VENV/bin:$PATH"
export RAY_AUTH_MODE=token                           # whoever reaches a Ray without a token can run programs as you
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN RAY_ADDRESS="$HEAD:$PORT"

on() {  # on HOST COMMAND: runs it in the same folder there. The token goes by stdin, for `ps` shows arguments to everyone
    "${ssh[@]}" "$1" "cd '$PWD' && PATH='$VENV/bin':\$PATH RAY_AUTH_MODE=token && export PATH RAY_AUTH_MODE \
        && read -r RAY_AUTH_TOKEN && export RAY_AUTH_TOKEN && $2" <<< "$RAY_AUTH_TOKEN"
}

runs="pgrep -u \$(id -u) -x 'raylet|gcs_server' > /dev/null"   # whether there is a Ray that `ray stop` would end

refuse() {
    echo "a Ray runs on $1 already, and the end of this script would stop it: run the program there, or first: ray stop" >&2
    exit 1
}

stop() {
    for host in "${others[@]}"; do
        on "$host" "ray stop --grace-period 5" > /dev/null 2>&1 || echo "Ray may still run on $host: ray stop" >&2 &
    done
    ray stop --grace-period 5 > /dev/null 2>&1 || true
    wait
}

if eval "$runs"; then refuse "this host"; fi
for host in "${others[@]}"; do
    if on "$host" "$runs"; then refuse "$host"; fi
done
trap stop EXIT
ray start --head --node-ip-address="$HEAD" --port="$PORT" "${start[@]}" > /dev/null
for host in "${others[@]}"; do
    on "$host" "ray start --address='$RAY_ADDRESS' ${start[*]}" > /dev/null
done
"$@"
