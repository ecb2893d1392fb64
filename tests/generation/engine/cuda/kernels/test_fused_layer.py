"""The small operations of a decoder layer against transformers' own modules, in the interpreter or on a device."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3_5 import modeling_qwen3_5

from tests.generation.engine.cuda.kernels.ahead_of_time import CAPABILITIES, compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.cuda.kernels.fused_layer import (
    add_rms_norm,
    gelu_multiply,
    norm_add,
    rms_norm,
    rotate_and_write,
    sigmoid_multiply,
    silu_multiply,
)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# In bfloat16 the interpreter truncates where a device rounds.
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype)


# By what is added to the weights: see `shift`.
NORMS: dict[float | None, type] = {None: Qwen3RMSNorm, 0.0: GptOssRMSNorm, 1.0: Gemma3RMSNorm}


def norm_of(size: int, dtype: torch.dtype, shift: float | None = None) -> torch.nn.Module:
    norm = NORMS[shift](size, eps=0.1).to(DEVICE, dtype).requires_grad_(False)
    norm.weight.data.uniform_(0.5, 2)
    return norm


def compare(ours: torch.Tensor, theirs: torch.Tensor, atol: int = 4) -> None:
    # A few roundings of float32 statistics; of half precision one in another direction.
    eps = max(torch.finfo(theirs.dtype).eps, torch.finfo(torch.float32).eps)
    torch.testing.assert_close(ours, theirs, rtol=4 * eps, atol=atol * eps)


@dtypes
@pytest.mark.parametrize("shift", NORMS)
def test_norms(dtype: torch.dtype, shift: float | None) -> None:
    torch.manual_seed(0)
    norm, branch = (norm_of(90, dtype, shift) for _ in range(2))
    x, residual = random(2, 3, 90, dtype=dtype), random(2, 3, 90, dtype=dtype)
    compare(rms_norm(x, norm.weight, 0.1, None, shift), norm(x))
    total, normed = add_rms_norm(x, residual, norm.weight, 0.1, None, shift)
    compare(total, x + residual)
    compare(normed, norm(total))
    total, normed = add_rms_norm(x, residual, norm.weight, 0.1, None, shift, branch.weight, 0.1)
    compare(total, branch(x) + residual)
    compare(normed, norm(total))
    assert torch.equal(norm_add(x, residual, branch.weight, 0.1, shift), total)
    assert rms_norm(x[:0], norm.weight, 0.1, None, shift).shape == (0, 3, 90)


GATES = {
    silu_multiply: F.silu, sigmoid_multiply: torch.sigmoid,
    gelu_multiply: lambda gate: F.gelu(gate, approximate="tanh"),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize("multiply", GATES)
def test_gates_that_are_halves_of_one_tensor(dtype: torch.dtype, multiply: Callable[..., torch.Tensor]) -> None:
    """Some of more than a program's share; gates of heads too."""
    torch.manual_seed(0)
    for shape in ((2, 3, 2 * 1030), (2, 3, 4, 2 * 24)):
        gate, up = (4 * random(*shape, dtype=dtype)).chunk(2, dim=-1)
        ours = multiply(gate, up)
        assert ours.is_contiguous()
        compare(ours, GATES[multiply](gate) * up, atol=8)
        if dtype == torch.float16 and DEVICE == "cpu" and multiply is silu_multiply:
            assert torch.equal(ours, F.silu(gate) * up)  # every rounding is where it should be


