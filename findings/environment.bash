# Sourced by the scripts of this folder, which then install pinned packages by $PYTHON.
# FINDINGS_VENV names a virtual environment to make once and use again; without it one is made in a temporary folder and removed.
set -euo pipefail
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
venv="${FINDINGS_VENV:-$scratch/venv}"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
PYTHON="$venv/bin/python"
PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
export PYTHONPATH OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TMPDIR="$scratch" PYTHONWARNINGS=ignore
export PIP_DISABLE_PIP_VERSION_CHECK=1
