"""Decoder layers on a CPU in one C++ call: all layers of a network (`whole_network.py`), or one.

The call gets the addresses of the layers' weights: collected once, and again if a weight has moved.
"""

import ctypes
from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ....native import cpu_products
from ....native.cpu_products import Matrix
from ....quantization.kernels.native import Native
from ....quantization.linear import QuantizedLinear
from ..kv.cache import RaggedLayer, autocast_dtype
from .cpu_layers import Norm, attention_function, computes, library, norm_of
from .products import Product


_Matrices, _Norms = Matrix * 7, Norm * 8
# Places of norms in `struct Layer` whose results are the inputs of products.
_BEFORE_ATTENTION, _OF_HEADS, _BEFORE_MLP, _OF_PRODUCT = 0, 3, 5, 6


class _Layer(ctypes.Structure):
    _fields_ = [
        ("matrices", _Matrices), ("norms", _Norms), ("scale", ctypes.c_double), ("softcap", ctypes.c_double),
        ("is_gelu", ctypes.c_int64), ("rotates", ctypes.c_int64), ("norms_all", ctypes.c_int64),
    ]  # fmt: skip


class Parts(NamedTuple):
    """Of a decoder layer."""

    projections: list[Any]
    """Modules in the order of `struct Layer`, with None for what is joined to the one before."""
    norms: list[Any]
    """Likewise, with None for a norm that the layer lacks."""
    numbers: tuple[float, ...]
    """The rest of `struct Layer`."""


_Call = ctypes.c_int64 * 26  # struct Call: pointers, sizes and strides, all eight bytes wide


