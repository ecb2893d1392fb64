"""Steps in C++ against the functions of families of transformers, and their bits beside other rows and tokens."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import mamba2_selective_state_update
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import causal_conv1d_fn, mamba_selective_state_update
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from spec_trl.generation.engine.network import cpu_states
from spec_trl.generation.engine.network.cpu_states import Replay
from spec_trl.native.native_code import compiler


if compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

ROWS, TOKENS = 3, 5
Given = dict[str, Any]
Function = Callable[[Given, Tensor, bool], tuple[Tensor, Replay]]


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def delta_rule(
    keys: int, heads: int, key_size: int, size: int, by_channel: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Given, Tensor]:
    channels = (key_size,) if by_channel else ()
    given: Given = {
        "query": numbers(ROWS, TOKENS, keys, key_size, dtype=dtype),
        "key": numbers(ROWS, TOKENS, keys, key_size + 1, dtype=dtype)[..., 1:],  # as parts of one projection lie
        "value": numbers(ROWS, TOKENS, heads, size, dtype=dtype),
        "g": -numbers(ROWS, TOKENS, heads, *channels).abs(),
        "beta": numbers(ROWS, TOKENS, heads, dtype=dtype).sigmoid(),
        "use_qk_l2norm_in_kernel": True,
    }
    return given, numbers(ROWS, heads, key_size, size)


def mamba_1(size: int, numbers_each: int, dtype: torch.dtype = torch.float32) -> tuple[Given, Tensor]:
    given: Given = {name: numbers(ROWS, size, TOKENS, dtype=dtype) for name in ("hidden_states", "dt", "z")}
    given |= {name: numbers(ROWS, TOKENS, numbers_each, dtype=dtype).transpose(1, 2) for name in ("B", "C")}
    given |= {"A": -numbers(size, numbers_each).abs(), "D": numbers(size), "delta_bias": numbers(size, dtype=dtype)}
    return given | {"delta_softplus": True}, numbers(ROWS, size, numbers_each, dtype=dtype)


def mamba_2(groups: int, heads: int, size: int, numbers_each: int) -> tuple[Given, Tensor]:
    given: Given = {"hidden_states": numbers(ROWS, TOKENS, heads, size), "dt": 9 * numbers(ROWS, TOKENS, heads)}
    given |= {name: numbers(ROWS, TOKENS, groups, numbers_each) for name in ("B", "C")}
    given |= {"A": -numbers(heads).abs(), "D": numbers(heads), "dt_bias": numbers(heads), "dt_softplus": True}
    return given, numbers(ROWS, heads, size, numbers_each)


def convolution(channels: int, kernel: int, silu: bool, bias: bool) -> tuple[Given, Tensor]:
    given: Given = {"x": numbers(ROWS, TOKENS, channels + 2)[..., 2:].transpose(1, 2), "silu": silu}
    given |= {"weight": numbers(channels, kernel), "bias": numbers(channels) if bias else None}
    return given, numbers(ROWS, kernel, channels).transpose(1, 2)


def convolve(given: Given, state: Tensor, writes: bool) -> tuple[Tensor, Replay]:
    return cpu_states.convolve(**given, state=state, writes=writes)


CASES: dict[str, tuple[Function, tuple[Given, Tensor], int]] = {  # with the axis of tokens
    "delta rule": (cpu_states.delta_rule, delta_rule(2, 4, 16, 16), 1),
    "delta rule, wide": (cpu_states.delta_rule, delta_rule(1, 3, 128, 136), 1),
    "delta rule, by channel": (cpu_states.delta_rule, delta_rule(3, 3, 20, 72, by_channel=True), 1),
    "delta rule, float64": (cpu_states.delta_rule, delta_rule(2, 2, 16, 24, dtype=torch.float64), 1),
    "delta rule, bfloat16": (cpu_states.delta_rule, delta_rule(2, 2, 16, 24, dtype=torch.bfloat16), 1),
    "mamba 1": (cpu_states.mamba_1, mamba_1(33, 16), 2),
    "mamba 1, float64": (cpu_states.mamba_1, mamba_1(20, 10, dtype=torch.float64), 2),
    "mamba 2": (cpu_states.mamba_2, mamba_2(2, 4, 16, 64), 1),
    "mamba 2, odd": (cpu_states.mamba_2, mamba_2(1, 3, 7, 20), 1),
    "convolution": (convolve, convolution(50, 4, silu=True, bias=True), 2),
    "convolution, plain": (convolve, convolution(32, 3, silu=False, bias=False), 2),
}


def by_family(name: str, given: Given, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and last states by functions of transformers."""
    if name.startswith("delta"):
        step = recurrent_kimi_delta_attention if "channel" in name else torch_recurrent_gated_delta_rule
        outputs, last = step(**given, initial_state=state, output_final_state=True)
        return outputs, last
    if name.startswith("convolution"):
        window = torch.cat([state, given["x"]], dim=-1)
        activation = "silu" if given["silu"] else None
        outputs = causal_conv1d_fn(window, given["weight"], given["bias"], activation=activation)
        return outputs[..., -TOKENS:], window[..., -state.shape[-1] :]
    state, outputs = state.clone(), []
    for at in range(TOKENS):
        if name.startswith("mamba 1"):
            parts = [given[part][..., at] for part in ("hidden_states", "dt")]
            more = given["A"], given["B"][..., at], given["C"][..., at], given["D"]
            options = {"z": given["z"][..., at], "dt_bias": given["delta_bias"]}
            outputs.append(mamba_selective_state_update(state, *parts, *more, **options, dt_softplus=True))
        else:
            size, wide = given["hidden_states"].shape[-1], given["B"].shape[-1]
            dt, D, bias = (value[..., None].expand(*value.shape, size) for value in
                           (given["dt"][:, at], given["D"], given["dt_bias"]))  # fmt: skip
            A = given["A"][:, None, None].expand(-1, size, wide)
            rest = A, given["B"][:, at], given["C"][:, at], D
            outputs.append(
                mamba2_selective_state_update(
                    state, given["hidden_states"][:, at], dt, *rest, dt_bias=bias, dt_softplus=True
                )
            )
    return torch.stack(outputs, dim=2 if name.startswith("mamba 1") else 1), state


