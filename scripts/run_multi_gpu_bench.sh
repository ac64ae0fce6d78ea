#!/usr/bin/env bash
# What has to be measured on a machine with several GPUs, step by step:
#
#   bash scripts/run_multi_gpu_bench.sh [table|curves|kill|all]     (all)
#
#   table    step times on 1, 2, 4 ... GPUs, all switches off, on, and one by one; needs no data, no checkpoint
#   curves   the loss of the same global batch on one GPU and on all of them, in one picture
#   kill     kills one rank of a run, then goes on from its last checkpoint on half of the GPUs (one, of an odd number)
#
# Checklist
#   [ ] nvidia-smi topo -m shows NVLink between all GPUs; nothing else runs on them
#   [ ] table: no row says "exit code"; the losses of "baseline" and "all" agree to BF16 rounding
#   [ ] table: "all" scales to 95% or more on 8 GPUs, and beats the published gain over its baseline
#   [ ] table: compare with the prediction in docs/multi_gpu.md and write both down there
#   [ ] curves: the two lines lie on each other
#   [ ] kill: every process ends by itself, with one line that names the rank; nvidia-smi shows no memory in use after
#   [ ] kill: metrics.jsonl holds every step once, and the loss goes on as it was
#
# Variables: GPUS (all here), GLOBAL_BATCH (8 x GPUS), STEPS (300), WORKSPACE_DIR with data and checkpoint (curves,
# kill), OUT (multi_gpu), VENV (.venv).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bin="${VENV:-$here/.venv}/bin"
gpus="${GPUS:-$("$bin/python" -c 'import torch; print(torch.cuda.device_count())')}"
out="${OUT:-multi_gpu}"
steps="${STEPS:-300}"
batch="${GLOBAL_BATCH:-$((8 * gpus))}"
what="${1:-all}"

case "$what" in
  table | curves | kill | all) ;;
  *)
    echo "run_multi_gpu_bench.sh: error: $what is none of table, curves, kill, all" >&2
    exit 2
    ;;
esac
if ((gpus < 2)); then
  echo "run_multi_gpu_bench.sh: error: $gpus GPUs here, at least 2 are needed. Set GPUS for a run on the CPU" >&2
  exit 2
fi
if ((batch % gpus)); then
  echo "run_multi_gpu_bench.sh: error: a global batch of $batch does not divide over $gpus GPUs. Set GLOBAL_BATCH" >&2
  exit 2
fi

# train FOLDER PROCESSES SAMPLES_AT_ONCE [flags]: a run of the global batch
train() {
  local folder="$1" processes="$2" each="$3"
  shift 3
  PER_DEVICE_BATCH="$each" TRAIN_STEPS="$steps" NPROC_PER_NODE="$processes" DM05_PERF_ENABLE="${DM05_PERF_ENABLE:-1}" \
    "$bin/python" -m dm05_train.launch --trainer-config.output-dir "$folder" \
    --trainer-config.gradient-accumulation-steps "$((batch / processes / each))" "$@"
}

if [[ "$what" == table || "$what" == all ]]; then
  mkdir -p "$out"
  counts=1
  for ((n = 2; n <= gpus; n *= 2)); do counts+=",$n"; done
  "$bin/python" "$here/tools/bench_multi_gpu.py" --gpus "$counts" --out "$out/table" | tee "$out/table.log"
fi

if [[ "$what" == curves || "$what" == all ]]; then
  each="$((batch / gpus))"
  train "$out/1_gpu" 1 "$each"
  train "$out/${gpus}_gpus" "$gpus" "$each"
  "$bin/python" -m dm05_train.plot "$out/1_gpu" "$out/${gpus}_gpus" --out "$out/curves.png"
fi

if [[ "$what" == kill || "$what" == all ]]; then
  each="$((batch / gpus))"
  fewer="$((gpus % 2 ? 1 : gpus / 2))"
  save=(--trainer-config.save-strategy steps --trainer-config.save-steps "$((steps / 3))")
  train "$out/killed" "$gpus" "$each" "${save[@]}" &
  launcher=$!
  until compgen -G "$out/killed/checkpoint-*/" >/dev/null; do
    kill -0 "$launcher" 2>/dev/null || { wait "$launcher"; exit 1; }
    sleep 1
  done
  torchrun="$(pgrep -P "$launcher" -f dm05_train.launch || echo "$launcher")"
  rank="$(pgrep -P "$torchrun" -f 'm dm05_train( |$)' | tail -n 1)"
  echo "killing rank process $rank"
  kill -KILL "$rank"
  if wait "$launcher"; then
    echo "run_multi_gpu_bench.sh: error: the run ended well with a rank killed" >&2
    exit 1
  fi
  train "$out/killed" "$fewer" "$each" "${save[@]}" --trainer-config.resume latest
fi
