"""What Algorithm 3 and the ladder refuse, with the argument and the remedy."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spec_trl.specactor.assignment import greedy_assignments
from spec_trl.specactor.ladder import Ladder, Rung
from tests.efficient_rollout.test_refusals import assert_hand_edit_is_named


RUNG = Rung("self", 2, 3, 0.5, 0.1, 0.05)
LADDER = Ladder((RUNG, replace(RUNG, batch=16, draft_length=2), replace(RUNG, method="ngram")), "a shape")


def algorithm_3(**changes: Any) -> object:
    """Its arguments for nobody."""
    arguments: dict[str, Any] = dict(requests={}, methods="xy", freed=[], workers_of={}, load={}, assigned={})
    return greedy_assignments(**(arguments | dict(max_batch=1, ladder_order="xy") | changes))


Act = Callable[[], object]
REFUSED: list[tuple[Act, str]] = [
    # assignment
    (lambda: algorithm_3(methods=[]), "methods is empty"),
    (lambda: algorithm_3(ladder_order=["x"]), r"ladder_order=\['x'\] lacks \['y'\]"),
    (lambda: algorithm_3(max_batch=0), "max_batch=0 is out of range"),
    # ladder
    (lambda: LADDER.speedup("eagle3", 1.5, 1, 2), r"method='eagle3' .*, which has \['self', 'ngram'\]"),
    (lambda: LADDER.speedup("self", 4.01, 1, 3), r"block_efficiency=4.01 of 'self' .*; it must be 1 to γ \+ 1 = 4"),
    (lambda: LADDER.speedup("self", math.nan, 1, 3), "block_efficiency=nan of 'self' is out of range"),
    (lambda: LADDER.speedup("self", 1.5, 0, 3), "batch=0 is out of range"),
    (lambda: LADDER.speedup("self", 1.5, 16, 6), r"draft_length=6 of 'self' .* near batch 16; choose one of \[2\]"),
    (lambda: replace(RUNG, method="none"), "method='none' must be the name of a drafter"),
    (lambda: replace(RUNG, method=3), "method=3 must be the name"),
    (lambda: replace(RUNG, batch=0), "batch=0 is out of range"),
    (lambda: replace(RUNG, draft_length=0), "draft_length=0 is out of range"),
    (lambda: replace(RUNG, draft_length=65), "draft_length=65 is out of range; it must be 1 to 64"),
    (lambda: replace(RUNG, acceptance=1.1), "acceptance=1.1 is out of range; it must be at least 0 and at most 1"),
    (lambda: replace(RUNG, seconds=0.0), "seconds=0.0 is out of range"),
    (lambda: replace(RUNG, plain_seconds=math.inf), "plain_seconds=inf is out of range"),
    (lambda: Ladder((), ""), "rungs is empty"),
    (lambda: Ladder((RUNG, replace(RUNG, seconds=0.2)), ""), r"rungs has \('self', 2, 3, 0.5\).* twice"),
]


@pytest.mark.parametrize(("act", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_arguments(act: Act, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (["version"], 2, r"version: Input should be 1 \(found 2\)"),
        (["rungs"], [], "rungs is empty"),
        (["rungs", 1, "batch"], 1.5, r"rungs\[1\]\.batch: .* valid integer \(found 1\.5\)"),
        (["rungs", 1], vars(RUNG), "rungs has .* twice"),
    ],
)
def test_a_hand_edit_is_named(where: list[Any], value: Any, message: str, tmp_path: Path) -> None:
    assert_hand_edit_is_named(LADDER, where, value, message, tmp_path)
