"""`"auto"` and `"best_of_n"`: past acceptance and the draft ladder choose among drafters, and no token changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig, release
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.rows import prompt_key
from spec_trl.generation.strategies import acceptance_history_of, make_control
from spec_trl.measuring import fill_ladder
from spec_trl.scheduling.acceptance import Acceptance, AcceptanceCounts
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.ladder import Ladder, Rung
from spec_trl.scheduling.roofline import Coefficients
from spec_trl.scheduling.selection import AcceptanceHistory
from tests.conftest import tiny_llama
from tests.generation.calls import EachRound, generate, outputs, pad_left, random_rows
from tests.generation.conftest import Clock, Make
from tests.generation.races import EOS, PROMPTS, ROWS
from tests.generation.test_control import FREE_DRAFTS


LENGTHS = (2, 4)


@pytest.fixture
def profiled(
    tiny: LlamaForCausalLM, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[Drafter]]:
    """A machine whose rounds take as long with drafts as without, by the clock and by the ladder. What was profiled:
    the drafters, by their names."""
    asked: dict[str, list[Drafter]] = {}

    def build(model: LlamaForCausalLM, drafters: list[Drafter], *_: Any, **__: Any) -> Ladder:
        asked["+".join(drafter.strategy for drafter in drafters)] = drafters
        return ladder_of(drafters)

    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(fill_ladder, "build_ladder", build)
    release(tiny)
    return asked


@pytest.fixture
def known(tiny: LlamaForCausalLM) -> AcceptanceHistory:
    """What is known of the tiny target's drafters: all have been tried, and fared alike."""
    release(tiny)
    history = acceptance_history_of(tiny)
    for name in ("self", "dflash", "ngram", "model", "history", "eagle3", "tts"):
        history.record(name, "elsewhere", AcceptanceCounts.expecting(Acceptance.geometric(0.6), 100))
    return history


def ladder_of(drafters: list[Drafter], seconds: dict[tuple[str, int], float] | None = None) -> Ladder:
    """Rounds of 1 second, but for those of `seconds` by drafter and γ, next to plain ones of 1 second."""
    cells = [(drafter.strategy, gamma) for drafter in drafters for gamma in LENGTHS]
    return Ladder(tuple(Rung(*cell[:1], 1, cell[1], 0.6, (seconds or {}).get(cell, 1.0), 1.0) for cell in cells), "")


def assert_same_tokens(result: Any, model: LlamaForCausalLM, **options: Any) -> None:
    assert outputs(result) == outputs(generate(model, PROMPTS, **options))
    assert result.statistics.drafter_failure is None


# ---- choices --------------------------------------------------------------------------------------------------------


SLOW_HISTORY = {("history", gamma): 9.0 for gamma in LENGTHS}
SLOW_SELF = {("self", gamma): 9.0 for gamma in LENGTHS}


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("slow", "expected"),
    [(SLOW_HISTORY | {("self", 4): 2.0}, ("self", 2)), (SLOW_SELF, ("history", 4)), (SLOW_SELF | SLOW_HISTORY, None)],
)
def test_the_ladder_chooses(
    slow: dict[tuple[str, int], float], expected: tuple[str, int] | None, tiny: LlamaForCausalLM, drafters: Make
) -> None:
    members = drafters("self", "history")
    config = SpeculativeConfig(sd_toggle="always", best_of_n_race=False)
    control = make_control(members, config, None, ladder_of(members, slow), acceptance_history_of(tiny))
    points = generate(tiny, PROMPTS, "auto", drafter=members, control=control, max_new_tokens=12).statistics.points
    assert next(((point.drafter, point.draft_length) for point in points if point.draft_length), None) == expected


@pytest.mark.usefixtures("profiled")
def test_past_acceptance_chooses(tiny: LlamaForCausalLM, known: AcceptanceHistory) -> None:
    """Each drafter has prompts that it was better at, or only one would draft."""
    for index, row in enumerate(ROWS):
        for name, share in (("self", index % 2), ("history", 1 - index % 2)):
            known.record(name, prompt_key(row), AcceptanceCounts(500 * share, 500, 500 * share, 500))
    result = generate(tiny, PROMPTS, "auto", {"max_batch_size": 2}, **EOS)
    assert_same_tokens(result, tiny, **EOS)
    statistics = result.statistics
    assert statistics.racing is None
    assert statistics.per_drafter["self"].blocks > 0 < statistics.per_drafter["history"].blocks


@pytest.mark.usefixtures("profiled", "known")
@pytest.mark.parametrize(
    ("names", "config", "options", "races"),
    [
        ((), {"max_batch_size": 3}, dict(do_sample=False, **EOS), True),
        (("history", "ngram"), {"best_of_n_race": False}, {}, False),
        (("history", "ngram"), {"best_of_n_budget": 50}, {}, True),
        (("history", "ngram"), {"best_of_n_budget": 1}, {}, False),
    ],
)
def test_races_keep_the_tokens_and_the_budget(
    names: tuple[str, ...], config: dict[str, Any], options: dict[str, Any], races: bool, tiny, drafters: Make
) -> None:
    """Rounds in which several drafted verify no more than the budget."""
    config, options = {"best_of_n_budget": 400} | config, {"max_new_tokens": 40} | options
    result = generate(tiny, PROMPTS, "best_of_n", config, drafter=drafters(*names), **options)
    assert_same_tokens(result, tiny, **options)
    statistics = result.statistics
    assert bool(statistics.racing and statistics.racing.rounds) == races
    assert not races or sum(counts.blocks > 0 for counts in statistics.per_drafter.values()) > 1
    verified = [p.batch * (1 + p.draft_length) for p in statistics.points if p.drafter and "+" in p.drafter]
    assert all(tokens <= config["best_of_n_budget"] for tokens in verified)


