#!/usr/bin/env bash
# Fetches what a bare GPU machine lacks, as wheels for Python 3.12 on x86-64 Linux:
#
#     bash benchmarks/gpu/wheels.sh [NAME==VERSION ...]
#
# It runs where there is a network, and needs pip (PYTHON names another interpreter). The wheels go to .wheels/, which git
# ignores: take that folder along with the checkout, and quarter.sh installs them there without a network. Bare is a
# machine with torch, triton, an older transformers, accelerate, peft, pyarrow, pandas, scipy, matplotlib, xxhash and
# pytest. What another machine lacks too is named in the arguments; what those need is not fetched by itself.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

pinned=$(grep -E '^(transformers|trl|pydantic|pydantic_core|annotated-types|typing-inspection)==' constraints.txt)
# Not the pinned datasets: it asks for pyarrow 24, and the machine's may be older. 4.7 is the oldest that trl 1.16 takes,
# and dill and multiprocess are the newest that it takes.
others="datasets==4.7.0 dill==0.4.0 multiprocess==0.70.18"

folder=${WHEELS:-.wheels}
rm -rf "$folder"
mkdir "$folder"
# shellcheck disable=SC2086
"${PYTHON:-python3}" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    -d "$folder" $pinned $others "$@"
ls -l "$folder"
size=$({ git ls-files -coz --exclude-standard && printf '%s\0' "$folder"; } | du -cm --files0-from=- | tail -n 1 | cut -f 1)
echo "checkout and wheels: $size MB"
if [ "$size" -gt 32 ]; then
    echo "wheels.sh: 32 MB are what should travel: name fewer packages" >&2
    exit 1
fi
