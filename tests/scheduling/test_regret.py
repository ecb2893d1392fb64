"""The planner on simulated worlds: close to an oracle, and never much slower than no drafts. No clock is read."""

import pytest

from benchmarks.control_regret import Summary, run
from benchmarks.control_worlds import CELLS, Cell, World


@pytest.mark.parametrize(
    ("noise", "planning", "regret"),
    [
        ("0%", 0.0, 0.09), ("20%", 0.0, 0.12), ("burst", 0.0, 0.1), ("20%", 0.06, 0.15), ("first", 0.0, 0.09),
        ("shocks", 0.0, 0.09),
    ],
)  # fmt: skip
def test_small_batches_stay_near_the_oracle_and_are_never_slower(noise: str, planning: float, regret: float) -> None:
    """Rows are few, so little is known: the hardest cells. The whole table is `benchmarks/control_regret.py`'s."""
    worlds = [World(cell, seed) for cell in CELLS if cell.batch <= 4 for seed in (0, 1)]
    found = Summary.of([run(world, noise, planning) for world in worlds])
    assert found.regret <= regret
    assert found.worst_sequence <= 1.02
    assert found.worst_rollout <= 1.1
    assert found.slower <= 0.09
    assert found.first_alone <= 1.03


def test_drafting_where_it_pays_and_not_where_it_hurts() -> None:
    pays, hurts = (run(World(Cell(16, regime), 0), "5%") for regime in ("pays", "hurts"))
    assert sum(pays.taken) <= 0.55 * sum(pays.plain)
    assert sum(hurts.taken) <= 1.01 * sum(hurts.plain)


def test_one_drafter_alone() -> None:
    found = run(World(Cell(4, "pays"), 0), "5%", methods=["self"])
    assert sum(found.taken) <= 0.6 * sum(found.plain)


def test_worlds_are_the_same_each_time() -> None:
    one, other = (World(Cell(4, "neutral"), 3, rollouts=2) for _ in range(2))
    assert one.rollouts == other.rollouts
    assert run(one, "20%").taken == run(other, "20%").taken