@dtypes
@pytest.mark.parametrize("normed", [False, True])
def test_rotates_and_writes_each_row_where_it_is(dtype: torch.dtype, normed: bool) -> None:
    """Heads of a size that is no power of two, K and V in one tensor, rows from the third on, buffers of any strides;
    nothing else of the cache changes."""
    torch.manual_seed(0)
    query, (key, value) = random(3, 2, 4, 24, dtype=dtype), random(2, 3, 2, 2, 24, dtype=dtype)
    cos, sin = random(2, 3, 2, 24, dtype=dtype)
    keys, values = random(7, 2, 30, 24, dtype=dtype), random(7, 30, 2, 24, dtype=dtype).transpose(1, 2)
    positions = torch.tensor([[3, 4], [28, 29], [9, 0]], device=DEVICE)
    norms = [norm_of(24, dtype) for _ in range(2)] if normed else [torch.nn.Identity()] * 2
    rotated, new_keys = apply_rotary_pos_emb(
        norms[0](query).transpose(1, 2), norms[1](key).transpose(1, 2), cos, sin
    )  # [B, heads, q, d]
    expected_keys, expected_values = keys.clone(), values.clone()
    rows = torch.arange(2, 5, device=DEVICE)[:, None]
    expected_keys[rows, :, positions] = new_keys.transpose(1, 2)
    expected_values[rows, :, positions] = value
    weights = [norm.weight for norm in norms] if normed else [None, None]
    places = rows.expand_as(positions), positions
    ours = rotate_and_write(query, key, value, cos, sin, keys, values, *places, *weights, 0.1)
    assert ours.is_contiguous() and torch.equal(values, expected_values)
    compare(ours, rotated)
    compare(keys, expected_keys)
    if not normed and dtype != torch.bfloat16:
        assert torch.equal(ours, rotated) and torch.equal(keys, expected_keys)  # every rounding is where it should be


@pytest.mark.parametrize(("dtype", "shift"), [(torch.float16, 1.0), (torch.float32, None)], ids=str)
def test_rotates_a_part_of_each_head(dtype: torch.dtype, shift: float | None) -> None:
    """The first 12 of 40, as Qwen3.5 does; or all by angles of one half, as GPT-OSS does. Queries lie beside gates."""
    torch.manual_seed(0)
    query, key = random(2, 3, 4, 80, dtype=dtype)[..., :40], random(2, 3, 2, 40, dtype=dtype)
    norms = [norm_of(40, dtype, shift) for _ in range(2)]
    places = torch.tensor([[[0] * 3, [1] * 3], [[3, 4, 5], [28, 29, 0]]], device=DEVICE)
    given = [norm(states).transpose(1, 2) for norm, states in zip(norms, (query, key), strict=True)]
    for family, width, half in ((modeling_qwen3_5, 12, 6), (modeling_gpt_oss, 20, 20)):
        cos, sin = random(2, 2, 3, width, dtype=dtype)
        keys, values = torch.zeros(2, 2, 2, 30, 40, dtype=dtype, device=DEVICE)
        rotated, new_keys = family.apply_rotary_pos_emb(*given, cos, sin)  # [B, heads, q, d]
        weights = [norm.weight for norm in norms]
        ours = rotate_and_write(query, key, key, cos, sin, keys, values, *places, *weights, 0.1, shift, half)
        compare(ours, rotated)
        compare(keys[places[0], :, places[1]], new_keys.transpose(1, 2))
        assert torch.equal(values[places[0], :, places[1]], key)


