"""NF4: its rounding, bitsandbytes' products and layouts, refreshes, its drafts, and what is said without it."""

import importlib.util
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl.quantization.kernels import LayerSpec, find_kernel
from spec_trl.quantization.kernels.base import NORMAL_FLOATS, join_rows
from spec_trl.quantization.kernels.bitsandbytes_nf4 import BitsAndBytesNF4Cpu, BitsAndBytesNF4Cuda
from spec_trl.quantization.kernels.kernel_times import ROWS, measure
from spec_trl.quantization.kernels.reference import ReferenceNF4
from spec_trl.quantization.rtn import RoundToNearest
from tests.quantization.conftest import pack, quantized


BF16 = torch.bfloat16
HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")
needs_avx512 = pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="no AVX-512 for bfloat16")


def nf4_layer(out: int, columns: int = 128, dtype: torch.dtype = torch.float32, device: str = "cpu") -> LayerSpec:
    return LayerSpec(out, columns, 4, 64, dtype, None, torch.device(device), normal_float=True)


def test_each_weight_becomes_the_nearest_value() -> None:
    """Of the 16 times the group's largest magnitude; a zero stays zero, also in a group of zeros."""
    torch.manual_seed(0)
    weight = torch.randn(70, 192, dtype=torch.float64)
    weight[3, :64], weight[:, ::5] = 0, 0
    found = pack(ReferenceNF4, nf4_layer(70, 192, torch.float64), weight).dequantize()  # [70, 192]
    groups = weight.view(70, 3, 64)
    values = torch.tensor(NORMAL_FLOATS, dtype=torch.float64) * groups.abs().amax(-1).clamp(min=1e-5)[..., None]
    nearest = (groups[..., None] - values[..., None, :]).abs().amin(-1)  # [70, 3, 64]
    torch.testing.assert_close((found.view_as(groups) - groups).abs(), nearest, rtol=0, atol=1e-12)
    assert (found[weight == 0] == 0).all()


@needs_bitsandbytes
def test_the_values_are_those_of_bitsandbytes() -> None:
    from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

    assert get_4bit_type("nf4", device="cpu").tolist() == list(NORMAL_FLOATS)
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    theirs = dequantize_4bit(*quantize_4bit(weight, quant_type="nf4", blocksize=64)).float()  # [64, 256]
    torch.testing.assert_close(pack(ReferenceNF4, nf4_layer(64, 256), weight).dequantize(), theirs)


@needs_bitsandbytes
@needs_avx512
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize(("out", "columns"), [(32, 64), (96, 192), (160, 1024)])
def test_it_multiplies_like_the_reference(out: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(out, columns).to(dtype)
    layer = nf4_layer(out, columns, dtype)
    assert find_kernel("auto", layer) is find_kernel("bitsandbytes", layer) is BitsAndBytesNF4Cpu
    slow = pack(ReferenceNF4, LayerSpec(out, columns, 4, 64, dtype, BF16, layer.device, True), weight)
    with patch("spec_trl.quantization.rtn.CPU_CHUNK", 64 * columns):  # in blocks of rows
        fast = pack(BitsAndBytesNF4Cpu, layer, weight)
    # Its layout for a GPU is the default one, which a CPU unpacks.
    for_gpu = pack(BitsAndBytesNF4Cuda, layer, weight)
    for rows in (1, 2, 7, 33):
        x = torch.randn(rows, columns).to(BF16)
        exact = x.double() @ slow.dequantize().double().T  # [rows, out]
        for packed in (fast, for_gpu):
            y = packed.linear(x)
            assert y.dtype == BF16 and y.shape == exact.shape
            assert (y.double() - exact).norm() < 0.01 * exact.norm()


@needs_bitsandbytes
def test_projections_of_one_input_share_one_product_on_a_gpu() -> None:
    torch.manual_seed(0)
    parts = [BitsAndBytesNF4Cuda(nf4_layer(out)) for out in (32, 8)]
    whole, x = join_rows(parts), torch.randn(3, 128).to(BF16)
    for part in parts:
        RoundToNearest().quantize_(torch.randn(part.layer.out_features, 128), part)
    assert whole is not None
    assert torch.equal(whole.linear(x), torch.cat([part.linear(x) for part in parts], dim=1))


@needs_bitsandbytes
@needs_avx512
def test_measuring_knows_its_codes() -> None:
    """On a GPU a kernel whose product is wrong is left out of the choice."""
    timed: list[str] = []

    def timer(name: str, rows: int, calls: Any) -> float:
        timed.append(name)
        return 1.0

    table = measure(nf4_layer(64), [BitsAndBytesNF4Cpu], timer)
    assert list(table.kernels) == ["bitsandbytes"] and timed.count("bitsandbytes") == len(ROWS)


def test_the_remedy_is_named_where_nothing_can_be_packed(
    llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = r'bitsandbytes is not installed; "pip install spec-trl\[bitsandbytes\]"'
    with pytest.raises(ValueError, match=f"nf4.*no layer.*{missing}.*rtn-w4-g64"):
        quantized(llama, "nf4")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with pytest.raises(ValueError, match="the CPU lacks AVX-512 for bfloat16"):
        quantized(llama, "nf4", "bitsandbytes")
    assert find_kernel("torch_int4", nf4_layer(64)) == "kernel 'torch_int4' has nothing for NF4 weights on cpu"
    assert find_kernel("reference", nf4_layer(64)) is ReferenceNF4
