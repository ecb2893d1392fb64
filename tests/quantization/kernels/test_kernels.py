"""All kernels: the same codes and the same product as the reference, stored in place, and what they refuse."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.quantization.kernels import LayerSpec, QuantizedRows, find_kernel, native
from spec_trl.quantization.kernels.marlin_humming import HummingInt4, MarlinInt4
from spec_trl.quantization.kernels.native import NativeInt4, NativeInt8
from spec_trl.quantization.kernels.onnxruntime_int4 import OnnxRuntimeInt4
from spec_trl.quantization.kernels.reference import ReferenceInt4, ReferenceInt8
from spec_trl.quantization.kernels.torch_core import TorchInt4Cpu, TorchInt4Cuda, TorchInt8Cpu
from spec_trl.quantization.kernels.triton_int4 import TritonInt4
from tests.quantization.conftest import layer_spec, needs_onnxruntime, pack


BF16 = torch.bfloat16
REFERENCES = ("reference", 4), ("reference", 8)
STORES_ON_CPU = [
    TorchInt4Cpu, NativeInt4, NativeInt8, TritonInt4, MarlinInt4, ReferenceInt4, TorchInt8Cpu, ReferenceInt8,
    pytest.param(OnnxRuntimeInt4, marks=needs_onnxruntime),
]  # fmt: skip
"""Kernels whose layout needs no GPU; test_on_gpu.py has the others."""


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    out=st.integers(1, 150), groups=st.integers(1, 7), group=st.sampled_from([32, 64, 128]), rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), seed=st.integers(0, 99),
)  # fmt: skip
def test_torch_multiplies_like_the_reference(out, groups, group, rows, dtype, seed) -> None:
    """4 bits: any number of outputs, each group size; 8 bits likewise with one group."""
    torch.manual_seed(seed)
    weight, x = torch.randn(out, groups * group).to(dtype), torch.randn(rows, groups * group).to(BF16)
    for bits, fast_kernel, slow_kernel in ((4, TorchInt4Cpu, ReferenceInt4), (8, TorchInt8Cpu, ReferenceInt8)):
        layer = layer_spec(
            *weight.shape, group if bits == 4 else groups * group, bits, dtype=dtype, activation_dtype=BF16
        )
        assert find_kernel("auto", layer) is fast_kernel
        fast, slow = pack(fast_kernel, layer, weight), pack(slow_kernel, layer, weight)
        exact, y = x.double() @ slow.dequantize().double().T, fast.linear(x)  # [rows, out] each
        assert y.dtype == BF16 and y.shape == exact.shape
        # bfloat16 keeps 8 bits of the offsets, of the dequantized weights and of the result
        scale = x.double().abs() @ (weight.double().abs() + slow.scales.double().amax()).T  # [rows, out]
        assert ((y.double() - exact).abs() <= 2**-7 * scale).all()
        assert (y.double() - exact).norm() < 0.01 * exact.norm()
        stored = fast.scales_and_offsets[:, :out, 0].T if bits == 4 else fast.scales
        assert torch.equal(stored, slow.scales)


@pytest.mark.parametrize("kernel", STORES_ON_CPU)
@pytest.mark.parametrize("out", [40, 192])
def test_rows_are_stored_in_place_block_by_block(kernel, out: int) -> None:
    torch.manual_seed(0)
    bits = kernel.bits
    layer = layer_spec(out, 256, 128 if bits == 4 else 256, bits, activation_dtype=BF16)
    codes = torch.randint(0, 16, (out, 256), dtype=torch.int32)
    zeros = torch.randint(0, 16, (out, layer.groups)).to(BF16)
    rows = QuantizedRows(codes, torch.rand(out, layer.groups).to(BF16), zeros)
    packed, whole = pack(kernel, layer, torch.randn(out, 256)), kernel(layer)
    pointers = [buffer.data_ptr() for buffer in packed.buffers()]
    whole.pack_(0, rows)
    for first in range(0, out, 64):
        block = slice(first, first + 64)
        packed.pack_(first, QuantizedRows(codes[block].clone(), rows.scales[block], zeros[block]))
    assert [buffer.data_ptr() for buffer in packed.buffers()] == pointers
    assert all(torch.equal(a, b) for a, b in zip(packed.buffers(), whole.buffers(), strict=True))
    if kernel is ReferenceInt4:
        assert torch.equal(packed.unpack(), codes)
    large = kernel(layer_spec(256, 1024, 128 if bits == 4 else 1024, bits, dtype=BF16))
    assert large.nbytes / (2 * 256 * 1024) <= (0.27 if bits == 4 else 0.51) and not large.state_dict()


@needs_onnxruntime
@pytest.mark.parametrize("capability", ["AVX512", "AVX2"])
def test_the_rule_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    """In float32 ours. Else, or without a compiler, onnxruntime: with AVX-512 only where it has several threads."""
    if NativeInt4.unsupported(layer_spec(64)) is None:
        assert find_kernel("auto", layer_spec(8192, 1024)) is NativeInt4
        assert find_kernel("auto", layer_spec(64, group=32)) is not NativeInt4
        assert find_kernel("auto", layer_spec(64, bits=8)) is NativeInt8
        assert find_kernel("auto", layer_spec(64, 1026, 1026, bits=8)) is not NativeInt8
    monkeypatch.setattr(native, "library", lambda *_: None)
    assert find_kernel("native", layer_spec(64)) == "native: no C++ compiler"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    small = TorchInt4Cpu if capability == "AVX512" else OnnxRuntimeInt4
    found = [find_kernel("auto", layer_spec(rows, 1024)) for rows in (64, 8128, 8192)]
    assert found == [small, small, OnnxRuntimeInt4]
    named = [find_kernel(name, layer_spec(64, bits=bits)) for name, bits in (("torch_int4", 4), *REFERENCES)]
    assert named == [TorchInt4Cpu, ReferenceInt4, ReferenceInt8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert find_kernel("auto", layer_spec(8192, 1024)) is small


FLOAT32 = dict(activation_dtype=torch.float32)


@pytest.mark.parametrize(
    ("kernel", "layer", "reason"),
    [
        ("torch_int8", layer_spec(40, 104, 104, bits=8), "torch_int8: 104 input features are no multiple of 16"),
        (
            "torch_int8",
            layer_spec(40, 96, 96, bits=8, **FLOAT32),
            "activation_dtype=torch.float32, and it computes in",
        ),
        # never the reference
        ("auto", layer_spec(64, activation_dtype=torch.float64), "torch_int4: activation_dtype=torch.float64"),
        ("torch_int4", layer_spec(64, bits=8), "kernel 'torch_int4' has nothing for 8-bit weights on cpu"),
        ("triton", layer_spec(64), "kernel 'triton' has nothing for 4-bit weights on cpu"),
        ("onnxruntime", layer_spec(64, bits=8), "kernel 'onnxruntime' has nothing for 8-bit weights on cpu"),
        ("onnxruntime", layer_spec(64, activation_dtype=BF16), "activation_dtype=torch.bfloat16, and it computes in"),
        ("torch_int4", layer_spec(36, device="cuda"), "torch_int4: 36 output features are no multiple of 8"),
        ("triton", layer_spec(64, device="cuda", **FLOAT32), "triton: activation_dtype=torch.float32"),
        ("humming", layer_spec(64, device="cuda", **FLOAT32), "humming: activation_dtype=torch.float32"),
        ("humming", layer_spec(72, device="cuda"), "humming: 72 output features are no multiple of 64"),
        ("marlin", layer_spec(64, 96, 32, device="cuda"), "96 input features are no multiple of 64"),
        ("marlin", layer_spec(64, 128, device="cuda"), "a row is a single group"),
    ],
)
def test_what_does_not_fit_gets_a_reason(kernel: str, layer: LayerSpec, reason: str) -> None:
    assert reason in find_kernel(kernel, layer)


@pytest.mark.parametrize(
    ("kernel", "requirement"),
    [
        (TritonInt4, "triton"), (HummingInt4, "spec-trl[humming]"), (MarlinInt4, "spec-trl[marlin]"),
        (OnnxRuntimeInt4, "spec-trl[cpu]"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(kernel, requirement: str, monkeypatch) -> None:
    layer = layer_spec(64, device="cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert f'"pip install {requirement}"' in kernel.unsupported(layer)
    if kernel is OnnxRuntimeInt4:
        return
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", "/cuda")
    for capability, fits in (((7, 5), False), ((8, 0), True), ((8, 9), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        for each in (kernel, TorchInt4Cuda):
            expected = None if fits else "the GPU is older than compute capability 8.0"
            assert each.unsupported(layer) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    needs = "64 output features are no multiple of 128, which this GPU needs"
    assert kernel.unsupported(layer) == (needs if kernel is HummingInt4 else None)
    assert kernel.unsupported(layer_spec(128, device="cuda")) is None
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    assert ("nvcc" in (kernel.unsupported(layer) or "")) == (kernel is MarlinInt4)
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert kernel.unsupported(layer) == "the GPU is not NVIDIA's"
