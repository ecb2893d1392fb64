"""Says when a CPU multiplies a bfloat16 or float16 policy more slowly than it would a float32 one."""

import platform
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...dense_linear import HAS_ONEDNN, multiply_by_onednn


ROWS = 64  # of x, as in a short prefill or a verification
OUTPUTS = 512  # of the layer: enough to keep a CPU busy, and few milliseconds where it has no instructions
MIN_WEIGHTS = 1 << 18  # of the layer: with fewer the call itself takes the time
MIN_GAIN = 1.2  # below it nobody should reload a model

warned: set[torch.dtype] = set()
"""What this process has looked at."""


def warn_of_slow_dtype(model: PreTrainedModel) -> None:
    """Warns, once per dtype and process, where `model` is on a CPU without instructions for its 16-bit dtype, and
    float32 measures faster on one of its layers."""
    dtype = model.dtype
    if model.device.type != "cpu" or dtype in warned or has_instructions(dtype):
        return
    layers = (module for module in model.modules() if type(module) is nn.Linear)
    weight = next((layer.weight for layer in layers if layer.weight.numel() >= MIN_WEIGHTS), None)  # [out, in]
    if weight is None:
        return
    warned.add(dtype)
    gain = float32_gain(weight.detach()[:OUTPUTS])
    if gain >= MIN_GAIN:
        warnings.warn(
            f"this CPU has no instructions for {dtype}: a product of {ROWS} rows with a layer of the model takes "
            f"{gain:.1f} times as long as in float32, measured now. Load the model with dtype=torch.float32 if its "
            "memory allows.",
            stacklevel=2,
        )


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether the CPU multiplies in `dtype` by instructions of its own, as far as torch says; float32 and wider
    always."""
    if dtype == torch.bfloat16 and platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype != torch.float16 or bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def float32_gain(weight: Tensor) -> float:
    """How many times as fast a product with `weight` [out, in] is in float32."""
    x = torch.ones(ROWS, weight.shape[1], dtype=weight.dtype)  # [m, in]; no random numbers: they are the caller's
    wide_x, wide = x.float(), weight.float()  # [m, in], [out, in]
    multiply_wide = partial(multiply_by_onednn, bias=None) if HAS_ONEDNN else F.linear
    return seconds(lambda: F.linear(x, weight)) / seconds(lambda: multiply_wide(wide_x, wide))


@torch.no_grad()
def seconds(multiply: Callable[[], Tensor]) -> float:
    """The least of three calls, after one that warms up."""
    taken = []
    for _ in range(4):
        started = time.perf_counter()
        multiply()
        taken.append(time.perf_counter() - started)
    return min(taken[1:])
