"""Which drafter drafts and when is a matter of time alone: tokens stay those of "none"."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import SpeculativeConfig, release
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.model_costs import model_constants
from spec_trl.generation.strategies import acceptance_history_of, keep_control, make_control, take_control
from spec_trl.scheduling.best_of_n import BestOfN
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate, NeverSpeculate, OneDrafter, Tally
from spec_trl.scheduling.ladder import Ladder, LadderCosts, Rung
from spec_trl.scheduling.profile import Profile, ProfileKey
from spec_trl.scheduling.roofline import Coefficients, ModelConstants, Roofline
from spec_trl.scheduling.toggle import SpeculationToggle
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows


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


class Scripted(OneDrafter):
    """A control that follows a script: (drafter, γ) per round, over and over."""

    def __init__(self, count: int, script: list[tuple[int, int]]) -> None:
        self.candidates = [Candidate(f"c{i}", 7, 7.0, 10**9) for i in range(count)]
        self.tallies = [Tally() for _ in self.candidates]
        self._script = script
        self.asked: list[tuple[int, float, int]] = []
        self.told: list[tuple[int, float, int]] = []

    def begin(self, capacity: int, prompts: Sequence[str]) -> None:
        self._rounds = itertools.cycle(self._script)
        self.begun = (capacity, list(prompts))

    def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
        self.asked.append((batch, length, waiting))
        return next(self._rounds)

    def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None:
        self.told.append((draft_length, seconds, tokens))

    def drop(self, index: int) -> None:
        self._script = [(i, 0 if i == index else gamma) for i, gamma in self._script]
        self._rounds = itertools.cycle(self._script)


def drafters_of(target: LlamaForCausalLM) -> list[Any]:
    assistant = tiny_llama(seed=1, num_hidden_layers=1)
    return [
        SelfDrafter(target, kernel="reference"), HistoryDrafter(10_000), SmallModelDrafter(assistant, target),
        NgramDrafter(2),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "script",
    [
        [(0, 3), (0, 0), (2, 5)],
        [(2, 2), (0, 0), (0, 0), (0, 0), (2, 4)],  # the small model has to catch up
        [(1, 5), (2, 1), (3, 2), (0, 7), (0, 0)],
    ],
)
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("capacity", [None, 2])
def test_any_change_of_drafter_keeps_the_tokens(
    tiny: LlamaForCausalLM, script: list[tuple[int, int]], sampled: bool, capacity: int | None
) -> None:
    prompts = pad_left(random_rows([5, 9, 7, 5, 12, 3]))
    options = dict(do_sample=sampled, max_new_tokens=40, eos_token_id=[5, 9])
    control = Scripted(4, script)
    result = generate(
        tiny, prompts, "auto", {"max_batch_size": capacity}, drafter=drafters_of(tiny), control=control, **options
    )
    none = generate(tiny, prompts, **options)
    assert outputs(result) == outputs(none)
    assert result.statistics is not None
    assert {point.drafter for point in result.statistics.points if point.draft_length} <= {
        "self", "history", "model", "ngram",
    }  # fmt: skip


def test_control_is_told_what_happened(tiny: LlamaForCausalLM) -> None:
    prompts = pad_left(random_rows([5, 9, 7, 4, 6]))
    control = Scripted(1, [(0, 4), (0, 0)])
    result = generate(
        tiny, prompts, "self", {"max_batch_size": 2}, drafter=drafters_of(tiny)[:1], control=control,
        eos_token_id=[5, 9], max_new_tokens=30,
    )  # fmt: skip
    statistics = result.statistics
    assert statistics is not None
    capacity, keys = control.begun
    assert capacity == 2 and len(set(keys)) == len(keys) == 5
    assert len(control.asked) == len(control.told) == statistics.rounds == sum(p.rounds for p in statistics.points)
    assert sum(tokens for *_, tokens in control.told) == statistics.tokens == sum(p.tokens for p in statistics.points)
    assert 0 < sum(seconds for _, seconds, _ in control.told) <= statistics.seconds
    # First round: the two first rows, three waiting.
    assert control.asked[0] == (2, (5 + 9) / 2, 3)
    assert {waiting for *_, waiting in control.asked} >= {0, 3}
    assert [gamma for gamma, *_ in control.told[:4]] == [4, 0, 4, 0]
    # Each round's mean length is what the rounds before committed.
    (batch, length, waiting), (_, _, tokens) = control.asked[0], control.told[0]
    if control.asked[1][2] == waiting:  # nobody ended in between
        assert control.asked[1][1] == length + tokens / batch


def test_drafts_never_reach_beyond_the_longest_room(tiny: LlamaForCausalLM) -> None:
    control = Scripted(1, [(0, 7)])
    generate(
        tiny, pad_left(random_rows([5])), "self", drafter=drafters_of(tiny)[:1], control=control, max_new_tokens=3
    )
    assert control.told[0][0] == 2  # and a bonus token


def test_a_failed_drafter_leaves_the_others(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of luck")

    drafters = drafters_of(tiny)
    monkeypatch.setattr(drafters[0], "propose", fail)
    prompts = pad_left(random_rows([5, 9]))
    control = Scripted(4, [(2, 3), (0, 3)])
    with pytest.warns(UserWarning, match="SelfDrafter failed"):
        result = generate(tiny, prompts, "auto", drafter=drafters, control=control)
    assert outputs(result) == outputs(generate(tiny, prompts))
    assert result.statistics is not None
    drafted: Counter[str | None] = Counter()
    for point in result.statistics.points:
        drafted[point.drafter] += point.rounds * (point.draft_length > 0)
    assert drafted["self"] == 1 and drafted["model"] > 1  # the round in which it failed, and no other


def test_several_by_measuring_alone(tiny: LlamaForCausalLM) -> None:
    prompts = pad_left(random_rows([5, 9, 7]))
    options = dict(max_new_tokens=120)
    result = generate(tiny, prompts, "self", drafter=drafters_of(tiny), **options)
    assert outputs(result) == outputs(generate(tiny, prompts, **options))
    assert result.statistics is not None
    assert result.statistics.speculating[0] == (0, 0)  # the baseline first


def test_an_assistant_that_nobody_needs_is_refused(tiny: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="assistant_model is given, but assistant_strategy='self' uses none"):
        generate(tiny, pad_left(random_rows([5])), "self", assistant_model=tiny)


def test_never_builds_no_drafter(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SelfDrafter, "__init__", lambda *_, **__: pytest.fail("a drafter was built"))
    prompts = pad_left(random_rows([5, 9]))
    result = generate(tiny, prompts, "self", {"sd_toggle": "never"})
    assert outputs(result) == outputs(generate(tiny, prompts))


def test_controls_by_configuration(tiny: LlamaForCausalLM) -> None:
    drafters = drafters_of(tiny)
    assert isinstance(make_control([], SpeculativeConfig()), NeverSpeculate)
    assert isinstance(make_control(drafters[:1], SpeculativeConfig(sd_toggle="never")), NeverSpeculate)
    assert isinstance(make_control(drafters[:1], SpeculativeConfig(sd_toggle="always")), AlwaysSpeculate)
    assert isinstance(make_control(drafters[:1], SpeculativeConfig()), SpeculationToggle)
    assert isinstance(make_control(drafters, SpeculativeConfig()), SpeculationToggle)  # by measuring
    config = SpeculativeConfig(sd_toggle="roofline", sd_margin=0.2, draft_length=3)
    control = make_control(drafters, config, PROFILE)
    assert isinstance(control, SpeculationToggle) and control.margin == 0.2
    assert [candidate.name for candidate in control.candidates] == ["self", "history", "model", "ngram"]
    assert [candidate.block_efficiency for candidate in control.candidates] == [3.0] * 4
    assert [candidate.is_network for candidate in control.candidates] == [True, False, True, False]
    assert control.candidates[0].max_rows == drafters[0].max_rows


def test_a_small_model_is_predicted_by_its_own_size(tiny: LlamaForCausalLM) -> None:
    self_drafter, _, small, _ = drafters_of(tiny)
    control = make_control([self_drafter, small], SpeculativeConfig(sd_toggle="roofline"), PROFILE)
    own, other = (candidate.roofline for candidate in control.candidates)
    assert own == PROFILE.roofline and other is not None
    assert other.target_seconds(4, 100.0) == own.target_seconds(4, 100.0)
    assert other.verify_seconds(4, 100.0, 5) == own.verify_seconds(4, 100.0, 5)
    assert other.constants.draft_weight_bytes == model_constants(small.network).weight_bytes
    assert other.draft_seconds(4, 100.0) != own.draft_seconds(4, 100.0)


def test_networks_of_their_own_are_timed_by_the_ladder(tiny: LlamaForCausalLM) -> None:
    """The copy and lookups are what the profile measured; another network's rounds are the ladder's, in proportion to
    the target's by the roofline."""
    drafters = drafters_of(tiny)
    rungs = [Rung(d.strategy, 4, 5, p, 3.0 + p, 2.0) for d in drafters for p in (0.0, 1.0)]
    ladder = Ladder(tuple(rungs), "")
    control = make_control(drafters, SpeculativeConfig(sd_toggle="roofline"), PROFILE, ladder)
    assert isinstance(control, BestOfN)
    control.begin(4, ["a", "b", "c", "d"])
    costs = {candidate.name: candidate.roofline for candidate in control.candidates}
    assert costs["self"] == costs["history"] == costs["ngram"] == PROFILE.roofline
    model = costs["model"]
    assert isinstance(model, LadderCosts)
    plain = PROFILE.roofline.target_seconds(4, 1000.0)
    assert model.target_seconds(4, 1000.0) == plain
    tau = control.candidates[2].block_efficiency
    assert 4 < tau < 5  # of γ = 5, at the rate that is assumed of what never drafted
    assert model.cycle_seconds(4, 1000.0, 5) == pytest.approx((3 + (tau - 1) / 5) / 2 * plain)


