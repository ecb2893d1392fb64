"""The engine on a GPU: captured and compiled forwards, the Triton kernels and the packed weights together."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import spec_trl
from spec_trl.generation import generate as one_call
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.session import Session
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows


pytestmark = pytest.mark.cuda

# Wide enough for every kernel, and long enough that rows pass several blocks of the attention kernel.
SIZES = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=8, max_position_embeddings=1024,
)  # fmt: skip


@pytest.fixture
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return tiny_llama(**SIZES).to("cuda", request.param)


@pytest.fixture
def prompts() -> Prompts:
    prompts = pad_left(random_rows([5, 90, 1, 320, 70, 7, 33], vocabulary=512))
    return {name: tensor.cuda() for name, tensor in prompts.items()}


def run(model: nn.Module, prompts: Prompts, strategy: str, runner: str, keep: bool = True, **options: Any) -> Any:
    config = {"runner": runner, "keep_graphs": keep, "draft_kernel": "auto" if strategy == "none" else "reference"}
    return generate(model, prompts, strategy, config, **({"max_new_tokens": 96} | options))


@pytest.mark.parametrize("model", [torch.float64, torch.float32], indirect=True)
@pytest.mark.parametrize("runner", ["graph", "compiled"])
@pytest.mark.parametrize("strategy", ["none", "self", "history"])
@pytest.mark.parametrize("options", [{}, {"do_sample": False}, {"temperature": 0.7, "top_k": 20, "min_p": 0.01}])
def test_captured_forwards_change_no_token(model, prompts, runner, strategy, options) -> None:
    """float64 attends under masks and draws with torch; float32 goes through the kernels, a near tie apart."""
    expected = run(model, prompts, "none", "eager", **options)
    result = run(model, prompts, strategy, runner, **options)
    assert result.statistics.graphs >= 1 and result.statistics.graph_bytes > 0
    assert result.statistics.drafter_failure is None
    same = sum(ours == theirs for ours, theirs in zip(outputs(result), outputs(expected), strict=True))
    assert same == 7 if model.dtype == torch.float64 else same >= 6


@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16], indirect=True)
def test_exact_log_probabilities_are_those_of_none_bit_for_bit(model, prompts, monkeypatch) -> None:
    """Captured and eager, with drafts and without, together and one row after the other."""
    runner_for = runner_choice.runner_for
    monkeypatch.setattr(one_call, "runner_for", lambda *given, **more: runner_for(*given, **more | {"exact": True}))
    expected = run(model, prompts, "none", "graph").logprobs
    for strategy, runner in (("self", "graph"), ("ngram", "graph"), ("none", "eager"), ("self", "eager")):
        assert torch.equal(run(model, prompts, strategy, runner).logprobs, expected), (strategy, runner)
    config = {"runner": "graph", "max_batch_size": 1}
    assert torch.equal(generate(model, prompts, "none", config, max_new_tokens=96).logprobs, expected)


@pytest.mark.parametrize("model", [torch.float32], indirect=True)
def test_captured_forwards_read_the_live_weights(model, prompts) -> None:
    first = run(model, prompts, "self", "graph")
    runner = Session.of(model).runner
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 0.5
    second = run(model, prompts, "self", "graph")
    assert Session.of(model).runner is runner
    assert outputs(second) != outputs(first)
    expected = outputs(run(model, prompts, "none", "eager"))
    assert sum(ours == theirs for ours, theirs in zip(outputs(second), expected, strict=True)) >= 6
    assert second.statistics.total.acceptance_rate > 0.2


@pytest.mark.parametrize("model", [torch.bfloat16], indirect=True)
def test_memory_is_given_back(model, prompts) -> None:
    def allocated() -> int:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps one for each stream that captured
        return torch.cuda.memory_allocated()

    before = allocated()
    run(model, prompts, "none", "graph")
    assert torch.cuda.memory_allocated() > before
    spec_trl.release(model)
    assert allocated() <= before + 2**20


@pytest.mark.parametrize("model", [torch.bfloat16], indirect=True)
def test_many_calls_leave_no_more_memory_than_one(model, prompts) -> None:
    """With what libraries keep: each call captures anew, on the stream of the one before."""
    left = []
    for _ in range(3):
        result = run(model, prompts, "none", "graph", keep=False)
        torch.cuda.synchronize()
        assert result.statistics.graphs >= 1
        left.append(torch.cuda.memory_allocated())
    assert left[1] == left[2]


@pytest.mark.parametrize("model", [torch.bfloat16], indirect=True)
@pytest.mark.parametrize("kernel", ["auto", "torch_int4", "triton"])
def test_packed_kernels_draft(model, prompts, kernel) -> None:
    config = {"runner": "graph", "draft_kernel": kernel, "efficient_rollout": {"lm_head": "packed"}}
    result = generate(model, prompts, "self", config, max_new_tokens=96)
    assert result.statistics.drafter_failure is None
    if kernel != "auto":  # which may find that nothing beats a layer this small
        assert result.statistics.total.acceptance_rate > 0.2


@pytest.mark.parametrize("model", [torch.float32], indirect=True)
def test_no_drafting_thread(model: LlamaForCausalLM, prompts: Prompts) -> None:
    with pytest.raises(ValueError, match='does not go with specactor.decoupled_execution="always"'):
        generate(model, prompts, "self", {"specactor": {"decoupled_execution": "always"}})