class OneCall:
    """Decoder layers, one after the other, as one C++ call.

    Args:
        layers: fused decoder layers. Their modules stay; hooks on them may come and go, and weights may move.
        parts: of each layer; None: it is not served.
        watched: further modules that must have no hooks.

    Attributes:
        indices: of the layers.
    """

    def __init__(self, layers: Sequence[Any], parts: Sequence[Parts | None], watched: Sequence[Any] = ()) -> None:
        self.indices, self._served = [getattr(layer.self_attn, "layer_idx", 0) for layer in layers], False
        self._parts = [each for each in parts if each is not None]
        modules = [module for each in self._parts for module in each.projections if module is not None]
        if len(self._parts) < len(layers) or not all(map(_is_served, modules)):
            return
        given = [norm for each in self._parts for norm in each.norms if norm is not None]
        inner = [part for layer in layers for part in (layer.self_attn, layer.mlp, layer.mlp.activation)]
        watched = [*watched, *inner, *modules, *given]
        self._hooks = [hooks for part in watched for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._hooks += [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
        self._quantized = [module for module in modules if isinstance(module, QuantizedLinear)]
        self._products = [module for module in modules if isinstance(module, Product)]
        self._flags = [vars(module) for module in self._quantized]
        self._most_tokens = min((float(module.max_rows) for module in self._quantized), default=inf)
        tensors: list[tuple[dict[str, Tensor | None], str]] = []
        for module in self._quantized:  # their packed weights never move
            tensors += [(module._buffers, "merged_bias"), (module.dense._parameters, "bias")]
        tensors += [(norm._parameters, "weight") for norm in given]
        weights = [(module._parameters, name) for module in self._products for name in ("weight", "bias")]
        self._others, self._weights = (
            [(where, name) for where, name in each if where.get(name) is not None] for each in (tensors, weights)
        )
        heads = {
            (*_outputs(*each.projections[:4]), layer.self_attn.head_dim)
            for each, layer in zip(self._parts, layers, strict=True)
        }
        queries, keys, self._head_dim = next(iter(heads))
        self._heads, self._kv_heads = queries // self._head_dim, keys // self._head_dim
        self._pointers: list[int] = []
        self._are_whole: list[bool] = []
        self._dtypes: tuple[torch.dtype, torch.dtype] | None = None
        self._served = len(heads) == 1

    def may_run(self, x: Tensor, tokens: int) -> bool:
        """Whether nothing watches the layers, all of a known kind, and they take `tokens` tokens in the dtype of x."""
        fits = self._served and computes(x) and cpu_products.serves(autocast_dtype(x.device) or x.dtype)
        return fits and tokens <= self._most_tokens and not any(self._hooks)

    def __call__(
        self, hidden_states: Tensor, angles: Sequence[Any], spans: Sequence[Tensor], caches: Sequence[Any]
    ) -> Tensor | None:
        """The output of the last layer for `hidden_states` [B, q, hidden], which :func:`computes` takes, in the dtype
        of all weights; None if a layer is not served, or watched.

        Args:
            angles: of each layer, cosine and sine [B, q, 2 * half], strided alike, in that dtype or float32, for what
                is rotated of a head.
            spans: of each layer's attention, `[B, 1, q, 2 to 4]` int64.
            caches: of the layers' K/V.
        """
        wide = hidden_states.dtype
        dtype = autocast_dtype(hidden_states.device) or wide
        batch, count, _ = hidden_states.shape
        if not self.may_run(hidden_states, batch * count):
            return None
        if any(map(torch.is_floating_point, spans)) or any(type(cache) is not RaggedLayer for cache in caches):
            return None
        tensors: list[Any] = [where[name] for where, name in self._others]
        if dtype == wide:
            tensors += [where[name] for where, name in self._weights]
        else:
            tensors += [tensor for product in self._products for tensor in product.copies or () if tensor is not None]
        pointers, are_whole = list(map(Tensor.data_ptr, tensors)), list(map(Tensor.is_contiguous, tensors))
        if pointers != self._pointers or are_whole != self._are_whole or (dtype, wide) != self._dtypes:
            self._functions = self._describe(dtype, wide)
            self._pointers, self._are_whole, self._dtypes = pointers, are_whole, (dtype, wide)
        if not self._functions:
            return None
        for cache in caches:
            if not cache.is_initialized:
                heads = hidden_states.new_empty(batch, self._kv_heads, 0, self._head_dim, dtype=dtype)
                cache.lazy_initialization(heads, heads)
        hidden = hidden_states.clone(memory_format=torch.contiguous_format)
        spans = [each.contiguous() for each in spans]
        to_rows, to_columns, first_row = caches[0].places
        all_keys = [cache.keys for cache in caches]
        all_values = [cache.values for cache in caches]
        cosines, sines = zip(*angles, strict=True)
        given = all_keys, all_values, spans, cosines, sines
        by_layer = [self._Pointers(*map(Tensor.data_ptr, each)) for each in given]
        cosine, sine = angles[0]
        call = _Call(
            hidden.data_ptr(), to_rows.data_ptr(), to_columns.data_ptr(), spans[0].shape[3], batch, count,
            self._heads, self._kv_heads, self._head_dim, cosine.shape[2] // 2, first_row,
            *cosine.stride()[:2], *sine.stride()[:2], *to_rows.stride(), *to_columns.stride(),
            *all_keys[0].stride()[:3], torch.get_num_threads(), cosine.dtype == torch.float32, *self._functions,
        )  # fmt: skip
        library(dtype, wide).decoder_layers(self._described, len(caches), *by_layer, call)
        for flags in self._flags:
            flags["called"] = True
        return hidden

    def _describe(self, dtype: torch.dtype, wide: torch.dtype) -> list[int]:
        """Describes the layers as C++ reads them; returns the functions that they call, or [] if it cannot."""
        attend, layers = attention_function(dtype, self._head_dim, True), []
        for projections, norms, numbers in self._parts:
            matrices = [Matrix() if module is None else _matrix_of(module, dtype, wide) for module in projections]
            weights = [norm_of(None, 0.0, None) if norm is None else _norm_if_plain(norm, wide) for norm in norms]
            # Under autocast the first two of these norms make the narrow inputs of products. C++ has rounded what the
            # last two take, and the family's code has not.
            needed, refused = (_BEFORE_ATTENTION, _BEFORE_MLP), (_OF_HEADS, _OF_PRODUCT)
            fits = None not in (norms[at] for at in needed) and {norms[at] for at in refused} == {None}
            if None in matrices or None in weights or attend is None or (dtype != wide and not fits):
                return []
            layers.append(_Layer(_Matrices(*matrices), _Norms(*weights), *numbers))  # type: ignore[misc]
        self._described, self._Pointers = (_Layer * len(layers))(*layers), ctypes.c_void_p * len(layers)
        bits = {int(matrix.bits) for layer in layers for matrix in layer.matrices} - {0}
        products = cpu_products.library(bits.pop() if len(bits) == 1 else None, dtype)
        if products is None:
            return []
        table = ctypes.addressof(ctypes.c_char.in_dll(products, "products"))
        return [table, cpu_products.address(attend)]


calls: WeakKeyDictionary[nn.Module, OneCall] = WeakKeyDictionary()
"""Of a decoder layer alone."""


def _outputs(query: Any, key: Any, _value: Any, output: Any) -> tuple[int, int]:
    """Of queries, and of keys."""
    queries: int = output.in_features
    return queries, (query.out_features - queries) // 2 if key is None else key.out_features


def _is_served(module: nn.Module) -> bool:
    if "forward" in vars(module):
        return False
    if isinstance(module, Product):
        return module.routine == "native" and isinstance(module, nn.Linear)
    is_native = type(module) is QuantizedLinear and isinstance(module.packed, Native)
    return is_native and module.inverse_scales is None


def _matrix_of(module: Any, dtype: torch.dtype, wide: torch.dtype) -> Matrix | None:
    """None if C++ cannot read a tensor."""
    is_product = isinstance(module, Product)
    weight, bias = (None, None) if is_product and dtype != wide else (module.weight, module.bias)
    if is_product and dtype != wide and module.copies is not None:
        weight, bias = module.copies
    if bias is not None and not _is_plain(bias, dtype):
        return None
    if not is_product:
        return module.packed.matrix(bias)
    return cpu_products.dense_matrix(weight, bias) if weight is not None and _is_plain(weight, dtype) else None


def _norm_if_plain(module: Any, dtype: torch.dtype) -> Norm | None:
    """None if C++ cannot read it."""
    return norm_of(module.weight, module.epsilon, module._shift) if _is_plain(module.weight, dtype) else None


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return cpu_products.is_readable(tensor) and tensor.dtype == dtype
