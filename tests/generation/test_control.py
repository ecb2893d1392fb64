"""Which drafter drafts and when is a matter of time alone: what controls are made of, asked and told, and what the
default one learns."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig, release
from spec_trl.generation import strategies
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.forwards.model_costs import model_constants
from spec_trl.generation.planner.clock import Clock as RoundsClock
from spec_trl.generation.planner.clock import ForwardSeconds, ProbedRounds
from spec_trl.generation.planner.control import AlwaysSpeculate, Chain, Control, NeverSpeculate, PlainRounds
from spec_trl.generation.planner.model_constants import ModelConstants, ProfileKey
from spec_trl.generation.planner.planner import Planner
from spec_trl.generation.session import Session
from spec_trl.generation.strategies import control_for, make_control
from spec_trl.papers.efficient_rollout import profile_cache
from spec_trl.papers.efficient_rollout.profile import Profile, roofline_of
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.efficient_rollout.toggle import RooflineToggle
from spec_trl.papers.specactor import ladder_calibration
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from spec_trl.papers.specactor.ladder import Ladder, Rung
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
FREE = ForwardSeconds([1, 64], [0.0, 0.0])
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
    assert (len(first["requests"]), first["length"], first["waiting"]) == (2, (5 + 9) / 2 + 1, 3), "first tokens"
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

LENGTHS = (2, 4)


def controlled(drafters: list[Drafter], config: SpeculativeConfig | None = None, **sources: Any) -> Control:
    """The control of `drafters`; rounds that are only probed take a second."""
    probed = ProbedRounds(ForwardSeconds([1, 64], [1.0, 1.0]), {drafter.strategy: FREE for drafter in drafters})
    clock = RoundsClock(probed, 0.5)
    return make_control(drafters, config or SpeculativeConfig(), LENGTHS, clock=clock, **sources)


def test_controls_by_configuration(four: list[Drafter]) -> None:
    assert isinstance(controlled([]), NeverSpeculate)
    assert isinstance(controlled(four[:1], SpeculativeConfig(sd_toggle="never")), NeverSpeculate)
    assert isinstance(controlled(four[:1], SpeculativeConfig(sd_toggle="always")), AlwaysSpeculate)
    toggle = controlled(four[:1], replace(ROOFLINE, draft_length=3), profile=PROFILE)
    assert isinstance(toggle, RooflineToggle)
    (candidate,) = toggle.candidates
    assert (candidate.name, candidate.draft_length, candidate.block_efficiency) == ("self", 3, 3.0)
    assert candidate.max_rows == four[0].max_rows
    assert isinstance(controlled(four[:1], ROOFLINE), Planner)  # the machine could not be calibrated
    planner = controlled(four)
    assert isinstance(planner, Planner) and planner.several_chains
    assert [(each.name, each.is_network) for each in planner.candidates] == [
        ("self", True), ("history", False), ("model", True), ("ngram", False),
    ]  # fmt: skip
    assert [planner.candidates[which].name for which in planner.compared_lookups] == ["history", "ngram"]
    with pytest.raises(ValueError, match=r"drafter has the strategies \['ngram', 'ngram'\]"):
        controlled([four[3], NgramDrafter(3)])


def test_a_small_model_is_predicted_by_its_own_size(four: list[Drafter]) -> None:
    own, other = (roofline_of(drafter, PROFILE) for drafter in (four[0], four[2]))
    assert own == PROFILE.roofline
    assert other.target_seconds(4, 100.0) == own.target_seconds(4, 100.0)
    assert other.verify_seconds(4, 100.0, 5) == own.verify_seconds(4, 100.0, 5)
    assert other.constants.draft_weight_bytes == model_constants(four[2].network).weight_bytes
    assert other.draft_seconds(4, 100.0) != own.draft_seconds(4, 100.0)


def test_what_was_calibrated_predicts_before_any_round(four: list[Drafter]) -> None:
    """Autoregressive rounds of two requests, a hundred in all, by each source; and the ladder's choice of method."""
    rounds = [PlainRounds(100, 2, 50.0)]
    slow = {"self": 9.0, "history": 1.0, "model": 9.0, "ngram": 3.0}
    rungs = [Rung(d.strategy, 2, length, 0.6, 2.0 * slow[d.strategy], 2.0) for d in four for length in (2, 4, 8)]
    ladder = Ladder(tuple(rungs), "")
    plain = PROFILE.roofline.target_seconds(2, 50.0)
    for sources, seconds in (({}, 1.0), ({"profile": PROFILE}, plain), ({"ladder": ladder}, 2.0)):
        planner = controlled([four[0], four[2]], ROOFLINE, **sources)
        planner.begin(2, ["a", "b"])
        planner.plan([0, 1], 50.0, 0)
        planner.record(0, seconds, 2)  # as predicted
        assert planner.plain_seconds(rounds) == pytest.approx(100 * seconds, rel=1e-3)
    planner = controlled(four, ROOFLINE, ladder=ladder)
    planner.begin(2, ["a", "b"])
    drafting = {chain.drafter for chain in planner.plan([0, 1], 50.0, 0)}
    assert drafting == {1}  # free there, and as likely to be right as the others


