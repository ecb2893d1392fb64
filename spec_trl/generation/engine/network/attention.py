"""Attention over a ragged cache: additive masks by position, and grouped heads without repeated K/V."""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import eager_mask

from ..cuda.kernels import run_on
from .cpu_layers import attend


T = TypeVar("T")
RAGGED_ATTENTION = "spec_trl_ragged"
EXACT_ATTENTION = "spec_trl_exact"

FULL, SLIDING, CHUNKED, DUMMY = "full_attention", "sliding_attention", "chunked_attention", "dummy"
# Layers without attention: they get no mask and store no K/V.
_NO_ATTENTION = {"moe", "mlp", DUMMY}
STATE_LAYERS = frozenset({"conv", "linear_attention", "hybrid"})
"""Layer types whose layers keep a state of convolutions or scans (`states.py`); "hybrid" attends too."""
STATELESS = {FULL, *_NO_ATTENTION}
"""Layer types of hybrid families whose layers keep nothing but K/V."""
# Names in GPT-Neo.
GPT_NEO_LAYERS = {"global": FULL, "local": SLIDING}


def attends(layer_type: str) -> bool:
    """Whether a layer of this type keeps K/V."""
    return layer_type == "hybrid" or layer_type not in STATE_LAYERS | _NO_ATTENTION


