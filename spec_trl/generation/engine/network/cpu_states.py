"""Steps of convolutions and recurrences in C++ on a CPU, if there is a compiler, over a few tokens per row.

A call begins at the states of a forward's rows. It overwrites them with its last states, or leaves them: then its
:data:`Replay` advances them by some tokens per row, from the same memory and without outputs. All sum in one order.
They replace some forty operations of torch per token and layer, each of which reads or writes all states.
The dtype is that of the states: float32, in families of any dtype, or float64.
"""

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....native.native_code import SOURCES, load, untraced
from .cpu_layers import SCALARS


Replay = Callable[[Tensor], None]
"""Advances the states by the first `lengths[b]` tokens (int64, on their device) of every row."""
_DTYPES = torch.float32, torch.float64
_PER_THREAD = 1 << 17  # bytes of states: with fewer, a second thread saves less than waking it takes


def serves(state: Tensor) -> bool:
    """Whether the functions serve such states."""
    return state.device.type == "cpu" and state.dtype in _DTYPES and _library(state.dtype) is not None


@functools.cache
def _library(dtype: torch.dtype) -> Any:
    functions = load(SOURCES / "cpu_states.cpp", SCALAR=SCALARS[dtype])
    if functions is not None:
        for function in (functions.convolve, functions.delta_rule, functions.mamba):
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    return functions


@untraced
def convolve(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, writes: bool
) -> tuple[Tensor, Replay]:
    """A causal convolution of each channel.

    Args:
        x: `[B, channels, q]`, the next tokens, in the dtype of all.
        state: `[B, channels, kernel]`, the columns before them; transposed they lie next to each other.
        weight: `[channels, kernel]`; bias: `[channels]`.
        silu: whether outputs go through SiLU.
        writes: whether to write the states.

    Returns:
        Outputs `[B, channels, q]`, and what replays tokens.
    """
    tokens, weight = x.transpose(1, 2), weight.to(x.dtype).contiguous()  # [B, q, channels], [channels, kernel]
    bias = None if bias is None else bias.to(x.dtype)
    tokens = tokens if tokens.stride(2) == 1 else tokens.contiguous()
    batch, count, channels = tokens.shape
    out = torch.empty(batch, count, channels, dtype=state.dtype)
    numbers = [
        batch, count, channels, state.shape[2], silu, _threads(state), *_part(tokens), weight.data_ptr(), _at(bias),
        state.data_ptr(),
    ]  # fmt: skip
    return out.transpose(1, 2), _run("convolve", numbers, out, [tokens, weight, bias, state], writes)


@untraced
def delta_rule(given: Mapping[str, Any], state: Tensor, writes: bool) -> tuple[Tensor, Replay]:
    """The gated delta rule (Yang et al. 2024, arXiv 2412.06464, equation 10), or Kimi's, whose decay is by channel.

    Args:
        given: arguments of the family's function over many tokens: `query` and `key` `[B, q, key_heads, d_k]`, `value`
            `[B, q, heads, d_v]`, `beta` `[B, q, heads]`, `g` `[B, q, heads]` or `[B, q, heads, d_k]`.
        state: `[B, heads, d_k, d_v]` contiguous.
        writes: whether to write the states.

    Returns:
        Outputs `[B, q, heads, d_v]`, and what replays tokens.
    """
    parts = [_plain(given[name].to(state.dtype)) for name in ("query", "key", "value", "g", "beta")]
    batch, count, key_heads, key_size = parts[0].shape
    heads, size = parts[2].shape[2:]
    out = torch.empty(batch, count, heads, size, dtype=state.dtype)
    numbers = [
        batch, count, heads, key_heads, key_size, size, given["use_qk_l2norm_in_kernel"], parts[3].dim() == 4,
        _threads(state), *(number for part in parts for number in _part(part)), state.data_ptr(),
    ]  # fmt: skip
    replay = _run("delta_rule", numbers, out, [*parts, state], writes)
    return out.to(given["query"].dtype), replay


