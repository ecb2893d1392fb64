"""Decoder layers of a shadow with fused kernels, where transformers' modules launch one kernel per small operation.

On a GPU they are Triton's; on a CPU they are C++, in forwards of the compiled runner. They replace the forwards of
classes of transformers that are those of `_REFERENCES`, whatever the family (:mod:`known_code`). Other classes,
subclasses included, classes with a replaced forward, and calls that the kernels cannot take (gradient, no ragged
cache, several dtypes) run unchanged.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation
from transformers.cache_utils import Cache

from ....native.native_code import compiler, untraced
from ....quantization.linear import QuantizedLinear, is_unwatched
from ..cuda.kernels import run_on
from ..kv.base import KVCache
from ..kv.cache import RaggedLayer, autocast_dtype
from ..kv.pages import PagedLayer
from . import cpu_layers, one_call
from .adapted_layers import AdaptedLinear, only_multiplies, project, project_gated
from .attention import ATTENTIONS, RAGGED_ATTENTION
from .family_hooks import cache_name
from .known_code import code_of, code_of_reference, has_its_forward
from .products import Activation, Product
from .snapshot import patched_forward


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_GATES = {nn.SiLU: "silu_multiply", SiLUActivation: "silu_multiply", GELUTanh: "gelu_multiply"}


class _Fused(nn.Module):
    _kernels: Any
    """`torch.ops.spec_trl`, Triton's, or :mod:`cpu_layers`: set when the class is made."""
    _on_cpu = True
    """Whether C++ serves the class too."""

    def _fit(self, x: Tensor, *others: Tensor) -> bool:
        """Whether the kernels, which have no gradient, take these tensors together: in one dtype."""
        served = cpu_layers.serves(x) if self._kernels is cpu_layers else x.dtype in _DTYPES
        for other in others:
            served = served and other.dtype == x.dtype
        return served and not torch.is_grad_enabled()


class _Norm(_Fused):
    weight: Tensor
    _eps_name = "variance_epsilon"
    _shift: float | None = None
    """See `kernels/fused_layer.py`."""

    @property
    def epsilon(self) -> float:
        """What is added to the variance."""
        epsilon: float = getattr(self, self._eps_name)
        return epsilon

    def forward(self, hidden_states: Tensor, *dtype: torch.dtype) -> Any:
        """`dtype`: of the result, if not that of the modules."""
        if not self._fit(hidden_states, self.weight) or self.weight.shape != hidden_states.shape[-1:]:
            return super().forward(hidden_states)
        how = [*(dtype or [None]), self._shift] if dtype or self._shift is not None else []
        return self._kernels.rms_norm(hidden_states.contiguous(), self.weight, self.epsilon, *how)


class _Mlp(_Fused):
    down_proj: Any
    _inputs: tuple[str, ...] = ("gate_proj", "up_proj")
    _activation = "act_fn"
    _norm_between = ""

    @property
    def activation(self) -> Any:
        return getattr(self, self._activation)

    def forward(self, x: Tensor) -> Any:
        activation = self.activation
        gate_of = _gate_of(activation) if is_unwatched(activation) else ""
        product = None
        inputs = [getattr(self, name) for name in self._inputs]
        if gate_of == "silu_multiply" and len(inputs) == 2 and self._kernels is not cpu_layers:
            product = project_gated(x, *inputs)
        if product is None:
            parts = project(x, *inputs)  # [..., intermediate]
            gate, up = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            fits = gate_of and self._fit(gate, up)
            product = getattr(self._kernels, gate_of)(gate, up) if fits else activation(gate) * up
        return self.down_proj(getattr(self, self._norm_between)(product) if self._norm_between else product)


