"""Which drafter drafts and when is a matter of time alone: what controls are made of, asked and told, and what the
default toggle, which measures, learns."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig, release
from spec_trl.generation import decoding
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.model_costs import model_constants
from spec_trl.generation.strategies import (
    KeptControl,
    acceptance_history_of,
    keep_control,
    make_control,
    take_control,
)
from spec_trl.measuring import fill_ladder, profile_cache
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.control import AlwaysSpeculate, Chain, NeverSpeculate
from spec_trl.scheduling.ladder import Ladder, LadderCosts, Rung
from spec_trl.scheduling.planner import Planner
from spec_trl.scheduling.profile import Profile, ProfileKey
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.toggle import FEWEST, SpeculationToggle
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.conftest import Clock, Make
from tests.generation.races import Plans


PROFILE = Profile(
    ProfileKey("abacus", "tiny", "float64", "rtn-w4-g128", "auto"),
    Roofline(
        ModelConstants("tiny", 1e6, 3e5, 2e6, 1e3, 1e3),
        Coefficients(1e9, 1e9, rho_kappa=1.0, eta_D=2.0, c_T=1e-4, c_D=2e-4, c_V=3e-4, t_T=1e-3, t_D=2e-3),
    ),
    draft_max_rows=None,
    diagnostics={},
    created="2026-11-21T00:00:00+00:00",
)
# A verification costs what a plain forward costs, and drafts cost nothing.
FREE_DRAFTS = replace(
    PROFILE, roofline=replace(PROFILE.roofline, coefficients=Coefficients(1e15, 1e9, 0.0, 0.0, 0.0, 0.0, 0.0))
)
TWO = pad_left(random_rows([5, 9]))
ROOFLINE = SpeculativeConfig(sd_toggle="roofline")


@pytest.fixture(scope="module")
def four(drafters: Make) -> list[Drafter]:
    return drafters("self", "history", "model", "ngram")


def test_a_control_is_told_what_happened(tiny: LlamaForCausalLM, four: list[Drafter]) -> None:
    control = Plans(1, [[Chain(0, 4)], []])
    statistics = generate(
        tiny, pad_left(random_rows([5, 9, 7, 4, 6])), "self", {"max_batch_size": 2}, drafter=four[:1], control=control,
        eos_token_id=[5, 9], max_new_tokens=30,
    ).statistics  # fmt: skip
    capacity, keys = control.begun
    assert capacity == 2 and len(set(keys)) == len(keys) == 5
    assert 0 < sum(each["seconds"] for each in control.rounds) <= statistics.seconds
    first, second = control.rounds[:2]
    assert (len(first["requests"]), first["length"], first["waiting"]) == (2, (5 + 9) / 2, 3)
    assert {each["waiting"] for each in control.rounds} >= {0, 3}
    assert [each["width"] for each in control.rounds[:4]] == [4, 0, 4, 0]
    # Each round's mean length is what the rounds before committed.
    assert second["waiting"] != 3 or second["length"] == first["length"] + first["tokens"] / 2


@pytest.mark.parametrize("strategy", ["self", "best_of_n"])
def test_never_builds_no_drafter(tiny: LlamaForCausalLM, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelfDrafter, "__init__", lambda *_, **__: pytest.fail("a drafter was built"))
    result = generate(tiny, TWO, strategy, {"sd_toggle": "never"})
    assert outputs(result) == outputs(generate(tiny, TWO)) and result.statistics.reason == "sd_toggle=never"


# ---- what controls are made of --------------------------------------------------------------------------------------


def test_controls_by_configuration(four: list[Drafter]) -> None:
    assert isinstance(make_control([], SpeculativeConfig()), NeverSpeculate)
    assert isinstance(make_control(four[:1], SpeculativeConfig(sd_toggle="never")), NeverSpeculate)
    assert isinstance(make_control(four[:1], SpeculativeConfig(sd_toggle="always")), AlwaysSpeculate)
    assert isinstance(make_control(four, SpeculativeConfig()), SpeculationToggle)  # by measuring
    control = make_control(four, replace(ROOFLINE, sd_margin=0.2, draft_length=3), PROFILE)
    assert isinstance(control, SpeculationToggle) and control.margin == 0.2
    assert [(each.name, each.block_efficiency, each.is_network) for each in control.candidates] == [
        ("self", 3.0, True), ("history", 3.0, False), ("model", 3.0, True), ("ngram", 3.0, False),
    ]  # fmt: skip
    assert control.candidates[0].max_rows == four[0].max_rows


def test_a_small_model_is_predicted_by_its_own_size(four: list[Drafter]) -> None:
    control = make_control([four[0], four[2]], ROOFLINE, PROFILE)
    own, other = (candidate.roofline for candidate in control.candidates)
    assert own == PROFILE.roofline and other is not None
    assert other.target_seconds(4, 100.0) == own.target_seconds(4, 100.0)
    assert other.verify_seconds(4, 100.0, 5) == own.verify_seconds(4, 100.0, 5)
    assert other.constants.draft_weight_bytes == model_constants(four[2].network).weight_bytes
    assert other.draft_seconds(4, 100.0) != own.draft_seconds(4, 100.0)


def test_networks_of_their_own_are_timed_by_the_ladder(four: list[Drafter]) -> None:
    """The copy and lookups are what the profile measured; another network's rounds are the ladder's, in proportion to
    the target's by the roofline. Without a profile the ladder times everything."""
    rungs = [Rung(drafter.strategy, 4, 5, p, 3.0 + p, 2.0) for drafter in four for p in (0.0, 1.0)]
    ladder = Ladder(tuple(rungs), "")
    control = make_control(four, ROOFLINE, PROFILE, ladder)
    assert isinstance(control, BestOfN)
    control.begin(4, ["a", "b", "c", "d"])
    costs = {candidate.name: candidate.roofline for candidate in control.candidates}
    assert costs["self"] == costs["history"] == costs["ngram"] == PROFILE.roofline
    model, plain = costs["model"], PROFILE.roofline.target_seconds(4, 1000.0)
    assert isinstance(model, LadderCosts) and model.target_seconds(4, 1000.0) == plain
    tau = control.candidates[2].block_efficiency
    assert 4 < tau < 5  # of γ = 5, at the rate that is assumed of what never drafted
    assert model.cycle_seconds(4, 1000.0, 5) == pytest.approx((3 + (tau - 1) / 5) / 2 * plain)
    control = make_control(four, SpeculativeConfig(), None, ladder)
    assert isinstance(control, BestOfN)
    control.begin(4, ["a", "b", "c", "d"])
    for candidate in control.candidates:
        assert candidate.roofline is not None and candidate.roofline.target_seconds(4, 1e6) == 2.0


