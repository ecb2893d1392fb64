"""Best-of-N is a matter of time alone: whatever is chosen and raced, tokens stay those of "none"."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig, release
from spec_trl.generation import decoding as entry
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.strategies import acceptance_history_of, make_control
from spec_trl.scheduling.acceptance import Acceptance, AcceptanceCounts
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.control import NeverSpeculate
from spec_trl.scheduling.ladder import Ladder, Rung
from spec_trl.scheduling.race_judge import RaceJudge
from spec_trl.scheduling.roofline import Coefficients
from spec_trl.scheduling.selection import AcceptanceHistory
from spec_trl.scheduling.toggle import SpeculationToggle
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.test_control import FREE_DRAFTS


ROWS = random_rows([5, 9, 1, 12, 7, 3])
PROMPTS = pad_left([*ROWS, ROWS[3]])
EOS = dict(eos_token_id=[7, 11])
BUDGET = 400
Make = Callable[..., list[Drafter]]


def level_ladder(drafters: list[Drafter], draft_lengths: tuple[int, ...] = (2, 4)) -> Ladder:
    """Drafts cost nothing."""
    return Ladder(
        tuple(Rung(drafter.strategy, 1, gamma, 0.5, 1.0, 1.0) for drafter in drafters for gamma in draft_lengths), ""
    )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured rounds of tiny models have no say: everybody drafts and races."""
    monkeypatch.setattr(SpeculationToggle, "_judge", lambda toggle: None)
    monkeypatch.setattr(RaceJudge, "_judge", lambda judge, batch: None)
    monkeypatch.setattr(entry, "find_ladder", lambda model, drafters, *_: level_ladder(drafters))


@pytest.fixture
def fresh_history(tiny: LlamaForCausalLM) -> AcceptanceHistory:
    """That of the tiny target, in which every drafter has been tried."""
    release(tiny)
    history = acceptance_history_of(tiny)
    for name in ("self", "dflash", "ngram", "model", "history", "eagle3", "tts"):
        history.record(name, "elsewhere", AcceptanceCounts.expecting(Acceptance.geometric(0.6), 100))
    return history


# ---- losslessness -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager", "fresh_history")
@pytest.mark.parametrize(
    ("names", "capacity", "options"),
    [
        ((), None, {}),
        ((), 3, EOS),
        ((), 2, dict(do_sample=False, **EOS)),
        (("ngram", "history"), None, EOS),
        (("self", "model", "ngram"), 3, dict(repetition_penalty=1.3, temperature=0.8, top_p=0.95, **EOS)),
        (("eagle3", "tts"), None, dict(do_sample=False)),
    ],
)
def test_any_mixture_keeps_the_tokens(
    names: tuple[str, ...],
    capacity: int | None,
    options: dict[str, Any],
    tiny: LlamaForCausalLM,
    drafters: Make,
) -> None:
    members = drafters(*names)
    config = {"max_batch_size": capacity, "best_of_n_budget": BUDGET}
    result = generate(tiny, PROMPTS, "best_of_n", config, drafter=members, max_new_tokens=32, **options)
    assert outputs(result) == outputs(generate(tiny, PROMPTS, max_new_tokens=32, **options))
    statistics = result.statistics
    assert statistics is not None and statistics.drafter_failure is None
    assert statistics.racing is not None and statistics.racing.rounds > 3
    assert sum(counts.blocks > 0 for counts in statistics.per_drafter.values()) > 1


