"""The product of `MarlinInt4`: compiles Marlin from the source that `gptqmodel` installs, and makes it an operator.

Importing gptqmodel patches safetensors, triton and transformers, so it is never imported. Its CUDA files are copied to
the user's cache, completed by their own generator, and compiled with torch's extension builder (some minutes, once).
"""

import functools
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from ...user_cache import cache_directory


UINT4 = 1125899906843648  # the kernel's number for unsigned 4-bit codes with zero points
SOURCES = ("marlin_torch_bf16.cpp", "gptq_marlin_bf16.cu", "gptq_marlin_repack.cu", "awq_marlin_repack.cu")


@functools.cache
def load_marlin() -> None:
    """Makes `torch.ops.gptqmodel_marlin_bf16` exist, and compiles it first where no earlier process has; raises
    RuntimeError where its sources cannot be completed or compiled."""
    if hasattr(torch.ops.gptqmodel_marlin_bf16, "gptq_marlin_gemm_bf16"):  # gptqmodel itself has made it
        return
    from torch.utils import cpp_extension

    found = importlib.util.find_spec("gptqmodel_ext")
    assert found is not None and found.origin is not None
    nvcc = str(Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc")
    capability = "{}{}".format(*torch.cuda.get_device_capability())
    name = f"marlin-{version('gptqmodel')}-torch-{torch.__version__}-cuda-{torch.version.cuda}-sm{capability}"
    home = cache_directory() / name
    sources = copy_sources(Path(found.origin).parent / "marlin", home / "source")
    objects = home / "build"
    objects.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-DENABLE_BF16"]
    cuda_flags = [*flags, "-diag-suppress=179,39,177"]
    # The kernels are templates that one file instantiates and another calls; newer compilers hide them by default.
    visible = "-static-global-template-stub"
    if visible in subprocess.run([nvcc, "--help"], capture_output=True, text=True, check=True).stdout:
        cuda_flags.append(f"{visible}=false")
    files = [*(sources / name for name in SOURCES), *sorted(sources.glob("kernel_bf16_*.cu"))]
    cpp_extension.load(
        name="spec_trl_marlin", sources=[str(file) for file in files], extra_cflags=flags,
        extra_cuda_cflags=cuda_flags, extra_include_paths=[str(sources)], build_directory=str(objects),
        is_python_module=False,
    )  # fmt: skip


def copy_sources(installed: Path, to: Path) -> Path:
    """Copies the folder `installed` to `to`, unless it is there (newer files would be compiled again), and completes
    the copy; returns `to`. Raises RuntimeError where the generator of the missing files fails."""
    if to.exists():
        return to
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        copied = Path(folder) / "source"
        shutil.copytree(installed, copied)
        done = subprocess.run(
            [sys.executable, "generate_kernels.py"], cwd=copied, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the generator of {installed} failed: {done.stderr.strip()[-500:]}")
        try:
            copied.rename(to)
        except OSError:  # another rank was faster
            if not to.exists():
                raise
    return to


@torch.library.custom_op("spec_trl::marlin_int4_mm", mutates_args=("workspace",))
def marlin_int4_mm(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, workspace: Tensor) -> Tensor:
    """x [m, in] bfloat16 times a weight in the layout of `MarlinInt4` → [m, stored_rows] bfloat16."""
    multiply = torch.ops.gptqmodel_marlin_bf16.gptq_marlin_gemm_bf16
    m, k, n = x.shape[0], x.shape[1], scales.shape[1]
    no_bias = no_global_scale = no_order = None
    full_k, atomic_adds, fp32_sums, float_zeros = True, False, True, False
    return multiply(
        x, None, codes, no_bias, scales, no_global_scale, zeros, no_order, no_order, workspace, UINT4, m, n, k,
        full_k, atomic_adds, fp32_sums, float_zeros,
    )  # fmt: skip


@marlin_int4_mm.register_fake
def _(x: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor, workspace: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], scales.shape[1])
