#!/usr/bin/env bash
# Triton 3.6.0, which torch 2.11 pins, with NumPy 2.4.6, under TRITON_INTERPRET=1, by which kernels are tested without a GPU.
# The interpreter holds a scalar argument as an array of one element. A loop up to it converts that array to a number, which
# NumPy refuses from 2.4 on: every kernel with `for i in range(n)` fails. Triton 3.7.0 squeezes the array first.
# Seen: NumPy 2.3.5: the loop runs. 2.4.6 (and 2.5.5): TypeError, "only 0-dimensional arrays can be converted to Python scalars".
. "$(dirname "$0")/environment.bash"
"$PYTHON" -m pip install -q --no-deps triton==3.6.0
cat >"$scratch/loop.py" <<'P'
import triton


@triton.jit
def loop(n):
    for _ in range(n):
        pass


try:
    loop[(1,)](3)
    print("runs")
except triton.runtime.errors.InterpreterError as error:
    print(error)
P
for numpy in 2.3.5 2.4.6; do
    "$PYTHON" -m pip install -q numpy==$numpy
    TRITON_INTERPRET=1 "$PYTHON" "$scratch/loop.py" | tee "$scratch/$numpy"
done
grep -q "^runs" "$scratch/2.3.5" && grep -q "only 0-dimensional arrays" "$scratch/2.4.6"
