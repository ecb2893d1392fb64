#!/usr/bin/env bash
# Checks and measures on one GPU within a quarter of an hour, in two commands that may run on two machines:
#
#     bash benchmarks/gpu/quarter.sh first                # is it right? and the headline: a 7 B shape
#     bash benchmarks/gpu/quarter.sh second               # what users compare with: TRL, transformers; small shapes
#     bash benchmarks/gpu/quarter.sh STAGE=SECONDS ...    # these stages: those of quarter.py, kernels, sanitizer
#
# Nothing is downloaded: what the machine lacks is installed from .wheels/ (see wheels.sh), anew where these changed. A
# stage runs in a process of its own with a time limit of its own, and writes its JSON after every measurement: one that
# hangs or dies loses neither the others nor what it had. The exit status is 1 if any stage failed.
#
# Environment:
#     OUT              folder that gets STAGE.json of each stage and logs.tar.gz (bench_output/gpu)
#     WHEELS           folder of wheels (.wheels)
#     QUARTER_CACHE    installed wheels and compiled kernels (/tmp/quarter)
#     QUARTER_ARGS     more arguments for every stage, e.g. "--shape qwen3-8b"; without a GPU "--tiny" tries them out
#     QUARTER_KERNEL   of the 4-bit copy (triton)
#     PYTHON           interpreter (python3)

set -u
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

declare -A plans=(
    [first]="smoke=115 headline=165 kernels=110"
    [second]="grpo=105 batched=60 static=75 small=45"
)
# shellcheck disable=SC2206
[ $# -eq 1 ] && stages=(${plans[$1]:-$1}) || stages=("$@")
for each in "${stages[@]:-none}"; do
    if [[ ! $each =~ ^(kernels|sanitizer|smoke|headline|small|grpo|static|batched|exact|vllm)=[0-9]+$ ]]; then
        echo "quarter.sh: '$each' is no stage; write first, second, or STAGE=SECONDS ..." >&2
        exit 2
    fi
done

python=${PYTHON:-python3} cache=${QUARTER_CACHE:-/tmp/quarter} out=${OUT:-bench_output/gpu} tiny=
[[ " ${QUARTER_ARGS:-} " == *" --tiny "* ]] && tiny=yes
mkdir -p "$out" "$cache/logs"
export SPEC_TRL_CACHE=$cache TRITON_CACHE_DIR=$cache/triton TORCHINDUCTOR_CACHE_DIR=$cache/inductor
cores=$(nproc)
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores < 4 ? cores : 4))}
wheels=$(sha256sum "${WHEELS:-.wheels}"/*.whl 2>/dev/null)
if [ -n "$wheels" ] && [ "$wheels" != "$(cat "$cache/wheels" 2>/dev/null)" ]; then
    rm -rf "$cache/site"
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$cache/site" "${WHEELS:-.wheels}"/*.whl \
        >"$cache/logs/pip.log" 2>&1 && echo "$wheels" >"$cache/wheels" || tail -n 3 "$cache/logs/pip.log"
fi
export PYTHONPATH=$cache/site:.${PYTHONPATH:+:$PYTHONPATH}
nvidia-smi >"$cache/logs/nvidia-smi.log" 2>&1

tests=(tests/generation/engine/kernels tests/quantization/kernels tests/generation/engine/test_on_cuda.py)
[ -n "$tiny" ] && tests=(tests/quantization/kernels/test_kernel_times.py tests/generation/engine/test_on_cuda.py)
test=("$python" -m pytest -q -p no:cacheprovider -p benchmarks.gpu.outcomes --tb=short -m "not slow")
failed=0
for each in "${stages[@]}"; do
    stage=${each%%=*} seconds=${each#*=} started=$SECONDS log=$cache/logs/${each%%=*}.log
    case $stage in
    kernels) command=(env OMP_NUM_THREADS=1 "${test[@]}" -n "$cores" -k "not compiled" "${tests[@]}") ;;
    sanitizer) # 10 to 50 times slower: tests that capture nothing, a few of each kernel
        command=(compute-sanitizer --tool memcheck --error-exitcode 86 "${test[@]}"
            -k "test_multiplies_like or test_pages or test_norms or test_rotates or test_silu or test_is_right"
            tests/generation/engine/kernels tests/quantization/kernels/test_triton_int4.py) ;;
    *) # shellcheck disable=SC2206
        command=("$python" -W ignore -m benchmarks.gpu.quarter "$stage" --output "$out" --seconds $((seconds - 6))
            ${QUARTER_ARGS:-}) ;;
    esac
    echo "== $stage (at most $seconds s)"
    rm -f "$out/$stage.json" # an earlier run's
    OUTCOMES=$out/$stage.json timeout -s INT -k 5 "$seconds" "${command[@]}" >"$log" 2>&1
    rc=$?
    [ $rc -eq 0 ] || failed=1
    grep -E "^\[$stage\]|^FAILED|^ERROR|passed|failed|ERROR SUMMARY" "$log" | cut -c 1-250 | tail -n 45
    echo "== $stage: rc $rc, $((SECONDS - started)) s, $SECONDS s in all"
    tar -czf "$out/logs.tar.gz" -C "$cache/logs" .
done
"$python" -m benchmarks.gpu.summary "$out"
exit $failed
