"""The warning of a 16-bit policy on a CPU that lacks the instructions: when, how often, and its number."""

import warnings

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import dense_linear
from spec_trl.dense_linear import float32_gain, has_instructions, warn_of_slow_dtype
from tests.conftest import tiny_llama
from tests.generation.calls import generate, pad_left, random_rows


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without any of the instructions."""
    monkeypatch.setattr(dense_linear, "warned", set())
    monkeypatch.setattr(dense_linear, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(dense_linear.platform, "machine", lambda: "x86_64")


def policy(dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    return tiny_llama().to(dtype)


def test_a_generation_warns_once(lacking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_linear, "float32_gain", lambda weight: 3.456)
    prompts = pad_left(random_rows([4, 2]))
    with pytest.warns(UserWarning, match=r"no instructions for torch.bfloat16.* 3.5 times .*dtype=torch.float32"):
        generate(policy(), prompts, max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(policy(), prompts, max_new_tokens=2)


@pytest.mark.parametrize(
    ("dtype", "gain", "supported", "smallest"),
    [
        (torch.float32, 9.0, False, 1),
        (torch.bfloat16, 1.1, False, 1),  # measured to be no slower
        (torch.bfloat16, 9.0, True, 1),
        (torch.bfloat16, 9.0, False, 1 << 30),  # no layer is large enough to tell
    ],
)
def test_otherwise_it_says_nothing(dtype, gain, supported, smallest, lacking, monkeypatch, recwarn) -> None:
    monkeypatch.setattr(dense_linear, "float32_gain", lambda weight: gain)
    monkeypatch.setattr(dense_linear, "MIN_WEIGHTS", smallest)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: supported)
    warn_of_slow_dtype(policy(dtype))
    assert not recwarn.list


def test_capabilities(lacking, monkeypatch: pytest.MonkeyPatch) -> None:
    assert has_instructions(torch.float32) and has_instructions(torch.float64) and not has_instructions(torch.bfloat16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert has_instructions(torch.bfloat16)
    for machine in ("x86_64", "aarch64"):  # as torch says on this machine
        monkeypatch.setattr(dense_linear.platform, "machine", lambda machine=machine: machine)
        assert has_instructions(torch.float16) == torch.ops.mkldnn._is_mkldnn_fp16_supported()


def test_the_gain_is_the_ratio_of_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes: list[torch.dtype] = []

    def seconds(multiply) -> float:
        dtypes.append(multiply().dtype)
        return {torch.bfloat16: 6.0, torch.float32: 2.0}[dtypes[-1]]

    monkeypatch.setattr(dense_linear, "seconds", seconds)
    assert float32_gain(torch.randn(8, 16, dtype=torch.bfloat16)) == 3.0
    assert dtypes == [torch.bfloat16, torch.float32]