def test_without_a_profile_the_ladder_times_everything(tiny: LlamaForCausalLM) -> None:
    drafters = drafters_of(tiny)
    ladder = Ladder(tuple(Rung(d.strategy, 4, 5, 0.5, 3.0, 2.0) for d in drafters), "")
    control = make_control(drafters, SpeculativeConfig(), None, ladder)
    assert isinstance(control, BestOfN)
    control.begin(4, ["a", "b", "c", "d"])
    for candidate in control.candidates:
        assert candidate.roofline is not None
        assert candidate.roofline.target_seconds(4, 1e6) == 2.0
        assert candidate.roofline.cycle_seconds(4, 1e6, 5) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sd_toggle": "sometimes"}, "sd_toggle='sometimes' is unknown; choose one of"),
        ({"sd_margin": -1}, "sd_margin=-1 is out of range; it must be a number of at least 0"),
        ({"sd_margin": "0.05"}, "sd_margin='0.05' is out of range"),
        ({"roofline_profile": "p.json", "sd_toggle": "always"}, "roofline_profile='p.json' is not read under sd_togg"),
        ({"roofline_mismatch": "shrug"}, "roofline_mismatch='shrug' is unknown"),
    ],
)
def test_bad_options(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**bad)


def test_margin_acts(tiny: LlamaForCausalLM) -> None:
    """The same imaginary machine, on which speculation promises a little."""
    prompts = pad_left(random_rows([5, 9]))
    rounds = {}
    for margin in (0.0, 1e6):
        config = SpeculativeConfig(sd_toggle="roofline", sd_margin=margin)
        drafter = SelfDrafter(tiny, kernel="reference")
        control = make_control([drafter], config, FREE_DRAFTS)
        result = generate(tiny, prompts, "self", drafter=drafter, control=control)
        assert result.statistics is not None
        rounds[margin] = sum(point.rounds for point in result.statistics.points if point.draft_length)
    assert rounds[0.0] > 0 == rounds[1e6]


