"""Every 4-bit kernel on a GPU: product, refresh in place under a captured graph, large blocks of rows, measuring."""

from dataclasses import replace

import pytest
import torch

from spec_trl.quantization.kernels import FAST_KERNELS, fitting_kernels, kernel_times
from spec_trl.quantization.kernels.reference import ReferenceInt4, ReferenceNF4
from spec_trl.quantization.rtn import RoundToNearest
from tests.quantization.conftest import layer_spec, pack


pytestmark = pytest.mark.cuda


@pytest.fixture(
    params=[kernel for kernel in FAST_KERNELS if kernel.device_type == "cuda"], ids=lambda kernel: kernel.name
)
def kernel(request):
    return request.param


def layer_for(kernel, shape):
    """The layer of this shape (out, in, group); the test is skipped where the kernel cannot hold it."""
    layer = replace(layer_spec(*shape, device="cuda", dtype=torch.bfloat16), normal_float=kernel.normal_float)
    reason = kernel.unsupported(layer)
    if reason is not None:
        pytest.skip(reason)
    return layer


@pytest.mark.parametrize("shape", [(512, 3584, 128), (3584, 512, 64), (4864, 896, 128), (1024, 1024, 32)])
def test_multiplies_like_the_reference(kernel, shape):
    torch.manual_seed(0)
    layer = layer_for(kernel, shape)
    weight = torch.randn(*shape[:2], device="cuda") / 60
    slow = ReferenceNF4 if kernel.normal_float else ReferenceInt4
    packed, reference = pack(kernel, layer, weight), pack(slow, layer, weight)
    exact_weight = reference.dequantize().double()
    for rows in (1, 3, 8, 16, 17, 64):
        x = torch.randn(rows, shape[1], device="cuda").bfloat16()
        exact = x.double() @ exact_weight.T
        y = packed.linear(x)
        assert y.shape == exact.shape and y.dtype == torch.bfloat16
        assert (y.double() - exact).std() < 0.01 * exact.std()
        assert ((y.double() - exact).abs() <= 0.05 * exact.std()).all()


def test_a_captured_graph_survives_a_refresh(kernel):
    torch.manual_seed(0)
    layer = layer_for(kernel, (3584, 3584, 128))
    old, new = (torch.randn(3584, 3584, device="cuda") for _ in range(2))
    packed, x = pack(kernel, layer, old), torch.randn(1, 3584, device="cuda").bfloat16()
    packed.linear(x)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = packed.linear(x)
    RoundToNearest().quantize_(new, packed)
    graph.replay()
    assert torch.equal(y, packed.linear(x))
    RoundToNearest().quantize_(old, packed)
    graph.replay()
    torch.testing.assert_close(y, pack(kernel, layer, old).linear(x))


def test_large_blocks_of_rows_pack_like_small_ones(kernel, monkeypatch):
    torch.manual_seed(0)
    layer = layer_for(kernel, (18944, 512, 128))
    weight = torch.randn(18944, 512, device="cuda")
    whole = pack(kernel, layer, weight)
    monkeypatch.setattr("spec_trl.quantization.rtn.GPU_CHUNK", 512 * 128)
    blocks = pack(kernel, layer, weight)
    assert all(torch.equal(a, b) for a, b in zip(whole.buffers(), blocks.buffers(), strict=True))


def test_quantizing_waits_for_nothing(kernel):
    packed, quantizer = kernel(layer_for(kernel, (1024, 1024, 128))), RoundToNearest()
    weight = torch.randn(1024, 1024, device="cuda")
    quantizer.quantize_(weight, packed)  # compiles, allocates
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantizer.quantize_(weight, packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_kernels_are_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_times, "tables", {})
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    layer = layer_spec(3584, 3584, device="cuda", dtype=torch.bfloat16)
    fitting = fitting_kernels("auto", layer)
    assert not isinstance(fitting, str)
    table = kernel_times.kernel_table(layer, fitting)
    assert list(table.kernels) == [kernel.name for kernel in fitting]
    assert all(1e-7 < seconds < 1e-2 for times in (table.dense, *table.kernels.values()) for seconds in times.values())
