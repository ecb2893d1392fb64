"""Decoder layers on a CPU in C++, if there is a compiler: attention, the operations between products, whole layers.

Attention reads the columns of a row, without a mask, so a row's output does not depend on other rows or on padding of
columns. It is compiled once per element type and head size, in about a second (`native_code.py`).

The operations between matrix products replace some thirty small torch calls. They have the arguments of those in
`kernels/fused_layer.py`, in float32 and bfloat16. A layer is one call, or all layers of a network are
(`whole_network.py`). It gets the addresses of their weights: collected once, and again if a weight has moved.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from transformers import PreTrainedModel

from ....native import cpu_products
from ....native.cpu_products import Matrix
from ....native.native_code import SOURCES, failed, load, load_ahead, untraced
from ....quantization.kernels.native import Native
from ....quantization.linear import QuantizedLinear
from ..kv.cache import RaggedLayer, autocast_dtype
from .products import Product


SCALARS = {torch.float32: "float", torch.float64: "double", torch.bfloat16: "Bfloat16", torch.float16: "_Float16"}
_ATTENTION, _LAYER = SOURCES / "cpu_attention.cpp", SOURCES / "cpu_layer.cpp"
_Numbers = ctypes.c_int64 * 12  # struct Sizes


@untraced
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Queries `[B, heads, q, d]` over `[B, kv_heads, columns, d]` → `[B, q, heads, d]`; None if it does not serve
    these. Sums are in float32, for float64 in float64.

    Args:
        query, key, value: in one dtype: bfloat16, float16, float32 or float64. Values may have another `d`.
        spans: `[B, 1, q, 2]` int64, first and last column of each query; or `[B, 1, q, 3]`: third, the row of K/V;
            or `[B, 1, q, 4]`: third, the column from
            which columns are shifted, fourth, the shift (:meth:`MaskPlan.spans`).
        scale: of the scores.
        softcap: scores become `tanh(score / softcap) * softcap`.
        sinks: `[heads]`, a score per head that joins the denominator.
    """
    head_size, value_size = max(query.shape[3], value.shape[3]), value.shape[3]
    function = attention_function(query.dtype, head_size) if query.dtype == key.dtype == value.dtype else None
    if function is None:
        return None
    # Heads of two sizes are padded with zeros. Such K/V is computed in every call (DeepSeek), which takes longer.
    query, key, value = (
        states if states.shape[3] == head_size else F.pad(states, (0, head_size - states.shape[3]))
        for states in (query, key, value)
    )
    if key.stride() != value.stride() or key.stride(3) != 1:
        key, value = key.contiguous(), value.contiguous()
    if query.stride(3) != 1:
        query = query.contiguous()
    batch, heads, count, _ = query.shape
    kv_heads = key.shape[1]
    output, spans = query.new_empty(batch, count, heads, head_size), spans.contiguous()
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(query.dtype, torch.float32)).contiguous()  # [heads]
    sizes = _Numbers(
        batch, kv_heads, heads // kv_heads, count, *query.stride()[:3], *key.stride()[:3], spans.shape[3],
        torch.get_num_threads(),
    )  # fmt: skip
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (query, key, value, spans, sinks, output)]
    function(*pointers, sizes, scale, softcap or 0.0)
    return output[..., :value_size].contiguous()


def compile_ahead(network: PreTrainedModel) -> None:
    """Begins to compile the libraries that forwards of `network` on a CPU will most likely call, all at once."""
    sizes = (getattr(module, "head_dim", None) for module in network.modules())
    head_size = next((size for size in sizes if isinstance(size, int)), None)
    if network.device.type == "cpu" and network.dtype in SCALARS and head_size is not None:
        _compile_ahead(network.dtype, head_size)


@functools.cache
def _compile_ahead(dtype: torch.dtype, head_size: int) -> None:
    scalar = SCALARS[dtype]
    load_ahead(SOURCES / "cpu_products.cpp")
    load_ahead(SOURCES / "cpu_sampling.cpp")
    if dtype in cpu_products.DTYPES:
        load_ahead(_LAYER, SCALAR=scalar, WIDE=scalar)
    load_ahead(_ATTENTION, SCALAR=scalar, HEAD_SIZE=head_size)