def test_statistics_of_predictions(tiny: LlamaForCausalLM) -> None:
    drafter = SelfDrafter(tiny, kernel="reference")
    control = make_control([drafter], SpeculativeConfig(sd_toggle="roofline"), FREE_DRAFTS)
    prompts = pad_left(random_rows([5, 9]))
    statistics = generate(tiny, prompts, "self", drafter=drafter, control=control).statistics
    assert statistics is not None
    assert statistics.predicted_speedup is not None and statistics.predicted_speedup > 1
    assert statistics.measured_speedup is not None and statistics.measured_speedup > 0
    assert statistics.plain_seconds is not None and statistics.reason.startswith("speculation ")
    # A prediction is there also where it keeps everything from drafting.
    refused = make_control([drafter], SpeculativeConfig(sd_toggle="roofline", sd_margin=1e6), FREE_DRAFTS)
    silent = generate(tiny, prompts, "self", drafter=drafter, control=refused).statistics
    assert silent is not None and silent.drafted_rounds == 0
    assert silent.predicted_speedup is not None and silent.predicted_speedup > 1
    assert silent.reason.startswith(f"speculation predicted {silent.predicted_speedup:.2f}× at 2 rows × ")
    plain = generate(tiny, prompts).statistics
    assert plain is not None and plain.predicted_speedup is None and plain.measured_speedup is None


