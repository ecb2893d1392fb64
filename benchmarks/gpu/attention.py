"""Attention of a few new tokens over a ragged cache: ours and what else there is, and the share of the bandwidth.

The cache is [rows, kv_heads, columns, head_dim] as the engine keeps it; a method that wants another layout gets a copy
in it, and what keeping that layout would cost is not counted. Every result is compared with float32.
"""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from .part import Part
from .shapes import config_of
from .timing import compare, copies_for, copy_bandwidth, once, relative_error


BATCHES = (1, 8, 32)
QUERIES = (1, 6)
LENGTH, RAGGED = 2048, (256, 4096)
COLUMN_BUCKET = 256  # an additive mask covers columns up to the longest row, rounded up
MOST_CACHES = 32
TOLERANCE = 0.02

Method = Callable[["Case", int], Tensor]
"""[B, q, heads, d] of one case over its cache number i."""


@dataclass
class Case:
    """One batch: row b holds `lengths[b]` tokens, of which the last q are queries.

    Args:
        query: [B, heads, q, d].
        keys, values: several caches, each [B, kv_heads, columns, d].
        lengths: of each row, the queries included; `device_lengths` [B] int32 the same on the device.
    """

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]

    def __post_init__(self) -> None:
        device, q = self.query.device, self.query.shape[2]
        self.batch, self.heads, self.queries, self.head_dim = self.query.shape
        self.kv_heads = self.keys[0].shape[1]
        self.groups = self.heads // self.kv_heads
        self.scale = self.head_dim**-0.5
        self.columns = min(-(-max(self.lengths) // COLUMN_BUCKET) * COLUMN_BUCKET, self.keys[0].shape[2])
        self.device_lengths = torch.tensor(self.lengths, dtype=torch.int32, device=device)  # [B]
        self.last = self.device_lengths[:, None].long() - q + torch.arange(q, device=device)  # [B, q] inclusive
        self.first = torch.zeros_like(self.last)  # [B, q]

    @property
    def kv_bytes(self) -> int:
        """Of K and V that must be read."""
        return sum(self.lengths) * 2 * self.kv_heads * self.head_dim * self.keys[0].element_size()

    def expected(self) -> Tensor:
        """[B, q, heads, d] in float32, row by row."""
        rows = []
        for b, length in enumerate(self.lengths):
            key, value = (
                cache[0][b, :, :length].float().repeat_interleave(self.groups, 0) for cache in (self.keys, self.values)
            )  # [heads, length, d]
            scores = self.query[b].float() @ key.transpose(1, 2) * self.scale  # [heads, q, length]
            hidden = torch.arange(length, device=key.device) > self.last[b, :, None]  # [q, length]
            rows.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value).transpose(0, 1))  # [q, heads, d]
        return torch.stack(rows)


def dtype_on(device: torch.device) -> torch.dtype:
    """bfloat16; but Triton's interpreter multiplies that wrongly, so float16 where this is only tried out."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def make_case(config: PreTrainedConfig, batch: int, queries: int, ragged: bool, part: Part) -> Case:
    """Random K/V in so many caches that no L2 holds them."""
    low, high, uniform = (16, 64, 48) if part.is_smoke else (*RAGGED, LENGTH)
    step = (high - low) / max(batch - 1, 1)
    lengths = [round(low + step * i) for i in range(batch)] if ragged else [uniform] * batch
    if ragged and batch == 1:
        lengths = [high]
    head_dim = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
    shape = (batch, config.num_key_value_heads, max(lengths) + 16, head_dim)
    used = 4 * sum(lengths) * shape[1] * head_dim
    count = min(copies_for(used, part.device), MOST_CACHES)
    make = partial(torch.randn, device=part.device)
    dtype = dtype_on(part.device)
    query = make(batch, config.num_attention_heads, queries, head_dim).to(dtype)
    keys, values = ([make(shape).to(dtype) for _ in range(count)] for _ in range(2))
    return Case(query, keys, values, lengths)


def ours(case: Case, exact: bool = False) -> Method:
    """The engine's kernel; `exact`: with one order of sums for every number of queries and rows."""
    from spec_trl.generation.engine.kernels.ragged_attention import ragged_decode_attention

    def run(case: Case, i: int) -> Tensor:
        given = case.query, case.keys[i], case.values[i], case.first, case.last, case.scale
        return ragged_decode_attention(*given, exact=exact)

    return run


def sdpa(case: Case) -> Method:
    """Heads of a K/V group folded into the query axis, under an additive mask."""
    key = torch.arange(case.columns, device=case.query.device)  # [columns]
    hidden = key > case.last[:, None, :, None]  # [B, 1, q, columns]
    mask = torch.zeros(hidden.shape, dtype=case.query.dtype, device=key.device)
    mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
    mask = mask.repeat(1, 1, case.groups, 1)  # [B, 1, groups * q, columns]

    def run(case: Case, i: int) -> Tensor:
        folded = case.query.reshape(case.batch, case.kv_heads, -1, case.head_dim)  # [B, kv, groups * q, d]
        key, value = case.keys[i][:, :, : case.columns], case.values[i][:, :, : case.columns]
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=case.scale)
        return out.reshape(case.batch, case.heads, case.queries, -1).transpose(1, 2)

    return run