def test_predictions_and_the_margin_act(tiny: LlamaForCausalLM, four: list[Drafter]) -> None:
    """On an imaginary machine where drafts are free."""
    control = make_control(four[:1], ROOFLINE, FREE_DRAFTS)
    statistics = generate(tiny, TWO, "self", drafter=four[0], control=control).statistics
    assert statistics.drafted_rounds > 0 and statistics.predicted_speedup > 1 and statistics.measured_speedup > 0
    assert statistics.plain_seconds is not None and statistics.reason.startswith("speculation ")
    # A prediction is there also where it keeps everything from drafting.
    refused = make_control(four[:1], replace(ROOFLINE, sd_margin=1e6), FREE_DRAFTS)
    silent = generate(tiny, TWO, "self", drafter=four[0], control=refused).statistics
    assert silent.drafted_rounds == 0 and silent.predicted_speedup > 1
    assert silent.reason.startswith(f"speculation predicted {silent.predicted_speedup:.2f}× at 2 rows × ")
    plain = generate(tiny, TWO).statistics
    assert plain.predicted_speedup is None and plain.measured_speedup is None


def test_the_control_is_kept_for_the_same_options(tiny: LlamaForCausalLM, drafters: Make) -> None:
    """It knows what rounds took. Another seed is the same job; other drafters, options, profile or ladder are not."""
    release(tiny)
    members = drafters("self", "ngram")
    ladder = Ladder((Rung("self", 1, 5, 0.6, 1.0, 1.0), Rung("ngram", 1, 5, 0.6, 1.0, 1.0)), "")
    other = replace(ladder, rungs=(ladder.rungs[0], replace(ladder.rungs[1], seconds=2.0)))
    config = SpeculativeConfig(seed=1)

    def control(**changes: Any) -> Any:
        given = {"drafters": members, "config": config, "profile": PROFILE, "ladder": ladder} | changes
        taken = take_control(tiny, **given)
        keep_control(tiny, taken)
        return taken.control

    kept = control()
    assert control(config=replace(config, seed=2)) is kept
    assert control(drafters=drafters("self", "ngram"), ladder=replace(ladder)) is kept
    assert kept.history is acceptance_history_of(tiny)
    for changes in (
        {"config": replace(config, sd_margin=0.1)}, {"config": replace(config, best_of_n_race=False)},
        {"profile": FREE_DRAFTS}, {"profile": None}, {"ladder": other}, {"drafters": members[:1]},
        {"drafters": members[::-1]},
    ):  # fmt: skip
        another = control(**changes)
        assert another is not kept and another.history is kept.history
        assert control() is not another
        kept = control()
    release(tiny)
    assert control() is not kept and control().history is not kept.history


