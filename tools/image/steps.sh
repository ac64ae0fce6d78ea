#!/usr/bin/env bash
# What the image is made of, step by step; the Dockerfile runs this file, and so can anyone who wants the same without Docker:
#
#   bash tools/image/steps.sh            as in the image
#   WORK_DIR=/somewhere/dm05 PREFIX=/somewhere/env bash tools/image/steps.sh
#
#   WORK_DIR      the workspace jobs run from, with code and scripts inside  (/root/workspace/dm05)
#   PREFIX        a virtual environment, made when missing; empty: the Python in use itself
#   PYTHON        the Python to use or to make the environment of           (python3)
#   SYSTEM        1 installs the system packages too (needs root)           (0)
#   DEPENDENCIES  0 leaves out what pip would download                      (1)
#   EXTRAS        optional parts of the package                             (train,video,tensorboard)
set -euo pipefail

source_dir="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
WORK_DIR="${WORK_DIR:-/root/workspace/dm05}"
PREFIX="${PREFIX:-}"
PYTHON="${PYTHON:-python3}"
EXTRAS="${EXTRAS:-train,video,tensorboard}"

step() { printf '\n== %s\n' "$*"; }

system_packages() {
  # gcc: Triton compiles a small launcher for each kernel on the machine it runs on.
  apt-get update
  DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends gcc libc6-dev procps
  rm -rf /var/lib/apt/lists/*
}

environment() {
  if [[ -n "$PREFIX" && ! -x "$PREFIX/bin/python" ]]; then
    "$PYTHON" -m venv "$PREFIX"
  fi
  [[ -z "$PREFIX" ]] || PYTHON="$PREFIX/bin/python"
}

code() {
  mkdir -p "$WORK_DIR" "$WORK_DIR/data" "$WORK_DIR/checkpoints" "$WORK_DIR/norm_stats" "$WORK_DIR/../outputs"
  if [[ "$source_dir" != "$(cd "$WORK_DIR" && pwd)" ]]; then
    local part
    for part in pyproject.toml README.md data_schemas prep train scripts tools docs; do
      [[ ! -e "$source_dir/$part" ]] || cp -a "$source_dir/$part" "$WORK_DIR/"
    done
  fi
  find "$WORK_DIR" -name __pycache__ -type d -prune -exec rm -rf {} +
}

packages() {
  if [[ "${DEPENDENCIES:-1}" == 1 ]]; then
    "$PYTHON" -m pip install --no-cache-dir "$WORK_DIR[$EXTRAS]"
  else
    local build=()
    ! "$PYTHON" -c 'import hatchling' 2>/dev/null || build=(--no-build-isolation)
    "$PYTHON" -m pip install --no-cache-dir --no-deps ${build[@]+"${build[@]}"} "$WORK_DIR"
  fi
}

check() {
  local bin
  bin="$(dirname "$(command -v "$PYTHON")")"
  (cd / && "$bin/dm05-prep" --help >/dev/null)
  (cd / && "$bin/dm05-train" --help >/dev/null)
  (cd "$WORK_DIR" && PYTHON="$PYTHON" bash scripts/run_full_sft_distributed.sh --dry-run)
}

if [[ "${SYSTEM:-0}" == 1 ]]; then
  step "system packages"
  system_packages
fi
step "environment"
environment
step "code and scripts to $WORK_DIR"
code
step "Python packages"
packages
step "check"
check
step "done: jobs run from $WORK_DIR"
