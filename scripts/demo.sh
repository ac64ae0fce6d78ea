#!/usr/bin/env bash
# The whole job on generated data, on a CPU, in minutes: scripts/demo.sh [DIR]   (make demo calls it)
#
#   DIR/parts, DIR/DM05    what a hub would serve: a LIBERO-like archive in parts, a tiny checkpoint
#   DIR/dm05               the workspace that preparation makes of it
#   DIR/outputs            the training run: metrics.jsonl, loss.png, checkpoint, eval
#
# Variables: VENV (.venv), STEPS of training (200).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What a person has set for a real run must not reach the demo.
unset WORKSPACE_DIR DATA_PATH NORM_STATS_PATH PER_DEVICE_BATCH TRAIN_STEPS DM05_DATASETS

dir="${1:-demo}"
bin="${VENV:-.venv}/bin"
steps="${STEPS:-200}"
workspace="$dir/dm05"
outputs="$dir/outputs"

stage() {
  printf '\n[%3d s] %s\n' "$SECONDS" "$1"
}

# The rates and lengths below suit the tiny model; a real run takes the defaults.
train_flags=(
  --workspace "$workspace"
  --data-config.val-episodes 2
  --trainer-config.output-dir "$outputs"
  --trainer-config.num-train-steps "$steps"
  --trainer-config.per-device-train-batch-size 48
  --trainer-config.model-max-length 128
  --trainer-config.dataloader-num-workers 1
  --trainer-config.logging-steps 20
  --trainer-config.save-at-end
  --optimizer-config.base-lr 3e-3
  --optimizer-config.warmup-steps 20
)

stage "1/7  input: episodes of a small arm, as the parts of one tar, and a tiny checkpoint"
"$bin/dm05-prep" demo "$dir"

stage "2/7  dataset: parts -> one stream -> layout -> index -> statistics"
"$bin/dm05-prep" dataset --source local --uri "$dir/parts" --workspace "$workspace"

stage "3/7  model: the checkpoint into the workspace, names and shapes checked"
"$bin/dm05-prep" model --source local --uri "$dir/DM05" --workspace "$workspace"

stage "4/7  validate: every frame and every image"
"$bin/dm05-prep" validate --deep --workspace "$workspace"

stage "5/7  train: $steps steps of the whole model"
rm -rf "$outputs"
"$bin/dm05-train" "${train_flags[@]}"

stage "6/7  eval: sampled against true actions on the two episodes it never saw"
"$bin/dm05-train" eval --workspace "$workspace" --model-config.model-name-or-path "$outputs/$(printf 'checkpoint-%06d' "$steps")"

stage "7/7  the loss curve"
"$bin/python" -m dm05_train.plot "$outputs" --out "$outputs/loss.png"

cat <<END

[$(printf '%3d' "$SECONDS") s] done. Look at $outputs/loss.png, then try:
  $bin/dm05-prep report --workspace $workspace                        the dataset as a page to look at
  $bin/dm05-prep pack --workspace $workspace                          the memory-mapped form
  $bin/dm05-prep dataset --source hf --workspace dm05                 the real LIBERO (35 GiB)
  $bin/dm05-prep model --source hf --workspace dm05                   the released weights (11.7 GB)
END
