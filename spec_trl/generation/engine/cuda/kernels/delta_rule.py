"""Computes the gated delta rule over a few tokens per row, in Triton. Importing this file imports Triton.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q     (Yang et al. 2024, arXiv 2412.06464, equation 10)

A program holds some columns of the state of a head of a row in registers, over all tokens. So a verification reads the
states once and writes none; a commit reads and writes them once; a captured step writes those of the rows in use. One
piece of machine code serves any numbers of rows and tokens: the bits are equal. Sums are float32.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import operator


# Chosen by reasoning, not measured yet: whole lines of memory of 128 bytes, and up to 64 registers per thread.
_MOST_COLUMNS = 32
_TILE = 8192
_NUM_WARPS = 4
_POINTERS, _NUMBERS = list(range(9)), list(range(9, 28))


# Nothing is specialised: layouts, and with them the order of sums, would follow strides, addresses and numbers.
@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_POINTERS)
def _scan(
    query_ptr: tl.tensor, key_ptr: tl.tensor, value_ptr: tl.tensor, g_ptr: tl.tensor, beta_ptr: tl.tensor,
    begin_ptr: tl.tensor, state_ptr: tl.tensor, lengths_ptr: tl.tensor, out_ptr: tl.tensor,
    tokens: tl.tensor, ragged: tl.tensor, writes: tl.tensor, outputs: tl.tensor,
    query_row: tl.tensor, query_token: tl.tensor, query_head: tl.tensor,
    key_row: tl.tensor, key_token: tl.tensor, key_head: tl.tensor,
    value_row: tl.tensor, value_token: tl.tensor, value_head: tl.tensor,
    g_row: tl.tensor, g_token: tl.tensor, g_head: tl.tensor,
    beta_row: tl.tensor, beta_token: tl.tensor, beta_head: tl.tensor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, SCALE: tl.constexpr,
    NORMS: tl.constexpr, BY_CHANNEL: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
) -> None:  # fmt: skip
    """One head of a row, and BLOCK_V columns of its state; GROUP heads share a head of queries and keys. With outputs
    all tokens run, and rows with a length of 0 do not write their state."""
    task = tl.program_id(0).to(tl.int64)
    row, head, k = task // HEADS, task % HEADS, tl.arange(0, BLOCK_K)  # k: [K]
    v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
    inside = (k < K)[:, None] & (v < V)[None, :]  # [K, V]
    places = task * K * V + k[:, None] * V + v[None, :]
    state = tl.load(begin_ptr + places, mask=inside, other=0.0)
    query_at = query_ptr + row * query_row + head // GROUP * query_head + k
    key_at = key_ptr + row * key_row + head // GROUP * key_head + k
    value_at = value_ptr + row * value_row + head * value_head + v
    g_at = g_ptr + row * g_row + head * g_head
    beta_at = beta_ptr + row * beta_row + head * beta_head
    out_at = out_ptr + (row * tokens * HEADS + head) * V + v
    count = tl.load(lengths_ptr + row, mask=ragged != 0, other=tokens)
    for _ in range(0, tl.where(outputs != 0, tokens, count)):
        query = tl.load(query_at, mask=k < K, other=0.0).to(tl.float32)
        key = tl.load(key_at, mask=k < K, other=0.0).to(tl.float32)
        if NORMS:
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        if BY_CHANNEL:
            state *= tl.exp(tl.load(g_at + k, mask=k < K, other=0.0).to(tl.float32))[:, None]
        else:
            state *= tl.exp(tl.load(g_at).to(tl.float32))
        value = tl.load(value_at, mask=v < V, other=0.0).to(tl.float32)
        change = (value - tl.sum(state * key[:, None], 0)) * tl.load(beta_at).to(tl.float32)
        state += key[:, None] * change[None, :]
        out = tl.sum(state * (query * SCALE)[:, None], 0)
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(v < V) & (outputs != 0))
        query_at += query_token
        key_at += key_token
        value_at += value_token
        g_at += g_token
        beta_at += beta_token
        out_at += HEADS * V
    tl.store(state_ptr + places, state, mask=inside & (writes != 0) & (count > 0))


def _shapes(query: Tensor, _key: object, value: Tensor, *rest: Any) -> Tensor:
    return query.new_empty(value.shape if rest[-1] else 0)


@operator("delta_rule", _shapes, writes=["state"])
def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    begin: Tensor | None,
    state: Tensor,
    lengths: Tensor | None,
    norms: bool,
    writes: bool,
    outputs: bool,
) -> Tensor:
    out = query.new_empty(value.shape if outputs else 0)
    parts = [query, key, value, g, beta]
    parts = [part if part.dim() == 3 or part.stride(3) == 1 else part.contiguous() for part in parts]
    query, value, g = parts[0], parts[2], parts[3]
    (batch, tokens, heads, size), (key_heads, key_size) = value.shape, query.shape[2:]
    block = triton.next_power_of_2(key_size)
    columns = min(triton.next_power_of_2(size), _MOST_COLUMNS, max(1, _TILE // block))
    with torch.cuda.device_of(state):  # Triton launches on the current device
        _scan[(batch * heads, triton.cdiv(size, columns))](
            *parts, state if begin is None else begin, state,
            triton.reinterpret(state, tl.int64) if lengths is None else lengths, out,
            tokens, int(lengths is not None), int(writes), int(outputs),
            *(stride for part in parts for stride in part.stride()[:3]),
            HEADS=heads, GROUP=heads // key_heads, K=key_size, V=size, SCALE=key_size**-0.5,
            NORMS=norms, BY_CHANNEL=g.dim() == 4, BLOCK_K=block, BLOCK_V=columns, num_warps=_NUM_WARPS,
        )  # fmt: skip
    return out


def delta_rule(
    given: Mapping[str, Any], state: Tensor, writes: bool | Tensor
) -> tuple[Tensor, Callable[[Tensor], None]]:
    """The gated delta rule, or Kimi's, whose decay is by channel: see
    :func:`~.delta_rule`. `state` is float32; other tensors are of any dtype.
    `writes` may be `[B]` int64: rows with a 0 do not write. With `initial_state` the scan begins there.
    """
    query, key, value, g, beta = (given[name] for name in ("query", "key", "value", "g", "beta"))
    norms, begin = given["use_qk_l2norm_in_kernel"], given.get("initial_state")
    rows, writes = (writes, True) if isinstance(writes, Tensor) else (None, writes)

    def replay(lengths: Tensor) -> None:
        _run(query, key, value, g, beta, None, state, lengths, norms, True, False)

    return _run(query, key, value, g, beta, begin, state, rows, norms, writes, True), replay