def test_drafters_that_come_and_go_keep_the_tokens(
    tiny: LlamaForCausalLM,
    drafters: Make,
    monkeypatch: pytest.MonkeyPatch,
    eager: None,
    fresh_history: AcceptanceHistory,
) -> None:
    members = drafters("self", "ngram", "model")
    propose, calls = NgramDrafter.propose, []

    def fail_later(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return propose(*args)

    monkeypatch.setattr(NgramDrafter, "propose", fail_later)
    with pytest.warns(UserWarning, match="NgramDrafter failed"):
        result = generate(tiny, PROMPTS, "best_of_n", {"best_of_n_budget": BUDGET}, drafter=members, max_new_tokens=60)
    assert outputs(result) == outputs(generate(tiny, PROMPTS, max_new_tokens=60))
    assert len(calls) == 3


def test_measured_rounds_have_a_say(tiny: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way, ladder included, with the strategy's own drafters; "auto" finds the same ladder."""
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    release(tiny)
    prompts = pad_left(random_rows([5, 9]))
    config = {"draft_length": 2, "best_of_n_drafters": ("self", "history")}
    for strategy in ("best_of_n", "best_of_n", "auto", "auto"):
        result = generate(tiny, prompts, strategy, config, max_new_tokens=60)
        assert outputs(result) == outputs(generate(tiny, prompts, max_new_tokens=60))
    (path,) = tmp_path.glob("**/*.ladder.json")
    assert Ladder.load(path).methods == ("self", "history")
    assert "control" in result.statistics.phase_seconds
    release(tiny)


# ---- what is kept -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager")
def test_history_is_kept_from_call_to_call(tiny: LlamaForCausalLM) -> None:
    release(tiny)
    config = {"best_of_n_drafters": ("ngram",)}
    generate(tiny, PROMPTS, "best_of_n", config)
    history = acceptance_history_of(tiny)
    state = history.state_dict()
    assert set(state["methods"]) == {"ngram"} and len(state["prompts"]) == 6  # two rows have the same
    assert state["rollout"] == 1
    generate(tiny, PROMPTS, "best_of_n", config)
    assert acceptance_history_of(tiny) is history and history.state_dict()["rollout"] == 2
    release(tiny)
    assert acceptance_history_of(tiny).state_dict()["methods"] == {}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("capacity", [None, 3])
def test_history_hears_of_every_draft(tiny: LlamaForCausalLM, capacity: int | None) -> None:
    release(tiny)
    config = {"best_of_n_drafters": ("self",), "max_batch_size": capacity}
    statistics = generate(tiny, PROMPTS, "best_of_n", config, max_new_tokens=40).statistics
    assert statistics is not None
    drafts = statistics.per_drafter["self"]
    prompts = acceptance_history_of(tiny).state_dict()["prompts"]
    first_accepted, first, further_accepted, further = (sum(own["self"][n] for _, own in prompts) for n in range(1, 5))
    assert (first_accepted, first) == (drafts.first_accepted, drafts.first_drafted)
    assert first_accepted + further_accepted == drafts.accepted > first_accepted > 0
    assert further_accepted < further < drafts.drafted - drafts.first_drafted  # some had no verdict
    release(tiny)


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eager", "fresh_history")
@pytest.mark.parametrize(("config", "races"), [({}, True), ({"best_of_n_race": False}, False)])
def test_race(tiny: LlamaForCausalLM, config: dict[str, Any], races: bool) -> None:
    config = {"best_of_n_budget": BUDGET, "best_of_n_drafters": ("history", "ngram")} | config
    statistics = generate(tiny, PROMPTS, "best_of_n", config, max_new_tokens=40).statistics
    assert statistics is not None
    assert (statistics.racing is not None) is races


@pytest.mark.usefixtures("eager", "fresh_history")
@pytest.mark.parametrize("budget", [1, 50, BUDGET])
def test_budget(tiny: LlamaForCausalLM, budget: int) -> None:
    """Rounds in which several drafted verify no more than that."""
    config = {"best_of_n_budget": budget, "best_of_n_drafters": ("history", "ngram")}
    statistics = generate(tiny, PROMPTS, "best_of_n", config, max_new_tokens=40).statistics
    assert statistics is not None
    races = [p.batch * (1 + p.draft_length) for p in statistics.points if p.drafter and "+" in p.drafter]
    assert all(verified <= budget for verified in races)
    assert bool(races) is (budget > 1)


def test_tolerance_and_margin(tiny: LlamaForCausalLM) -> None:
    members: list[Drafter] = [NgramDrafter(2)]
    for tolerance, free in ((0.0, 3), (1e6, 5)):
        config = SpeculativeConfig(sd_toggle="roofline", best_of_n_tolerance=tolerance, sd_margin=0.3)
        control = make_control(members, config, FREE_DRAFTS, level_ladder(members), AcceptanceHistory())
        assert isinstance(control, BestOfN) and control._toggle.margin == 0.3
        control = make_control(members, config, _steep(), level_ladder(members), AcceptanceHistory())
        assert control.free_tokens(1, 10.0, 2) == free
    never = make_control(members, SpeculativeConfig(sd_toggle="never"), None, level_ladder(members))
    assert isinstance(never, NeverSpeculate)


def _steep() -> Any:
    """Each verified token takes as long as the one before."""
    roofline = replace(FREE_DRAFTS.roofline, coefficients=Coefficients(1.0, 1e30, 0.0, 0.0, 0.0, 0.0, 0.0))
    return replace(FREE_DRAFTS, roofline=roofline)


@pytest.mark.usefixtures("eager", "fresh_history")
def test_assistants(
    tiny: LlamaForCausalLM,
    tiny_assistant: LlamaForCausalLM,
    checkpoints: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used: list[Drafter] = []

    def watch(model: Any, drafters: list[Drafter], *_: Any) -> Ladder:
        used[:] = drafters
        return level_ladder(drafters)

    monkeypatch.setattr(entry, "find_ladder", watch)
    config = {"best_of_n_drafters": ("eagle3", "model", "dflash")}
    given = {"eagle3": checkpoints["eagle3"], "model": tiny_assistant, "dflash": checkpoints["dflash"]}
    generate(tiny, PROMPTS, "best_of_n", config | {"best_of_n_assistants": given})
    assert [type(drafter) for drafter in used] == [Eagle3Drafter, SmallModelDrafter, DFlashDrafter]
    del given["dflash"]
    generate(
        tiny, PROMPTS, "best_of_n", config | {"best_of_n_assistants": given}, assistant_model=checkpoints["dflash"]
    )
    assert len(used) == 3
    for wrong in ({}, {"assistant_model": tiny_assistant}):
        with pytest.raises(ValueError, match=r"of which \['eagle3', 'model', 'dflash'\] lack an assistant"):
            generate(tiny, PROMPTS, "best_of_n", config, **wrong)
    with pytest.raises(ValueError, match=r"assistant_model=LlamaForCausalLM with best_of_n_drafters=\['ngram'\]"):
        generate(tiny, PROMPTS, "best_of_n", {"best_of_n_drafters": ["ngram"]}, assistant_model=tiny_assistant)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"best_of_n_drafters": ()}, r"best_of_n_drafters=\(\) must be one or more different ones of \['self'"),
        ({"best_of_n_drafters": "ngram"}, "best_of_n_drafters='ngram' must be"),
        ({"best_of_n_drafters": ("ngram", "ngram")}, "must be one or more different ones"),
        ({"best_of_n_drafters": ("auto",)}, "must be one or more different ones"),
        (
            {"best_of_n_assistants": {"model": "x"}},
            r"best_of_n_assistants=\{'model': 'x'\} must be a dict with some of",
        ),
        ({"best_of_n_assistants": "x"}, "best_of_n_assistants='x' must be a dict"),
        ({"best_of_n_budget": 0}, "best_of_n_budget=0 is out of range; it must be at least 1"),
        ({"best_of_n_tolerance": -0.1}, "best_of_n_tolerance=-0.1 is out of range"),
        ({"best_of_n_race": 1}, "best_of_n_race=1 is no bool"),
    ],
)
def test_bad_options(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**bad)


@pytest.mark.parametrize("do_sample", [True, False])
def test_rejection_is_refused_before_any_work(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, do_sample: bool
) -> None:
    monkeypatch.setattr(entry, "make_drafters", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match='verification="rejection" does not go with assistant_strategy="best_of_n"'):
        generate(tiny, PROMPTS, "best_of_n", {"verification": "rejection"}, do_sample=do_sample)


def test_draft_lengths_of_the_ladder() -> None:
    lengths = {gamma: SpeculativeConfig(draft_length=gamma).ladder_draft_lengths() for gamma in (1, 5, 64)}
    assert lengths == {1: (1, 2), 5: (2, 5, 10), 64: (32, 64)}


@pytest.mark.parametrize("strategy", ["best_of_n", "auto"])
def test_without_sd_nothing_is_profiled(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    monkeypatch.setattr(entry, "find_ladder", lambda *_: pytest.fail("profiled"))
    prompts = pad_left(random_rows([5, 9]))
    result = generate(tiny, prompts, strategy, {"sd_toggle": "never"})
    assert outputs(result) == outputs(generate(tiny, prompts))
    given = generate(tiny, prompts, strategy, {"sd_toggle": "never"}, drafter=[NgramDrafter(2)])
    assert outputs(given) == outputs(result)
