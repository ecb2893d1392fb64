"""The gated delta rule, in the interpreter or on a device: right, and with the same bits beside other rows, tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from tests.generation.engine.cuda.kernels.ahead_of_time import CAPABILITIES, compile_for


pytest.importorskip("triton", reason="Triton is not installed")

from spec_trl.generation.engine.cuda.kernels.delta_rule import delta_rule


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = ("query", "key", "value", "g", "beta")
ROWS = 3
# Heads of keys, heads, key size, value size, decay by channel, norms, dtype: two blocks of columns, sizes like OLMo's.
CASES = {
    "grouped": (2, 4, 16, 32, False, True, torch.float32),
    "odd": (3, 3, 96, 40, False, False, torch.float32),
    "by channel": (2, 2, 20, 72, True, True, torch.float32),
    "bfloat16": (1, 2, 16, 24, False, True, torch.bfloat16),
}
cases = pytest.mark.parametrize("name", CASES)


def make(name: str, tokens: int) -> tuple[dict[str, Any], Tensor]:
    keys, heads, key_size, size, by_channel, norms, dtype = CASES[name]
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    channels = (key_size,) if by_channel else ()
    given = {
        "query": random(tokens, keys, key_size).to(dtype),
        "key": random(tokens, keys, key_size + 1)[..., 1:].to(dtype) / key_size**0.5,
        "value": random(tokens, size, heads).transpose(2, 3).to(dtype),  # numbers of a head do not lie next to others
        "g": -random(tokens, heads, *channels).abs().float(),
        "beta": random(tokens, heads).sigmoid().to(dtype),
    }
    given = {part: value.to(DEVICE) for part, value in given.items()}
    return given | {"use_qk_l2norm_in_kernel": norms}, random(heads, key_size, size).float().to(DEVICE)


def in_float64(given: dict[str, Any], state: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Outputs `[B, T, heads, V]` of all tokens, and states after the first `lengths[b]`."""
    query, key, value, g, beta = (given[part].double() for part in TOKENS)
    if given["use_qk_l2norm_in_kernel"]:
        query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    group = value.shape[2] // query.shape[2]
    query, key = (x.repeat_interleave(group, 2)[..., None] for x in (query / query.shape[-1] ** 0.5, key))
    decay = (g[..., None] if g.dim() == 4 else g[..., None, None]).exp()
    state, outputs, last = state.double(), [], state.double()
    for at in range(value.shape[1]):
        state = state * decay[:, at]
        change = (value[:, at] - (state * key[:, at]).sum(2)) * beta[:, at, :, None]
        state = state + key[:, at] * change[:, :, None]
        outputs.append((state * query[:, at]).sum(2))
        taken = torch.tensor([length > at for length in lengths], device=state.device)
        last = torch.where(taken[:, None, None, None], state, last)
    return torch.stack(outputs, 1), last


@pytest.mark.parametrize("tokens", [1, 4, 9])
@cases
def test_is_right(name: str, tokens: int) -> None:
    """Outputs, states of a step, and of ragged commits, as families compute them."""
    given, state = make(name, tokens)
    lengths = [tokens, 0, min(tokens, 2)]
    expected, last = in_float64(given, state, lengths)
    rounding = 2e-2 if given["query"].dtype == torch.bfloat16 else 1e-5
    close = {"rtol": rounding, "atol": rounding}
    family = recurrent_kimi_delta_attention if given["g"].dim() == 4 else torch_recurrent_gated_delta_rule
    theirs, theirs_last = family(**given, initial_state=state, output_final_state=True)
    torch.testing.assert_close(theirs.double(), expected, **close)
    written = state.clone()
    outputs, _ = delta_rule(given, written, True)
    assert outputs.dtype == theirs.dtype and outputs.is_contiguous()
    torch.testing.assert_close(outputs.double(), expected, **close)
    torch.testing.assert_close(written, theirs_last, rtol=1e-5, atol=1e-5)
    before = state.clone()
    _, replay = delta_rule(given, state, False)
    assert torch.equal(state, before)
    replay(torch.tensor(lengths, device=DEVICE))
    torch.testing.assert_close(state.double(), last, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[1], before[1])