def test_float32_policy_can_be_toggled_by_measuring_alone() -> None:
    model = tiny_llama().float()
    prompts = pad_left(random_rows([5, 9, 3]))
    drafters = [SelfDrafter(model), HistoryDrafter(10_000)]
    result = generate(model, prompts, "self", drafter=drafters, do_sample=False, max_new_tokens=100)
    assert torch.equal(result.sequences, generate(model, prompts, do_sample=False, max_new_tokens=100).sequences)


# ---- kept between calls ---------------------------------------------------------------------------------------------


def test_the_control_is_kept_for_the_same_options(tiny: LlamaForCausalLM) -> None:
    """It knows what rounds took. Another seed is the same job; other drafters, options, profile or ladder are not."""
    release(tiny)
    drafters = [SelfDrafter(tiny), NgramDrafter(3)]
    ladder = Ladder((Rung("self", 1, 5, 0.6, 1.0, 1.0), Rung("ngram", 1, 5, 0.6, 1.0, 1.0)), "")
    other = replace(ladder, rungs=(ladder.rungs[0], replace(ladder.rungs[1], seconds=2.0)))
    config = SpeculativeConfig(seed=1)

    def control(**changes: Any) -> Any:
        given = {"drafters": drafters, "config": config, "profile": PROFILE, "ladder": ladder} | changes
        taken = take_control(tiny, **given)
        keep_control(tiny, taken)
        return taken.control

    kept = control()
    assert control(config=replace(config, seed=2)) is kept
    assert control(drafters=[SelfDrafter(tiny), NgramDrafter(2)], ladder=replace(ladder)) is kept
    assert kept.history is acceptance_history_of(tiny)
    for changes in (
        {"config": replace(config, sd_margin=0.1)}, {"config": replace(config, best_of_n_race=False)},
        {"profile": FREE_DRAFTS}, {"profile": None}, {"ladder": other}, {"drafters": drafters[:1]},
        {"drafters": drafters[::-1]},
    ):  # fmt: skip
        another = control(**changes)
        assert another is not kept and another.history is kept.history
        assert control() is not another
        kept = control()
    release(tiny)
    assert control() is not kept and control().history is not kept.history