def flex(case: Case) -> Method:
    """FlexAttention, compiled on a GPU, with a block mask of this round's lengths."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    offsets = case.last[:, 0]  # [B]

    def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return kv <= offsets[b] + q

    device = case.query.device
    is_cuda = device.type == "cuda"
    torch.compiler.reset()  # every case is compiled for its own shapes, and recompilations are limited
    mask = create_block_mask(
        causal, case.batch, None, case.queries, case.keys[0].shape[2], device=str(device), _compile=is_cuda
    )
    attend = torch.compile(flex_attention, dynamic=False) if is_cuda else flex_attention

    def run(case: Case, i: int) -> Tensor:
        out = attend(
            case.query, case.keys[i], case.values[i], block_mask=mask, scale=case.scale, enable_gqa=case.groups > 1
        )
        return out.transpose(1, 2)

    return run


def flash(case: Case) -> Method:
    """flash-attn's decoding kernel."""
    attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
    keys, values = ([cache.transpose(1, 2).contiguous() for cache in caches] for caches in (case.keys, case.values))
    query = case.query.transpose(1, 2).contiguous()  # [B, q, heads, d]

    def run(case: Case, i: int) -> Tensor:
        return attend(
            query, keys[i], values[i], cache_seqlens=case.device_lengths, softmax_scale=case.scale, causal=True
        )

    return run


def varlen(case: Case, **more: bool) -> Method:
    """torch's own variable-length attention over K/V without padding."""
    attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn  # its signature changes with torch

    def packed(cache: Tensor) -> Tensor:
        rows = [cache[b, :, :length].transpose(0, 1) for b, length in enumerate(case.lengths)]
        return torch.cat(rows)  # [tokens, kv, d]

    keys, values = ([packed(cache) for cache in caches] for caches in (case.keys, case.values))
    query = case.query.transpose(1, 2).reshape(-1, case.heads, case.head_dim)  # [B * q, heads, d]
    starts = F.pad(case.device_lengths.cumsum(0, dtype=torch.int32), (1, 0))  # [B + 1]
    query_starts = torch.arange(case.batch + 1, dtype=torch.int32, device=query.device) * case.queries  # [B + 1]

    def run(case: Case, i: int) -> Tensor:
        out = attend(
            query, keys[i], values[i], query_starts, starts, case.queries, max(case.lengths),
            scale=case.scale, window_size=(-1, 0), **more,
        )  # fmt: skip
        return out.view(case.batch, case.queries, case.heads, -1)

    return run


METHODS: dict[str, Callable[[Case], Method]] = {
    "ours": ours,
    "ours, exact": partial(ours, exact=True),
    "sdpa, additive mask": sdpa,
    "flex_attention": flex,
    "flash_attn_with_kvcache": flash,
    "torch varlen": varlen,
    "torch varlen, enable_gqa": partial(varlen, enable_gqa=True),
}
"""The last two differ in what torch versions accept."""


def available(part: Part) -> dict[str, Callable[[Case], Method]]:
    """Those of METHODS that can be tried here; says once why another cannot."""
    reasons: dict[str, str] = {}
    if importlib.util.find_spec("flash_attn") is None:
        reasons["flash_attn_with_kvcache"] = "flash-attn is not installed"
    if part.triton_absent is not None:
        reasons |= dict.fromkeys(("ours", "ours, exact"), part.triton_absent)
    if part.device.type != "cuda":
        reasons |= {name: "needs a GPU" for name in METHODS if name.startswith("torch varlen")}
    for name, reason in reasons.items():
        part.skip(name, reason)
    return {name: make for name, make in METHODS.items() if name not in reasons}


def check(case: Case, method: Method) -> float:
    """Relative error of the method, which must be small.

    Raises:
        ArithmeticError: it is not.
    """
    error = relative_error(method(case, 0), case.expected())
    if not error < TOLERANCE:
        raise ArithmeticError(f"relative error {error:.3g} against float32, and {TOLERANCE} is allowed")
    return error


def measure(
    part: Part, methods: dict[str, Callable[[Case], Method]], key: str, case: Case, bandwidth: float
) -> dict[str, Any]:
    """All `methods` on one case."""
    runs: dict[str, Method] = {}
    errors: dict[str, float] = {}
    preparation: dict[str, float] = {}
    for name, make in methods.items():

        def prepare(make: Callable[[Case], Method] = make, name: str = name) -> Method:
            made: list[Method] = []
            preparation[name] = once(lambda: made.append(make(case)), part.device)
            errors[name] = check(case, made[0])
            if part.device.type == "cuda":  # can it be captured?
                compare({name: [partial(made[0], case, 0)]}, part.device, repeats=1)
            return made[0]

        method = part.attempt(f"{key} | {name}", prepare)
        if method is not None:
            runs[name] = method
    works = {name: [partial(method, case, i) for i in range(len(case.keys))] for name, method in runs.items()}
    timings = compare(works, part.device) if works else {}
    return {
        "kv_bytes": case.kv_bytes,
        "caches": len(case.keys),
        "longest": max(case.lengths),
        "methods": {
            name: asdict(timing)
            | {
                "relative_error": errors[name],
                "bandwidth_share": case.kv_bytes / timing.seconds / bandwidth,
                "preparation_seconds": preparation[name],
            }
            for name, timing in timings.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("attention", __doc__, arguments)
    config = config_of(part.shape)
    torch.manual_seed(part.seed)
    bandwidth = copy_bandwidth(part.device)
    lengths = {"uniform": LENGTH, "ragged": RAGGED}
    part.state(dtype=str(dtype_on(part.device)), copy_bandwidth=bandwidth, lengths=lengths)
    methods = available(part)
    uncompiled = {name: make for name, make in methods.items() if make is not flex}
    for ragged in (True,) if part.is_smoke else (True, False):
        for batch in (2,) if part.is_smoke else BATCHES:
            for queries in QUERIES:
                key = f"B {batch}, q {queries}, {'ragged' if ragged else 'uniform'}"
                case = part.attempt(key, partial(make_case, config, batch, queries, ragged, part))
                if case is not None:
                    # FlexAttention compiles for seconds in each case: the ragged ones are what it is for here.
                    part.measure(key, partial(measure, part, methods if ragged else uncompiled, key, case, bandwidth))
                del case
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