@dtypes
def test_a_row_is_the_same_whatever_rows_are_beside_it(dtype: torch.dtype) -> None:
    """A program has one row, one head of a token, or elements: how many there are decides nothing."""
    torch.manual_seed(0)
    x, residual, weight = random(7, 9, 90, dtype=dtype), random(7, 9, 90, dtype=dtype), random(90, dtype=dtype)
    one = slice(3, 4), slice(5, 6)
    whole = rms_norm(x, weight, 0.1), *add_rms_norm(x, residual, weight, 0.1), silu_multiply(x, residual)
    given = x[one].contiguous(), residual[one].contiguous()
    alone = rms_norm(given[0], weight, 0.1), *add_rms_norm(*given, weight, 0.1), silu_multiply(*given)
    assert all(torch.equal(ours, theirs[one]) for ours, theirs in zip(alone, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@torch.no_grad()
def test_what_is_float32_under_autocast_stays_so(dtype: torch.dtype) -> None:
    """Residual stream, norms and angles; products, K/V, and what products are given are narrow."""
    torch.manual_seed(0)
    norm, x = norm_of(90, torch.float32), random(2, 3, 90, dtype=dtype)
    residual = random(2, 3, 90, dtype=torch.float32)
    compare(rms_norm(residual, norm.weight, 0.1, dtype), norm(residual).to(dtype))
    total, normed = add_rms_norm(x, residual, norm.weight, 0.1, dtype)
    assert torch.equal(total, x + residual) and total.dtype == torch.float32
    compare(normed, norm(total).to(dtype))
    query, (key, value) = random(3, 2, 4, 24, dtype=dtype), random(2, 3, 2, 2, 24, dtype=dtype)
    cos, sin = random(2, 3, 2, 24, dtype=torch.float32)
    positions = torch.tensor([[3, 4], [28, 29], [9, 0]], device=DEVICE)
    places = torch.arange(3, device=DEVICE)[:, None].expand_as(positions), positions
    for norms in ([torch.nn.Identity()] * 2, [norm_of(24, torch.float32) for _ in range(2)]):
        rotated, new_keys = apply_rotary_pos_emb(
            norms[0](query).transpose(1, 2), norms[1](key).transpose(1, 2), cos, sin
        )  # [B, heads, q, d]
        assert rotated.dtype == torch.float32
        keys, values = torch.zeros(2, 3, 2, 30, 24, dtype=dtype, device=DEVICE)
        weights = [getattr(each, "weight", None) for each in norms]
        ours = rotate_and_write(query, key, value, cos, sin, keys, values, *places, *weights, 0.1)
        compare(ours, rotated.to(dtype))
        compare(keys[places[0], :, positions], new_keys.to(dtype).transpose(1, 2))
        assert torch.equal(values[places[0], :, positions], value)
        if dtype == torch.float16 and weights[0] is None:
            assert torch.equal(ours, rotated.to(dtype)), "every rounding is where it should be"


@pytest.mark.parametrize(
    "tests",
    [("test_schema", "test_faketensor"), pytest.param("test_aot_dispatch_dynamic", marks=pytest.mark.slow)],
)
def test_are_proper_operators(tests: str | tuple[str, ...]) -> None:
    operators = torch.ops.spec_trl
    x, weight = random(2, 3, 8, dtype=torch.float32), random(8, dtype=torch.float32)
    query, key = random(2, 3, 4, 8, dtype=torch.float32), random(2, 3, 2, 8, dtype=torch.float32)
    cache, positions = random(2, 2, 9, 8, dtype=torch.float32), torch.tensor([[0, 1, 2], [4, 5, 6]], device=DEVICE)
    calls = [
        (operators.rms_norm, (x, weight, 0.1)),
        (operators.add_rms_norm, (x, x, weight, 0.1)),
        (operators.rms_norm, (x, weight, 0.1, torch.bfloat16)),
        (operators.add_rms_norm, (x.half(), x, weight, 0.1, torch.float16)),
        (operators.add_rms_norm, (x, x, weight, 0.1, None, 1.0, weight, 0.1)),
        (operators.norm_add, (x, x, weight, 0.1, 0.0)),
        (operators.silu_multiply, (x, x)),
        (
            operators.rotate_and_write,
            (query, key, key, x, x, cache, cache.clone(), positions % 2, positions, weight, weight, 0.1),
        ),
    ]
    for operator, inputs in calls:
        torch.library.opcheck(operator.default, inputs, test_utils=tests)


def test_bad_input_is_refused() -> None:
    x, cache = torch.zeros(2, 3, 8), torch.zeros(2, 2, 9, 8)
    heads, positions = torch.zeros(2, 3, 2, 8), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="x, residual and weight do not fit"):
        rms_norm(x, torch.zeros(7), 0.1)
    with pytest.raises(ValueError, match=r"x, residual and weight.*torch.float16.*float32"):
        add_rms_norm(x, x, torch.zeros(8).half(), 0.1)
    with pytest.raises(ValueError, match=r"x, residual and weight.*torch.float32"):
        add_rms_norm(x, x.half(), torch.zeros(8).half(), 0.1)
    with pytest.raises(ValueError, match="gate and up do not fit"):
        silu_multiply(x, x[:, :2])
    with pytest.raises(ValueError, match="query, key, value, cos, sin, cache, places and norms do not fit"):
        rotate_and_write(heads, heads, heads, x, x, cache, cache, positions[:1], positions, None, None, 0.1)
    for each in (x.half(), x.double()):
        with pytest.raises(ValueError, match="query, key, value, cos, sin, cache, places and norms do not fit"):
            rotate_and_write(heads, heads, heads, each, each, cache, cache, positions, positions, None, None, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability, tmp_path) -> None:
    """What the interpreter lets pass, a compiler may not."""
    calls = """
from spec_trl.generation.engine.cuda.kernels.fused_layer import *
for dtype in (torch.bfloat16, torch.float32, torch.float64):
    def empty(*shape):
        return torch.empty(*shape, dtype=dtype)
    x, weight = empty(2, 1, 3584), empty(3584)
    rms_norm(x, weight, 1e-6)
    add_rms_norm(x, x, weight, 1e-6)
    for shift in (1.0, 0.0) if dtype != torch.float64 else (1.0,):
        add_rms_norm(x, x, weight, 1e-6, None, shift, weight, 1e-6)
        norm_add(x, x, weight, 1e-6, shift)
    for multiply in (silu_multiply, gelu_multiply):
        multiply(*empty(2, 1, 2 * 18944).chunk(2, -1))
    sigmoid_multiply(*empty(2, 1, 16, 2 * 256).chunk(2, -1))
    query, key, cache = empty(2, 1, 16, 512)[..., :256], empty(2, 1, 4, 256), empty(2, 4, 512, 256)
    places = torch.zeros(2, 1, dtype=torch.int64)
    for norm, angle, half in ((empty(256), empty(2, 1, 64), 32), (None, empty(2, 1, 128), 128)):
        given = query, key, key, angle, angle, cache, cache.clone(), places, places, norm, norm, 1e-6
        rotate_and_write(*given, 1.0, half)
    query, key, angle, cache = empty(2, 6, 28, 128), empty(2, 6, 4, 128), empty(2, 6, 128), empty(2, 4, 512, 128)
    for norm in (None, empty(128)):
        places = torch.zeros(2, 6, dtype=torch.int64)
        rotate_and_write(query, key, key, angle, angle, cache, cache.clone(), places, places, norm, norm, 1e-6)
    if dtype == torch.bfloat16:  # under autocast
        rms_norm(x.float(), weight.float(), 1e-6, dtype)
        add_rms_norm(x, x.float(), weight.float(), 1e-6, dtype)
        norm, angle = norm.float(), angle.float()
        for norm in (None, norm):
            rotate_and_write(query, key, key, angle, angle, cache, cache.clone(), places, places, norm, norm, 1e-6)
        for size, width, heads, head in ((896, 4864, 14, 64), (1536, 8960, 12, 128)):  # 0.5 and 1.5 B
            rms_norm(empty(2, 1, size), empty(size), 1e-6)
            silu_multiply(*empty(2, 1, 2 * width).chunk(2, -1))
            key, angle, cache = empty(2, 1, 2, head), empty(2, 1, head), empty(2, 2, 512, head)
            places = torch.zeros(2, 1, dtype=torch.int64)
            rotate_and_write(empty(2, 1, heads, head), key, key, angle, angle, cache, cache.clone(), places, places,
                             None, None, 1e-6)
"""
    kernels = compile_for(capability, calls, tmp_path)
    names = ["_gated"] * 3 + ["_rotate_and_write"] * 4
    small = ["_rms_norm", "_gated", "_rotate_and_write"]
    mixed, norm = ["_rms_norm", "_rms_norm", "_rotate_and_write", "_rotate_and_write"], ["_rms_norm"]
    expected = 6 * norm + names + mixed + 2 * small + 6 * norm + names + 4 * norm + names
    assert [kernel.name for kernel in kernels] == expected


@pytest.mark.cuda
def test_a_captured_graph_writes_anew() -> None:
    """At the positions that the graph finds in its buffer, and as the eager kernel does."""
    torch.manual_seed(0)
    query, key = random(4, 6, 28, 128, dtype=torch.bfloat16), random(4, 6, 4, 128, dtype=torch.bfloat16)
    cos, sin = random(2, 4, 6, 128, dtype=torch.bfloat16)
    keys, values = random(2, 4, 4, 512, 128, dtype=torch.bfloat16)
    rows = torch.arange(4, device=DEVICE)[:, None].expand(4, 6)
    positions = torch.arange(6, device=DEVICE).repeat(4, 1)
    given = query, key, key, cos, sin
    rotate_and_write(*given, keys, values, rows, positions, None, None, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = rotate_and_write(*given, keys, values, rows, positions, None, None, 0.0)
    positions += 100
    query.copy_(random(4, 6, 28, 128, dtype=torch.bfloat16))
    expected_keys, expected_values = keys.clone(), values.clone()
    graph.replay()
    assert torch.equal(out, rotate_and_write(*given, expected_keys, expected_values, rows, positions, None, None, 0.0))
    assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)
