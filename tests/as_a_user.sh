#!/usr/bin/env bash
# Walks the README's path as a new user does: a fresh environment, the newest packages that pyproject.toml allows but torch
# (no constraints), an empty cache, no compiled kernels, and a working directory outside of the clone.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"

"${PYTHON:-python3}" -m venv venv
pip=(venv/bin/python -m pip install -q --disable-pip-version-check)
"${pip[@]}" torch==2.13.0 # the release of the suite: the newest one of an index may be a build of several gigabytes
"${pip[@]}" "$root[cpu]"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false SPEC_TRL_CACHE="$scratch/cache" XDG_CACHE_HOME="$scratch/cache"

venv/bin/spec-trl --version
venv/bin/spec-trl bench "$root/examples/data/stories260K" --seconds 180 # compiling included; it ends as soon as all is measured
PYTHONSAFEPATH=1 venv/bin/python "$root/tests/as_a_user.py" "$root"
