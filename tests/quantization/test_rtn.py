"""Round-to-nearest: scales and values of any weight, seen through the reference kernel."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spec_trl.quantization import rtn
from spec_trl.quantization.kernels.reference import ReferenceInt4, ReferenceInt8
from spec_trl.quantization.rtn import find_scheme
from tests.quantization.conftest import layer_spec, pack


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@st.composite
def weights(draw: st.DrawFn) -> tuple[int, int, Tensor]:
    """Bits, group, and a weight [out, in] whose rows may be shifted to one side of 0, all zero, or zero in places."""
    bits = draw(st.sampled_from([4, 8]))
    rows, groups, group = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.sampled_from([32, 64, 128]))
    columns = group * groups if bits == 4 else 13 * groups
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    weight *= draw(st.sampled_from([1e-3, 1, 50]))
    weight += draw(st.sampled_from([0.0, 3.0, -3.0])) * weight.abs().max()
    weight[torch.rand(rows, generator=generator) < 0.2] = 0
    weight[torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.3]))] = 0
    return bits, group if bits == 4 else columns, weight.to(draw(st.sampled_from(DTYPES)))


@settings(deadline=None, max_examples=90, derandomize=True)
@given(weights(), st.sampled_from([None, torch.bfloat16]), st.integers(1, 9))
def test_no_weight_is_off_by_more_than_half_a_step(
    case: tuple[int, int, Tensor], dtype: torch.dtype | None, chunk_rows: int
) -> None:
    """And none that is 0 is off at all. A step is the range with 0 in it, divided by 15 (8 bits: the largest magnitude
    by 127), rounded before the codes are computed, however the rows are cut."""
    bits, group, weight = case
    before, levels = weight.clone(), 15 if bits == 4 else 127
    kernel = ReferenceInt4 if bits == 4 else ReferenceInt8
    layer = layer_spec(*weight.shape, group, bits, dtype=weight.dtype, activation_dtype=dtype)
    with patch.object(rtn, "CPU_CHUNK", chunk_rows * weight.shape[1]):
        packed, strided = (pack(kernel, layer, each) for each in (weight, weight.T.contiguous().T))
    assert torch.equal(weight, before) and torch.equal(packed.dequantize(), strided.dequantize())

    grouped = weight.to(torch.promote_types(weight.dtype, torch.float32)).view(len(weight), -1, group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)  # [out, groups] each
    size = high - low if bits == 4 else torch.maximum(high, -low)  # [out, groups]
    scales = (size / levels).clamp(min=rtn.MIN_SCALE).to(packed.activation_dtype)  # [out, groups]
    assert torch.equal(packed.scales.view_as(scales), scales)
    # Rounding the scale itself may move the far end of the range by `levels` steps times its relative error.
    eps, steps = torch.finfo(packed.activation_dtype).eps, scales.double().repeat_interleave(group, dim=1)  # [out, in]
    bound = (0.5 + levels * eps) * steps + eps * weight.double().abs() + 4 * eps * levels * steps  # [out, in]
    found = packed.dequantize()  # [out, in]
    assert ((found.double() - weight.double()).abs() <= bound).all()
    assert (found[weight == 0] == 0).all()


@pytest.mark.parametrize(
    ("scheme", "columns", "group"),
    [
        ("rtn-w4-g128", 896, 128), ("rtn-w4-g128", 4864 + 64, 64), ("rtn-w4-g128", 288, 32), ("rtn-w4-g64", 896, 64),
        ("rtn-w4-g128", 100, None), ("rtn-w4-g32", 896, 32), ("rtn-w8", 100, 100), ("awq-w4-g64", 896, 64),
    ],
)  # fmt: skip
def test_group_is_the_largest_that_divides_the_row(scheme: str, columns: int, group: int | None) -> None:
    found = find_scheme(scheme)
    assert (found.group_for(columns), found.bits) == (group, 8 if scheme == "rtn-w8" else 4)
    assert found.activation_aware is scheme.startswith("awq")
