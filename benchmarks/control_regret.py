"""How far the planner, and a rule of thirty lines (`control_rule`), stay behind an oracle, and whether they are ever
slower than no drafts: on simulated worlds.

15 cells (1, 4, 16, 64 rows, and 16 with refill; drafting pays, hardly pays, or hurts), each with eight rollouts in a
row from a fresh start, under six kinds of noise. No clock is read: the table is the same on each machine.
Where the planner is told wrongly (`--probes`), rollouts follow until plain decoding has taken 1,500 rounds.

    python -m benchmarks.control_regret --worlds 3
    python -m benchmarks.control_regret --worlds 1 --noises 5% --probes all \
        --output benchmarks/results/control_regret_probes.json
    python -m benchmarks.control_regret --log output_dir     # on what a training run recorded
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from spec_trl.generation.planner import clock as clocks
from spec_trl.generation.planner.acceptance import Drafts
from spec_trl.generation.planner.control import Candidate, Control
from spec_trl.generation.planner.planner import Planner

from .control_rule import FastestControl
from .control_worlds import CELLS, NOISES, PROBES, Bounds, Cell, Clock, Decoder, World, decode, noise_named
from .measure import Finding, Options, begin, findings_table, shown, write_result
from .recorded_world import RecordedWorld


def planner(world: World, clock: Clock, methods: Sequence[str] = ()) -> Planner:
    """A control that knows nothing of its world but what a calibration believes. Without `methods`: of all."""
    names = methods or world.methods
    drafts = Drafts(names, [name not in world.networks for name in names])
    candidates, seconds = _candidates(world, names), clocks.Clock(world.predict, 0.2)
    return Planner(candidates, world.draft_lengths, seconds, drafts, now=clock)


def rule(world: World, clock: Clock, methods: Sequence[str] = ()) -> FastestControl:
    """The rule, which believes nothing."""
    return FastestControl(_candidates(world, methods or world.methods), world.draft_lengths)


def _candidates(world: World, names: Sequence[str]) -> list[Candidate]:
    return [Candidate(each, world.draft_lengths[-1], 1.0, 10**9, each in world.networks) for each in names]


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


HORIZON = 1500  # rounds of plain decoding, within which a planner that is told wrongly finds out


def long_world(cell: Cell, seed: int, wrong: str) -> World:
    """As many rollouts as plain decoding decodes in at least `HORIZON` rounds: 3 to 28, by the cell."""
    rounds, rollouts = 0, 0
    while rounds < HORIZON:
        rollouts += 1
        state = Decoder(World(cell, seed, rollouts), rollouts - 1)
        while state.rows:
            state.play((), 1)
            rounds += 1
    return World(cell, seed, rollouts, wrong)


def run(
    world: World, noise: str, planning: float = 0.0, methods: Sequence[str] = (), bounds: Bounds | None = None,
    make: Callable[[World, Clock, Sequence[str]], Control] = planner,
) -> Outcome:  # fmt: skip
    """All rollouts of `world` one after the other under one control, which sees a plan take `planning` seconds. What a
    planner is told does not move `bounds`."""
    clock, bounds, off = Clock(planning), bounds or Bounds(world), noise_named(noise, world.seed)
    control = make(world, clock, methods)
    taken = [decode(control, world, number, off, clock).seconds for number in range(len(world.rollouts))]
    return Outcome(world.cell, taken, bounds.plain, bounds.fixed, bounds.oracle)


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


def findings(noise: str, found: Summary, alone: bool) -> list[Finding]:
    """The numbers of one noise; `alone`: whether a world of one row was among them."""
    return [
        Finding(f"noise {noise}: time of all rollouts, mean over worlds", found.regret, "±%", "the oracle"),
        Finding(f"noise {noise}: the same", found.over_fixed, "±%", "the best fixed plan of each rollout"),
        Finding(f"noise {noise}: worst eight rollouts", found.worst_sequence, "×", "no drafts"),
        Finding(f"noise {noise}: worst rollout", found.worst_rollout, "×", "no drafts"),
        Finding(f"noise {noise}: rollouts more than 2 % slower than without drafts", found.slower, "%"),
        Finding(f"noise {noise}: first rollout of one row, drafting hurts", found.first_alone, "×", "no drafts"),
    ][: 6 if alone else 5]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "control_regret", "--worlds 1 --noises 0% --batches 1")
    add = parser.add_argument
    add("--worlds", type=int, default=3, help="of each cell, from --seed on")
    add("--noises", nargs="+", default=NOISES, choices=NOISES)
    add("--batches", nargs="+", type=int, default=[1, 4, 16, 64], help="rows")
    add("--probes", nargs="+", default=["right"], choices=[*PROBES, "all"], help="what the planner is told of rounds; "
        "right: right within a few per cent")  # fmt: skip
    add("--log", type=Path, help="output_dir of a run, whose rollouts are replayed; writes no result")
    add("--planning", type=float, default=0.0, help="autoregressive rounds that making a plan seems to take")
    options = parser.read(arguments, "worlds")
    machine, seeds = begin(options), range(options.seed, options.seed + options.worlds)
    cells = [cell for cell in CELLS if cell.batch in options.batches]
    options.probes = list(PROBES) if "all" in options.probes else options.probes
    wrong = options.probes != ["right"]
    if options.log is None:
        make = (lambda cell, seed: long_world(cell, seed, "right")) if wrong else World
        worlds = [make(cell, seed) for cell in cells for seed in seeds]
    else:
        if wrong:
            parser.error("--log replays what a run was told; leave out --probes")
        worlds = [RecordedWorld(options.log, seed) for seed in seeds]
    found, bounds = [], [Bounds(world) for world in worlds]
    for noise in options.noises:
        for probe in options.probes:
            for world in worlds:
                world.wrong = PROBES[probe]
            outcomes = [
                run(world, noise, options.planning, (), own) for world, own in zip(worlds, bounds, strict=True)
            ]
            alone = options.log is None and 1 in options.batches
            named = noise if options.probes == ["right"] else f"{noise}, probe {probe}"
            found += findings(named, Summary.of(outcomes), alone)
        if not wrong:
            outcomes = [run(world, noise, bounds=own, make=rule) for world, own in zip(worlds, bounds, strict=True)]
            found += findings(f"{noise}, the thirty-line rule", Summary.of(outcomes), alone)
    if options.log is not None:
        print(f"{worlds[0].cell.batch} rows, {', '.join(worlds[0].methods)}\n{findings_table(found)}")
        return
    rollouts = f"rollouts of {HORIZON} plain rounds" if wrong else "eight rollouts"
    write_result(
        options.output, "never_slower", "The planner on simulated worlds",
        f"{len(cells)} cells of {options.worlds} worlds each, {rollouts} in a row from a fresh start; three "
        "drafters at γ 2, 5, 10. Times are formulas, and the same on each machine. The oracle knows all times and "
        "texts, and chooses anew every 12 rounds. "
        f"To the planner, making a plan takes {options.planning} of an autoregressive round; its time is not counted.",
        machine, None, found, {"options": shown(options, "log")},
    )  # fmt: skip


if __name__ == "__main__":
    main()
