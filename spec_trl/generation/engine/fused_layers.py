"""Decoder layers of a shadow on a GPU: fused kernels where transformers' modules launch one for each small operation.

Classes are told by their names and modules, and each family's code was read: any other class, subclasses included,
keeps its own code. So do calls that the kernels cannot take: with gradient, without a ragged cache, in several dtypes.
"""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache

from ...quantization.linear import project
from .attention import RAGGED_ATTENTION, ragged_attention
from .cache import RaggedCache, _RaggedLayer, autocast_dtype
from .kernels import run_on


FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SILU = (nn.SiLU, SiLUActivation)


class _Norm(nn.Module):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Any:
        if not _fit(hidden_states, self.weight):
            return super().forward(hidden_states)
        return torch.ops.spec_trl.rms_norm.default(hidden_states.contiguous(), self.weight, self.variance_epsilon)


class _Mlp(nn.Module):
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    def forward(self, x: Tensor) -> Any:
        gate, up = project(x, self.gate_proj, self.up_proj)  # [..., intermediate]
        fused = _fit(gate, up) and _is_unwatched(self.act_fn)
        return self.down_proj(torch.ops.spec_trl.silu_multiply.default(gate, up) if fused else self.act_fn(gate) * up)


class _Attention(nn.Module):
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    _norms: tuple[str, ...] = ()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = position_embeddings, attention_mask, past_key_values
        layer = _layer_of(past_key_values, self.layer_idx)
        norms = [getattr(self, name) for name in self._norms]
        if (
            layer is None
            or self.config._attn_implementation != RAGGED_ATTENTION
            or not all(map(_is_fused_norm, norms))
            or not _fit(hidden_states, *position_embeddings, *(norm.weight for norm in norms))
            or autocast_dtype(hidden_states.device) not in (None, hidden_states.dtype)
        ):
            return super().forward(hidden_states, *given, **kwargs)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (states.view(shape) for states in projected)  # [B, q, heads or kv_heads, d]
        if not _fit(hidden_states, query, key, value):
            return super().forward(hidden_states, *given, **kwargs)
        query, keys, values = layer.rotate_and_update(query, key, value, *position_embeddings, norms)
        output, _ = ragged_attention(self, query, keys, values, attention_mask, self.scaling)  # [B, q, heads, d]
        return self.o_proj(output.flatten(2)), None


class _AttentionWithNorms(_Attention):
    _norms = "q_norm", "k_norm"


class _DecoderLayer(nn.Module):
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        norm = self.post_attention_layernorm
        if args or not _is_fused_norm(norm) or not _fit(hidden_states, norm.weight):
            return super().forward(hidden_states, *args, **kwargs)
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
        if attended.dtype != hidden_states.dtype:
            residual = hidden_states + attended
            return residual + self.mlp(norm(residual))
        residual, normed = torch.ops.spec_trl.add_rms_norm.default(
            attended.contiguous(), hidden_states.contiguous(), norm.weight, norm.variance_epsilon
        )
        return residual + self.mlp(normed)


def with_fused_kernels(kind: type, module: nn.Module) -> type:
    """The class that the clone of `module`, of class `kind`, should have: `kind` itself, or a subclass with fused
    kernels where these run and the class is known."""
    fused, parameter = _fused(kind), next(module.parameters(), None)
    if fused is kind or parameter is None or not run_on(parameter.device) or "forward" in vars(module):
        return kind
    if issubclass(fused, _Mlp) and type(module.act_fn) not in _SILU:
        return kind
    return fused if _launches(parameter.device) else kind


@functools.cache
def _launches(device: torch.device) -> bool:
    """Whether Triton can compile a kernel and launch it; says so once where it cannot (it needs a C compiler)."""
    try:
        from .kernels import fused_layer  # registers the operators

        fused_layer.rms_norm(torch.ones(1, 16, device=device), torch.ones(16, device=device), 1e-6)
    except Exception as error:
        warnings.warn(
            f"Triton's kernels do not run on {device}; decoder layers keep transformers' own code, with the same "
            f"tokens but slower: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        return False
    return True


@functools.cache
def _fused(kind: type) -> type:
    for family in FAMILIES:
        if kind.__module__ == f"transformers.models.{family.lower()}.modeling_{family.lower()}":
            attention = _AttentionWithNorms if family == "Qwen3" else _Attention
            ours = dict(RMSNorm=_Norm, MLP=_Mlp, Attention=attention, DecoderLayer=_DecoderLayer)
            mixin = ours.get(kind.__name__.removeprefix(family))
            if mixin is not None:
                return type(f"Fused{kind.__name__}", (mixin, kind), {})
    return kind


def _fit(x: Tensor, *others: Tensor) -> bool:
    """Whether the kernels, which have no gradient, take these together."""
    return not torch.is_grad_enabled() and x.dtype in _DTYPES and all(other.dtype == x.dtype for other in others)


def _is_fused_norm(module: nn.Module) -> bool:
    """Whether `module` may be computed as a part of something else."""
    return isinstance(module, _Norm) and _is_unwatched(module)


def _is_unwatched(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks)


def _layer_of(cache: Any, index: int) -> Any:
    """Where a forward over `cache` writes; None: not into columns of a ragged cache alone."""
    if cache is None or (isinstance(cache, Cache) and not isinstance(cache, RaggedCache)):
        return None
    layer = cache.layer_at(index)
    return layer if type(layer) is _RaggedLayer else None
