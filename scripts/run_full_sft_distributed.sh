#!/usr/bin/env bash
# Full fine-tuning of DM05 on one machine or many. Start the same line on every machine:
#
#   bash scripts/run_full_sft_distributed.sh [flags of dm05-train]        (--dry-run shows the torchrun command)
#
# Where things are
#   WORKSPACE_DIR     workspace with data/, norm_stats/ and checkpoints/    (the current folder)
#   DATA_PATH         takes the place of WORKSPACE_DIR/data
#   NORM_STATS_PATH   takes the place of WORKSPACE_DIR/norm_stats
# How much
#   PER_DEVICE_BATCH  samples a GPU takes at once                           (4)
#   TRAIN_STEPS       optimizer steps                                       (300)
# Which machines
#   NNODES            number of machines        (1; a platform's WORLD_SIZE means the same)
#   RANK              which machine this is     (0 .. NNODES-1; or NODE_RANK)
#   NPROC_PER_NODE    processes a machine       (its GPUs; or GPUS_PER_NODE)
#   MASTER_ADDR       address of machine 0      (needed for several machines)
#   MASTER_PORT       its port                  (29500; any free one on a single machine)
#   JOIN_TIMEOUT      seconds machines wait for each other                  (600)
#   DDP_BUCKET_MB     size of a gradient bucket (1000 on one machine, 512 on several)
#
# SIGTERM and SIGUSR1 make the run save a checkpoint and end with exit code 0.
set -euo pipefail

export PER_DEVICE_BATCH="${PER_DEVICE_BATCH:-4}"
export TRAIN_STEPS="${TRAIN_STEPS:-300}"
# A meeting that fails is said in words; torch would add a stack trace. The ranks themselves log errors.
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-FATAL}"

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
if [[ -z "${PYTHON:-}" && -x "$here/.venv/bin/python" ]]; then
  python="$here/.venv/bin/python"
fi
if ! command -v "$python" >/dev/null; then
  echo "run_full_sft_distributed.sh: error: no $python here. Install Python 3.10 or newer, or set PYTHON" >&2
  exit 1
fi
if ! "$python" -c 'import dm05_train' 2>/dev/null; then
  echo "run_full_sft_distributed.sh: error: $python has no dm05_train. Run: $python -m pip install 'dm05[train]'" >&2
  exit 1
fi
exec "$python" -m dm05_train.launch "$@"
