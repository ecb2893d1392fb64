"""Turns a shadow of the policy into its quantized drafter (ER §3.1)."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from ..native.cpu_products import DTYPES, library
from ..value_checks import require_choice
from .awq import ActivationAware, ActivationStatistics
from .experts import QuantizedExperts, holds_stacked_weights, inspect_experts, is_experts, matrices_of, matrix_names
from .kernels import KERNEL_NAMES, LayerSpec, PackedWeight, announce, make_packed
from .kernels.native import Native, NativeInt8
from .linear import PackedLayer, QuantizedLinear, is_unwatched, join
from .rtn import GROUP_SIZES, Scheme, find_scheme
from .source_weight import SourceSpec, inspect_projection, is_projection, is_trained_copy, under_adapters


# Routers decide discretely on small weights: rounding sends tokens to the wrong experts and saves nothing.
ROUTER_NAMES = ("gate", "router", "shared_expert_gate")
# They set the rates of a state: tiny weights, whose errors last for the rest of a text. Mamba's `dt_proj` is
# read and not called.
DECAY_NAMES = ("in_proj_a", "in_proj_b", "b_proj", "dt_proj")
# Least share of a draft step's bytes for "auto" to pack the lm_head: below it, the gain is under a quarter.
LM_HEAD_SHARE = 1 / 3
# Projections of the same input, in the families of `engine/network/fused_layers.py`.
SIBLINGS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


@dataclass(eq=False)
class QuantizedNetwork:
    """The packed layers of a drafter, by their names in the shadow, and the projections that no kernel can hold.

    Kernels may stand in for others until the first :meth:`refresh` measures them: `build(True)` then makes the network
    again.
    """

    layers: dict[str, PackedLayer]
    dense_layers: list[str]
    build: "Callable[[bool], QuantizedNetwork]"

    @property
    def packed_bytes(self) -> int:
        return sum(layer.packed_bytes for layer in self.layers.values())

    @property
    def max_rows(self) -> int:
        """Most rows with packed weights; more rows run the policy's dense weights. 0: nothing is packed."""
        return max((layer.max_rows for layer in self.layers.values()), default=0)

    @property
    def activation_aware_layers(self) -> list[str]:
        """Names of layers that use statistics of the policy's projections of the same names."""
        linear = {name: layer for name, layer in self.layers.items() if isinstance(layer, QuantizedLinear)}
        return [name for name, layer in linear.items() if layer.inverse_scales is not None]

    def refresh(self, statistics: ActivationStatistics | None = None) -> None:
        """Quantizes the live weights again, into the same buffers, and merges adapters layer by layer. The first call
        times kernels that have no times, and may change the kernels of layers.

        Args:
            statistics: of the policy's newest forwards, for activation-aware schemes (AWQ, ER §C.4). Layers without
                statistics are rounded to nearest.

        Raises:
            ValueError: the statistics have other widths than the projections.
        """
        self._measure()
        names = [] if statistics is None else self.activation_aware_layers
        activations = {name: statistics.of(name) for name in names if statistics is not None}
        for name, observed in activations.items():
            width = self.layers[name].packed_weights[0].layer.in_features
            if observed is not None and observed.mean_square.numel() != width:
                raise ValueError(
                    f"statistics: {name!r} has {observed.mean_square.numel()} input channels there and {width} in the "
                    "drafter; pass statistics of the policy that the drafter was made of."
                )
        quantizer = ActivationAware()
        with torch.no_grad():
            for name, layer in self.layers.items():
                layer.refresh(quantizer, activations.get(name))

    @property
    def stand_ins(self) -> list[LayerSpec]:
        """The weights with stand-in kernels."""
        weights = [packed for layer in self.layers.values() for packed in layer.packed_weights]
        return [packed.layer for packed in weights if not packed.is_final]

    def _measure(self) -> None:
        """Replaces all layers, before they hold weights, if kernels stand in for others."""
        if layers := self.stand_ins:
            announce({layer.shape for layer in layers}, layers[0].device)
            for layer in self.layers.values():
                for packed in layer.packed_weights:
                    packed.to("meta")  # frees its buffers: memory may be short by now
            measured = self.build(True)
            self.layers, self.dense_layers = measured.layers, measured.dense_layers

    def assert_all_called(self, aside: Collection[str] = ()) -> None:
        """Raises RuntimeError if a packed layer outside of `aside` has not run since the last refresh: a drafter that
        runs the policy's layers is slow. Captured forwards do not count."""
        if idle := [name for name, layer in self.layers.items() if not layer.called and name not in aside]:
            raise RuntimeError(
                f"{len(idle)} of {len(self.layers)} quantized layers did not run in the draft forward, so the drafter "
                f"is not the one that was built: {_shorten(idle)}. Rebuild the drafter from the unpatched model."
            )