@dataclass(frozen=True)
class MaskPlan:
    """The masks that a family's forward takes: one tensor, or a dict with one tensor per layer type."""

    layer_types: tuple[str, ...]
    per_type: bool
    sliding_window: int
    chunk_size: int

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> "MaskPlan":
        """One rule for all families: `layer_types` set: a dict per type; else `sliding_window`: sliding; else
        `attention_chunk_size`: chunked; else full.

        Raises:
            ValueError: a layer type is not known.
        """
        settings = vars(config)  # families leave out different keys
        window, chunk = settings.get("sliding_window"), settings.get("attention_chunk_size")
        if config.model_type == "gpt_neo":
            return cls(tuple({GPT_NEO_LAYERS[name] for name in config.attention_layers}), True, config.window_size, 0)
        if types := getattr(config, "layer_types", None):  # a property in some hybrid families
            kinds = set(types) | ({FULL} if "hybrid" in types else set())  # such a layer attends, and keeps a state
            layer_types = tuple(sorted(kinds - _NO_ATTENTION - STATE_LAYERS))
            unknown = [layer_type for layer_type in layer_types if layer_type not in (FULL, SLIDING, CHUNKED)]
            if unknown:
                raise ValueError(
                    f"model type '{config.model_type}' has layers of type {unknown}, whose caches and masks are not "
                    "known here. spec_trl serves full, sliding and chunked attention, and states of convolutions and "
                    "scans; generate without `assistant_strategy`."
                )
            return cls(layer_types, True, window or 0, chunk or 0)
        layer_type = SLIDING if window is not None else CHUNKED if chunk is not None else FULL
        return cls((layer_type,), False, window or 0, chunk or 0)

    @classmethod
    def for_network(cls, network: PreTrainedModel) -> "MaskPlan":
        """Makes the plan of a network. A window counts only if one of its masks has it (Moshi's masks are full)."""
        plan = cls.from_config(network.config.get_text_config(decoder=True))
        if plan.layer_types == (SLIDING,):
            forwards = [inspect.unwrap(type(module).forward) for module in network.modules()]
            made = {name for forward in forwards if inspect.isfunction(forward) for name in forward.__code__.co_names}
            if "create_causal_mask" in made and "create_sliding_window_causal_mask" not in made:
                return replace(plan, layer_types=(FULL,))
        return plan

    @property
    def unmasked_window(self) -> int | None:
        """Sliding window that transformers applies by truncating its cache, not in the mask."""
        return self.sliding_window or None if self.layer_types == (FULL,) and not self.per_type else None

    def spans(
        self,
        positions: Tensor,
        table: Tensor | None = None,
        places: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Masks as spans: the first and the last column that a query sees, `[B, 1, q, 2]` int64, or one such tensor
        per layer type. Their size depends only on the queries, so a captured forward serves rows of every length.

        Args:
            positions: `[B, q]` int64, the queries' columns.
            table: of pages (`PagedCache.table_to_read`), `[B, pages]` int32, an even number; two pages are stored like
                the span of one query: `[B, 1, q + pages / 2, 2]`; of longer spans more. The table is part of the mask,
                since the mask is the only argument that every family passes on to attention.
            places: as of :meth:`build`; then spans are `[B, 1, q, 4]`: the first and the last position that a query
                sees, the column from which columns differ from positions, and the difference.
            rows: `[B, q]` int64, the row of K/V that a query reads, for texts one after the other in a row of queries;
                then spans are `[B, 1, q, 3]`.
        """
        spans: dict[str, Tensor] = {}
        for layer_type in self.layer_types:
            first = torch.zeros_like(positions)  # [B, q]
            if layer_type == SLIDING:
                first = (positions - self.sliding_window + 1).clamp(min=0)
            elif layer_type == CHUNKED:
                first = positions // self.chunk_size * self.chunk_size
            span = torch.stack([first, positions], dim=-1)  # [B, q, 2]
            if places is not None:
                split = places[:, :1].expand_as(places) + 1
                span = torch.cat([span, torch.stack([split, places - positions], dim=-1)], dim=-1)  # [B, q, 4]
            if rows is not None:
                span = torch.cat([span, rows[..., None]], dim=-1)  # [B, q, 3]
            spans[layer_type] = with_table(span, table)
        return self._by_type(spans)

    def build(
        self,
        positions: Tensor,
        columns: int,
        dtype: torch.dtype,
        places: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Additive masks for queries at `positions` over the first `columns` of the cache.

        Args:
            positions: `[B, q]` int64.
            dtype: floating dtype of the queries.
            places: `[B, q]` int64, the cache column of every query, if several chains of a row follow its last
                committed token, the first query (:meth:`~.EagerRunner.forward_at`); None: the position.
            keys: `[B, columns]` int64, position of every key (`TailCache`); None: its column.

        Returns:
            `[B, 1, q, columns]` of 0 and the dtype's minimum, or one such tensor per layer type.
        """
        # 0 / min rather than a bool mask: eager code *adds* its mask, and SDPA would convert a bool in every layer.
        hidden = torch.finfo(dtype).min
        # [columns] or [B, 1, 1, columns]
        key = torch.arange(columns, device=positions.device) if keys is None else keys[:, None, None]
        query = positions[:, None, :, None]  # [B, 1, q, 1]
        at, later = key, key > query  # as key, [B, 1, q, columns]
        if places is not None:
            place, last = places[:, None, :, None], places[:, None, :1, None]  # [B, 1, q, 1], [B, 1, 1, 1]
            # Positions of keys of the query's chain; keys of earlier chains get positions up to `last`.
            at = torch.where(key > last, key - (place - query), key)  # [B, 1, q, columns]
            later = (key > place) | ((key > last) & (at <= last))
        masks: dict[str, Tensor] = {}
        for layer_type in self.layer_types:
            masked = later
            if layer_type == SLIDING:
                masked = masked | (at <= query - self.sliding_window)
            elif layer_type == CHUNKED:
                masked = masked | (at // self.chunk_size != query // self.chunk_size)
            masks[layer_type] = torch.zeros(masked.shape, dtype=dtype, device=key.device).masked_fill_(masked, hidden)
        return self._by_type(masks)

    def _by_type(self, masks: dict[str, Tensor]) -> Any:
        if not self.layer_types:
            return None  # no layer attends
        # Layers with a state take no mask: their cache knows what is padding.
        return masks | dict.fromkeys(STATE_LAYERS) if self.per_type else masks[self.layer_types[0]]


def as_spans(first: Tensor, last: Tensor, table: Tensor | None) -> Tensor:
    """The mask `[B, 1, q, 2]` of queries that see columns `first` to `last` (both `[B, q]` int64), or with the `table`
    of :meth:`MaskPlan.spans` after it, `[B, 1, q + pages / 2, 2]`."""
    return with_table(torch.stack([first, last], dim=-1), table)


def with_table(spans: Tensor, table: Tensor | None) -> Tensor:
    """Spans `[B, q, w]` as a mask, with as many pages of the `table` as a span has numbers in a row after them."""
    if table is not None:
        width = spans.shape[2]
        spans = torch.cat([spans, F.pad(table, (0, -table.shape[1] % width)).unflatten(1, (-1, width))], dim=1)
    return spans[:, None]


def takes_spans(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether :func:`ragged_attention` takes spans as masks: the CUDA kernel does, in 16 bits and float32."""
    return run_on(device) and dtype in (torch.float32, torch.bfloat16, torch.float16)


def reads_spans(network: PreTrainedModel) -> bool:
    """Whether attention in `network` takes spans; families with other attention code need masks."""
    return takes_spans(network.device, network.dtype) and calls_attention(network)


def calls_attention(network: PreTrainedModel) -> bool:
    """Whether all attention of a network's shadow is :func:`ragged_attention`. Many families call the attention that
    their config names without declaring it."""
    if network._supports_attention_backend:
        return True
    kinds: set[tuple[Any, bool]] = {(type(module), hasattr(module, "is_causal")) for module in network.modules()}
    calls = {is_rewritten(kind) or _calls_attention(kind, is_attention) for kind, is_attention in kinds}
    types = getattr(network.config.get_text_config(decoder=True), "layer_types", None) or ()
    has_none = len(types) > 0 and not any(map(attends, types))  # as in Mamba
    return False not in calls and (True in calls or has_none)


@functools.cache
def _calls_attention(kind: Any, is_attention: bool) -> bool | None:
    """None: `kind` does not attend. Some text attention, beside that of a vision tower, has no `is_causal`."""
    forward = inspect.unwrap(kind.forward)
    code = forward.__code__ if inspect.isfunction(forward) else None
    names, variables = ((), ()) if code is None else (code.co_names, code.co_varnames)
    bases = (inspect.unwrap(base.forward) for base in kind.__mro__ if "forward" in vars(base))  # of a fused class too
    calls = any("ALL_ATTENTION_FUNCTIONS" in base.__code__.co_names for base in bases if inspect.isfunction(base))
    if issubclass(kind, _RewrittenAttention) or calls:
        return True
    return False if is_attention or ("softmax" in names and "attention_mask" in variables) else None


def is_rewritten(kind: Any) -> bool:
    """Whether :func:`attention_class` serves a class, whose attention ignores the attention function of its config."""
    return kind.__name__ in _REWRITTEN and kind.__module__.startswith("transformers.")


@functools.cache
def attention_class(kind: Any) -> Any:
    """A subclass of `kind` that calls :func:`ragged_attention` instead of the family's code."""
    return type(f"Ragged{kind.__name__}", (_REWRITTEN[kind.__name__], kind), {})


class _WithoutCudnn:
    """Inside, torch does not choose cuDNN's attention, its default from Hopper on: planning a new shape takes tenths
    of a second, and rounds often have new shapes.

    The setting is global to the process, and drafters may learn in another thread: the last exit restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._was_enabled)


WITHOUT_CUDNN = _WithoutCudnn()


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    query_scales: Tensor | None = None,
    exact: bool = False,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of `[B, heads, q, d]` queries over `[B, kv_heads, columns, d]` keys under an additive mask or spans;
    where these hold a table, over the pages `[pages, kv_heads, 64, d]` of a pool.

    The heads of one K/V group are folded into the query axis, so K/V is read once and never repeated:

        heads (h = kv_head * groups + g):  [B, kv * groups, q, d]  ->  [B, kv, groups * q, d]

    `softcap` (Gemma 2) and attention sinks `s_aux` (GPT-OSS) take the same fold through plain matmuls. `query_scales`
    (Llama 4, `[B, 1, q, 1]` float32) are factors of the queries. `exact`: on CUDA under spans the bits of a query's
    output depend on the query and on the keys and values it sees, not on other queries and rows, or the cache's size.
    """
    if query_scales is not None:
        query = (query * query_scales).to(query.dtype)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    if not attention_mask.is_floating_point() and not run_on(query.device):
        # Autocast may leave queries wide and K/V narrow.
        output = attend(query.to(key.dtype), key, value, attention_mask, scale, softcap, s_aux)
        if output is not None:
            return output.to(query.dtype), None  # [B, q, heads, d]
        if attention_mask.shape[3] == 3:  # as columns of one row
            begin = attention_mask[..., 2:] * key.shape[2]  # [1, 1, q, 1]
            attention_mask = attention_mask[..., :2] + begin
            key, value = (states.transpose(0, 1).flatten(1, 2)[None] for states in (key, value))
        attention_mask = _mask_of(attention_mask, key.shape[2], key.dtype)  # [B, 1, q, columns]
    if not attention_mask.is_floating_point():
        from ..cuda.kernels.ragged_attention import ragged_decode_attention  # imports Triton

        length = query.shape[2]
        spans = attention_mask[:, 0, :length]  # [B, q, 2 or 4]
        moved = spans[..., 2:].contiguous() if spans.shape[2] == 4 else None  # [B, q, 2]
        table = attention_mask[:, 0, length:].flatten(1) if attention_mask.shape[2] > length else None  # [B, pages]
        output = ragged_decode_attention(
            query.to(key.dtype), key, value, spans[..., 0], spans[..., 1], scale, softcap, s_aux, table, exact, moved
        )
        return output.to(query.dtype), None  # [B, q, heads, d]
    batch, heads, length, _head_dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    query = query.reshape(batch, kv_heads, groups * length, -1)  # [B, kv, groups * q, d]
    if groups > 1 and length > 1:
        attention_mask = attention_mask.repeat(1, 1, groups, 1)  # [B, 1, groups * q, columns]
    if softcap is None and s_aux is None:
        with WITHOUT_CUDNN if query.is_cuda and not torch.compiler.is_compiling() else nullcontext():
            output = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    else:
        scores = query @ key.transpose(2, 3) * scale  # [B, kv, groups * q, columns]
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + attention_mask
        if s_aux is not None:
            sinks = s_aux.view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, length, -1)  # [B, kv, groups, q, 1]
            scores = torch.cat([scores, sinks.reshape(batch, kv_heads, -1, 1).to(scores.dtype)], dim=-1)
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(dim=-1, dtype=wide).to(value.dtype)
        output = weights[..., : key.shape[2]] @ value  # [B, kv, groups * q, d]
    output = output.reshape(batch, heads, length, -1)  # [B, heads, q, d]
    return output.transpose(1, 2).contiguous(), None  # [B, q, heads, d], of which some families take a view


def _mask_of(spans: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """The additive mask `[B, 1, q, columns]` of `spans` `[B, 1, q, 2 or 4]`."""
    at = column = torch.arange(columns, device=spans.device)
    masked = torch.zeros((), dtype=torch.bool, device=spans.device)
    if spans.shape[3] == 4:
        split, shift = spans[..., 2:3], spans[..., 3:]  # [B, 1, q, 1]
        at = torch.where(column < split, column, column - shift)  # [B, 1, q, columns], position of every key
        masked = (column >= split) & (at < split)
    masked = masked | (at < spans[..., :1]) | (at > spans[..., 1:2])  # [B, 1, q, columns]
    return torch.zeros(masked.shape, dtype=dtype, device=spans.device).masked_fill_(masked, torch.finfo(dtype).min)


ATTENTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    RAGGED_ATTENTION: ragged_attention, EXACT_ATTENTION: partial(ragged_attention, exact=True),
}  # fmt: skip
for _name, _function in ATTENTIONS.items():
    AttentionInterface.register(_name, _function)
    # Passes masks on unchanged. Without this entry transformers would drop the sliding window of an unknown backend.
    AttentionMaskInterface.register(_name, eager_mask)


class _RewrittenAttention(nn.Module):
    """Attention of a family that ignores the attention function of its config."""


class _Method(_RewrittenAttention):
    """Base for families whose attention code is a method."""

    config: PreTrainedConfig

    def _attn(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> tuple[Tensor, None]:
        scale = 1 / float(getattr(self, "scale_attn", 1))
        attention = ATTENTIONS[self.config._attn_implementation]
        output, _ = attention(self, query, key, value, attention_mask, scale)  # [B, q, heads, d]
        return output.transpose(1, 2), None


class _Call(_RewrittenAttention):
    """Base for families that call torch's attention if the config names it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _RaggedCalls():
            return super().forward(*args, **kwargs)


class _RaggedCalls(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        query, key, value = args
        output, _ = ragged_attention(nn.Identity(), query, key, value, kwargs["attn_mask"])  # [B, q, heads, d]
        return output.transpose(1, 2)


_REWRITTEN = {"GPTNeoSelfAttention": _Method, "GPTJAttention": _Method, "FalconAttention": _Call}


class ReadsSpans(Protocol):
    """A runner of `network`, which attends under spans if `uses_spans`, else under masks, which are never exact."""

    network: Any
    is_exact: bool
    uses_spans: bool


def attended(runner: ReadsSpans, run: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
    """Returns `run()`, a forward of `runner`. If it fails under spans, warns, calls `undo`, and returns `run()` under
    masks, which `runner` uses from now on."""
    try:
        return run()
    except Exception as error:
        if runner.is_exact or not runner.uses_spans or isinstance(error, torch.OutOfMemoryError):
            raise
        undo()
        runner.uses_spans = False
        warnings.warn(
            f"the attention kernel failed under {type(runner.network).__name__}, which goes on under masks, with the "
            f"same tokens but slower: {type(error).__name__}: {error}",
            stacklevel=3,
        )
    return run()