@functools.cache
def attention_function(dtype: torch.dtype, head_size: int) -> Callable[..., None] | None:
    """The C++ function for these; None if it cannot be compiled."""
    scalar = SCALARS.get(dtype)
    library = None if scalar is None else load(_ATTENTION, SCALAR=scalar, HEAD_SIZE=head_size)
    if library is None:
        return None
    library.attend.argtypes = [ctypes.c_void_p] * 6 + [_Numbers, ctypes.c_double, ctypes.c_double]
    library.attend.restype = None
    return library.attend


def attention_failed() -> bool:
    """Whether the C++ of attention could not be compiled, as far as is known."""
    return any(library.source.endswith(_ATTENTION.name) for library in failed)


_PER_THREAD = 1 << 15  # elements: with fewer, a second thread saves less than waking it takes

_Heads = ctypes.c_int64 * 31  # struct Heads
_Strides = ctypes.c_int64 * 2


def serves(x: Tensor) -> bool:
    """Whether the functions take `x`: float32 or bfloat16, in inference mode (in forwards of the compiled runner), and
    under no autocast to another dtype. In float64 the norms of families still compute in float32, and would round
    differently here."""
    return computes(x) and autocast_dtype(x.device) in (None, x.dtype)


def computes(hidden_states: Tensor) -> bool:
    """Whether :class:`OneCall` takes them: like :func:`serves`, or float32 under autocast to bfloat16."""
    dtype = autocast_dtype(hidden_states.device) or hidden_states.dtype
    fits = (dtype, hidden_states.dtype) in _DTYPES and hidden_states.device.type == "cpu"
    return fits and torch.is_inference_mode_enabled() and library(dtype, hidden_states.dtype) is not None


_DTYPES = {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)}
"""Of products, and of the residual stream."""


class _Norm(ctypes.Structure):
    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_double), ("shift", ctypes.c_double)]


def _norm(weight: Tensor | None, eps: float, shift: float | None) -> _Norm:
    return _Norm(None if weight is None else weight.data_ptr(), eps, -1.0 if shift is None else shift)