# ---- the default: no calibration before the first token; rounds tell what pays, and later calls remember ------------


MEASURED: dict[str, Any] = {"sd_toggle": SpeculativeConfig.sd_toggle}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaForCausalLM]:
    """One of its own, with which is kept what calls learned of it; nothing may be profiled before the first token."""
    for module, name in ((profile_cache, "calibrate"), (fill_ladder, "build_ladder")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("something was profiled"))
    model = tiny_llama()
    yield model
    release(model)


def drafting_rounds(model: LlamaForCausalLM, strategy: str) -> int:
    """Number of rounds that drafted, in a call whose tokens are those of "none"."""
    result = generate(model, TWO, strategy, MEASURED)
    assert outputs(result) == outputs(generate(model, TWO))
    return sum(point.rounds for point in result.statistics.points if point.draft_length)


@pytest.mark.parametrize("strategy", ["self", "ngram", "history", "tts"])
def test_nothing_comes_before_the_first_token(model: LlamaForCausalLM, strategy: str) -> None:
    assert SpeculativeConfig.sd_toggle == "measured"
    assert drafting_rounds(model, strategy), "it was not tried"
    drafting_rounds(model, strategy)


def test_what_measured_slower_is_off_in_later_calls(model: LlamaForCausalLM, clock: Clock) -> None:
    clock.draft_seconds = 1000.0
    assert 0 < drafting_rounds(model, "ngram") <= FEWEST
    assert drafting_rounds(model, "ngram") == 0
    assert drafting_rounds(model, "self") > 0  # another drafter
    assert drafting_rounds(model, "ngram") == 0  # does not make it forget
    release(model)
    assert drafting_rounds(model, "ngram") > 0


@pytest.mark.parametrize("strategy", ["auto", "best_of_n"])
def test_a_planner_keeps_what_it_learned(
    model: LlamaForCausalLM, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[KeptControl] = []
    monkeypatch.setattr(decoding, "keep_control", lambda model, own: (taken.append(own), keep_control(model, own)))
    config = MEASURED | {"best_of_n_drafters": ["self", "ngram"]}
    expected, rounds = outputs(generate(model, TWO, max_new_tokens=60)), []
    for _ in range(3):
        assert outputs(generate(model, TWO, strategy, config, max_new_tokens=60)) == expected
        rounds.append(taken[-1].control.times.rounds)
    assert rounds == sorted(set(rounds)) and len({id(each.control) for each in taken}) == 1
    planner = taken[0].control
    assert isinstance(planner, Planner)
    assert [planner.drafts.positions(which) > 0 for which in planner.listens_to] == [True]  # though it may never draft
    release(model)
    generate(model, TWO, strategy, config)
    assert taken[-1].control is not planner


def test_where_a_round_is_cheap_the_planner_drafts(model: LlamaForCausalLM, clock: Clock) -> None:
    clock.draft_seconds = 1000.0
    config = MEASURED | {"best_of_n_drafters": ["self", "ngram"], "draft_length": 2}
    dear = generate(model, TWO, "best_of_n", config, max_new_tokens=120).statistics
    assert dear.drafted_rounds <= 0.05 * dear.rounds
