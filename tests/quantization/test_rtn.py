"""Round-to-nearest: what the codes say about the weight, seen through the reference kernel."""

import pytest
import torch

from spec_trl.quantization.kernels import LayerSpec
from spec_trl.quantization.kernels.reference import ReferenceInt4, ReferenceInt8
from spec_trl.quantization.rtn import CPU_CHUNK, MIN_SCALE, RoundToNearest
from spec_trl.quantization.scheme import find_scheme


def quantize(weight, bits=4, group=32, activation_dtype=None):
    layer = LayerSpec(*weight.shape, bits, group, weight.dtype, activation_dtype, weight.device)
    packed = (ReferenceInt4 if bits == 4 else ReferenceInt8)(layer)
    RoundToNearest().quantize_(weight, packed)
    return packed


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0], ids=["mixed", "positive", "negative"])
def test_four_bit_error_is_half_a_step(dtype, shift):
    torch.manual_seed(0)
    weight = (torch.rand(40, 96, dtype=torch.float64) - 0.5 + shift).to(dtype)
    packed = quantize(weight)
    codes = packed.dequantize().double()  # [40, 96]
    steps = packed.scales.double().repeat_interleave(32, dim=1)  # [40, 96]
    # Rounding the scale itself may move the far end of the range by 15 steps times its relative error.
    bound = (0.5 + 15 * torch.finfo(dtype).eps) * steps + torch.finfo(dtype).eps * weight.double().abs()
    assert ((codes - weight.double()).abs() <= bound).all()


@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0], ids=["mixed", "positive", "negative"])
def test_range_contains_zero_and_uses_all_codes(shift):
    torch.manual_seed(0)
    weight = torch.rand(8, 64) - 0.5 + shift
    packed = quantize(weight)
    grouped = weight.view(8, 2, 32)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    torch.testing.assert_close(packed.scales, (high - low) / 15)
    torch.testing.assert_close(packed.zeros.float(), (-low / packed.scales).round())
    if shift:
        assert packed.zeros.unique().tolist() == ([0] if shift > 0 else [15])


def test_weights_on_the_grid_survive_exactly():
    codes = torch.arange(16).repeat(3, 2)  # [3, 32], every code in every group
    weight = (codes - torch.tensor([[0], [6], [15]])) * 0.25  # [3, 32]
    assert torch.equal(quantize(weight).dequantize(), weight)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_weights_stay_zero(bits):
    torch.manual_seed(0)
    weight = torch.randn(4, 64)
    weight[0] = 0
    weight[:, ::3] = 0
    packed = quantize(weight, bits=bits, group=32 if bits == 4 else 64)
    assert (packed.dequantize()[weight == 0] == 0).all()
    assert packed.scales.view(4, -1)[0].tolist() == pytest.approx([MIN_SCALE] * packed.scales.view(4, -1).shape[1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_eight_bit_error_is_half_a_step(dtype):
    torch.manual_seed(0)
    weight = torch.randn(40, 96, dtype=torch.float64).to(dtype)
    packed = quantize(weight, bits=8, group=96)
    eps = torch.finfo(dtype).eps
    bound = (0.5 + 127 * eps) * packed.scales.double()[:, None] + eps * weight.double().abs()  # [40, 96]
    assert ((packed.dequantize().double() - weight.double()).abs() <= bound).all()
    assert packed.codes.abs().amax() == 127


def test_codes_are_computed_with_the_rounded_scale():
    torch.manual_seed(0)
    weight = torch.randn(16, 64)
    packed = quantize(weight, activation_dtype=torch.bfloat16)
    assert packed.scales.dtype == torch.bfloat16
    grouped = weight.view(16, 2, 32)
    scales = ((grouped.amax(-1) - grouped.amin(-1)) / 15).bfloat16().float()  # [16, 2]
    zeros = (-grouped.amin(-1) / scales).round()  # [16, 2]
    codes = (grouped / scales[..., None] + zeros[..., None]).round().clamp(0, 15)  # [16, 2, 32]
    expected = ((codes - zeros[..., None]).bfloat16() * scales[..., None].bfloat16()).flatten(1)
    assert torch.equal(packed.dequantize(), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_chunks_and_strides_do_not_show(bits):
    torch.manual_seed(0)
    columns = 1024
    weight = torch.randn(CPU_CHUNK // columns * 2 + 7, columns)  # two whole chunks and a rest
    group = 128 if bits == 4 else columns
    whole = quantize(weight, bits=bits, group=group)
    transposed = quantize(weight.T.contiguous().T, bits=bits, group=group)
    rows = [quantize(row[None], bits=bits, group=group).dequantize() for row in weight]
    assert torch.equal(whole.dequantize(), torch.cat(rows))
    assert torch.equal(whole.dequantize(), transposed.dequantize())


def test_the_weight_is_only_read():
    weight = torch.randn(8, 64)
    before = weight.clone()
    quantize(weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize(
    ("scheme", "columns", "group"),
    [
        ("rtn-w4-g128", 896, 128),
        ("rtn-w4-g128", 4864 + 64, 64),
        ("rtn-w4-g128", 288, 32),
        ("rtn-w4-g128", 100, None),
        ("rtn-w4-g64", 896, 64),
        ("rtn-w4-g32", 896, 32),
        ("rtn-w8", 100, 100),
    ],
)
def test_group_is_the_largest_that_divides_the_row(scheme, columns, group):
    assert find_scheme(scheme).group_for(columns) == group
