"""RMS norms of a shadow on a CPU: compiled C++ in the place of six operations, each of which costs its call."""

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from .native_code import compiler, load


class _CompiledNorm(nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, x: Tensor) -> Any:
        """x [..., size] → [..., size]"""
        # Inference mode: in forwards of the compiled runner alone, and without gradient.
        fits = torch.is_inference_mode_enabled() and x.dtype == self.weight.dtype == torch.float32
        function = _compiled() if fits and x.is_contiguous() else None
        if function is None:
            return super().forward(x)
        y, size = torch.empty_like(x), x.shape[-1]
        pointers = x.data_ptr(), self.weight.data_ptr(), y.data_ptr()
        function(*pointers, x.numel() // size, size, self.variance_epsilon)
        return y


def with_compiled_norm(kind: type, module: nn.Module) -> type:
    """The class that the clone of `module`, of class `kind`, should have: `kind` itself, or a subclass with a compiled
    norm where the norm's code is Llama's, as it is in most families."""
    return _subclass(kind) if _is_llamas(kind) and module.weight.device.type == "cpu" and compiler() else kind


@functools.cache
def _subclass(kind: type) -> type:
    return type(f"Compiled{kind.__name__}", (_CompiledNorm, kind), {})


@functools.cache
def _is_llamas(kind: type) -> bool:
    def code(of: type) -> tuple[object, ...]:
        own = getattr(of.forward, "__code__", None)  # type: ignore[attr-defined]
        return () if own is None else (own.co_code, own.co_names, own.co_consts)

    return code(kind) == code(LlamaRMSNorm)


@functools.cache
def _compiled() -> Callable[..., None] | None:
    library = load(Path(__file__).with_suffix(".cpp"))
    if library is None:
        return None
    library.normalize.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_double]
    library.normalize.restype = None
    return library.normalize