def quantize_projections(
    shadow: PreTrainedModel,
    scheme: str = "auto",
    kernel: str = "auto",
    lm_head: str = "auto",
    pack: bool = True,
) -> QuantizedNetwork:
    """Replaces the attention and FFN projections of `shadow` by quantized ones, in place.

    Embeddings, norms, biases and routers are the policy's. Layers without a kernel stay dense; one warning names them.

    Args:
        shadow: a causal LM over the policy's Parameters, with other module objects, in eval mode.
        scheme: "auto", "rtn-w4-g128", "rtn-w4-g64", "rtn-w4-g32", "rtn-w8", "awq-w4-g128", "awq-w4-g64", "awq-w4-g32"
            or "nf4"; "auto" as :func:`choose_scheme` says. A row that the group does not divide takes the next smaller
            group. "awq" rounds to nearest until the first refresh with statistics.
        kernel: "auto" = the best for each layer; or a kernel's name.
        lm_head: "dense", "packed", or "auto" = packed if, left dense, it made up at least a third of the weight bytes
            of a draft step. A head with hooks or a patched forward stays dense.
        pack: whether to quantize the present weights, or leave the buffers empty until `refresh()` measures.

    Raises:
        ValueError: an unknown name; or "nf4" without a kernel for any layer.
    """
    require_choice("kernel", kernel, KERNEL_NAMES)
    require_choice("lm_head", lm_head, ("auto", "dense", "packed"))
    wanted = choose_scheme(scheme, kernel, shadow)
    network = _build(shadow, wanted, kernel, lm_head, measures=False)
    if pack:
        network.refresh()
    return network


def _build(shadow: PreTrainedModel, wanted: Scheme, kernel: str, lm_head: str, measures: bool) -> QuantizedNetwork:
    """Replaces layers of `shadow`, also already replaced ones; `measures`: as of `make_packed`."""
    builder = _Builder(shadow, wanted, kernel, measures)
    with torch.inference_mode(False), torch.no_grad():  # buffers made in inference mode could not be refreshed outside
        builder.replace_projections(shadow.get_decoder())
        builder.replace_lm_head(lm_head)
        builder.join_siblings()
    layers, reasons = builder.layers, builder.left_dense
    if wanted.normal_float and not layers:
        raise ValueError(
            f"scheme={wanted.name!r} can pack no layer of this model: {'; '.join(reasons)}. 'rtn-w4-g64' has kernels "
            "that come with torch."
        )
    dense = [name for names in reasons.values() for name in names]
    network = QuantizedNetwork(layers, dense, partial(_build, shadow, wanted, kernel, lm_head))
    if reasons and not network.stand_ins:  # else the next build says it
        count = len(network.dense_layers)
        warnings.warn(
            f"{count} of {count + len(layers)} layers of the drafter stay dense under scheme {wanted.name!r}: "
            + "; ".join(f"{_shorten(names)} ({reason})" for reason, names in reasons.items()),
            stacklevel=3,
        )
    return network


def choose_scheme(name: str, kernel: str, policy: PreTrainedModel) -> Scheme:
    """The scheme called `name`. "auto" is 8 bits, which keep more drafts, for a policy in float32 or 16 bits on a CPU
    with our C++, else 4 bits (ER §3.1)."""
    if name != "auto":
        return find_scheme(name)
    is_served = policy.device.type == "cpu" and policy.dtype in DTYPES and not torch.is_autocast_enabled("cpu")
    has_kernel = is_served and kernel in ("auto", Native.name) and library(NativeInt8.bits, torch.float32) is not None
    return find_scheme("rtn-w8" if has_kernel else "rtn-w4-g128")


