# Sourced by the scripts of this folder: `environment PACKAGE...` sets PYTHON to an interpreter that has these pinned packages.
# FINDINGS_VENV names a virtual environment to make once and use again; without it one is made in a temporary folder and removed.
set -euo pipefail
environment() {
  local scratch; scratch="$(mktemp -d)"
  trap "rm -rf '$scratch'" EXIT
  local venv="${FINDINGS_VENV:-$scratch/venv}"
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check torch==2.13.0 "$@"
  PYTHON="$venv/bin/python"
  export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TMPDIR="$scratch" PYTHONWARNINGS=ignore
  PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
  export PYTHONPATH
}
