"""Drafts inside a vLLM engine: tokens, distributions, pushes and lengths."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from spec_trl.vllm.counts import Counts
from tests.vllm.conftest import HAS_VLLM, make_engine


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


@torch.no_grad()
def greedy(model: PreTrainedModel, count: int) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        found.append(text[len(prompt) :])
    return found


@torch.no_grad()
def distributions(model: PreTrainedModel, prompt: list[int], temperature: float) -> list[Tensor]:
    """Of the first, second and third token after `prompt`, `[V]` float64 each, over all tokens before them."""
    vocabulary, texts = model.config.vocab_size, torch.tensor([prompt])
    weights, found = torch.ones(1, dtype=torch.float64), list[Tensor]()  # of the texts
    for _ in range(3):
        each = (model(texts).logits[:, -1].double() / temperature).softmax(-1)  # [texts, V]
        found.append(weights @ each)
        weights = (weights[:, None] * each).flatten()
        newest = torch.arange(vocabulary).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(vocabulary, 0), newest], 1)
    return found


def p_value(tokens: list[int], expected: Tensor) -> float:
    """Of a chi-squared test; rare tokens are one class."""
    wanted = expected * len(tokens)
    seen = torch.bincount(torch.tensor(tokens), minlength=len(expected)).double()
    often = wanted >= 5
    seen, wanted = (torch.cat([each[often], each[~often].sum()[None]]) for each in (seen, wanted))
    return float(stats.chisquare(seen[wanted > 0], wanted[wanted > 0]).pvalue)


def check_samples(llm: Any, model: PreTrainedModel, prompt: list[int], least: int) -> None:
    """Of 3,000 texts, the first three tokens, of which the last two are drafted. `least`: accepted tokens."""
    for temperature in (1.0, 1.8):
        before = counts(llm)
        rows = sample(llm, [prompt] * 3000, 4, temperature)
        for at, expected in enumerate(distributions(model, prompt, temperature)):
            assert p_value([tokens[at] for tokens, _ in rows], expected) > 0.001, (temperature, at)
        assert (counts(llm) - before).accepted > least
        with torch.no_grad():
            for tokens, logprobs in rows[:8]:
                logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double()
                exact = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(logprobs), exact.float(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("strategy", ["self", "model", "history", "eagle3", "mtp"])
def test_a_strategy_changes_no_distribution(
    strategy: str, request: pytest.FixtureRequest, policy_folder: Path, plain: PreTrainedModel
) -> None:
    """Greedy tokens are those without drafts; samples have the policy's distribution."""
    folder, policy, assistant = policy_folder, plain, None
    if strategy == "model":
        assistant = str(policy_folder)
    elif strategy == "eagle3":
        assistant = request.getfixturevalue("eagle3_folder")
    elif strategy == "mtp":
        folder = request.getfixturevalue("with_mtp_folder")
        policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = make_engine(strategy, folder, assistant, **ALWAYS)
    expected = greedy(policy, 24)
    for _ in range(2):  # a history drafts the earlier text
        assert [tokens for tokens, _ in sample(llm, PROMPTS, 24)] == expected
    assert counts(llm).accepted > 20
    check_samples(llm, policy, PROMPTS[0], 200)


def moved(policy_folder: Path) -> PreTrainedModel:
    """Another policy, of the same shape."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * weight.std(correction=0) * torch.randn_like(weight)
    return model


def test_pushed_weights(engine: Callable[..., Any], policy_folder: Path, tmp_path: Path) -> None:
    """The policy's alone make drafts stale; with the drafter's, rows and drafts are those of a new engine."""
    from spec_trl.vllm.transport import hand_over

    llm, policy = engine("self", **ALWAYS), moved(policy_folder)
    weights = [(name, weight.detach()) for name, weight in policy.named_parameters()]
    expected, rates = greedy(policy, 24), []
    for session in (None, "start_weight_update", "start_draft_weight_update"):
        if session is not None:
            llm.collective_rpc(session)
            llm.collective_rpc("update_weights", args=(hand_over(weights),))
            llm.collective_rpc("finish_weight_update")
        before = counts(llm)
        rows = [tokens for tokens, _ in sample(llm, PROMPTS, 24)]
        now = counts(llm) - before
        rates.append(now.accepted / now.drafted)
        assert session is None or rows == expected
    start, stale, pushed = rates
    policy.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(policy_folder).save_pretrained(tmp_path)
    del llm
    gc.collect()
    llm = make_engine("self", tmp_path, **ALWAYS)
    assert [tokens for tokens, _ in sample(llm, PROMPTS, 24)] == expected
    new = counts(llm).accepted / counts(llm).drafted
    assert start > 0.9 and stale < 0.5 and pushed == pytest.approx(new) and new > 0.9


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
            return chosen

        monkeypatch.setattr(step_planner.StepPlanner, "next_length", set_length)
        before = counts(llm)
        assert [tokens for tokens, _ in sample(llm, PROMPTS, 24)] == expected
        now = counts(llm) - before
        seen.append((now.drafted, now.drafts))
        assert now.drafted <= length * now.drafts
    assert seen[1] == (0, 0) and seen[0][0] > 0 and seen[2][0] > 0
    monkeypatch.setattr(step_planner.StepPlanner, "next_length", lambda _, rows, *__: 4 * (rows < 3))
    for rows in (4, 2):  # off at many rows
        before = counts(llm)
        assert [tokens for tokens, _ in sample(llm, PROMPTS[:rows], 24)] == expected[:rows]
        assert ((counts(llm) - before).drafted > 0) == (rows < 3)