@dataclass
class _Builder:
    """Walks the shadow, replaces projections, and records the dense ones."""

    shadow: PreTrainedModel
    scheme: Scheme
    kernel: str
    measures: bool
    layers: dict[str, PackedLayer] = field(default_factory=dict)
    left_dense: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # reason → names

    def __post_init__(self) -> None:
        for name, module in list(self.shadow.named_modules()):
            if isinstance(module, PackedLayer):
                self.shadow.set_submodule(name, module.dense)
        self.names: dict[nn.Module, str] = {module: name for name, module in self.shadow.named_modules()}

    def replace_projections(self, parent: nn.Module) -> None:
        """Replaces the projections below `parent`, except in vision towers, unused in drafting."""
        layers = layer_specs(parent, self.scheme)
        for child_name, child in list(parent.named_children()):
            is_tower = isinstance(child, PreTrainedModel) and "text" not in child.input_modalities
            if child is self.shadow.get_output_embeddings() or child_name in (*ROUTER_NAMES, *DECAY_NAMES) or is_tower:
                continue
            if is_projection(child):
                self._replace(parent, child_name, self._quantized_linear(child, layers[child_name]))
            elif is_experts(child):
                self._replace(parent, child_name, self._quantized_experts(child))
            elif holds_stacked_weights(child):
                self._replace(parent, child_name, "its stacked weights lack transformers' experts interface")
            elif not is_trained_copy(child):
                self.replace_projections(child)
            elif any(is_projection(module) for module in child.modules()):
                self._replace(parent, child_name, "peft keeps a trained copy of it (modules_to_save)")

    def replace_lm_head(self, choice: str) -> None:
        """Replaces the output embedding if `choice` says so. A tied input embedding is another module and stays."""
        head = self.shadow.get_output_embeddings()
        if choice == "dense" or head is None:
            return
        if choice == "auto" and is_projection(head):
            weight = under_adapters(head).weight
            share = weight.nbytes / (weight.nbytes + sum(layer.packed_bytes for layer in self.layers.values()))
            if share < LM_HEAD_SHARE:
                return
        replacement: PackedLayer | str
        if not is_unwatched(head):  # TRL's cast_lm_head_to_fp32
            replacement = "its forward is patched or hooked, which a replacement would lose"
        elif not is_projection(head):
            replacement = f"a {type(head).__name__} is no linear layer"
        else:
            replacement = self._quantized_linear(head, layer_spec(inspect_projection(head), self.scheme))
        if choice == "auto" and isinstance(replacement, str):
            return  # nobody asked for it
        parent_name, _, child_name = self.names[head].rpartition(".")
        self._replace(self.shadow.get_submodule(parent_name), child_name, replacement)

    def join_siblings(self) -> None:
        for parent in self.shadow.modules():
            for names in SIBLINGS:
                layers = [parent._modules.get(name) for name in names]
                if all(isinstance(layer, QuantizedLinear) and layer.packed.layer.siblings for layer in layers):
                    join(*layers)

    def _replace(self, parent: nn.Module, child_name: str, replacement: PackedLayer | str) -> None:
        name = self.names[parent.get_submodule(child_name)]
        if isinstance(replacement, str):
            self.left_dense[replacement].append(name)
        else:
            setattr(parent, child_name, replacement)
            self.layers[name] = replacement

    def _quantized_linear(self, module: nn.Module, layer: LayerSpec | str) -> QuantizedLinear | str:
        packed = layer if isinstance(layer, str) else make_packed(self.kernel, layer, self.measures)
        return packed if isinstance(packed, str) else QuantizedLinear(module, packed, self.scheme.activation_aware)

    def _quantized_experts(self, module: nn.Module) -> QuantizedExperts | str:
        packed: list[list[PackedWeight]] = []
        for name in matrix_names(module):
            layer = layer_spec(inspect_experts(module, name), self.scheme)
            first = layer if isinstance(layer, str) else make_packed(self.kernel, layer, self.measures)
            if isinstance(first, str):
                return first
            packed.append([first, *(type(first)(first.layer) for _ in matrices_of(module, name)[1:])])
        return QuantizedExperts(module, *packed)


def layer_specs(parent: nn.Module, scheme: Scheme) -> dict[str, LayerSpec | str]:
    """Returns the specs of the projections directly below `parent`, by name, or the reason why no kernel can hold
    them. `SIBLINGS` are linked if one product may serve them: no input scales, equal but for their rows, all or none
    with a bias."""
    specs = {
        name: layer_spec(inspect_projection(child), scheme)
        for name, child in parent.named_children()
        if is_projection(child)
    }
    for names in () if scheme.activation_aware else SIBLINGS:
        layers = [layer for name in names if isinstance(layer := specs.get(name), LayerSpec)]
        likes = {replace(layer, out_features=0) for layer in layers}
        biased = {under_adapters(getattr(parent, name)).bias is not None for name in names if name in specs}
        if len(layers) == len(names) and len(likes) == len(biased) == 1:
            rows = tuple(layer.out_features for layer in layers)
            specs |= {name: replace(layer, siblings=rows) for name, layer in zip(names, layers, strict=True)}
    return specs


def layer_spec(source: SourceSpec | str, scheme: Scheme) -> LayerSpec | str:
    """Returns the spec of a weight, or the reason why no kernel can hold it."""
    if isinstance(source, str):
        return source
    group = scheme.group_for(source.in_features)
    if group is None:
        return f"{source.in_features} input features are no multiple of {GROUP_SIZES[-1]}"
    sizes, codes = (source.out_features, source.in_features), (scheme.bits, group)
    return LayerSpec(*sizes, *codes, source.dtype, None, source.device, scheme.normal_float)


def _shorten(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
