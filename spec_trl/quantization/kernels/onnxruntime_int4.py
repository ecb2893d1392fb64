"""Multiplies 4-bit weights by int8 activations on a CPU by onnxruntime, an optional extra.

A session rearranges the weights when made, so `pack_` makes a new session after the last rows, in 0.3 to 0.6 ms per
million weights. The buffers here hold the codes of the quantizer, the session a rearranged second copy.

The one-node ONNX model of a session is written byte by byte, without the `onnx` package. A model is a Protocol Buffers
message. A field is its number and kind in one integer, then its content: an integer (kind 0), or a length and bytes
(kind 2: text or a message inside). The numbers are those of onnx.proto.
"""

from typing import Any

import torch
from torch import Tensor

from .base import LayerSpec, Package, PackedWeight, QuantizedRows


WEIGHTS_PER_THREAD = 1 << 22
"""Weights: with fewer, waking a second thread costs what it saves. Threads must not spin, or they would take cores
from torch: those of onnxruntime's shared pool spin for 33 ms after a product."""

MAX_ROWS = {torch.float32: 64, torch.float64: 64}
"""Most rows of x, of those measured (1 to 64), with a gain over the dense layer of a policy in this dtype, with
AVX-512 and without AMX; 32 in the others."""

FLOAT, UINT8 = 1, 2  # TensorProto.DataType
INT8_ACTIVATIONS = 4  # accuracy level of MatMulNBits: x is rounded to int8, block by block


def is_fastest(layer: LayerSpec) -> bool:
    """Whether the kernel is faster than torch's: always without AVX-512, with it on several threads. A rule, because a
    busy machine might measure wrongly."""
    is_large = layer.out_features * layer.in_features >= 2 * WEIGHTS_PER_THREAD and torch.get_num_threads() > 1
    return is_large or torch.backends.cpu.get_cpu_capability() != "AVX512"


class _Session(list[Any]):
    """None or one session, shared by shadows that share a packed weight's attributes; a copy makes a new one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Session, ()


class OnnxRuntimeInt4(PackedWeight):
    """`MatMulNBits`, accuracy level 4: float32 in and out."""

    name = "onnxruntime"
    bits = 4
    device_type = "cpu"
    package = Package("onnxruntime", "onnxruntime", "spec-trl[cpu]")
    activation_dtypes = (torch.float32,)

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.max_rows = MAX_ROWS.get(layer.policy_dtype, 32)
        out, groups = layer.out_features, layer.groups
        self.codes = self.allocate(out, groups, layer.group // 2, dtype=torch.uint8)  # [out, groups, group/2]
        self.scales = self.allocate(out, groups, dtype=torch.float32)  # [out, groups]
        self.zeros = self.allocate(out, (groups + 1) // 2, dtype=torch.uint8)  # [out, ceil(groups/2)]
        self._session = _Session()

    def pack_(self, first_row: int, rows: QuantizedRows) -> None:
        self._session.clear()
        end = first_row + len(rows.codes)
        codes, zeros = self.codes[first_row:end].flatten(1), rows.zeros.to(torch.uint8)
        torch.add(rows.codes[:, 0::2], rows.codes[:, 1::2], alpha=16, out=codes)  # [rows, in/2]
        self.scales[first_row:end] = rows.scales  # [rows, groups]
        self.zeros[first_row:end] = zeros[:, 0::2]  # [rows, ceil(groups/2)]
        self.zeros[first_row:end, : zeros.shape[1] // 2] |= zeros[:, 1::2] << 4  # [rows, groups//2]
        if end == self.layer.out_features:
            self._prepare()

    def linear(self, x: Tensor) -> Tensor:
        session = self._session[0] if self._session else self._prepare()
        (y,) = session.run(None, {"x": x.detach().contiguous().numpy()})  # [m, out]
        return torch.from_numpy(y)

    def _prepare(self) -> Any:
        """A session over the present codes, with at most torch's present number of threads."""
        import onnxruntime

        layer = self.layer
        options = onnxruntime.SessionOptions()
        worthwhile = layer.out_features * layer.in_features // WEIGHTS_PER_THREAD
        options.intra_op_num_threads = min(max(worthwhile, 1), torch.get_num_threads())
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.enable_cpu_mem_arena = False  # it would keep the memory of each layer's largest product
        weights = {"codes": self.codes, "scales": self.scales, "zeros": self.zeros}
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(weight.numpy()) for weight in weights.values()]
        options.add_external_initializers(list(weights), values)
        model = matmul_nbits_model(layer.out_features, layer.in_features, layer.group)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._session.append(session)
        return session


def matmul_nbits_model(out_features: int, in_features: int, group: int) -> bytes:
    """y = x @ ((codes - zeros) * scales)ᵀ with 4 bits: x [m, in] and y [m, out] in float32. The session must be given
    codes uint8 [out, groups, group/2], scales float32 [out, groups] and zeros uint8 [out, ceil(groups/2)]; of two
    codes or zeros in a byte the first is in the low half."""
    groups = in_features // group
    attributes = {
        "K": in_features, "N": out_features, "bits": 4, "block_size": group, "accuracy_level": INT8_ACTIVATIONS,
    }  # fmt: skip
    node = b"".join(_field(1, name) for name in ("x", "codes", "scales", "zeros")) + _field(2, "y")
    node += _field(4, "MatMulNBits") + _field(7, "com.microsoft")
    for name, value in attributes.items():
        node += _field(5, _field(1, name) + _field(3, value) + _field(20, 2))  # an attribute that is an integer
    graph = _field(1, node) + _field(2, "linear")
    graph += _field(5, _weight("codes", UINT8, out_features, groups, group // 2))
    graph += _field(5, _weight("scales", FLOAT, out_features, groups))
    graph += _field(5, _weight("zeros", UINT8, out_features, (groups + 1) // 2))
    graph += _field(11, _matrix("x", in_features)) + _field(12, _matrix("y", out_features))
    operators = _field(1, "com.microsoft") + _field(2, 1)  # version 1 of these operators
    return _field(1, 8) + _field(7, graph) + _field(8, operators)  # version 8 of the format


def _weight(name: str, kind: int, *shape: int) -> bytes:
    """A TensorProto with external content; no file of that name is opened."""
    dims = b"".join(_field(1, size) for size in shape)
    location = _field(1, "location") + _field(2, "memory")
    return dims + _field(2, kind) + _field(8, name) + _field(13, location) + _field(14, 1)


def _matrix(name: str, columns: int) -> bytes:
    shape = _field(1, _field(2, "m")) + _field(1, _field(1, columns))
    return _field(1, name) + _field(2, _field(1, _field(1, FLOAT) + _field(2, shape)))


def _field(number: int, content: int | str | bytes) -> bytes:
    if isinstance(content, int):
        return _integer(number << 3) + _integer(content)
    data = content.encode() if isinstance(content, str) else content
    return _integer(number << 3 | 2) + _integer(len(data)) + data


def _integer(value: int) -> bytes:
    """Seven bits to a byte, the lowest first; the eighth marks that more follow."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _integer(rest) if rest else bytes([low])