@untraced
def rms_norm(x: Tensor, weight: Tensor, eps: float, _dtype: None = None, shift: float | None = None) -> Tensor:
    """`[..., hidden]` contiguous, normed over its last dimension and times `weight` `[hidden]`."""
    out, size, norm = torch.empty_like(x), x.shape[-1], _norm(weight, eps, shift)
    pointers = x.data_ptr(), None, None, None, norm, out.data_ptr()
    library(x.dtype).rms_norm(*pointers, x.numel() // size, size, _threads(out))
    return out


@untraced
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    _dtype: None = None,
    shift: float | None = None,
    branch_weight: Tensor | None = None,
    branch_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """x + residual, both `[..., hidden]` contiguous, and :func:`rms_norm` of that. With a `branch_weight` `[hidden]` x
    is normed before, by a norm of the same `shift`."""
    total, out, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    branch = None if branch_weight is None else _norm(branch_weight, branch_eps, shift)
    pointers = x.data_ptr(), branch, residual.data_ptr(), total.data_ptr(), _norm(weight, eps, shift), out.data_ptr()
    library(x.dtype).rms_norm(*pointers, x.numel() // size, size, _threads(out))
    return total, out


@untraced
def norm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, shift: float | None) -> Tensor:
    """residual + :func:`rms_norm` of x, both `[..., hidden]` contiguous."""
    total, size = torch.empty_like(x), x.shape[-1]
    pointers = x.data_ptr(), _norm(weight, eps, shift), residual.data_ptr(), total.data_ptr(), None, None
    library(x.dtype).rms_norm(*pointers, x.numel() // size, size, _threads(total))
    return total


def silu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both `[..., n]` with any stride of rows, as `[..., n]` contiguous."""
    return _gate_multiply(gate, up, is_gelu=False)


def gelu_multiply(gate: Tensor, up: Tensor) -> Tensor:
    """The same with GELU, approximated by tanh."""
    return _gate_multiply(gate, up, is_gelu=True)


@untraced
def _gate_multiply(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    size = gate.shape[-1]
    gate, up = gate.reshape(-1, size), up.reshape(-1, size)
    strides = _Strides(gate.stride(0), up.stride(0))
    pointers = gate.data_ptr(), up.data_ptr(), out.data_ptr()
    library(gate.dtype).gate_multiply(*pointers, len(gate), size, strides, is_gelu, _threads(out))
    return out


@untraced
def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    to_rows: Tensor,
    to_columns: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    eps: float,
    shift: float | None,
    half: int,
) -> Tensor:
    """Rotates the first 2 * half elements of queries and keys by their positions, and writes keys and values into a
    layer's cache: see :func:`~.rotate_and_write`."""
    batch, length, heads, head_dim = query.shape
    out = query.new_empty(batch, heads, length, head_dim)
    sizes = _Heads(
        batch, length, heads, key.shape[2], head_dim, half,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
        *cos.stride()[:2], *sin.stride()[:2], *to_rows.stride(), *to_columns.stride(),
        *keys.stride()[:3], *values.stride()[:3], _threads(out), cos.dtype == torch.float32,
    )  # fmt: skip
    tensors = query, key, value, cos, sin, keys, values, to_rows, to_columns
    norms = _norm(query_weight, eps, shift), _norm(key_weight, eps, shift)
    function = library(query.dtype).rotate_and_write
    function(*(tensor.data_ptr() for tensor in tensors), *norms, out.data_ptr(), sizes)
    return out


def _threads(out: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + out.numel() // _PER_THREAD)


@functools.cache
def library(dtype: torch.dtype, wide: torch.dtype | None = None) -> Any:
    """The functions compiled for `dtype`, with a residual stream in `wide`, by default the same; None without a
    compiler."""
    functions = load(_LAYER, SCALAR=SCALARS[dtype], WIDE=SCALARS[wide or dtype])
    if functions is not None:
        pointer, integer, norm = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(_Norm)
        functions.decoder_layers.argtypes = [pointer, integer, *[pointer] * 6]
        functions.rms_norm.argtypes = [pointer, norm, pointer, pointer, norm, pointer, *[integer] * 3]
        functions.gate_multiply.argtypes = [pointer] * 3 + [integer, integer, _Strides, integer, integer]
        functions.rotate_and_write.argtypes = [pointer] * 9 + [norm, norm, pointer, _Heads]
        for name in ("rms_norm", "gate_multiply", "rotate_and_write", "decoder_layers"):
            getattr(functions, name).restype = None
    return functions


_Matrices, _Norms = Matrix * 7, _Norm * 8
_BEFORE_PRODUCTS = 0, 3, 5, 6  # of these norms


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
        attend, layers = attention_function(dtype, self._head_dim), []
        for projections, norms, numbers in self._parts:
            matrices = [Matrix() if module is None else _matrix_of(module, dtype, wide) for module in projections]
            weights = [_norm(None, 0.0, None) if norm is None else _norm_of(norm, wide) for norm in norms]
            # Under autocast only these norms make products' inputs narrow, and those between products round no more.
            given = [place for place in _BEFORE_PRODUCTS if norms[place] is not None]
            is_other = dtype != wide and given != [0, 5]
            if None in matrices or None in weights or attend is None or is_other:
                return []
            layers.append(_Layer(_Matrices(*matrices), _Norms(*weights), *numbers))  # type: ignore[misc]
        self._described, self._Pointers = (_Layer * len(layers))(*layers), ctypes.c_void_p * len(layers)
        return [cpu_products.address(function) for function in (cpu_products.library().multiply, attend)]


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
        return module.routine == "native" and isinstance(module, nn.Linear) and cpu_products.library() is not None
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


def _norm_of(module: Any, dtype: torch.dtype) -> _Norm | None:
    """None if C++ cannot read it."""
    return _norm(module.weight, module.epsilon, module._shift) if _is_plain(module.weight, dtype) else None


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    return cpu_products.is_readable(tensor) and tensor.dtype == dtype