class _Attention(_Fused):
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    o_proj: Any
    _cache_name: str
    _inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    _norms: tuple[str, ...] = ()
    """Of the heads of queries and keys."""
    _wide_norms: tuple[str, ...] = ()
    """Of all heads together."""
    _norm_between = ""
    _needs = ""
    """An attribute without which the forward computes otherwise."""
    _options: dict[str, str] = {}
    """Keywords of attention, and the attributes that they come from."""
    _is_gated = False
    """Whether the query's projection returns a gate of the output beside each head."""
    _has_one_half = False
    """Whether angles are given for half of the rotated elements."""
    _rounds_back = False
    """Whether angles in float32 leave queries and keys in their dtype."""

    @property
    def is_plain(self) -> bool:
        """Whether C++ computes the whole of it."""
        known = set(self._options) <= {"softcap"} and self._needs in ("", "use_rope")
        return known and not self._is_gated

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer = layer_of(kwargs.get(self._cache_name), self.layer_idx)
        as_known = not self._needs or getattr(self, self._needs)
        norms = [getattr(self, name) for name in self._norms if as_known]
        angles = kwargs.get("position_embeddings")
        if (
            layer is None
            or args
            or angles is None
            or not as_known
            or self.training
            or self.config._attn_implementation not in ATTENTIONS
            or not _are_fused(norms, self.head_dim)
            or len({norm.epsilon for norm in norms}) > 1
            or not self._fit(hidden_states)
            or not self._fit(*angles, *(norm.weight for norm in norms))
        ):
            return super().forward(hidden_states, *args, **kwargs)
        query, key, value, gate = self._heads(hidden_states)  # [B, q, heads or kv_heads, d]
        # Under autocast products are narrower than angles and norms.
        narrow = autocast_dtype(query.device) or hidden_states.dtype
        if {query.dtype, key.dtype, value.dtype} != {narrow} or not self._takes_angles(query, angles[0]):
            return super().forward(hidden_states, **kwargs)
        write, half = self._kernels.rotate_and_write, angles[0].shape[-1] // (1 if self._has_one_half else 2)
        how = [norms[0]._shift if norms else None, half]
        query, keys, values = layer.rotate_and_update(write, query, key, value, *angles, norms, *how)
        attend = ATTENTIONS[self.config._attn_implementation]
        options = {name: getattr(self, attribute) for name, attribute in self._options.items()}
        mask = kwargs.get("attention_mask")
        output, _ = attend(self, query, keys, values, mask, self.scaling, **options)  # [B, q, heads, d]
        if gate is not None:
            output = self._kernels.sigmoid_multiply(gate, output)
        output = output.flatten(2)
        return self.o_proj(getattr(self, self._norm_between)(output) if self._norm_between else output), None

    def _heads(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        parts = project(hidden_states, *(getattr(self, name) for name in self._inputs))
        if len(parts) == 1:
            size: int = self.num_key_value_heads * self.head_dim  # type: ignore[assignment, operator]
            parts = list(parts[0].split([parts[0].shape[-1] - 2 * size, size, size], dim=-1))
        for index, name in enumerate(self._wide_norms):
            parts[index] = getattr(self, name)(parts[index])
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (part.view(shape) for part in parts)
        if not self._is_gated:
            return query, key, value, None
        query, gate = parts[0].unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        return query, key, value, gate

    def _takes_angles(self, query: Tensor, cosine: Tensor) -> bool:
        rounded = self._rounds_back and cosine.dtype == torch.float32 and query.dtype.itemsize == 2
        fits = query.dtype == cosine.dtype if self._kernels is cpu_layers else _goes_with(query, cosine)
        return fits or rounded


class DecoderLayer(_Fused):
    self_attn: Any
    mlp: Any
    _cache_name: str
    _order: tuple[str, ...] = ("input_layernorm", "", "post_attention_layernorm", "")
    """Names of the norms before attention, after it, before the MLP and after it; "": there is none."""
    _dropouts: tuple[str, ...] = ()
    """Which do nothing but in training."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_traced = args or torch.compiler.is_compiling()  # by the compiled runner
        if not is_traced and (whole := self._in_one_call(hidden_states, **kwargs)) is not None:
            return whole
        first, after, second, last = (getattr(self, name) if name else None for name in self._order)
        norms = [norm for norm in (after, second, last) if norm is not None]
        fused = _are_fused(norms, hidden_states.shape[-1]) and hasattr(self, "self_attn")
        if args or self._drops() or not fused or not self._fit(hidden_states, *(norm.weight for norm in norms)):
            return super().forward(hidden_states, *args, **kwargs)
        given, dtype = hidden_states, self._narrow(hidden_states, self.self_attn)
        if first is not None:
            given = first(hidden_states, *(dtype if _is_fused_norm(first) else []))
        attended, _ = self.self_attn(hidden_states=given, **kwargs)
        residual, given = self._add(attended, hidden_states, after, second)
        fed = self.mlp(given)
        return self._add(fed[0] if isinstance(fed, tuple) else fed, residual, last)[0]

    def _add(self, x: Tensor, residual: Tensor, after: Any, before: Any = None) -> tuple[Tensor, Tensor]:
        """residual + x, which goes through the norm `after`, if any; and what the norm `before`, if any, of the MLP
        makes of that."""
        if not _goes_with(x, residual) or (after is before is None):
            total = residual + (x if after is None else after(x))
            return total, total if before is None else before(total)
        given = x.contiguous(), residual.contiguous()
        if before is None:
            total = self._kernels.norm_add(*given, after.weight, after.epsilon, after._shift)
            return total, total
        how: list[Any] = self._narrow(residual, self.mlp)
        if after is not None or before._shift is not None:
            how = [*(how or [None]), before._shift, *((after.weight, after.epsilon) if after is not None else ())]
        total, normed = self._kernels.add_rms_norm(*given, before.weight, before.epsilon, *how)
        return total, normed

    def _drops(self) -> bool:
        dropouts = [getattr(self, name) for name in self._dropouts]
        return any(each.training or not is_unwatched(each) for each in dropouts)

    def _narrow(self, x: Tensor, part: nn.Module) -> list[Any]:
        """The dtype in which a norm before `part` may return its result, if another than that of the residual."""
        dtype = autocast_dtype(x.device)
        return [dtype] if dtype is not None and _only_multiplies(part) else []

    @untraced
    def _in_one_call(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Tensor | None:
        """On a CPU, if all parts of the layer are Llama's, or those of its kind, and unwatched."""
        has_angles = isinstance(position_embeddings, tuple)  # DeepSeek-V2 has complex numbers
        if self._kernels is not cpu_layers or not has_angles or attention_mask is None or self._drops():
            return None
        attention, (cosine, _) = self.self_attn, position_embeddings
        if not cpu_layers.computes(hidden_states) or torch.is_grad_enabled() or not isinstance(attention, _Attention):
            return None
        if not attention._takes_angles(hidden_states, cosine):
            return None
        call = one_call.calls.get(self)
        if call is None:
            call = one_call.calls[self] = one_call.OneCall([self], [self.parts()])
        caches = [layer_of(kwargs.get(self._cache_name), call.indices[0])]
        return call(hidden_states, [position_embeddings], [attention_mask], caches)

    def parts(self) -> one_call.Parts | None:
        """As :class:`~.OneCall` takes them; None: one is not ours."""
        attention, mlp = self.self_attn, self.mlp
        if not isinstance(attention, _Attention) or not isinstance(mlp, _Mlp) or not attention.is_plain:
            return None
        heads = [getattr(attention, name) for name in attention._norms or attention._wide_norms] or [None, None]
        inner = [getattr(part, part._norm_between) if part._norm_between else None for part in (attention, mlp)]
        first, after, second, last = (getattr(self, name) if name else None for name in self._order)
        norms = [first, *heads, inner[0], after, second, inner[1], last]
        gate = _gate_of(mlp.activation)
        ours = gate and all(norm is None or isinstance(norm, _Norm) for norm in norms)
        patched = "forward" in vars(mlp.activation)
        if not ours or patched or attention.config._attn_implementation != RAGGED_ATTENTION:
            return None
        queries, gates = ([getattr(part, name) for name in part._inputs] for part in (attention, mlp))
        queries, gates = queries + [None] * (3 - len(queries)), gates + [None] * (2 - len(gates))
        products = [*queries, attention.o_proj, *gates, mlp.down_proj]
        softcap = next((getattr(attention, name) for name in attention._options.values()), None) or 0.0
        rotates = not attention._needs or bool(getattr(attention, attention._needs))
        flags = gate == "gelu_multiply", rotates, bool(attention._wide_norms)
        return one_call.Parts(products, norms, (attention.scaling, softcap, *flags))


_HEADS = {"_norms": ("q_norm", "k_norm")}
_REFERENCES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama.LlamaRMSNorm": (_Norm, {}),
    "gemma3.Gemma3RMSNorm": (_Norm, dict(_shift=1.0, _eps_name="eps")),
    "gpt_oss.GptOssRMSNorm": (_Norm, dict(_shift=0.0)),
    "llama.LlamaMLP": (_Mlp, {}),
    "bitnet.BitNetMLP": (_Mlp, dict(_norm_between="ffn_sub_norm")),
    "phi3.Phi3MLP": (_Mlp, dict(_inputs=("gate_up_proj",), _activation="activation_fn")),
    "llama.LlamaAttention": (_Attention, {}),
    "qwen2_vl.Qwen2VLAttention": (_Attention, {}),
    "seed_oss.SeedOssAttention": (_Attention, {}),  # with a dropout
    "granitemoehybrid.GraniteMoeHybridAttention": (_Attention, {}),  # without rotation if there are no angles
    "smollm3.SmolLM3Attention": (_Attention, dict(_needs="use_rope")),
    "bitnet.BitNetAttention": (_Attention, dict(_norm_between="attn_sub_norm")),
    "qwen3.Qwen3Attention": (_Attention, _HEADS),
    "gemma3.Gemma3Attention": (_Attention, _HEADS),
    "gemma2.Gemma2Attention": (_Attention, dict(_options={"softcap": "attn_logit_softcapping"})),
    "olmo2.Olmo2Attention": (_Attention, dict(_wide_norms=("q_norm", "k_norm"), _rounds_back=True)),
    "gpt_oss.GptOssAttention": (_Attention, dict(_options={"s_aux": "sinks"}, _has_one_half=True, _on_cpu=False)),
    "phi3.Phi3Attention": (_Attention, dict(_inputs=("qkv_proj",))),
    "glm4_moe.Glm4MoeAttention": (_Attention, dict(_HEADS, _needs="use_qk_norm", _on_cpu=False)),
    "qwen3_5.Qwen3_5Attention": (_Attention, dict(_HEADS, _is_gated=True, _on_cpu=False)),
    "llama.LlamaDecoderLayer": (DecoderLayer, {}),
    "mixtral.MixtralDecoderLayer": (DecoderLayer, {}),
    "phi3.Phi3DecoderLayer": (DecoderLayer, dict(_dropouts=("resid_attn_dropout", "resid_mlp_dropout"))),
    "gpt_oss.GptOssDecoderLayer": (DecoderLayer, {}),
    "qwen3_5.Qwen3_5DecoderLayer": (DecoderLayer, dict(_on_cpu=False)),
    "qwen3_next.Qwen3NextDecoderLayer": (DecoderLayer, dict(_on_cpu=False)),
    "gemma3.Gemma3DecoderLayer": (DecoderLayer, dict(_order=(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"))),
    "glm4.Glm4DecoderLayer": (DecoderLayer, dict(_on_cpu=False, _order=(
        "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"))),
    "olmo2.Olmo2DecoderLayer": (DecoderLayer, dict(_order=(
        "", "post_attention_layernorm", "", "post_feedforward_layernorm"))),
}  # fmt: skip
"""What fuses a class whose forward is that of a class `<family>.<name>` of transformers."""
_SUFFIXES = ("RMSNorm", "MLP", "Attention", "DecoderLayer")


def fuses(kind: type, module: nn.Module, exact: bool, on_cpu: bool) -> bool | str:
    """Whether :func:`fused_class` serves `module`, of class `kind`, or why not.

    Args:
        exact: only with kernels whose order of sums does not depend on the number of rows.
        on_cpu: with C++ on a CPU; False: with Triton's kernels.
    """
    parameter = next(module.parameters(), None)
    if parameter is None or on_cpu != ((device := parameter.device).type == "cpu" and not run_on(device)):
        return False
    fused: Any = fused_class(kind, on_cpu)
    if fused is kind:
        is_like = kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(_SUFFIXES)
        return "its forward is none of those that have fused kernels here" if is_like else False
    if patched_forward(module) is not None or not has_its_forward(kind):
        return "its forward was replaced"
    if exact and issubclass(fused, AdaptedLinear):
        return "the order of sums in kernels for adapters depends on the number of rows"
    if issubclass(fused, _Mlp):
        gate = _gate_of(activation := getattr(module, fused._activation))
        is_fast = not isinstance(activation, GELUTanh) or isinstance(activation.act, functools.partial)
        is_own = gate == "" or not is_fast
        if is_own or not has_its_forward(_activation_class(activation)):
            return f"no fused kernel has its activation, {type(activation).__name__}"
    if on_cpu:
        return compiler() is not None or "there is no C++ compiler"
    return (run_on(device) and launches(device)) or "Triton's kernels do not run"


def _gate_of(activation: nn.Module) -> str:
    """The kernel that multiplies with it; "": there is none."""
    return _GATES.get(_activation_class(activation), "")


def _activation_class(activation: nn.Module) -> Any:
    kind: Any = type(activation)
    return kind.__bases__[1] if issubclass(kind, Activation) else kind


@functools.cache
def launches(device: torch.device) -> bool:
    """Whether Triton can compile and launch a kernel; warns once if not (it needs a C compiler)."""
    try:
        from ..cuda.kernels import fused_layer  # registers the operators

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
def fused_class(kind: type, on_cpu: bool) -> type:
    """A subclass of `kind` with fused kernels; `kind` itself if there are none."""
    if (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "Linear") and not on_cpu:
        return type("AdaptedLinear", (AdaptedLinear, kind), {})
    if not (kind.__module__.startswith("transformers.models.") and kind.__name__.endswith(_SUFFIXES)):
        return kind
    mixin, members = _known().get(code_of(kind), (None, {}))
    if mixin is None or (on_cpu and not members.get("_on_cpu", True)):
        return kind
    kernels = cpu_layers if on_cpu else torch.ops.spec_trl
    members = {"_kernels": kernels, "_cache_name": cache_name(kind), **members}
    return type(f"Fused{kind.__name__}", (mixin, kind), members)


@functools.cache
def _known() -> dict[str, tuple[Any, dict[str, Any]]]:
    """`_REFERENCES` by the code of their forwards, without those that transformers lacks."""
    found = {code_of_reference(name): how for name, how in _REFERENCES.items()}
    found.pop("", None)
    return found


def _is_fused_norm(module: nn.Module) -> bool:
    """Whether `module` may be computed as part of a fused call."""
    return isinstance(module, _Norm) and is_unwatched(module)


def _are_fused(norms: Sequence[Any], size: int) -> bool:
    """Whether norms, all of one kind, may be computed as part of a fused call over rows of `size`."""
    fused = all(_is_fused_norm(norm) and norm.weight.shape == (size,) for norm in norms)
    return fused and len({norm._shift for norm in norms}) <= 1


def _only_multiplies(module: nn.Module) -> bool:
    """Whether attention or an MLP only multiplies its input with weights, for which autocast casts it: then the input
    may be cast before."""
    if not isinstance(module, _Attention | _Mlp):
        return False
    layers = [getattr(module, name) for name in module._inputs]
    known = all(isinstance(layer, QuantizedLinear | Product) or only_multiplies(layer) for layer in layers)
    return known and all(map(is_unwatched, [module, *layers]))


def _goes_with(x: Tensor, wide: Tensor) -> bool:
    """Whether a kernel takes `wide` beside x: of its dtype, or float32 beside what autocast makes of that."""
    return wide.dtype == x.dtype or (wide.dtype == torch.float32 and x.dtype == autocast_dtype(x.device))


def layer_of(cache: Any, index: int) -> Any:
    """The layer `index` of a ragged cache, which a forward writes to; None: it does not write to one alone."""
    if cache is None or (isinstance(cache, Cache) and not isinstance(cache, KVCache)):
        return None
    layer = cache.layer_at(index)
    return layer if type(layer) in (RaggedLayer, PagedLayer) else None
