"""Compiles Triton kernels for a GPU that need not be there: what the host code would launch, with its specialisations.

The interpreter runs a kernel as Python and lets pass much that the compiler refuses.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest


# Runs in a process of its own: whether Triton interprets is settled when it is imported.
_PROGRAM = """
import json
import re
import subprocess
import sys
from types import ModuleType

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Absent:
    def get_current_target(self):
        return GPUTarget("cuda", {capability}, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

driver.set_active(Absent())
run, kernels = JITFunction.run, []

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    cubin = {folder!r} + "/kernel.cubin"
    with open(cubin, "wb") as file:
        file.write(kernel.asm["cubin"])
    usage = subprocess.run([triton.knobs.nvidia.cuobjdump.path, "-res-usage", cubin], capture_output=True, text=True)
    registers, spilled = (int(re.search(name + r":(\\d+)", usage.stdout)[1]) for name in ("REG", "STACK"))
    signature, constants = kernel.src.signature, kernel.src.constants
    dtypes = sorted({{each[1:] for each in signature.values() if each.startswith("*")}})
    chosen = [
        f"{{name}}={{constants[place,]}}" for place, name in enumerate(signature)
        if name.isupper() and (place,) in constants
    ]
    launch = f"{{kernel.metadata.num_warps}} warps", f"{{kernel.metadata.num_stages}} stages"
    variant = ", ".join(["/".join(dtypes), *chosen, *launch])
    kernels.append((self.fn.__name__, kernel.metadata.shared, spilled, registers, variant, kernel.asm["ptx"]))

JITFunction.run = compile_only
# Kernels need nothing of transformers, which the package itself would import for seconds.
sys.modules["spec_trl"] = package = ModuleType("spec_trl")
package.__path__ = [{package!r}]
{calls}
print(json.dumps([triton.__version__, kernels]))
"""


CAPABILITIES = [80, 90, 100, 120]
TOLD_TO = "SPEC_TRL_KERNEL_LIST"
"""Variable with a file that is told of every kernel compiled, a line each: `benchmarks.gpu.registers` sets it."""


class Kernel(NamedTuple):
    name: str
    shared: int  # bytes of shared memory
    spilled: int  # bytes per thread
    registers: int  # per thread
    variant: str  # dtypes that it points to, constants, warps and stages
    ptx: str


def compile_for(capability: int, calls: str, folder: Path) -> list[Kernel]:
    """Compiles every kernel that `calls` (Python; CPU tensors) launches for a GPU of this compute capability (times
    ten), and launches none. Triton's cache is in `folder`.

    Returns:
        The kernels in the order of the launches. None spills registers: that is asserted here.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    package = str(Path(__file__).parents[5] / "spec_trl")
    program = _PROGRAM.format(capability=capability, calls=calls, package=package, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    if "Cannot find ptxas" in done.stderr:
        pytest.skip("this build of Triton has no assembler for NVIDIA GPUs")
    assert done.returncode == 0, done.stderr[-4000:]
    version, found = json.loads(done.stdout.splitlines()[-1])
    kernels = [Kernel(*kernel) for kernel in found]
    if file := os.environ.get(TOLD_TO):
        with open(file, "a", encoding="utf-8") as lines:
            lines.writelines(json.dumps([version, capability, *kernel[:-1]]) + "\n" for kernel in kernels)
    spilled = [kernel[:3] for kernel in kernels if kernel.spilled]
    assert not spilled, spilled
    return kernels
