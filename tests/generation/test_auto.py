"""Under "auto" acceptance so far and the draft ladder choose, and tokens stay those of "none"."""

from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from spec_trl import SpeculativeConfig, release
from spec_trl.generation import decoding as entry
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.rows import prompt_key
from spec_trl.generation.strategies import acceptance_history_of, make_control
from spec_trl.scheduling.acceptance import AcceptanceCounts
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.ladder import Ladder, LadderCosts, Rung
from spec_trl.scheduling.selection import AcceptanceHistory
from spec_trl.scheduling.toggle import SpeculationToggle
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.test_control import PROFILE


ROWS = random_rows([5, 9, 1, 12])
PROMPTS = pad_left([*ROWS, ROWS[3]])
LENGTHS = (2, 4)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], float]:
    """Of a round by drafter and γ on an imaginary machine, 1 unless set here, as long as a plain one. Rounds that the
    tiny models measure have no say."""
    given: dict[tuple[str, int], float] = {}

    def find(model: LlamaForCausalLM, drafters: list[Drafter], *_: Any) -> Ladder:
        cells = [(drafter.strategy, gamma) for drafter in drafters for gamma in LENGTHS]
        return Ladder(tuple(Rung(name, 1, gamma, 0.6, given.get((name, gamma), 1), 1) for name, gamma in cells), "")

    monkeypatch.setattr(entry, "find_ladder", find)
    monkeypatch.setattr(SpeculationToggle, "_judge", lambda toggle: None)
    return given


@pytest.fixture
def known(tiny: LlamaForCausalLM) -> AcceptanceHistory:
    """What is known of the tiny target's drafters: all have been tried, and fared alike."""
    release(tiny)
    history = acceptance_history_of(tiny)
    for name in ("self", "history", "model"):
        history.record(name, "elsewhere", AcceptanceCounts(60, 100, 60, 100))
    return history


def drafted(result: Any) -> dict[str, set[int]]:
    """γ that each drafter used by itself."""
    found: dict[str, set[int]] = {}
    for point in result.statistics.points:
        if point.draft_length:
            found.setdefault(point.drafter, set()).add(point.draft_length)
    return found


@pytest.mark.usefixtures("seconds")
@pytest.mark.parametrize(
    ("with_model", "config", "options"),
    [
        (False, {}, {}),
        (True, {"max_batch_size": 2}, dict(eos_token_id=[7, 11])),
        (True, {}, dict(do_sample=False)),
        (False, {"max_batch_size": 3}, dict(repetition_penalty=1.3, temperature=0.8, top_p=0.95)),
    ],
)
def test_tokens_are_those_of_none(
    with_model: bool,
    config: dict[str, Any],
    options: dict[str, Any],
    tiny: LlamaForCausalLM,
    tiny_assistant: LlamaForCausalLM,
    known: AcceptanceHistory,
) -> None:
    for index, row in enumerate(ROWS):  # each drafter has prompts that it is better at
        for name, share in (("self", index % 2), ("history", 1 - index % 2)):
            known.record(name, prompt_key(row), AcceptanceCounts(500 * share, 500, 500 * share, 500))
    given = {"assistant_model": tiny_assistant} if with_model else {}
    result = generate(tiny, PROMPTS, "auto", config, max_new_tokens=40, **given, **options)
    assert outputs(result) == outputs(generate(tiny, PROMPTS, max_new_tokens=40, **options))
    statistics = result.statistics
    assert statistics is not None and statistics.drafter_failure is None and statistics.racing is None
    assert statistics.per_drafter["self"].blocks > 0 < statistics.per_drafter["history"].blocks


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("slow", "expected"),
    [
        ({("history", 2): 9.0, ("history", 4): 9.0, ("self", 4): 2.0}, {"self": {2}}),
        ({("self", 2): 9.0, ("self", 4): 9.0}, {"history": {4}}),
        ({(name, gamma): 9.0 for name in ("self", "history") for gamma in LENGTHS}, {}),
    ],
)
def test_the_ladder_chooses(
    slow: dict[tuple[str, int], float],
    expected: dict[str, set[int]],
    tiny: LlamaForCausalLM,
    seconds: dict[tuple[str, int], float],
) -> None:
    seconds |= slow
    result = generate(tiny, PROMPTS, "auto", max_new_tokens=40)
    full = {name: {max(lengths)} for name, lengths in drafted(result).items()}  # the last rounds are shorter
    assert full == expected


@pytest.mark.parametrize("best", ["self", "history"])
@pytest.mark.usefixtures("seconds")
def test_past_acceptance_chooses(best: str, tiny: LlamaForCausalLM, known: AcceptanceHistory) -> None:
    known.record(best, "elsewhere", AcceptanceCounts(100, 100, 100, 100))
    result = generate(tiny, PROMPTS, "auto", max_new_tokens=40)
    assert set(drafted(result)) == {best}


@pytest.mark.usefixtures("seconds")
def test_it_is_kept_from_call_to_call(tiny: LlamaForCausalLM) -> None:
    release(tiny)
    generate(tiny, PROMPTS, "auto")
    history = acceptance_history_of(tiny)
    assert set(history.state_dict()["methods"]) == {"self"}  # the first of two equal ones, on trial
    release(tiny)
    assert acceptance_history_of(tiny) is not history


def test_the_roofline_predicts_where_there_is_one(tiny: LlamaForCausalLM) -> None:
    drafters = [SelfDrafter(tiny, kernel="reference"), HistoryDrafter(1000)]
    rungs = tuple(Rung(drafter.strategy, 1, gamma, 0.6, 1.0, 1.0) for drafter in drafters for gamma in LENGTHS)
    for toggle, profile, kind in (("roofline", PROFILE, type(PROFILE.roofline)), ("always", None, LadderCosts)):
        config = SpeculativeConfig(sd_toggle=toggle, best_of_n_race=False)
        control = make_control(drafters, config, profile, Ladder(rungs, ""))
        assert isinstance(control, BestOfN)
        control.begin(1, ["prompt"])
        assert {type(candidate.roofline) for candidate in control.candidates} == {kind}
        assert control.most_drafted == max(LENGTHS)  # room for one chain per row


def test_rejection_is_refused_before_any_work(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "make_drafters", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match='which the history among the drafters of assistant_strategy="auto" has none'):
        generate(tiny, PROMPTS, "auto", {"verification": "rejection"})


@pytest.mark.parametrize("strategy", ["auto", "best_of_n"])
def test_generate_within_generate(strategy: str, seconds: dict[tuple[str, int], float]) -> None:
    """A stopping criterion that generates with the same model and options, as a judge does."""
    model = tiny_llama()
    expected = outputs(generate(model, PROMPTS))
    history = acceptance_history_of(model)

    class Judge(StoppingCriteria):
        calls = 0
        prefix_only = True  # so that something is drafted meanwhile

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                generate(model, pad_left(random_rows([5], seed=3)), strategy)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    judge = Judge()
    assert outputs(generate(model, PROMPTS, strategy, stopping_criteria=StoppingCriteriaList([judge]))) == expected
    assert judge.calls > 3
    assert acceptance_history_of(model) is history and history.state_dict()["rollout"] == 1  # not the judge's as well
    release(model)
