"""Drafts inside a vLLM engine: tokens, distributions, pushes and lengths."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spec_trl.vllm.counts import Counts
from tests.vllm.conftest import HAS_VLLM


pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
PROMPTS = [[5, 9, 11, 30, 7], [8, 20], [33, 12, 6, 41, 25, 17, 9, 5], [21, 22, 23]]
ALWAYS: dict[str, Any] = {"draft_length": 3, "sd_toggle": "always"}


Row = tuple[list[int], list[float]]


def sample(llm: Any, prompts: list[list[int]], count: int, temperature: float = 0.0) -> list[Row]:
    """Tokens of each prompt, and their log-probabilities in nats."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=temperature, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], how, use_tqdm=False)
    rows = []
    for each in outputs:
        (one,) = each.outputs
        tokens = list(one.token_ids)
        rows.append((tokens, [step[token].logprob for token, step in zip(tokens, one.logprobs, strict=True)]))
    return rows


def counts(llm: Any) -> Counts:
    return Counts.of_metrics(llm.get_metrics())


@pytest.fixture(scope="module")
def plain(policy_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()


@torch.no_grad()
def greedy(model: PreTrainedModel, count: int) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found


@pytest.mark.parametrize("strategy", ["self", "history"])
def test_greedy_tokens_are_those_without_drafts(
    strategy: str, engine: Callable[..., Any], plain: PreTrainedModel
) -> None:
    llm = engine(strategy, **ALWAYS)
    expected = greedy(plain, 24)
    for _ in range(2):  # a history drafts the earlier text
        assert [tokens for tokens, _ in sample(llm, PROMPTS, 24)] == expected
    assert counts(llm).accepted > 20


@torch.no_grad()
def distribution(model: PreTrainedModel, text: list[int], temperature: float) -> Tensor:
    """Of the token after `text`, `[V]` float64."""
    return (model(torch.tensor([text])).logits[0, -1].double() / temperature).softmax(-1)


def p_value(tokens: list[int], expected: Tensor) -> float:
    """Of a chi-squared test; rare tokens are one class."""
    often = [token for token in range(len(expected)) if expected[token] * len(tokens) >= 5]
    seen = Counter(tokens)
    observed = [seen[token] for token in often]
    wanted = [float(expected[token]) * len(tokens) for token in often]
    rest = len(tokens) - sum(wanted)
    if rest > 1e-6 * len(tokens):
        observed, wanted = [*observed, len(tokens) - sum(observed)], [*wanted, rest]
    return float(stats.chisquare(observed, wanted).pvalue)


@pytest.mark.parametrize("temperature", [1.0, 1.8])
@pytest.mark.parametrize("strategy", ["self", "history"])
def test_sampled_tokens_have_the_policys_distribution(
    strategy: str, temperature: float, engine: Callable[..., Any], plain: PreTrainedModel
) -> None:
    """Of 3,000 texts, the second and third token after the most frequent ones before: those are drafted."""
    llm, prompt = engine(strategy, **ALWAYS), PROMPTS[0]
    rows = sample(llm, [prompt] * 3000, 4, temperature)
    before: list[int] = []
    for _ in range(3):
        following = [tokens[len(before)] for tokens, _ in rows if tokens[: len(before)] == before]
        assert p_value(following, distribution(plain, prompt + before, temperature)) > 0.001, before
        before.append(Counter(following).most_common(1)[0][0])
    assert counts(llm).accepted > 500
    tokens, logprobs = rows[0]
    expected = [distribution(plain, prompt + tokens[:at], temperature) for at in range(len(tokens))]
    exact = [one[token].log().item() for one, token in zip(expected, tokens, strict=True)]
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-4)


def moved(policy_folder: Path) -> PreTrainedModel:
    """Another policy, of the same shape."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * weight.std(correction=0) * torch.randn_like(weight)
    return model


def test_pushed_weights(engine: Callable[..., Any], policy_folder: Path) -> None:
    """The policy's alone make drafts stale; the drafter's make them as good as new ones."""
    from spec_trl.vllm.transport import hand_over

    llm, policy = engine("self", **ALWAYS), moved(policy_folder)
    weights = [(name, weight.detach()) for name, weight in policy.named_parameters()]
    rates = []
    for session in (None, "start_weight_update", "start_draft_weight_update"):
        if session is not None:
            llm.collective_rpc(session)
            llm.collective_rpc("update_weights", args=(hand_over(weights),))
            llm.collective_rpc("finish_weight_update")
        before = counts(llm)
        rows = [tokens for tokens, _ in sample(llm, PROMPTS, 24)]
        now = counts(llm) - before
        rates.append(now.accepted / now.drafted)
        if session is not None:
            assert rows == greedy(policy, 24)
    fresh, stale, pushed = rates
    assert fresh > 0.9 and stale < 0.5 and pushed > 0.9


def test_the_planner_drafts_inside_vllm(engine: Callable[..., Any], plain: PreTrainedModel) -> None:
    """As long as it has not seen that a copy gains nothing on a CPU; greedy tokens stay."""
    llm = engine("history", draft_length=[2, 4])
    expected = greedy(plain, 24)
    for _ in range(3):
        assert [tokens for tokens, _ in sample(llm, PROMPTS, 24)] == expected
    from spec_trl.vllm import step_planner

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__name__ == "LengthScheduler" and step_planner.newest_length is not None


@pytest.mark.parametrize("strategy", ["self", "history"])
def test_lengths_that_change_while_it_runs(
    strategy: str, engine: Callable[..., Any], plain: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spec_trl.vllm import step_planner

    llm, expected, seen = engine(strategy, draft_length=[1, 4]), greedy(plain, 24), []
    for length in (4, 0, 1, 4):

        def set_length(*_: Any, chosen: int = length) -> int:
            step_planner.newest_length = chosen
            return chosen

        monkeypatch.setattr(step_planner.StepPlanner, "next_length", set_length)
        before = counts(llm)
        assert [tokens for tokens, _ in sample(llm, PROMPTS, 24)] == expected
        now = counts(llm) - before
        seen.append((now.drafted, now.drafts))
        assert now.drafted <= length * now.drafts
    assert seen[1] == (0, 0) and seen[0][0] > 0 and seen[2][0] > 0
