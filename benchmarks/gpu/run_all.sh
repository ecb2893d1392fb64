#!/usr/bin/env bash
# Checks and measures everything on one GPU, within 9 minutes.
#
#     bash benchmarks/gpu/run_all.sh [OUT] [PART ...]
#
# from the repository's root, with torch (CUDA), transformers, trl and this package's other dependencies installed, or
# on PYTHONPATH. Nothing is downloaded: models have the shapes of real ones and weights made on the spot, and a policy
# with a real acceptance is trained in seconds. The default shape is a 7 B model: 15 GB of weights, some caches beside.
#
# OUT     folder for one JSON per part, logs, and summary.json, which holds all of them and is renewed after each part
#         (default: $OUT, or bench_output/gpu).
# PART    only these, in this order; see `parts` below. By default all, the most important first; what finds no time
#         left says so in its JSON. So a first run takes what fits, and a second one names the parts that are missing:
#
#     bash benchmarks/gpu/run_all.sh bench_output/gpu
#     bash benchmarks/gpu/run_all.sh bench_output/gpu grpo decode_batched decode_static
#     bash benchmarks/gpu/run_all.sh bench_output/gpu kernels attention sampler decode_runners
#     python -m benchmarks.gpu.summary bench_output/gpu
#
# A part runs in a process of its own with a time limit of its own, and writes its JSON after every measurement: one
# that hangs or dies loses neither the others nor what it had.
#
# Environment:
#     PYTHON              interpreter (python3)
#     GPU_BENCH_SECONDS   for everything together (530)
#     GPU_BENCH_ARGS      more arguments for every part, e.g. "--shape qwen3-8b"; to try the script out without a GPU:
#                         "--device cpu --shape tiny"
#     SPEC_TRL_CACHE      where kernels' measured tables are kept (OUT/cache)

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

python=${PYTHON:-python3}
out=${1:-${OUT:-bench_output/gpu}}
[ $# -gt 0 ] && shift
deadline=$(($(date +%s) + ${GPU_BENCH_SECONDS:-530}))

# Seconds that each part may take at most, in the order of importance. The first four have room even if each takes all
# of its time: whether the kernels compute the right thing, what `self` gains over `none`, and `none` over `generate`.
declare -A budget=(
    [machine]=40 [checks]=150 [speculation]=210 [decode_default]=110 [rounds]=170 [profiling]=60 [grpo]=200 [refresh]=45
    [decode_batched]=150 [decode_static]=200 [kernels]=90 [attention]=90 [sampler]=40 [decode_runners]=110
)
parts=(
    machine checks speculation decode_default rounds profiling grpo refresh decode_batched decode_static kernels
    attention sampler decode_runners
)
[ $# -gt 0 ] && parts=("$@")
for part in "${parts[@]}"; do
    if [ -z "${budget[$part]:-}" ]; then
        echo "run_all.sh: part '$part' is unknown; choose among: ${!budget[*]}" >&2
        exit 2
    fi
done

mkdir -p "$out"
out=$(cd "$out" && pwd)
export SPEC_TRL_CACHE=${SPEC_TRL_CACHE:-$out/cache}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
# humming opens NVRTC by its path, and NVRTC then looks for its builtins among the libraries.
nvrtc=$("$python" -c 'import pathlib, sys
found = {str(f.parent) for p in sys.path if p for f in pathlib.Path(p).glob("nvidia/*/lib/libnvrtc-builtins*")}
print(":".join(sorted(found)))' 2>/dev/null)
[ -n "$nvrtc" ] && export LD_LIBRARY_PATH=$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
failed=0

skipped() { # part, reason
    # What an earlier run measured stays.
    [ -e "$out/$1.json" ] ||
        printf '{"part": "%s", "status": "skipped: %s", "measured": {}}\n' "$1" "$2" >"$out/$1.json"
    echo "== $1: skipped: $2"
}

checks() { # seconds
    # Kernels first: what they compute comes before what is made of it. Their other tests run on the device too.
    local kernels="not run" marked="not run" left parallel=""
    "$python" -c "import xdist" 2>/dev/null && parallel="-n 4"
    rm -f "$out"/checks*.log
    # shellcheck disable=SC2086
    timeout -k 5 "$1" "$python" -m pytest -q -p no:cacheprovider $parallel tests/generation/engine/kernels \
        tests/quantization/kernels >"$out/checks_kernels.log" 2>&1
    kernels=$?
    left=$(($1 - (SECONDS - started)))
    if [ $left -gt 15 ]; then
        # One after the other: they look at the device's memory.
        timeout -k 5 $left "$python" -m pytest -q -p no:cacheprovider -m cuda tests \
            --ignore tests/generation/engine/kernels --ignore tests/quantization/kernels \
            >"$out/checks.log" 2>&1
        marked=$?
    fi
    tail -n 3 "$out"/checks*.log
    "$python" - "$out" $((SECONDS - started)) "$kernels" "$marked" <<'PY'
import json, sys
from pathlib import Path

folder, seconds, codes = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
meaning = {"0": "passed", "5": "no test is marked cuda", "124": "out of time", "not run": "no time left"}
states = [meaning.get(code, f"failed, rc {code}") for code in codes]
logs = {path.stem: path.read_text().splitlines()[-60:] for path in sorted(folder.glob("checks*.log"))}
status = f"kernels: {states[0]}; others that need a GPU: {states[1]}"
result = {"part": "checks", "status": status, "seconds": seconds, "measured": {"rc": codes, "ends_of_logs": logs}}
(folder / "checks.json").write_text(json.dumps(result, indent=1) + "\n")
sys.exit(any("failed" in state for state in states))
PY
}

for part in "${parts[@]}"; do
    left=$((deadline - $(date +%s)))
    seconds=$((left < budget[$part] ? left : budget[$part]))
    if [ $seconds -lt 15 ]; then
        skipped "$part" "no time left"
        continue
    fi
    started=$SECONDS
    echo "== $part (at most $seconds s)"
    if [ "$part" = checks ]; then
        checks $seconds
        rc=$?
    else
        module=("benchmarks.gpu.$part")
        [[ $part == decode_* ]] && module=(benchmarks.gpu.decode --group "${part#decode_}")
        # The part itself starts nothing in its last seconds; the limit is for one that hangs.
        # shellcheck disable=SC2086
        timeout -k 5 $seconds "$python" -m "${module[@]}" --output "$out" --seconds $((seconds - 8)) \
            ${GPU_BENCH_ARGS:-} 2>"$out/$part.log" | cut -c 1-300
        rc=${PIPESTATUS[0]}
    fi
    [ "$rc" -ne 0 ] && failed=1 && echo "== $part: rc $rc; the end of its log:" && tail -n 5 "$out/$part"*.log 2>/dev/null
    if [ ! -e "$out/$part.json" ]; then
        printf '{"part": "%s", "status": "failed, rc %s", "measured": {}}\n' "$part" "$rc" >"$out/$part.json"
    fi
    echo "== $part: $((SECONDS - started)) s"
    "$python" -m benchmarks.gpu.summary "$out" --quiet
done
"$python" -m benchmarks.gpu.summary "$out"
exit $failed
