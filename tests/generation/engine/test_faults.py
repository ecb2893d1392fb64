"""Faults beyond those that `test_token_identity.py` draws: what is said of them, and a broken target."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.guarded_drafters import GuardedDrafters
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.planner.acceptance import Drafts
from spec_trl.generation.planner.clock import Clock
from spec_trl.generation.planner.control import Candidate
from spec_trl.generation.planner.planner import Planner
from spec_trl.papers.efficient_rollout.toggle import RooflineToggle
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs
from tests.generation.races import PROMPTS, Knowing


EOS = dict(eos_token_id=[7, 11, 12])
CONFIG = {"max_batch_size": 3, "draft_length": 2}


@pytest.fixture(scope="module")
def expected(tiny) -> list[list[int]]:
    return outputs(generate(tiny, PROMPTS, **EOS))


def test_the_seconds_of_a_drafter_that_fails_still_count() -> None:
    """Or the round in which it fails would seem to take longer by all that it ever learned."""
    drafters = GuardedDrafters([Standing([[]], None)], lambda _: None)
    with pytest.warns(UserWarning, match="Standing failed"):
        drafters.ask_all(lambda _: 1 / 0)
    assert not drafters.in_use and drafters.waited == 2.0


class Standing(Knowing):
    waited = 2.0


class Spoiled(Knowing):
    """What the drafter proposes goes through `spoil`."""

    def __init__(self, answers: list[list[int]], spoil: Callable[[Proposal], Proposal]) -> None:
        super().__init__(answers, None)
        self.spoil = spoil

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        return self.spoil(super().propose(draft_length, noise))


def test_a_failure_is_said_once_and_ends_with_the_generation(tiny, expected, monkeypatch) -> None:
    drafter, begin = Knowing(expected, None), Knowing.begin

    def fail(*_: Any) -> None:
        raise KeyError("the drafter's own trouble")

    control = RooflineToggle(Candidate("custom", 2, 2.0, 100), lambda *_: 1.0)
    monkeypatch.setattr(drafter, "begin", fail)
    for _ in range(2):  # a control that has been in use, too
        with pytest.warns(UserWarning, match="Knowing failed.*same tokens.*KeyError: .the drafter") as caught:
            result = generate(tiny, PROMPTS, drafter=drafter, config=CONFIG, control=control, **EOS)
        assert len(caught) == 1 and outputs(result) == expected
        assert "KeyError" in result.statistics.drafter_failure
        assert not result.statistics.drafted_rounds
    monkeypatch.setattr(drafter, "begin", begin.__get__(drafter))
    result = generate(tiny, PROMPTS, drafter=drafter, config=CONFIG, **EOS)
    assert result.statistics.acceptance_rate > 0.8 and result.statistics.drafter_failure is None
    assert outputs(result) == expected


@pytest.mark.parametrize("action", ["propose", "observe", "move"])
def test_a_planner_goes_on_without_who_fails(action: str, tiny, expected, monkeypatch, clock) -> None:
    """In whatever part of a round, and though the plan was to be kept. Rounds take as long as `clock` says: on a busy
    machine some would seem so slow that the planner stops drafting before anything fails."""
    drafter, calls = Knowing(expected, None), iter(range(100))
    run = getattr(drafter, action)

    def fail(*given: Any) -> Any:
        return run(*given) if next(calls) < 3 else 1 / 0

    monkeypatch.setattr(drafter, action, fail)
    seconds = iter(range(10**6))  # a plan seems to take long to make
    control = Planner(
        [Candidate("custom", 2, 2.0, 100)], [2], Clock(lambda lengths, *_: 0.5 if lengths else 1.0, 0.2),
        Drafts(["custom"], [False]), now=lambda: float(next(seconds)),
    )  # fmt: skip
    control.budget = 1.0
    with pytest.warns(UserWarning, match="Knowing failed.*same tokens.*ZeroDivisionError"):
        result = generate(tiny, PROMPTS, drafter=drafter, config=CONFIG, control=control, **EOS)
    assert outputs(result) == expected and 0 < result.statistics.drafted_rounds < result.statistics.rounds


def test_ctrl_c_is_not_a_drafter_failure(tiny, expected) -> None:
    def interrupted(_: Proposal) -> Proposal:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tiny, PROMPTS, drafter=Spoiled(expected, interrupted))


@pytest.mark.parametrize(("logits", "width"), [(torch.nan, 64), (-torch.inf, 64), (0.0, 63)])
def test_broken_draft_probabilities(logits: float, width: int, tiny, recwarn) -> None:
    """Under rejection verification; tokens may differ from "none", so the test is that the run goes on and ends."""

    def spoil(made: Proposal) -> Proposal:
        return Proposal(made.tokens, made.lengths, torch.full((*made.tokens.shape, width), logits))

    drafter = Spoiled([[]] * 7, spoil)
    drafter.has_probabilities = True
    result = generate(tiny, PROMPTS, drafter=drafter, config={"verification": "rejection", "draft_length": 4})
    assert result.statistics.total.accepted == 0 and bool(result.statistics.drafter_failure) == (width == 63)
    assert ["Spoiled failed" in str(warning.message) for warning in recwarn] == [True] * (width == 63)
    assert result.lengths.tolist() == [24] * 7 and torch.isfinite(result.logprobs).all()


def test_a_twin_that_runs_the_policy_is_noticed(tiny, expected) -> None:
    """Packed layers were taken out again: correct, slow, and silent but for the check."""
    drafter = SelfDrafter(tiny, kernel="reference")
    drafter.network.model.layers[0].mlp = tiny.model.layers[0].mlp
    with pytest.warns(UserWarning, match="3 of 15 quantized layers did not run"):
        result = generate(tiny, PROMPTS, drafter=drafter, **EOS)
    assert outputs(result) == expected


# ---- a broken target -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:the drafter")
@pytest.mark.parametrize(("strategy", "do_sample"), [("none", False), ("self", True)])
def test_nan_in_the_target(do_sample: bool, strategy: str) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = torch.nan
    match = "request 2 at generated position 0, after 0 decoding rounds"
    with pytest.raises(FloatingPointError, match=match) as caught:
        generate(model, PROMPTS, strategy, do_sample=do_sample)
    assert "'model.layers.1.mlp.up_proj' (torch.float64)" in str(caught.value)


def test_nan_in_one_row_alone() -> None:
    """A token that only row 4 ever reads; the message says which request it was, in the order of the caller."""
    model = tiny_llama()
    prompts = PROMPTS | dict(input_ids=PROMPTS["input_ids"].masked_fill(PROMPTS["input_ids"] == 50, 51))
    prompts["input_ids"][4, -2] = 50
    with torch.no_grad():
        model.model.embed_tokens.weight[50] = torch.nan
        model.lm_head.weight[50] = 0
    with pytest.raises(FloatingPointError, match="request 4 at generated position 0"):
        generate(model, prompts, "ngram", do_sample=False)


class BreakAt(LogitsProcessor):
    """Leaves no token to sample for prefixes of one length."""

    prefix_only = True

    def __init__(self, new_tokens: int, value: float = -torch.inf) -> None:
        self.length, self.value = PROMPTS["input_ids"].shape[1] + new_tokens, value

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, self.value) if input_ids.shape[1] == self.length else scores


@pytest.mark.parametrize(
    ("strategy", "value", "verification"),
    [("none", torch.nan, "exact"), ("self", -torch.inf, "exact"), ("none", -torch.inf, "rejection")],
)
def test_processors_that_leave_no_token(value: float, verification: str, strategy: str, tiny) -> None:
    """The position is that of the token which could not be sampled, drafted or not."""
    match = "leave no token to sample.*generated position 9,.*the logits processors did it"
    with pytest.raises(FloatingPointError, match=match):
        generate(tiny, PROMPTS, strategy, {"verification": verification}, logits_processor=[BreakAt(9, value)])


def test_broken_logits_after_the_end_do_not_matter(tiny, expected) -> None:
    """What comes after a row's EOS is none of its business, even where a draft reached there."""
    row = next(row for row, tokens in enumerate(expected) if 1 < len(tokens) < 20)
    prompt = {name: tensor[row : row + 1] for name, tensor in PROMPTS.items()}
    processors = LogitsProcessorList([BreakAt(len(expected[row]))])
    drafter = Knowing([expected[row] + [3] * 9], None)
    options = dict(drafter=drafter, config={"draft_length": 20}, request_ids=[row], logits_processor=processors)
    assert outputs(generate(tiny, prompt, **options, **EOS)) == [expected[row]]
