"""Draws tokens and computes log-probabilities on a CPU in C++: a pass over the logits in the place of some twenty."""

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from .native_code import SOURCES, load, untraced


def serves(logits: Tensor) -> bool:
    """Whether the functions take `logits`: float32 on the CPU, without gradient."""
    is_plain = type(logits) is Tensor and logits.device.type == "cpu" and logits.dtype == torch.float32
    return is_plain and not (torch.is_grad_enabled() and logits.requires_grad) and library() is not None


@untraced
def gumbel_noise(keys: Tensor, vocabulary: int) -> Tensor:
    """Noise `[n, vocabulary]` float32 for `keys` `[n]` int64."""
    noise, keys = torch.empty(len(keys), vocabulary), keys.contiguous()
    library().gumbel_noise(keys.data_ptr(), *noise.shape, noise.data_ptr(), torch.get_num_threads())
    return noise


@untraced
def draw(logits: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and tokens `[...]` of the largest sums of `logits` `[..., vocabulary]` and the noise of `keys` `[...]`.
    Scores are NaN where a logit is NaN."""
    logits, keys = logits.contiguous(), keys.contiguous()
    scores, tokens = logits.new_empty(keys.shape), torch.empty_like(keys)
    pointers = logits.data_ptr(), keys.data_ptr(), keys.numel(), logits.shape[-1], tokens.data_ptr(), scores.data_ptr()
    library().draw(*pointers, torch.get_num_threads())
    return scores, tokens


@untraced
def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) at `tokens`: `[..., vocabulary]`, `[...]` int64 -> `[...]`."""
    logits, tokens = logits.contiguous(), tokens.contiguous()
    found = logits.new_empty(tokens.shape)
    pointers = logits.data_ptr(), tokens.data_ptr(), tokens.numel(), logits.shape[-1], found.data_ptr()
    library().logprobs(*pointers, torch.get_num_threads())
    return found


@functools.cache
def library() -> Any:
    """The compiled functions; None without a compiler."""
    functions = load(SOURCES / "cpu_sampling.cpp")
    if functions is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        functions.gumbel_noise.argtypes = [pointer, integer, integer, pointer, integer]
        functions.draw.argtypes = [pointer, pointer, integer, integer, pointer, pointer, integer]
        functions.logprobs.argtypes = [pointer, pointer, integer, integer, pointer, integer]
        for name in ("gumbel_noise", "draw", "logprobs"):
            getattr(functions, name).restype = None
    return functions