def cut(given: Given, axis: int, rows: slice, tokens: slice) -> Given:
    """The arguments of some rows and tokens."""
    index = (rows, tokens) if axis == 1 else (rows, slice(None), tokens)
    return {
        name: value[index]
        if isinstance(value, Tensor) and value.dim() > 2 and (value.shape[0], value.shape[axis]) == (ROWS, TOKENS)
        else value
        for name, value in given.items()
    }


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
def test_they_compute_what_families_do(name: str) -> None:
    function, (given, state), _ = CASES[name]
    expected, last = by_family(name, given, state)
    written = state.clone(memory_format=torch.preserve_format)
    outputs, _ = function(given, written, True)
    assert outputs.dtype == expected.dtype and outputs.shape == expected.shape
    rounding = 1e-2 if outputs.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(outputs, expected, rtol=rounding, atol=rounding)
    torch.testing.assert_close(written, last.to(written.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.usefixtures("threads")
def test_bits_do_not_depend_on_other_rows_or_tokens(name: str) -> None:
    """A verification, which writes nothing, then a commit of ragged lengths: the bits of each row's steps alone."""
    function, (given, state), axis = CASES[name]
    before, lengths = state.clone(), [TOKENS, 0, 2]
    outputs, replay = function(given, state, False)
    assert torch.equal(state, before)
    committed = state.clone(memory_format=torch.preserve_format)
    function(given, committed, False)[1](torch.tensor(lengths))
    for row, length in enumerate(lengths):
        alone = before[row : row + 1].clone(memory_format=torch.preserve_format)
        for at in range(TOKENS):
            if at == length:
                assert torch.equal(committed[row], alone[0])
            step, _ = function(cut(given, axis, slice(row, row + 1), slice(at, at + 1)), alone, True)
            assert torch.equal(step[0].select(axis - 1, 0), outputs[row].select(axis - 1, at))
        if length == TOKENS:
            assert torch.equal(committed[row], alone[0])
    assert not torch.equal(committed, before)
