#!/bin/bash
# GRPO on the nodes of a Slurm job: Ray is started on all of them, the program on the first. See docs/deploy/slurm.md.
#
#     sbatch --nodes=2 --gpus-per-node=8 examples/deploy/slurm.sh --gpus --nodes 2 --train dp=16 --model Qwen/Qwen3-0.6B
#
# Arguments go to examples/rlhf/grpo.py. Submit it in the folder of the checkout, which all nodes have to reach.
#SBATCH --job-name=grpo
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

VENV=${VENV:-$SLURM_SUBMIT_DIR/.venv}                # the same path on all nodes
HEAD=${HEAD:-$(hostname -I | cut -d ' ' -f 1)}       # the first node, on which this script runs, as the others reach it
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}      # of Ray: another one for each job, below the ephemeral ports

if [ ! -x "$VENV/bin/ray" ]; then
    echo "there is no Ray in $VENV: install one there, as docs/deploy/ says, or name another environment by VENV=" >&2
    exit 1
fi
export PATH="$VENV/bin:$PATH"
export RAY_AUTH_MODE=token                           # whoever reaches a Ray without a token can run programs as you
RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_TOKEN
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300    # seconds for all nodes to start; 30 are few on a shared file system
export RAY_gcs_rpc_server_reconnect_timeout_s=40     # for other nodes to end after the first one; its `ray stop` takes up to 20

cd "$SLURM_SUBMIT_DIR"
srun --ntasks="$SLURM_JOB_NUM_NODES" --cpus-per-task="$SLURM_CPUS_ON_NODE" \
    ray symmetric-run --address "$HEAD:$PORT" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="$SLURM_CPUS_ON_NODE" --num-gpus="${SLURM_GPUS_ON_NODE:-0}" --disable-usage-stats \
    -- python -u examples/rlhf/grpo.py --backend ray "$@"
