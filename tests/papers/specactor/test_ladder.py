"""The draft ladder: speedups from profiled cells, rankings, costs, and its file."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_trl.generation.planner.acceptance import Acceptance
from spec_trl.generation.planner.model_constants import ModelConstants
from spec_trl.papers.efficient_rollout.roofline import Coefficients, Roofline
from spec_trl.papers.specactor.ladder import BlockEfficiency, Ladder, LadderRounds, Rung, ladder_path
from tests.papers.efficient_rollout.test_refusals import assert_hand_edit_is_named


def rungs(method: str, batch: int, length: int, seconds: dict[float, float], plain: float = 1.0) -> list[Rung]:
    """Cells of one (method, batch, γ), from seconds by acceptance."""
    return [Rung(method, batch, length, acceptance, time, plain) for acceptance, time in seconds.items()]


def at(acceptance: float) -> BlockEfficiency:
    """τ by γ of one rate for all positions."""
    return Acceptance.geometric(acceptance).block_efficiency


LADDER = Ladder(
    (
        *rungs("self", 1, 2, {0.2: 2.0, 0.8: 3.0}),
        *rungs("self", 1, 6, {0.2: 4.0, 0.8: 4.0}),
        *rungs("self", 8, 2, {0.2: 4.0, 0.8: 4.0}, plain=2.0),
        *rungs("ngram", 1, 4, {0.5: 1.25}),
        *rungs("ngram", 4, 4, {0.5: 2.5}),
    ),
    "LlamaForCausalLM-2x64",
)


def test_speedup_by_hand() -> None:
    assert LADDER.speedup("self", 1.84, 1, 2) == pytest.approx(1.84 / 2.5)  # half-way between 1.24 and 2.44
    assert LADDER.speedup("self", 3.0 + 1e-12, 1, 2) == pytest.approx(3 / 3)  # sums of many rates
    assert LADDER.speedup("self", 1.24, 8, 2) == pytest.approx(1.24 * 2 / 4)  # plain rounds of the same profile
    assert LADDER.methods == ("self", "ngram") and LADDER.batches == (1, 4, 8)
    assert LADDER.draft_lengths("self", 1) == (2, 6) and LADDER.draft_lengths("self", 8) == (2,)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.dictionaries(st.integers(0, 10), st.floats(0.1, 10), min_size=1, max_size=6), st.randoms(), st.floats(1, 5))
def test_times_are_interpolated_between_those_of_the_profile(
    seconds: dict[int, float], random: Random, tau: float
) -> None:
    """Whatever the order in which cells were profiled; outside of the profiled τ the nearest time holds."""
    cells = rungs("self", 1, 4, {p / 10: time for p, time in seconds.items()})
    random.shuffle(cells)
    known = sorted((at(p / 10)(4), time) for p, time in seconds.items())
    expected = np.interp(tau, [tau for tau, _ in known], [time for _, time in known])
    assert Ladder(tuple(cells), "").round_seconds("self", tau, 1, 4)[0] == pytest.approx(expected)


def test_plain_time_drifts_with_the_rounds_next_to_it() -> None:
    drifting = Ladder((Rung("self", 1, 2, 0.0, 1.0, 1.0), Rung("self", 1, 2, 1.0, 3.0, 3.0)), "")
    assert drifting.speedup("self", 2.0, 1, 2) == pytest.approx(2.0)  # twice as slow, both of them


@pytest.mark.parametrize(
    ("batch", "bucket"),
    [(1, 1), (2, 1), (3, 8), (8, 8), (23, 8), (24, 72), (25, 72), (1000, 72)],  # 24 is 3 times off both: the larger
)
def test_nearest_batch_by_ratio(batch: int, bucket: int) -> None:
    seconds = {1: 1.0, 8: 2.0, 72: 4.0}
    ladder = Ladder(tuple(Rung("self", b, 1, 0.5, s, 1.0) for b, s in seconds.items()), "")
    assert ladder.speedup("self", 1.5, batch, 1) == pytest.approx(1.5 / seconds[bucket])


def test_best_draft_length_follows_acceptance() -> None:
    best = [LADDER.best_draft_length("self", at(p / 20), 1) for p in range(21)]
    lengths = [length for length, _ in best]
    assert (lengths[0], lengths[-1]) == (2, 6) and lengths == sorted(lengths)
    for p, (length, speedup) in enumerate(best):
        both = {n: LADDER.speedup("self", at(p / 20)(n), 1, n) for n in (2, 6)}
        assert speedup == max(both.values()) == both[length]
    equals = Ladder(tuple(Rung("self", 1, n, 0.0, 1.0, 1.0) for n in (4, 2, 3)), "")
    assert equals.best_draft_length("self", at(0.0), 1) == (2, 1.0)  # the shortest
    # A draft that is right as a whole or not at all pays when it is long, though its τ at γ = 2 is that of p = 0.618.
    lookup = Acceptance(0.5, 1.0)
    assert lookup.block_efficiency(2) == pytest.approx(at(0.618)(2), abs=1e-3)
    assert LADDER.best_draft_length("self", at(0.618), 1)[0] == 2
    assert LADDER.best_draft_length("self", lookup.block_efficiency, 1) == pytest.approx((6, 4 / 4))


GROWING = Roofline(  # a second, and one per 100 cached tokens
    ModelConstants("growing", 1.0, 0.0, 1.0, 0.0, 0.01),
    Coefficients(F_eff=1e9, BW_eff=1.0, rho_kappa=1.0, eta_D=0.0, c_T=0.0, c_D=0.0, c_V=0.0),
)


def test_rounds_by_a_ladder() -> None:
    """It says how many autoregressive rounds a round is worth; a roofline, if any, how long those take."""
    ladder = Ladder((*rungs("a", 4, 2, {0.5: 4.0}), *rungs("b", 4, 2, {0.5: 6.0}, plain=3.0)), "")
    rounds = LadderRounds(ladder)
    assert rounds({}, 0, 4, 1e6) == 2.0  # the median of 1 and 3
    assert rounds({"a": 2}, 2, 4, 1e6) == pytest.approx(8.0)
    assert rounds({"b": 2}, 2, 4, 1e6) == pytest.approx(4.0)
    assert rounds({"a": 2, "b": 2}, 4, 4, 1e6) == pytest.approx(10.0)  # what each takes beyond a plain one
    for batch, length, plain in ((4, 100.0, 5.0), (4, 10_000.0, 401.0), (80, 100.0, 81.0)):
        assert LadderRounds(ladder, GROWING)({}, 0, batch, length) == pytest.approx(plain)
        assert LadderRounds(ladder, GROWING)({"a": 2}, 2, batch, length) == pytest.approx(4 * plain)


def test_files(tmp_path: Path) -> None:
    path = ladder_path(tmp_path / "folder" / "H200_bf16.v1.json")
    assert path == tmp_path / "folder" / "H200_bf16.v1.ladder.json"
    assert len({ladder_path(f"folder/{name}") for name in ("profile.v1", "profile.v2", "profile.json")}) == 3
    for ladder in (LADDER, Ladder((Rung("self", 2, 3, 0.5, 1 / 3, 0.05),), "other")):
        ladder.save(path)
        assert Ladder.load(str(path)) == ladder
    (rung,) = ladder.rungs
    assert json.loads(path.read_text()) == {"version": 1, "shape": "other", "rungs": [vars(rung)]}


RUNG = Rung("self", 2, 3, 0.5, 0.1, 0.05)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: LADDER.speedup("eagle3", 1.5, 1, 2), r"method='eagle3' .*\['self', 'ngram'\]; profile it"),
        (lambda: LADDER.speedup("self", 3.01, 1, 2), r"block_efficiency=3.01 of 'self' .* must be 1 to .* 3"),
        (lambda: LADDER.speedup("self", math.nan, 1, 2), "block_efficiency=nan of 'self'"),
        (lambda: LADDER.speedup("self", 1.5, 0, 2), "batch=0"),
        (lambda: LADDER.speedup("self", 1.5, 8, 6), r"draft_length=6 of 'self' .* batch 8; choose one of \[2\]"),
        (lambda: replace(RUNG, method="none"), "method='none'"),
        (lambda: replace(RUNG, method=3), "method=3"),
        (lambda: replace(RUNG, batch=0), "batch=0"),
        (lambda: replace(RUNG, draft_length=0), "draft_length=0"),
        (lambda: replace(RUNG, draft_length=65), "draft_length=65 .* 1 to 64"),
        (lambda: replace(RUNG, acceptance=1.1), "acceptance=1.1"),
        (lambda: replace(RUNG, seconds=0.0), "seconds=0.0"),
        (lambda: replace(RUNG, plain_seconds=math.inf), "plain_seconds=inf"),
        (lambda: Ladder((), ""), "rungs is empty"),
        (lambda: Ladder((RUNG, replace(RUNG, seconds=0.2)), ""), r"rungs has \('self', 2, 3, 0.5\).* twice"),
    ],
)  # fmt: skip
def test_refusals(act: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["version"], 2, r"version: Input should be 1 \(found 2\)"),
        (["rungs"], [], "rungs is empty"),
        (["rungs", 1, "batch"], 1.5, r"rungs\[1\]\.batch: .* valid integer \(found 1\.5\)"),
        (["rungs", 1], asdict(LADDER.rungs[0]), "rungs has .* twice"),
    ],
)
def test_a_hand_edit_is_named(where: list[Any], value: Any, message: str, tmp_path: Path) -> None:
    assert_hand_edit_is_named(LADDER, where, value, message, tmp_path)