def test_tolerance_is_of_free_tokens(drafters: Make) -> None:
    members = drafters("ngram")
    roofline = replace(FREE_DRAFTS.roofline, coefficients=Coefficients(1.0, 1e30, 0.0, 0.0, 0.0, 0.0, 0.0))
    steep = replace(FREE_DRAFTS, roofline=roofline)  # each verified token takes as long as the one before
    for tolerance, free in ((0.0, 3), (1e6, 5)):
        config = SpeculativeConfig(sd_toggle="roofline", best_of_n_tolerance=tolerance)
        control = make_control(members, config, steep, ladder_of(members))
        assert isinstance(control, BestOfN) and control.free_tokens(1, 10.0, 2) == free


# ---- what is kept, and the whole way --------------------------------------------------------------------------------


@pytest.mark.usefixtures("profiled")
@pytest.mark.parametrize("capacity", [None, 3])
def test_history_hears_of_every_draft_and_is_kept(tiny: LlamaForCausalLM, capacity: int | None) -> None:
    config = {"best_of_n_drafters": ("self",), "max_batch_size": capacity}
    drafts = generate(tiny, PROMPTS, "best_of_n", config, max_new_tokens=40).statistics.per_drafter["self"]
    history = acceptance_history_of(tiny)
    state = history.state_dict()
    assert set(state["methods"]) == {"self"} and len(state["prompts"]) == 6 and state["rollout"] == 1
    first_accepted, first, further_accepted, further = (
        sum(own["self"][n] for _, own in state["prompts"]) for n in range(1, 5)
    )
    assert (first_accepted, first) == (drafts.first_accepted, drafts.first_drafted)
    assert first_accepted + further_accepted == drafts.accepted > first_accepted > 0
    assert further_accepted < further < drafts.drafted - drafts.first_drafted  # some had no verdict
    generate(tiny, PROMPTS, "best_of_n", config, max_new_tokens=4)
    assert acceptance_history_of(tiny) is history and history.state_dict()["rollout"] == 2
    release(tiny)
    assert acceptance_history_of(tiny).state_dict()["methods"] == {}


def test_profiled_on_this_machine(tiny: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, ladder included, with the strategy's own drafters; "auto" finds the same ladder."""
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    release(tiny)
    prompts = pad_left(random_rows([5, 9]))
    config = {"draft_length": 2, "best_of_n_drafters": ("self", "history")}
    expected = outputs(generate(tiny, prompts))
    for strategy in ("best_of_n", "auto"):
        result = generate(tiny, prompts, strategy, config)
        assert outputs(result) == expected and "control" in result.statistics.phase_seconds
    (path,) = tmp_path.glob("**/*.ladder.json")
    assert Ladder.load(path).methods == ("self", "history")
    release(tiny)


@pytest.mark.usefixtures("profiled")
def test_a_history_serves_one_call_at_a_time() -> None:
    """What a judge, who generates with the same model within the call, learns is not kept."""
    model = tiny_llama()
    history = acceptance_history_of(model)
    judge = EachRound(lambda number: number == 3 and generate(model, PROMPTS, "auto"))
    assert_same_tokens(generate(model, PROMPTS, "auto", stopping_criteria=[judge]), model)
    assert judge.round > 3
    assert acceptance_history_of(model) is history and history.state_dict()["rollout"] == 1
    release(model)


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("known")
def test_assistants(
    tiny: LlamaForCausalLM,
    tiny_assistant: LlamaForCausalLM,
    checkpoints: dict[str, str],
    profiled: dict[str, list[Drafter]],
) -> None:
    """Which of them lack one `test_configuration.py` says."""
    config = {"best_of_n_drafters": ("eagle3", "model", "dflash")}
    given: dict[str, Any] = {"eagle3": checkpoints["eagle3"], "model": tiny_assistant}
    more = config | {"best_of_n_assistants": given}
    generate(tiny, PROMPTS, "best_of_n", more, max_new_tokens=4, assistant_model=checkpoints["dflash"])
    found = [type(drafter).__name__ for drafter in profiled["eagle3+model+dflash"]]
    assert found == ["Eagle3Drafter", "SmallModelDrafter", "DFlashDrafter"]
    release(tiny)


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        ("best_of_n", 'verification="rejection" does not go with assistant_strategy="best_of_n"'),
        ("auto", 'which the history among the drafters of assistant_strategy="auto" has none'),
    ],
)
def test_rejection_is_refused_before_any_work(
    strategy: str, match: str, tiny: LlamaForCausalLM, profiled: dict[str, list[Drafter]]
) -> None:
    for do_sample in (True, False):
        with pytest.raises(ValueError, match=match):
            generate(tiny, PROMPTS, strategy, {"verification": "rejection"}, do_sample=do_sample)
    assert not profiled
