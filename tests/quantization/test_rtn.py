"""Round-to-nearest: the codes, scales and zero points of any weight, seen through the reference kernel."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spec_trl.quantization import rtn
from spec_trl.quantization.kernels import LayerSpec
from spec_trl.quantization.kernels.reference import ReferenceInt4, ReferenceInt8
from spec_trl.quantization.rtn import MIN_SCALE, RoundToNearest
from spec_trl.quantization.scheme import find_scheme


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def quantize(weight: Tensor, bits: int, group: int, activation_dtype: torch.dtype | None = None):
    layer = LayerSpec(*weight.shape, bits, group, weight.dtype, activation_dtype, weight.device)
    packed = (ReferenceInt4 if bits == 4 else ReferenceInt8)(layer)
    RoundToNearest().quantize_(weight, packed)
    return packed


@st.composite
def weights(draw: st.DrawFn, group: int | None) -> Tensor:
    """A weight [out, in] whose rows may be shifted to one side of 0, all zero, or zero in places."""
    rows, groups = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    columns = group * groups if group is not None else 13 * groups
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weight *= draw(st.sampled_from([1e-3, 1, 50]))
    weight += draw(st.sampled_from([0.0, 3.0, -3.0])) * weight.abs().max()
    weight[torch.rand(rows, generator=generator) < 0.2] = 0
    weight[torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = 0
    return weight.to(draw(st.sampled_from(DTYPES)))


def check_bounds(weight: Tensor, packed, group: int, far: int) -> None:
    """No weight is off by more than half a step, and none that is 0 is off at all."""
    eps = torch.finfo(packed.activation_dtype).eps
    steps = packed.scales.double().view(len(weight), -1).repeat_interleave(group, dim=1)  # [out, in]
    # Rounding the scale itself may move the far end of the range by `far` steps times its relative error.
    bound = (0.5 + far * eps) * steps + eps * weight.double().abs() + 4 * eps * far * steps  # [out, in]
    found = packed.dequantize()  # [out, in]
    assert ((found.double() - weight.double()).abs() <= bound).all()
    assert (found[weight == 0] == 0).all()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.sampled_from([32, 64, 128]).flatmap(lambda group: st.tuples(st.just(group), weights(group))),
    st.sampled_from([None, torch.bfloat16]),
    st.integers(1, 9),
)
def test_four_bits(grouped_weight: tuple[int, Tensor], dtype: torch.dtype | None, chunk_rows: int) -> None:
    """Range with 0 in it, divided by 15; the codes are computed with the rounded scale, however the rows are cut."""
    group, weight = grouped_weight
    before = weight.clone()
    with patch.object(rtn, "CPU_CHUNK", chunk_rows * weight.shape[1]):
        packed = quantize(weight, 4, group, dtype)
        strided = quantize(weight.T.contiguous().T, 4, group, dtype)
    assert torch.equal(weight, before)
    grouped = weight.to(torch.promote_types(weight.dtype, torch.float32)).view(len(weight), -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)  # [out, groups] each
    scales = ((high - low) / 15).clamp(min=MIN_SCALE).to(dtype or weight.dtype)  # [out, groups]
    zeros = (-low / scales.to(grouped.dtype)).round().clamp(0, 15)  # [out, groups]
    codes = (grouped / scales.to(grouped.dtype)[..., None] + zeros[..., None]).round().clamp(0, 15)
    assert torch.equal(packed.scales, scales) and torch.equal(packed.zeros, zeros.to(torch.uint8))
    assert torch.equal(packed.unpack(), codes.flatten(1).to(torch.uint8))
    assert torch.equal(packed.dequantize(), strided.dequantize())
    check_bounds(weight, packed, group, far=15)


@settings(deadline=None, max_examples=30, derandomize=True)
@given(weights(None), st.sampled_from([None, torch.bfloat16]), st.integers(1, 9))
def test_eight_bits(weight: Tensor, dtype: torch.dtype | None, chunk_rows: int) -> None:
    columns = weight.shape[1]
    with patch.object(rtn, "CPU_CHUNK", chunk_rows * columns):
        packed = quantize(weight, 8, columns, dtype)
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    scales = (wide.abs().amax(-1) / 127).clamp(min=MIN_SCALE).to(dtype or weight.dtype)  # [out]
    codes = (wide / scales.to(wide.dtype)[:, None]).round().clamp(-127, 127)  # [out, in]
    assert torch.equal(packed.scales, scales) and torch.equal(packed.codes, codes.to(torch.int8))
    check_bounds(weight, packed, columns, far=127)


def test_weights_on_the_grid_survive_exactly() -> None:
    codes = torch.arange(16).repeat(3, 2)  # [3, 32], every code in every group
    weight = (codes - torch.tensor([[0], [6], [15]])) * 0.25  # [3, 32]
    assert torch.equal(quantize(weight, 4, 32).dequantize(), weight)


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
        ("awq-w4-g128", 160, 32),
        ("awq-w4-g64", 896, 64),
        ("awq-w4-g32", 896, 32),
    ],
)
def test_group_is_the_largest_that_divides_the_row(scheme: str, columns: int, group: int | None) -> None:
    found = find_scheme(scheme)
    assert (found.group_for(columns), found.bits) == (group, 8 if scheme == "rtn-w8" else 4)
    assert found.activation_aware is scheme.startswith("awq")
