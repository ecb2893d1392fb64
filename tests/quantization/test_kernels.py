"""Every kernel against the reference: the same codes, the same product."""

import pytest
import torch

from spec_trl.quantization.kernels import KERNELS, LayerSpec, check_kernel_name, find_kernel
from spec_trl.quantization.kernels.humming import HummingInt4
from spec_trl.quantization.kernels.reference import ReferenceInt4, ReferenceInt8
from spec_trl.quantization.kernels.torch_int4 import TorchInt4Cpu, TorchInt4Cuda
from spec_trl.quantization.kernels.torch_int8 import TorchInt8Cpu
from spec_trl.quantization.rtn import RoundToNearest


CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
# out, in, group
SHAPES = [
    (64, 128, 128),
    (208, 64, 32),
    (16, 32, 32),
    (344, 128, 32),
    (496, 896, 128),
    (3000, 896, 128),
    (1024, 1024, 64),
]


def spec(out_features, in_features, group, bits=4, device="cpu", dtype=torch.float32, activation_dtype=None):
    return LayerSpec(out_features, in_features, bits, group, dtype, activation_dtype, torch.device(device))


def skip_without(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pack(kernel, layer, weight):
    packed = kernel(layer)
    RoundToNearest().quantize_(weight, packed)
    return packed


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_int4_multiplies_like_the_reference(device, shape, rows):
    skip_without(device)
    torch.manual_seed(0)
    out_features, in_features, group = shape
    layer = spec(*shape, device=device, activation_dtype=torch.bfloat16)
    weight = torch.randn(out_features, in_features, device=device)
    x = torch.randn(rows, in_features, device=device).bfloat16()
    kernel = find_kernel("torch_int4", layer)
    assert kernel is (TorchInt4Cpu if device == "cpu" else TorchInt4Cuda)
    fast, reference = pack(kernel, layer, weight), pack(ReferenceInt4, layer, weight)
    assert torch.equal(fast.scales_and_offsets[:, :out_features, 0].T, reference.scales)
    exact = x.double() @ reference.dequantize().double().T  # [rows, out]
    y = fast.linear(x)  # [rows, out]
    assert y.dtype == torch.bfloat16 and y.shape == exact.shape
    # bfloat16 keeps 8 bits of the offsets, of the dequantized weights and of the result
    scale = x.double().abs() @ (weight.double().abs() + reference.scales.double().amax()).T  # [rows, out]
    assert ((y.double() - exact).abs() <= 2**-7 * scale).all()
    assert (y.double() - exact).std() < 0.01 * exact.std()


@pytest.mark.parametrize("out_features", [1, 40, 127, 300, 2049])
def test_int4_on_a_cpu_takes_any_number_of_outputs(out_features):
    torch.manual_seed(0)
    weight, x = torch.randn(out_features, 128), torch.randn(3, 128).bfloat16()
    packed = pack(TorchInt4Cpu, spec(out_features, 128, 128), weight)
    padded = pack(TorchInt4Cpu, spec(2064, 128, 128), torch.cat((weight, torch.randn(2064 - out_features, 128))))
    assert packed.linear(x).shape == (3, out_features)
    assert torch.equal(packed.linear(x), padded.linear(x)[:, :out_features])


@pytest.mark.parametrize("shape", [(33, 64, 64), (100, 48, 48), (512, 896, 896)])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_int8_multiplies_like_the_reference(shape, rows):
    torch.manual_seed(0)
    layer = spec(*shape, bits=8, activation_dtype=torch.bfloat16)
    weight = torch.randn(*shape[:2])
    x = torch.randn(rows, shape[1]).bfloat16()
    assert find_kernel("auto", layer) is TorchInt8Cpu
    fast, reference = pack(TorchInt8Cpu, layer, weight), pack(ReferenceInt8, layer, weight)
    assert torch.equal(fast.codes, reference.codes)
    exact = x.double() @ reference.dequantize().double().T  # [rows, out]
    assert (fast.linear(x).double() - exact).std() < 0.01 * exact.std()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [4, 8])
def test_reference_computes_in_the_policy_dtype(dtype, bits):
    torch.manual_seed(0)
    weight = torch.randn(24, 64, dtype=dtype)
    packed = pack(ReferenceInt4 if bits == 4 else ReferenceInt8, spec(24, 64, 64, bits=bits, dtype=dtype), weight)
    x = torch.randn(5, 64, dtype=dtype)
    assert packed.linear(x).dtype == packed.dequantize().dtype == dtype
    error = (packed.dequantize() - weight).double().abs().amax() / weight.double().abs().amax()
    assert error < (0.08 if bits == 4 else 0.01)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_memory(kernel, bits):
    if kernel in (TorchInt4Cuda, HummingInt4):
        pytest.skip("needs a GPU to allocate")
    if kernel.bits != bits:
        pytest.skip("another width")
    packed = kernel(spec(256, 1024, 128 if bits == 4 else 1024, bits=bits, dtype=torch.bfloat16))
    share = packed.nbytes / (2 * 256 * 1024)
    assert share <= (0.27 if bits == 4 else 0.51)
    assert not packed.state_dict()


def test_auto_takes_the_fast_kernel_and_never_the_reference():
    assert find_kernel("auto", spec(64, 128, 128)) is TorchInt4Cpu
    assert find_kernel("auto", spec(64, 128, 128, bits=8)) is TorchInt8Cpu
    assert find_kernel("reference", spec(64, 128, 128)) is ReferenceInt4
    assert find_kernel("reference", spec(64, 128, 128, bits=8)) is ReferenceInt8
    assert isinstance(find_kernel("auto", spec(64, 128, 128, activation_dtype=torch.float32)), str)


@pytest.mark.parametrize(
    ("kernel", "layer", "reason"),
    [
        ("torch_int8", spec(40, 104, 104, bits=8), "torch_int8: 104 input features are no multiple of 16"),
        ("torch_int4", spec(64, 128, 128, bits=8), "kernel 'torch_int4' has nothing for 8-bit weights on cpu"),
        ("torch_int8", spec(64, 128, 128), "kernel 'torch_int8' has nothing for 4-bit weights on cpu"),
        ("torch_int4", spec(64, 128, 128, activation_dtype=torch.float32), "activation_dtype=torch.float32"),
        ("auto", spec(64, 128, 128, device="cuda", bits=8), "kernel 'auto' has nothing for 8-bit weights on cuda"),
    ],
)
def test_what_does_not_fit_gets_a_reason(kernel, layer, reason):
    assert reason in find_kernel(kernel, layer)


def test_an_unknown_kernel_is_refused_with_the_names():
    names = "'auto', 'torch_int4', 'triton', 'humming', 'marlin', 'torch_int8', 'reference'"
    with pytest.raises(ValueError, match=rf"kernel='marlln'.*{names}"):
        check_kernel_name("marlln")
