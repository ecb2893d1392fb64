"""A decoder layer of a shadow in one call, on a CPU: `decoder_layer` of `cpu_layer.cpp`, for few tokens in float32.

A small network's step is bound by the calls of its small operations, some thirty per layer; here it is one. What the
C++ must know of a layer is gathered once, and again where a weight has moved.
"""

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ... import cpu_products
from ...cpu_products import Matrix
from ...dense_linear import DenseLinear
from ...quantization.kernels.native import Native
from ...quantization.linear import QuantizedLinear
from . import cpu_attention, cpu_layer
from .cache import RaggedLayer


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double)]


class _Layer(ctypes.Structure):
    _fields_ = [("matrices", Matrix * 7), ("norms", _Norm * 6), ("scale", ctypes.c_double)]


_Call = ctypes.c_int64 * 29  # struct Call: pointers, sizes and strides, all eight bytes wide


class OneCall:
    """What a decoder layer computes, as C++ takes it.

    Args:
        layer: a fused decoder layer. Its modules stay; hooks on them may come and go, and weights may move.
        norms: six modules in the order of `struct Layer`, with None for a norm that the layer lacks. None instead of
            the list: the layer is not served.

    Attributes:
        index: of the layer.
    """

    def __init__(self, layer: Any, norms: list[Any] | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self._served = attention.layer_idx, False
        if norms is None:
            return
        projections = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        modules = [*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(map(_is_served, modules)):
            return
        watched = [attention, mlp, mlp.act_fn, *modules, *(norm for norm in norms if norm is not None)]
        self._hooks = [hooks for each in watched for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._hooks += [module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks]
        self._quantized = [module for module in modules if isinstance(module, QuantizedLinear)]
        self._flags = [vars(module) for module in self._quantized]
        tensors: list[tuple[dict[str, Tensor | None], str]] = []
        for module in modules:
            if isinstance(module, QuantizedLinear):
                tensors += [(module.packed._buffers, "codes"), (module._buffers, "merged_bias")]
                module = module.dense
            tensors += [(module._parameters, "weight"), (module._parameters, "bias")]
        tensors += [(norm._parameters, "weight") for norm in norms if norm is not None]
        self._tensors = [(where, name) for where, name in tensors if where.get(name) is not None]
        self._projections, self._norms, self._scale = modules, norms, attention.scaling
        self._head_dim = attention.head_dim
        self._pointers: tuple[int, ...] = ()
        self._attend = cpu_attention.compiled(torch.float32, self._head_dim)
        self._heads = modules[0].out_features // self._head_dim
        self._kv_heads = modules[1].out_features // self._head_dim
        self._served = self._attend is not None
        functions = (cpu_products.library().multiply, self._attend) if self._served else ()
        self._functions = [cpu_products.address(function) for function in functions]

    def __call__(
        self, hidden_states: Tensor, cosine: Tensor, sine: Tensor, spans: Tensor, cache: RaggedLayer
    ) -> Tensor | None:
        """The layer's output for `hidden_states` [B, q, hidden] float32; None where it is not served, or watched.

        Args:
            cosine, sine: [B, q, head_dim] float32 each.
            spans: of attention, `[B, 1, q, 2 or 4]` int64.
            cache: where it writes and reads.
        """
        if not self._served or any(self._hooks) or spans.is_floating_point() or not cpu_products.serves(torch.float32):
            return None
        pointers = tuple(_place_of(where[name]) for where, name in self._tensors)
        if pointers != self._pointers:
            self._describe(pointers)
        batch, count, _ = hidden_states.shape
        if batch * count > self._most_rows:
            return None
        if not cache.is_initialized:
            heads = hidden_states.new_empty(batch, self._kv_heads, 0, self._head_dim)
            cache.lazy_initialization(heads, heads)
        hidden, spans = hidden_states.clone(memory_format=torch.contiguous_format), spans.contiguous()
        to_rows, to_columns, first_row = cache.places
        keys = cache.keys
        call = _Call(
            hidden.data_ptr(), cosine.data_ptr(), sine.data_ptr(), keys.data_ptr(), cache.values.data_ptr(),
            to_rows.data_ptr(), to_columns.data_ptr(), spans.data_ptr(), spans.shape[3],
            batch, count, self._heads, self._kv_heads, self._head_dim, first_row,
            *cosine.stride()[:2], *sine.stride()[:2], *to_rows.stride(), *to_columns.stride(), *keys.stride()[:3],
            torch.get_num_threads(), *self._functions,
        )  # fmt: skip
        cpu_layer.library().decoder_layer(self._described, call)
        for flags in self._flags:
            flags["called"] = True
        return hidden

    def _describe(self, pointers: tuple[int, ...]) -> None:
        matrices = [_matrix_of(module) for module in self._projections]
        self._most_rows = min([cpu_products.MOST_ROWS, *(module.max_rows for module in self._quantized)])
        weights = [_Norm(None, 0.0) if each is None else _norm_of(each) for each in self._norms]
        self._pointers = pointers
        if None in matrices or None in weights:
            self._most_rows = 0
            return
        layer = _Layer((Matrix * 7)(*matrices), (_Norm * 6)(*weights), self._scale)  # type: ignore[misc]
        self._described = ctypes.byref(layer)


calls: WeakKeyDictionary[nn.Module, OneCall] = WeakKeyDictionary()
"""What was made of layers that live."""


def _place_of(tensor: Any) -> int:
    """Where its numbers lie next to each other; 0: they do not, as those of a transposed weight in the same place."""
    return tensor.data_ptr() if tensor.is_contiguous() else 0


def _is_served(module: nn.Module) -> bool:
    if "forward" in vars(module):
        return False
    if type(module) is DenseLinear:
        return cpu_products.library() is not None
    is_native = type(module) is QuantizedLinear and isinstance(module.packed, Native)
    return is_native and module.inverse_scales is None


def _matrix_of(module: Any) -> Matrix | None:
    """None where C++ cannot read a tensor."""
    bias = module.bias
    if bias is not None and not _is_plain(bias):
        return None
    if isinstance(module, QuantizedLinear):
        return module.packed.matrix(bias)  # type: ignore[operator]
    return cpu_products.dense_matrix(module.weight, bias) if _is_plain(module.weight) else None


def _norm_of(module: Any) -> _Norm | None:
    """None where C++ cannot read it."""
    return _Norm(module.weight.data_ptr(), module.variance_epsilon) if _is_plain(module.weight) else None


def _is_plain(tensor: Tensor) -> bool:
    return cpu_products.is_plain(tensor) and tensor.dtype == torch.float32
