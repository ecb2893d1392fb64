"""An ONNX model of one node, `com.microsoft.MatMulNBits`, written byte by byte: the `onnx` package is not needed.

A model is a Protocol Buffers message. A field is its number and kind in one integer, then its content: an integer
(kind 0), or a length and bytes (kind 2: text or a message inside). The numbers are those of onnx.proto.
"""

FLOAT, UINT8 = 1, 2  # TensorProto.DataType
INT8_ACTIVATIONS = 4  # accuracy level of MatMulNBits: x is rounded to int8, block by block


def matmul_nbits_model(out_features: int, in_features: int, group: int) -> bytes:
    """y = x @ ((codes - zeros) * scales)ᵀ with 4 bits: x [m, in] and y [m, out] in float32. The session that loads the
    model must be given codes uint8 [out, groups, group/2], scales float32 [out, groups] and zeros uint8
    [out, ceil(groups/2)]; of two codes or zeros in a byte the first is in the low half."""
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
    """A TensorProto whose content lies elsewhere; the location is a name that nobody opens."""
    dims = b"".join(_field(1, size) for size in shape)
    location = _field(1, "location") + _field(2, "memory")
    return dims + _field(2, kind) + _field(8, name) + _field(13, location) + _field(14, 1)


def _matrix(name: str, columns: int) -> bytes:
    """A ValueInfoProto of float32 [m, columns]."""
    shape = _field(1, _field(2, "m")) + _field(1, _field(1, columns))
    return _field(1, name) + _field(2, _field(1, _field(1, FLOAT) + _field(2, shape)))


def _field(number: int, content: int | str | bytes) -> bytes:
    if isinstance(content, int):
        return _integer(number << 3) + _integer(content)
    data = content.encode() if isinstance(content, str) else content
    return _integer(number << 3 | 2) + _integer(len(data)) + data


def _integer(value: int) -> bytes:
    """Seven bits to a byte, the lowest first; the eighth says that more follow."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + _integer(rest) if rest else bytes([low])
