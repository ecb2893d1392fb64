#!/usr/bin/env bash
# Runs tests/applications with the releases of applications named here: tests/applications.sh [PYTEST OPTION ...]
# They call `generate` with criteria and processors of their own. SMOLLM2=FOLDER takes a chat model too (minutes).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

[[ -n "${VENV:-}" ]] || make --no-print-directory venv
VENV="${VENV:-.venv}"
"$VENV/bin/python" -m venv "$scratch/venv" # on top of the suite's environment, which stays as it is
purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
"$VENV/bin/python" -c "$purelib" >"$("$scratch/venv/bin/python" -c "$purelib")/suite.pth"
"$scratch/venv/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt \
  smolagents==1.26.0 langchain-huggingface==0.3.1 langchain-core==0.3.76 lm-eval==0.4.13 xgrammar==0.2.8 outlines==1.3.3
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false SPEC_TRL_CACHE="$scratch/cache"
PYTHONPATH="$PWD" "$scratch/venv/bin/python" -m pytest -q -n 0 "$@" tests/applications
