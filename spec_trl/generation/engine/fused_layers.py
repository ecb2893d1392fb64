"""Decoder layers of a shadow with fused kernels, where transformers' modules launch one kernel per small operation.

On a GPU they are Triton's; on a CPU they are C++, in forwards of the compiled runner. They replace the forwards of
classes of known families, recognised by their names and modules. Other classes, subclasses included, classes with a
replaced forward, and calls that the kernels cannot take (gradient, no ragged cache, several dtypes) run unchanged.
"""

import dis
import functools
import sys
import warnings
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.cache_utils import Cache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...cpu_products import ByRegisters
from ...native_code import compiler, untraced
from ...quantization.linear import QuantizedLinear
from ...quantization.quantized_copy import SIBLINGS
from . import cpu_layers
from .adapted_layers import AdaptedLinear, only_multiplies, project, project_gated
from .attention import ATTENTIONS, RAGGED_ATTENTION
from .cache import RaggedCache, RaggedLayer, autocast_dtype
from .family_hooks import cache_name
from .kernels import run_on
from .linear_layers import NarrowProduct
from .pages import PagedLayer
from .training_marks import patched_forward


FAMILIES = ("BitNet", "Llama", "Mistral", "Qwen2", "Qwen3")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SILU = (nn.SiLU, SiLUActivation)


class _Fused(nn.Module):
    _kernels: Any
    """`torch.ops.spec_trl`, Triton's, or :mod:`cpu_layers`: set when the class is made."""

    def _fit(self, x: Tensor, *others: Tensor) -> bool:
        """Whether the kernels, which have no gradient, take these tensors together: in one dtype."""
        served = cpu_layers.serves(x) if self._kernels is cpu_layers else x.dtype in _DTYPES
        for other in others:
            served = served and other.dtype == x.dtype
        return served and not torch.is_grad_enabled()


class _Norm(_Fused):
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor, *dtype: torch.dtype) -> Any:
        """`dtype`: of the result, if not that of the modules."""
        if not self._fit(hidden_states, self.weight):
            return super().forward(hidden_states)
        return self._kernels.rms_norm(hidden_states.contiguous(), self.weight, self.variance_epsilon, *dtype)


class _Mlp(_Fused):
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    act_fn: Any

    def forward(self, x: Tensor) -> Any:
        if _is_unwatched(self.act_fn) and (product := project_gated(x, self.gate_proj, self.up_proj)) is not None:
            return self.down_proj(self._between(product))
        gate, up = project(x, self.gate_proj, self.up_proj)  # [..., intermediate]
        fused = self._fit(gate, up) and _is_unwatched(self.act_fn)
        product = self._kernels.silu_multiply(gate, up) if fused else self.act_fn(gate) * up  # [..., intermediate]
        return self.down_proj(self._between(product))

    def _between(self, product: Tensor) -> Any:
        return product


class _MlpWithNorm(_Mlp):
    ffn_sub_norm: Any

    def _between(self, product: Tensor) -> Any:
        return self.ffn_sub_norm(product)


