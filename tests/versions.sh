#!/usr/bin/env bash
# Runs the test suite under other releases of transformers than the pinned one: tests/versions.sh [RELEASE ...]
# By default under the oldest, the pinned and the newest that pyproject.toml allows. TORCH=RELEASE chooses another torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

[[ $# -gt 0 ]] || set -- 5.17.0 5.23.0 5.24.0
for version in "$@"; do
  echo "transformers $version"
  venv="$scratch/$version"
  "${PYTHON:-python3}" -m venv "$venv"
  pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
  "${pip[@]}" "torch==${TORCH:-2.13.0}"
  "${pip[@]}" -e ".[test]" "transformers==$version"
  make --no-print-directory unit VENV="$venv"
done
