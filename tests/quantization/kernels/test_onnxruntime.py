"""onnxruntime's kernel: its product, refreshes and copies, what the written model says, and its drafts."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from spec_trl.generation.engine.network.shadow import share_weights
from spec_trl.quantization.kernels import QuantizedRows
from spec_trl.quantization.kernels.onnxruntime_int4 import OnnxRuntimeInt4, matmul_nbits_model
from spec_trl.quantization.kernels.reference import ReferenceInt4
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.quantization.conftest import layer_spec, pack


onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (spec-trl[cpu])")
FLOAT32 = dict(activation_dtype=torch.float32)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    out=st.integers(1, 150), groups=st.integers(1, 7), group=st.sampled_from([32, 64, 128]), rows=st.integers(0, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_multiplies_like_the_reference(out, groups, group, rows, dtype, seed) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(out, groups * group).to(dtype), torch.randn(rows, groups * group)
    fast = pack(OnnxRuntimeInt4, layer_spec(*weight.shape, group, dtype=dtype), weight)
    slow = pack(ReferenceInt4, layer_spec(*weight.shape, group, **FLOAT32), weight)
    # A group of x is rounded to 255 steps between -max and max: half a step off in each channel, at most.
    steps = x.view(rows, groups, group).abs().amax(-1) / 127  # [rows, groups]
    bound = steps @ slow.dequantize().abs().view(out, groups, group).sum(-1).T / 2  # [rows, out]
    exact, y = slow.linear(x), fast.linear(x)  # [rows, out] each
    assert y.dtype == torch.float32 and y.shape == exact.shape
    assert ((y - exact).abs() <= 1.01 * bound + 1e-4).all()


def test_new_weights_reach_every_shadow_and_copies_keep_theirs() -> None:
    torch.manual_seed(0)
    old, new, x = torch.randn(70, 256), torch.randn(70, 256), torch.randn(3, 256)
    packed = pack(OnnxRuntimeInt4, layer_spec(70), old)
    holder = nn.Sequential(packed)
    shadow, twin, pickled = share_weights(holder)[0], copy.deepcopy(packed), pickle.dumps(packed)
    before = packed.linear(x)  # [3, 70]
    quantized_again = pack(OnnxRuntimeInt4, layer_spec(70), new).linear(x)
    for first in (0, 64):
        rows = slice(first, first + 64)
        source = pack(ReferenceInt4, layer_spec(len(new[rows]), **FLOAT32), new[rows])
        packed.pack_(first, rows_of(source))
    assert not torch.equal(before, quantized_again)
    for each in (packed, shadow):
        assert torch.equal(each.linear(x), quantized_again)
    for each in (twin, pickle.loads(pickled)):
        assert torch.equal(each.linear(x), before)


def rows_of(packed: ReferenceInt4) -> QuantizedRows:
    return QuantizedRows(packed.unpack().int(), packed.scales, packed.zeros.float())


def test_threads_may_share_it() -> None:
    torch.manual_seed(0)
    packed = copy.deepcopy(pack(OnnxRuntimeInt4, layer_spec(512), torch.randn(512, 256)))  # without a session yet
    inputs = torch.randn(64, 2, 256)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(packed.linear, inputs))
    assert all(torch.equal(y, packed.linear(x)) for x, y in zip(inputs, together, strict=True))


def test_the_written_model_is_what_it_should_be() -> None:
    """As onnxruntime reads it; sizes of more than one byte are in it."""
    packed = pack(OnnxRuntimeInt4, layer_spec(300, 1024), torch.randn(300, 1024))
    model, options = matmul_nbits_model(300, 1024, 128), onnxruntime.SessionOptions()
    weights = [onnxruntime.OrtValue.ortvalue_from_numpy(buffer.numpy()) for buffer in packed.buffers()]
    options.add_external_initializers(["codes", "scales", "zeros"], weights)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    (x,), (y,) = session.get_inputs(), session.get_outputs()
    assert (x.name, x.type, x.shape) == ("x", "tensor(float)", ["m", 1024])
    assert (y.name, y.type, y.shape) == ("y", "tensor(float)", ["m", 300])


def test_drafts_beside_the_target_change_no_token(stories: Any) -> None:
    prompts = pad_left(random_rows([4, 7, 2]))
    config = {"draft_kernel": "onnxruntime", "efficient_rollout": {"lm_head": "packed"}}
    config["specactor"] = {"decoupled_execution": "always"}
    found = generate(stories, prompts, "self", config)
    assert outputs(found) == outputs(generate(stories, prompts, "none"))
