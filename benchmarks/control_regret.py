"""How far a control stays behind an oracle, and whether it is ever slower than no drafts: on simulated worlds.

15 cells (1, 4, 16, 64 rows, and 16 with refill; drafting pays, hardly pays, or hurts), each with eight rollouts in a
row from a fresh start, under four kinds of noise. No clock is read: the table is the same on each machine.

    python -m benchmarks.control_regret --seeds 3
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from spec_trl.scheduling.control import Candidate
from spec_trl.scheduling.ledger import Drafts, Times
from spec_trl.scheduling.planner import Planner

from .control_worlds import CELLS, DRAFT_LENGTHS, METHODS, NETWORKS, NOISES, Bounds, Cell, World, decode, noise_named


def planner(world: World, methods: Sequence[str] = METHODS) -> Planner:
    """A control that knows nothing of its world but what a calibration believes."""
    candidates = [Candidate(name, DRAFT_LENGTHS[-1], 1.0, 10**9, None, name in NETWORKS) for name in methods]
    drafts = Drafts(methods, [name not in NETWORKS for name in methods])
    return Planner(candidates, DRAFT_LENGTHS, world.predict, Times(0.2), drafts)


@dataclass(frozen=True)
class Outcome:
    """Seconds of each rollout of a world."""

    cell: Cell
    taken: list[float]
    plain: list[float]
    fixed: list[float]
    oracle: list[float]

    @property
    def slower(self) -> list[float]:
        """Of each rollout, over never speculating."""
        return [taken / plain for taken, plain in zip(self.taken, self.plain, strict=True)]


def run(cell: Cell, seed: int, noise: str, rollouts: int = 8, methods: Sequence[str] = METHODS) -> Outcome:
    """Rollouts one after the other under one planner."""
    world = World(cell, seed, rollouts)
    control, bounds = planner(world, methods), Bounds(world)
    taken = [decode(control, world, number, noise_named(noise, seed)).seconds for number in range(rollouts)]
    return Outcome(cell, taken, bounds.plain, bounds.fixed, bounds.oracle)


@dataclass(frozen=True)
class Summary:
    """Of many worlds."""

    regret: float  # geometric mean of the time over the oracle's, less 1
    over_fixed: float  # the same over the best fixed plan of each rollout
    worst_sequence: float  # of the times of a world's rollouts together, over never speculating
    worst_rollout: float
    slower: float  # share of rollouts that take more than 1.02 of never speculating
    first_alone: float  # worst first rollout of one row where drafting hurts

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> "Summary":
        """Of `outcomes` under one noise."""
        each = [ratio for own in outcomes for ratio in own.slower]
        return cls(
            _mean([sum(own.taken) / sum(own.oracle) for own in outcomes]) - 1,
            _mean([sum(own.taken) / sum(own.fixed) for own in outcomes]) - 1,
            max(sum(own.taken) / sum(own.plain) for own in outcomes),
            max(each),
            sum(ratio > 1.02 for ratio in each) / len(each),
            max((own.slower[0] for own in outcomes if own.cell == Cell(1, "hurts")), default=math.nan),
        )


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="worlds of each cell")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--noises", nargs="+", default=NOISES, choices=NOISES)
    args = parser.parse_args()
    for noise in args.noises:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        print(noise, Summary.of([run(cell, seed, noise) for cell in CELLS for seed in seeds]), flush=True)


if __name__ == "__main__":
    main()