def test_predictions_and_the_margin_act(tiny: LlamaForCausalLM, four: list[Drafter]) -> None:
    """On an imaginary machine where drafts are free."""
    control = controlled(four[:1], ROOFLINE, profile=FREE_DRAFTS)
    statistics = generate(tiny, TWO, "self", drafter=four[0], control=control).statistics
    assert statistics.drafted_rounds > 0 and statistics.predicted_speedup > 1 and statistics.measured_speedup > 0
    assert statistics.plain_seconds is not None and statistics.reason.startswith("the roofline predicted ")
    # A prediction is there also where it keeps everything from drafting.
    refused = controlled(four[:1], replace(ROOFLINE, efficient_rollout=dict(margin=1e6)), profile=FREE_DRAFTS)
    silent = generate(tiny, TWO, "self", drafter=four[0], control=refused).statistics
    assert silent.drafted_rounds == 0 and silent.predicted_speedup > 1
    assert silent.reason.startswith(f"speculation predicted {silent.predicted_speedup:.2f}× at 2 rows × ")
    plain = generate(tiny, TWO).statistics
    assert plain.predicted_speedup is None and plain.measured_speedup is None


def test_the_control_is_kept_for_the_same_options(
    tiny: LlamaForCausalLM, drafters: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It knows what rounds took. Another seed is the same job; other drafters, options, profile or ladder are not."""
    release(tiny)
    members = drafters("self", "ngram")
    cells = [Rung(name, 1, length, 0.6, 1.0, 1.0) for name in ("self", "ngram") for length in LENGTHS]
    ladder = Ladder(tuple(cells), "")
    other = replace(ladder, rungs=(*cells[:-1], replace(cells[-1], seconds=2.0)))
    config = SpeculativeConfig(seed=1)

    def control(**changes: Any) -> Control:
        given = {"drafters": members, "config": config, "profile": PROFILE, "ladder": ladder} | changes
        for source in ("profile", "ladder"):
            monkeypatch.setattr(strategies, f"find_{source}", lambda *_, found=given[source]: found)
        with Session.lend(tiny) as session:
            return control_for(session, "best_of_n", tiny, given["drafters"], given["config"], 2, 64).control

    kept = control()
    assert control(config=replace(config, seed=2)) is kept
    assert control(drafters=drafters("self", "ngram"), ladder=replace(ladder)) is kept
    for changes in (
        {"config": replace(config, efficient_rollout=dict(margin=0.1))},
        {"config": replace(config, specactor=dict(race=False))},
        {"profile": FREE_DRAFTS}, {"profile": None}, {"ladder": other}, {"drafters": members[:1]},
        {"drafters": members[::-1]},
    ):  # fmt: skip
        assert control(**changes) is not kept
        kept = control()
    try:
        tiny.float()
        assert control() is not kept
    finally:
        tiny.double()
    kept = control()
    release(tiny)
    assert control() is not kept


def test_what_runs_a_network_is_no_lookup(drafters: Make) -> None:
    ahead = DecoupledDrafter(DraftThread(*drafters("self")))
    assert not ahead.has_probabilities and controlled([ahead]).compared_lookups == []
    assert controlled(drafters("self", "ngram")).compared_lookups == [1]


# ---- the default: no calibration before the first token; rounds tell what pays, and later calls remember ------------


MEASURED: dict[str, Any] = {"sd_toggle": SpeculativeConfig.sd_toggle}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[LlamaForCausalLM]:
    """One of its own, with which is kept what calls learned of it; nothing may be profiled before the first token."""
    for module, name in ((profile_cache, "calibrate"), (ladder_calibration, "build_ladder")):
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
    for _ in range(2):
        drafting_rounds(model, strategy)


def test_what_is_dear_is_hardly_tried(model: LlamaForCausalLM, clock: Clock) -> None:
    """The first time it may be a shock, and is set aside; the second time it counts."""
    clock.draft_seconds = 1000.0
    assert [drafting_rounds(model, "ngram") for _ in range(2)] == [2, 0]


@pytest.mark.parametrize("strategy", ["auto", "best_of_n"])
def test_a_planner_keeps_what_it_learned(
    model: LlamaForCausalLM, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Control] = []
    make = strategies.make_control
    monkeypatch.setattr(strategies, "make_control", lambda *given: taken.append(make(*given)) or taken[-1])
    config = MEASURED | ({"specactor": {"drafters": ["self", "ngram"]}} if strategy == "best_of_n" else {})
    expected, rounds = outputs(generate(model, TWO, max_new_tokens=60)), []
    taken.clear()  # of "none"
    for _ in range(3):
        assert outputs(generate(model, TWO, strategy, config, max_new_tokens=60)) == expected
        rounds.append(taken[-1].clock.rounds)
    (planner,) = taken
    assert rounds == sorted(set(rounds))
    assert isinstance(planner, Planner)
    (heard,) = (planner.drafts.methods[which] for which in planner.compared_lookups)
    assert any(planner.drafts.state_dict()["methods"][heard])  # though it may never draft
    release(model)
    generate(model, TWO, strategy, config)
    assert taken[-1] is not planner


def test_where_a_round_is_cheap_the_planner_drafts(model: LlamaForCausalLM, clock: Clock) -> None:
    clock.draft_seconds = 1000.0
    config = MEASURED | {"specactor": {"drafters": ["self", "ngram"]}, "draft_length": 2}
    dear = generate(model, TWO, "best_of_n", config, max_new_tokens=120).statistics
    assert dear.drafted_rounds <= 0.05 * dear.rounds