@untraced
def mamba_1(given: Mapping[str, Any], state: Tensor, writes: bool) -> tuple[Tensor, Replay]:
    """Mamba's selective scan (Gu and Dao 2023, arXiv 2312.00752, algorithm 2), with a gate.

    Args:
        given: arguments of the family's function over many tokens: `hidden_states`, `dt` and `z` `[B, d, q]`, `B` and
            `C` `[B, n, q]`, `A` `[d, n]`, `D` and
            `delta_bias` `[d]`, `delta_softplus`.
        state: `[B, d, n]` contiguous.
        writes: whether to write the states.

    Returns:
        Outputs `[B, d, q]`, and what replays tokens.
    """
    x, dt, z, B, C = (given[name].transpose(1, 2) for name in ("hidden_states", "dt", "z", "B", "C"))
    by_head = x[..., None], z[..., None], dt, B[:, :, None], C[:, :, None]
    constants = given["A"], given["D"], given["delta_bias"]
    out, replay = _mamba(by_head, constants, given["delta_softplus"], state[:, :, None], writes)
    return out[..., 0].transpose(1, 2).to(x.dtype), replay


@untraced
def mamba_2(given: Mapping[str, Any], state: Tensor, writes: bool) -> tuple[Tensor, Replay]:
    """Mamba 2's scan (Dao and Gu 2024, arXiv 2405.21060), with time steps as families' functions for one token take
    them: not bounded.

    Args:
        given: arguments of the family's function over many tokens: `hidden_states` `[B, q, heads, d]`, `dt`
            `[B, q, heads]`, `B` and `C` `[B, q, groups, n]`, `A`, `D` and `dt_bias` `[heads]`, `dt_softplus`.
        state: `[B, heads, d, n]` contiguous.
        writes: whether to write the states.

    Returns:
        Outputs `[B, q, heads, d]`, and what replays tokens.
    """
    x = given["hidden_states"]
    parts, constants = (x, None, given["dt"], given["B"], given["C"]), (given["A"], given["D"], given["dt_bias"])
    out, replay = _mamba(parts, constants, given["dt_softplus"], state, writes)
    return out.to(x.dtype), replay


def _mamba(
    parts: tuple[Tensor | None, ...],
    constants: tuple[Tensor | None, ...],
    softplus: bool,
    state: Tensor,
    writes: bool,
) -> tuple[Tensor, Replay]:
    x, z, dt, B, C = (None if part is None else _plain(part.to(state.dtype)) for part in parts)
    A, D, bias = (None if each is None else each.to(state.dtype).contiguous() for each in constants)
    assert x is not None and B is not None and A is not None
    out = torch.empty(x.shape, dtype=state.dtype)
    numbers = [
        *x.shape[:3], B.shape[2], x.shape[3], B.shape[3], A.dim() == 2, softplus, _threads(state),
        *(number for part in (x, z, dt, B, C) for number in _part(part)), *map(_at, (A, D, bias)), state.data_ptr(),
    ]  # fmt: skip
    return out, _run("mamba", numbers, out, [x, z, dt, B, C, A, D, bias, state], writes)


def _run(name: str, numbers: list[int], out: Tensor, read: list[Tensor | None], writes: bool) -> Replay:
    """Calls a function with the numbers of its struct, whose last one is the address of `out`."""
    function = getattr(_library(out.dtype), name)
    call = (ctypes.c_int64 * (len(numbers) + 1))(*numbers, out.data_ptr())
    function(call, None, writes)

    def replay(lengths: Tensor, alive: object = read) -> None:
        call[len(numbers)] = 0
        function(call, lengths.data_ptr(), True)

    return replay


def _plain(tensor: Tensor) -> Tensor:
    """`tensor` `[B, q, heads]`, or `[B, q, heads, n]` with the n numbers next to each other."""
    return tensor if tensor.dim() == 3 or tensor.stride(-1) == 1 else tensor.contiguous()


def _part(tensor: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if tensor is None else (tensor.data_ptr(), *tensor.stride()[:3])  # type: ignore[return-value]


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _threads(state: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + state.nbytes // _PER_THREAD)
