"""Attention over a ragged cache on a CPU: compiled C++, where there is a compiler.

It reads each row's own columns, and no mask, so a row's output does not depend on the other rows or on how far columns
are padded. It is compiled once per element type and head size, in about a second, and kept in the user's cache.
"""

import ctypes
import functools
import hashlib
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...json_files import replacing
from ...quantization.kernels.kernel_table import cache_directory


logger = logging.getLogger(__name__)

MOST_QUERIES = 65
"""Tokens per row up to which it is used: γ + 1 at most; torch's own attention reads long prompts faster."""
_SCALARS = {torch.float32: "float", torch.float64: "double"}
_SOURCE = Path(__file__).with_suffix(".cpp")
# -ffast-math, which lets sums be taken in vectors, is for compiling alone: a linker that is told of it adds code that
# has the whole process round tiny numbers to zero.
_COMPILE = ("-std=c++17", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-fPIC")
_LINK = ("-shared", "-fopenmp")
_SECONDS = 60  # after which a compiler is given up

_Numbers = ctypes.c_int64 * 11  # struct Sizes


def compiler() -> str | None:
    """The C++ compiler of this machine."""
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def runs_compiled(network: PreTrainedModel) -> bool:
    """Whether attention in `network` can take spans (:meth:`MaskPlan.spans`) for masks on a CPU."""
    is_served = network.device.type == "cpu" and network.dtype in _SCALARS and network._supports_attention_backend
    return is_served and compiler() is not None


def attend(query: Tensor, key: Tensor, value: Tensor, spans: Tensor, scale: float) -> Tensor | None:
    """Queries `[B, heads, q, d]` over `[B, kv_heads, columns, d]` under `spans` (`[B, 1, q, 2]` int64, first and last
    column of each query) → `[B, q, heads, d]`; None where it does not serve these."""
    head_size = query.shape[3]
    alike = key.shape == value.shape and key.stride() == value.stride() and key.stride(3) == 1
    function = _compiled(query.dtype, head_size) if alike and query.dtype == key.dtype == value.dtype else None
    if function is None:
        return None
    if query.stride(3) != 1:
        query = query.contiguous()
    batch, heads, count, _ = query.shape
    kv_heads = key.shape[1]
    output = query.new_empty(batch, count, heads, head_size)
    numbers = _Numbers(
        batch, kv_heads, heads // kv_heads, count, *query.stride()[:3], *key.stride()[:3], torch.get_num_threads()
    )
    pointers = (tensor.data_ptr() for tensor in (query, key, value, spans.contiguous(), output))
    function(*pointers, numbers, scale)
    return output


@functools.cache
def _compiled(dtype: torch.dtype, head_size: int) -> Callable[..., None] | None:
    """The function, compiled now or by an earlier process; None where that fails."""
    program = compiler()
    if dtype not in _SCALARS or program is None:
        return None
    options = (*_COMPILE, f"-DSCALAR={_SCALARS[dtype]}", f"-DHEAD_SIZE={head_size}")

    def call(*arguments: str) -> bytes:
        return subprocess.run([program, *arguments], check=True, capture_output=True, timeout=_SECONDS).stdout

    try:
        # What the compiler defines names its version and the instructions of this CPU: machines may share a home.
        facts = call(*options, "-dM", "-E", "-x", "c++", "/dev/null") + _SOURCE.read_bytes()
        path = cache_directory() / f"cpu_attention_{hashlib.sha256(facts).hexdigest()[:16]}.so"
        if not path.exists():
            with replacing(path.with_suffix(".o")) as compiled, replacing(path) as linked:
                call(*options, "-c", str(_SOURCE), "-o", str(compiled))
                call(*_LINK, str(compiled), "-o", str(linked))
        function = ctypes.CDLL(str(path)).attend
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        logger.info("attention stays torch's own, which is slower on a CPU: %s %s", error, said.decode())
        return None
    function.argtypes = [ctypes.c_void_p] * 5 + [_Numbers, ctypes.c_double]
    function.restype = None
    return function
