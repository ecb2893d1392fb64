#!/usr/bin/env bash
# Checks and measures everything on one GPU, in three commands of 9 minutes each:
#
#     bash benchmarks/gpu/run_all.sh right       # do the kernels compute the right thing?
#     bash benchmarks/gpu/run_all.sh fast        # rounds, and "none" and "self" against generate
#     bash benchmarks/gpu/run_all.sh training    # GRPO as the README does it, what exact=True costs, other baselines
#     bash benchmarks/gpu/run_all.sh PART ...    # these parts, in this order; see `phases` and `budget` below
#
# from the repository's root or elsewhere. Nothing is downloaded: models have the shapes of real ones and weights made on
# the spot, and a policy with a real acceptance is trained in seconds. The default shape is a 7 B model: 15 GB of
# weights, some caches beside. What the machine lacks is installed from .wheels/, if that is there (see wheels.sh).
#
# If tests fail in `right`, `fast` runs those tests alone, with whole tracebacks; name its parts to measure all the same.
#
# A part runs in a process of its own with a time limit of its own, and writes its JSON after every measurement: one that
# hangs or dies loses neither the others nor what it had. What finds no time left says so in its JSON.
#
# Environment:
#     OUT                 folder that gets summary.json and results.tar.gz (all results) at the end, also where a part
#                         failed (GPU_BENCH_FOLDER)
#     GPU_BENCH_FOLDER    one JSON and a log per part, and cache/, with what later commands need not do again: installed
#                         wheels, compiled kernels, measured kernel tables (bench_output/gpu). Keep it between commands.
#     GPU_BENCH_SECONDS   for everything together (530)
#     GPU_BENCH_ARGS      more arguments for every part, e.g. "--shape qwen3-8b"; to try the script out without a GPU:
#                         "--tiny"
#     PYTHON              interpreter (python3)

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

deadline=$(($(date +%s) + ${GPU_BENCH_SECONDS:-530}))
python=${PYTHON:-python3}

# The most important parts come first, with the seconds that each may take at most.
declare -A phases=(
    [right]="checks_cuda checks_kernels checks_sanitizer"
    [fast]="rounds decode_default speculation"
    [training]="grpo decode_exact decode_top_p decode_static decode_batched"
)
declare -A budget=(
    [checks_cuda]=200 [checks_kernels]=180 [checks_sanitizer]=130
    [rounds]=200 [decode_default]=110 [speculation]=240
    [grpo]=210 [decode_exact]=130 [decode_top_p]=60 [decode_static]=100 [decode_batched]=100
)
parts=()
for word in "$@"; do
    # shellcheck disable=SC2206
    parts+=(${phases[$word]:-$word})
done
for part in "${parts[@]:-none named}"; do
    if [ -z "${budget[$part]:-}" ]; then
        echo "run_all.sh: part '$part' is unknown; choose right, fast or training, or among: ${!budget[*]}" >&2
        exit 2
    fi
done

folder=${GPU_BENCH_FOLDER:-bench_output/gpu}
mkdir -p "$folder/cache" "${OUT:=$folder}"
folder=$(cd "$folder" && pwd)
cache=$folder/cache
export SPEC_TRL_CACHE=${SPEC_TRL_CACHE:-$cache} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
failed=0

finish() {
    "$python" -m benchmarks.gpu.summary "$folder"
    # What "auto" measured of the 4-bit kernels, by layer and number of rows.
    mkdir -p "$folder/kernels"
    find "$SPEC_TRL_CACHE" -path '*/kernels/*.json' -exec cp {} "$folder/kernels" \;
    tar -czf "$OUT/results.tar.gz" -C "$folder" --exclude ./cache --exclude ./results.tar.gz .
    [ "$OUT" -ef "$folder" ] || cp "$folder/summary.json" "$OUT"
    exit $failed
}
trap finish EXIT
trap 'failed=1; exit' INT TERM

missing() {
    "$python" -c 'import importlib.util
print(*(name for name in ("trl", "datasets", "pydantic") if not importlib.util.find_spec(name)))'
}
if [ -n "$(missing)" ] && ls .wheels/*.whl >/dev/null 2>&1; then
    rm -rf "$cache/site"
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$cache/site" .wheels/*.whl
    PYTHONPATH=$cache/site:$PYTHONPATH
fi
[ -z "$(missing)" ] || echo "== not installed: $(missing); what needs it fails: see benchmarks/gpu/wheels.sh"
# humming opens NVRTC by its path, and NVRTC then looks for its builtins among the libraries.
nvrtc=$("$python" -c 'import pathlib, sys
found = {str(f.parent) for p in sys.path if p for f in pathlib.Path(p).glob("nvidia/*/lib/libnvrtc-builtins*")}
print(":".join(sorted(found)))' 2>/dev/null)
[ -n "$nvrtc" ] && export LD_LIBRARY_PATH=$nvrtc${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

if [ "$*" = fast ] && ls "$folder"/checks_*.failed >/dev/null 2>&1; then
    echo "== tests failed: they run again, alone; to measure all the same: run_all.sh ${phases[fast]}"
    parts=()
    for mark in "$folder"/checks_*.failed; do
        parts+=("$(basename "$mark" .failed)")
    done
    export PYTEST_ADDOPTS="--last-failed --tb=long"
fi

for part in "${parts[@]}"; do
    left=$((deadline - $(date +%s)))
    seconds=$((left < budget[$part] ? left : budget[$part]))
    if [ $seconds -lt 15 ]; then
        # What an earlier run measured stays.
        [ -e "$folder/$part.json" ] ||
            printf '{"part": "%s", "status": "skipped: no time left", "measured": {}}\n' "$part" >"$folder/$part.json"
        echo "== $part: skipped: no time left"
        continue
    fi
    started=$SECONDS
    echo "== $part (at most $seconds s)"
    module=("benchmarks.gpu.$part")
    [[ $part == decode_* || $part == checks_* ]] && module=("benchmarks.gpu.${part%%_*}" --group "${part#*_}")
    # The part itself starts nothing in its last seconds; the limit is for one that hangs.
    # shellcheck disable=SC2086
    timeout -k 5 $seconds "$python" -m "${module[@]}" --output "$folder" --seconds $((seconds - 8)) \
        ${GPU_BENCH_ARGS:-} 2>"$folder/$part.log" | cut -c 1-300
    rc=${PIPESTATUS[0]}
    [ "$rc" -ne 0 ] && failed=1 && echo "== $part: rc $rc; the end of its log:" && tail -n 9 "$folder/$part.log"
    if [ ! -e "$folder/$part.json" ]; then
        printf '{"part": "%s", "status": "failed, rc %s", "measured": {}}\n' "$part" "$rc" >"$folder/$part.json"
    fi
    if [[ $part == checks_* ]]; then
        rm -f "$folder/$part.failed"
        [ "$rc" -eq 0 ] || touch "$folder/$part.failed"
    fi
    echo "== $part: $((SECONDS - started)) s"
    "$python" -m benchmarks.gpu.summary "$folder" --quiet
done