@cases
def test_bits_do_not_depend_on_other_rows_or_tokens(name: str) -> None:
    """A verification and its commit have the bits of each row's steps alone."""
    given, state = make(name, 5)
    committed, lengths = state.clone(), [5, 1, 2]
    outputs, replay = delta_rule(given, committed, False)
    replay(torch.tensor(lengths, device=DEVICE))
    for row, length in enumerate(lengths):
        alone = state[row : row + 1].clone()
        for at in range(5):
            token = {part: given[part][row : row + 1, at : at + 1] for part in TOKENS}
            step, _ = delta_rule(given | token, alone, True)
            assert torch.equal(step[0, 0], outputs[row, at])
            if at + 1 == length:
                assert torch.equal(committed[row], alone[0])


@cases
def test_a_step_writes_the_rows_that_are_counted_and_may_begin_elsewhere(name: str) -> None:
    given, state = make(name, 1)
    before, written, counted, own = state.clone(), state.clone(), state.clone(), torch.zeros_like(state)
    expected, _ = delta_rule(given, written, True)
    outputs, _ = delta_rule(given, counted, torch.tensor([1, 0, 1], device=DEVICE))
    assert torch.equal(outputs, expected) and torch.equal(counted[::2], written[::2])
    assert torch.equal(counted[1], before[1]) and not torch.equal(written[1], before[1])
    outputs, _ = delta_rule(given | {"initial_state": state}, own, True)
    assert torch.equal(outputs, expected) and torch.equal(own, written) and torch.equal(state, before)


def test_no_rows() -> None:
    given, state = make("grouped", 2)
    outputs, replay = delta_rule(given | {part: given[part][:0] for part in TOKENS}, state[:0], False)
    replay(torch.empty(0, dtype=torch.int64, device=DEVICE))
    assert outputs.shape == (0, 2, 4, 32)


@pytest.mark.parametrize("tests", ["test_schema", "test_faketensor"])
def test_is_a_proper_operator(tests: str) -> None:
    given, state = make("grouped", 2)
    inputs = *(given[part] for part in TOKENS), None, state, None, True, True, True
    torch.library.opcheck(torch.ops.spec_trl.delta_rule.default, inputs, test_utils=tests)


# Heads of keys, heads, key size, value size, decay by channel, dtype: Qwen3.5's and Next's, Kimi's, OLMo hybrid's.
SHAPES = [
    (16, 32, 128, 128, False, "bfloat16"), (32, 32, 128, 128, True, "bfloat16"), (30, 30, 96, 192, False, "float32"),
    (2, 2, 256, 512, True, "float16"), (2, 4, 16, 16, False, "float32"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code(capability: int, tmp_path) -> None:
    """One piece for steps, verifications and commits of every number of rows and tokens."""
    calls = f"""
from spec_trl.generation.engine.cuda.kernels.delta_rule import delta_rule
for keys, heads, key_size, size, by_channel, dtype in {SHAPES}:
    dtype = getattr(torch, dtype)
    for rows, tokens, writes in ((1, 1, True), (16, 1, False), (3, 9, False)):
        given = dict(query=torch.empty(rows, tokens, keys, key_size, dtype=dtype), use_qk_l2norm_in_kernel=True)
        given["key"], given["beta"] = given["query"], torch.empty(rows, tokens, heads, dtype=dtype)
        given["value"] = torch.empty(rows, tokens, 2 * heads, size, dtype=dtype)[:, :, heads:]
        given["g"] = torch.empty(rows, tokens, heads, *([key_size] if by_channel else []))
        _, replay = delta_rule(given, torch.empty(rows, heads, key_size, size), writes)
        replay(torch.ones(rows, dtype=torch.int64))
"""
    kernels = compile_for(capability, calls, tmp_path)
    assert len(kernels) == 6 * len(SHAPES)
    for at in range(0, len(kernels), 6):
        assert len({kernel.ptx for kernel in kernels[at : at + 6]}) == 1, SHAPES[at // 6]
    assert max(kernel.shared for kernel in kernels) <= 99 * 1024  # what the smallest of these GPUs gives a program
