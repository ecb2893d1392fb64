"""A decoder layer of a shadow in one call, on a CPU: `decoder_layer` of `cpu_layer.cpp`, for few tokens in float32.

A small network's step is bound by the calls of its small operations, some thirty per layer; here it is one.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ... import cpu_products
from ...cpu_products import Matrix
from ...dense_linear import DenseLinear
from ...quantization.kernels.native_int4 import NativeInt4
from ...quantization.linear import QuantizedLinear
from . import cpu_attention, cpu_layer
from .cache import _RaggedLayer


_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PRODUCTS = ("gate_proj", "up_proj", "down_proj")


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double)]


class _Layer(ctypes.Structure):
    _fields_ = [("matrices", Matrix * 7), ("norms", _Norm * 6), ("scale", ctypes.c_double)]


_Call = ctypes.c_int64 * 28  # struct Call: pointers, sizes and strides, all eight bytes wide
_NO_NORM = _Norm(None, 0.0)


def decoder_layer(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    spans: Tensor,
    cache: _RaggedLayer,
    norms: list[Any],
) -> Tensor | None:
    """What `layer` makes of `hidden_states` [B, q, hidden]; None where it is not served.

    Args:
        layer: a fused decoder layer, which nobody watches.
        position_embeddings: cosine and sine, [B or 1, q, head_dim] float32 each.
        spans: of attention, `[B, 1, q, 2]` int64.
        cache: where it writes and reads.
        norms: six, as in `struct Layer`; None: there is no such norm.
    """
    attention, mlp = layer.self_attn, layer.mlp
    batch, count, _ = hidden_states.shape
    modules = [getattr(attention, name) for name in _PROJECTIONS] + [getattr(mlp, name) for name in _PRODUCTS]
    matrices = [matrix for module in modules if (matrix := matrix_of(module, batch * count)) is not None]
    attend = cpu_attention.compiled(torch.float32, attention.head_dim)
    if len(matrices) < len(modules) or attend is None or spans.is_floating_point():
        return None
    cosine, sine = position_embeddings
    if not cache.is_initialized:
        heads = hidden_states.new_empty(batch, modules[1].out_features // attention.head_dim, 0, attention.head_dim)
        cache.lazy_initialization(heads, heads)
    hidden, spans = hidden_states.clone(memory_format=torch.contiguous_format), spans.contiguous()
    to_rows, to_columns, first_row = cache.places
    tensors = hidden, cosine, sine, cache.keys, cache.values, to_rows, to_columns, spans
    call = _Call(
        *(tensor.data_ptr() for tensor in tensors),
        batch, count, modules[0].out_features // attention.head_dim, cache.keys.shape[1], attention.head_dim,
        first_row, *cosine.stride()[:2], *sine.stride()[:2], *to_rows.stride(), *to_columns.stride(),
        *cache.keys.stride()[:3], torch.get_num_threads(),
        cpu_products.address(cpu_products.library().multiply), cpu_products.address(attend),
    )  # fmt: skip
    weights = (_NO_NORM if each is None else _Norm(each.weight.data_ptr(), each.variance_epsilon) for each in norms)
    described = _Layer((Matrix * 7)(*matrices), (_Norm * 6)(*weights), attention.scaling)
    cpu_layer.library().decoder_layer(ctypes.byref(described), call)
    for module in modules:
        if isinstance(module, QuantizedLinear):
            module.called = True
    return hidden


def matrix_of(module: nn.Module, rows: int) -> Matrix | None:
    """What `module` multiplies `rows` rows with, where that is a matrix of :mod:`cpu_products` and a bias."""
    if type(module) is DenseLinear:
        is_plain = module.weight.dtype == torch.float32 and module.weight.is_contiguous()
        served = is_plain and cpu_products.serves(rows)
        return cpu_products.dense_matrix(module.weight, module.bias) if served else None
    if type(module) is not QuantizedLinear or type(module.packed) is not NativeInt4 or rows > module.max_rows:
        return None
    if module.inverse_scales is not None or module.passes_gradient:
        return None
    bias = module.bias
    return module.packed.matrix(bias) if bias is None or bias.dtype == torch.float32 else None