class _Attention(_Fused):
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    _cache_name: str
    _norms: tuple[str, ...] = ()

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        layer = _layer_of(kwargs.get(self._cache_name), self.layer_idx)
        norms = [getattr(self, name) for name in self._norms]
        if (
            layer is None
            or self.config._attn_implementation not in ATTENTIONS
            or not all(map(_is_fused_norm, norms))
            or not self._fit(hidden_states)
            or not self._fit(*position_embeddings, *(norm.weight for norm in norms))
        ):
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projected = project(hidden_states, self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (states.view(shape) for states in projected)  # [B, q, heads or kv_heads, d]
        # Under autocast products are narrower than angles and norms.
        narrow = autocast_dtype(query.device) or hidden_states.dtype
        if {query.dtype, key.dtype, value.dtype} != {narrow} or not _goes_with(query, position_embeddings[0]):
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        write = self._kernels.rotate_and_write
        query, keys, values = layer.rotate_and_update(write, query, key, value, *position_embeddings, norms)
        attend = ATTENTIONS[self.config._attn_implementation]
        output, _ = attend(self, query, keys, values, attention_mask, self.scaling)  # [B, q, heads, d]
        return self.o_proj(self._between(output.flatten(2))), None

    def _between(self, output: Tensor) -> Any:
        return output


class _AttentionWithNorms(_Attention):
    _norms = "q_norm", "k_norm"


class _AttentionWithNormAfter(_Attention):
    attn_sub_norm: Any

    def _between(self, output: Tensor) -> Any:
        return self.attn_sub_norm(output)


class _DecoderLayer(_Fused):
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any
    _cache_name: str

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        norm = self.post_attention_layernorm
        is_traced = args or torch.compiler.is_compiling()  # by the compiled runner
        if not is_traced and (whole := self._in_one_call(hidden_states, **kwargs)) is not None:
            return whole
        if args or not _is_fused_norm(norm) or not self._fit(hidden_states, norm.weight):
            return super().forward(hidden_states, *args, **kwargs)
        first, dtype = self.input_layernorm, autocast_dtype(hidden_states.device)
        narrow = [dtype] if dtype is not None and _is_fused_norm(first) and _only_multiplies(self.self_attn) else []
        attended, _ = self.self_attn(hidden_states=first(hidden_states, *narrow), **kwargs)
        if not _goes_with(attended, hidden_states):
            residual = hidden_states + attended
            return residual + self.mlp(norm(residual))
        narrow = [dtype] if dtype is not None and _only_multiplies(self.mlp) else []
        residual, normed = self._kernels.add_rms_norm(
            attended.contiguous(), hidden_states.contiguous(), norm.weight, norm.variance_epsilon, *narrow
        )
        return residual + self.mlp(normed)

    @untraced
    def _in_one_call(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Tensor | None:
        """On a CPU, if all parts of the layer are those of its family and unwatched."""
        if self._kernels is not cpu_layers or not self._fit(hidden_states, *position_embeddings):
            return None
        call = cpu_layers.calls.get(self)
        if call is None:
            call = cpu_layers.calls[self] = cpu_layers.OneCall(self, self._norms_in_order())
        layer = _layer_of(kwargs.get(self._cache_name), call.index)
        if type(layer) is not RaggedLayer:
            return None
        cosine, sine = position_embeddings
        return call(hidden_states, cosine, sine, attention_mask, layer)

    def _norms_in_order(self) -> list[Any] | None:
        """Norms as :class:`~spec_trl.generation.engine.cpu_layers.OneCall` takes them; None: a part is not ours."""
        attention, mlp = self.self_attn, self.mlp
        if not isinstance(attention, _Attention) or not isinstance(mlp, _Mlp):
            return None
        heads = [getattr(attention, name) for name in attention._norms] or [None, None]
        after = [getattr(part, name, None) for part, name in ((attention, "attn_sub_norm"), (mlp, "ffn_sub_norm"))]
        norms = [self.input_layernorm, *heads, after[0], self.post_attention_layernorm, after[1]]
        ours = all(norm is None or isinstance(norm, _Norm) for norm in norms)
        patched = "forward" in vars(mlp.act_fn)
        return norms if ours and not patched and attention.config._attn_implementation == RAGGED_ATTENTION else None


def with_fused_kernels(kind: type, module: nn.Module, exact: bool = False) -> type:
    """The class of the clone of `module`, of class `kind`: `kind`, or a subclass with fused kernels if these serve
    it; `exact`: only kernels whose order of sums does not depend on the number of rows."""
    if exact and issubclass(kind, AdaptedLinear):
        return kind.__bases__[1]
    parameter = next(module.parameters(), None)
    if parameter is None or patched_forward(module) is not None:
        return kind
    device = parameter.device
    on_cpu = device.type == "cpu" and not run_on(device)
    fused = _fused(kind, on_cpu)
    if fused is kind or not _has_its_forward(kind) or (exact and issubclass(fused, AdaptedLinear)):
        return kind
    if issubclass(fused, _Mlp):
        activation = type(module.act_fn)
        if issubclass(activation, ByRegisters):
            activation = activation.__bases__[1]
        if activation not in _SILU or not _has_its_forward(activation):
            return kind
    runs = compiler() is not None if on_cpu else run_on(device) and launches(device)
    return fused if runs else kind


@functools.cache
def launches(device: torch.device) -> bool:
    """Whether Triton can compile and launch a kernel; warns once if not (it needs a C compiler)."""
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
def _fused(kind: type, on_cpu: bool) -> type:
    for family in FAMILIES:
        if kind.__module__ == f"transformers.models.{family.lower()}.modeling_{family.lower()}":
            attention = dict(Qwen3=_AttentionWithNorms, BitNet=_AttentionWithNormAfter).get(family, _Attention)
            mlp = _MlpWithNorm if family == "BitNet" else _Mlp
            ours = dict(RMSNorm=_Norm, MLP=mlp, Attention=attention, DecoderLayer=_DecoderLayer)
            mixin = ours.get(kind.__name__.removeprefix(family))
            if mixin is not None:
                kernels = cpu_layers if on_cpu else torch.ops.spec_trl
                members = {"_kernels": kernels, "_cache_name": cache_name(kind)}
                return type(f"Fused{kind.__name__}", (mixin, kind), members)
    if (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear") and not on_cpu:
        return type("AdaptedLinear", (AdaptedLinear, kind), {})
    if _is_llamas_norm(kind):
        return type(f"Fused{kind.__name__}", (_Norm, kind), {"_kernels": cpu_layers if on_cpu else torch.ops.spec_trl})
    return kind


def _is_llamas_norm(kind: Any) -> bool:
    """Whether a class of transformers is the norm of Llama under another name, as in most families."""
    if not (kind.__module__.startswith("transformers.models.") and kind.__name__.endswith("RMSNorm")):
        return False
    code, llamas = (getattr(norm.forward, "__code__", None) for norm in (kind, LlamaRMSNorm))
    parts = "co_code", "co_names", "co_consts", "co_varnames"
    return None not in (code, llamas) and all(getattr(code, part) == getattr(llamas, part) for part in parts)


# Modules that wrap forwards: of decoder layers; and, from 5.24 on, of all that take a cache, by its old name too.
_WRAPPERS = ("transformers.modeling_layers", "transformers.utils.deprecation")


def _has_its_forward(kind: Any) -> bool:
    """Whether the forward of a module class, and the functions that it calls in its module, are the original ones."""
    forward = kind.forward
    while getattr(forward, "__globals__", {}).get("__name__") in _WRAPPERS:
        forward = forward.__wrapped__
    return _is_of_source(forward, f"{kind.__name__}.forward", sys.modules[kind.__module__])


def _is_of_source(function: Any, name: str, module: ModuleType) -> bool:
    """Whether `function`, and what it calls in `module`, are those that the source of `module` defines."""
    code = getattr(function, "__code__", None)
    if code is None or (code.co_filename, code.co_qualname) != (module.__file__, name):
        return False
    named = {name: vars(module)[name] for name in _globals_of(code) if name in vars(module)}
    called = {name: value for name, value in named.items() if callable(value) and not isinstance(value, type)}
    return all(_is_of_source(value, name, module) for name, value in called.items())


@functools.cache
def _globals_of(code: CodeType) -> frozenset[str]:
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")


def has_fused_sums(norm: nn.Module) -> bool:
    """Whether our kernel sums the rows of `norm`, in an order that does not depend on their number."""
    return isinstance(norm, _Norm)


def _is_fused_norm(module: nn.Module) -> bool:
    """Whether `module` may be computed as part of a fused call."""
    return isinstance(module, _Norm) and _is_unwatched(module)


def _is_unwatched(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _only_multiplies(module: nn.Module) -> bool:
    """Whether attention or an MLP only multiplies its input with weights, for which autocast casts it: then the input
    may be cast before."""
    if not isinstance(module, _Attention | _Mlp):
        return False
    names = SIBLINGS[0] if isinstance(module, _Attention) else SIBLINGS[1]
    layers = [getattr(module, name) for name in names]
    plain = (QuantizedLinear, NarrowProduct)
    known = all(isinstance(layer, plain) or only_multiplies(layer) for layer in layers)
    return known and all(map(_is_unwatched, [module, *layers]))


def _goes_with(x: Tensor, wide: Tensor) -> bool:
    """Whether a kernel takes `wide` beside x: of its dtype, or float32 beside what autocast makes of that."""
    return wide.dtype == x.dtype or (wide.dtype == torch.float32 and x.dtype == autocast_dtype(x.device))


def _layer_of(cache: Any, index: int) -> Any:
    """The layer `index` of a ragged cache, which a forward writes to; None: it does not write to one alone."""
    if cache is None or (isinstance(cache, Cache) and not isinstance(cache, RaggedCache)):
        return None
    layer = cache.layer_at(index)
    return layer if type(layer) in (RaggedLayer, PagedLayer) else None
