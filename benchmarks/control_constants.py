"""What breaks when a constant of the planner is doubled: the worlds of `control_regret` with 1 and 4 rows.

No clock is read: the table is the same on each machine. `spec_trl/generation/planner/README.md` has it.

    python -m benchmarks.control_constants
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from spec_trl.generation.planner import acceptance, clock, planner

from .control_regret import Outcome, Summary, run
from .control_worlds import CELLS, NOISES, Bounds, World
from .measure import Finding, Options, begin, shown, write_result


CONSTANTS: dict[Any, tuple[str, ...]] = {
    clock: ("DRIFT", "CELL_ERROR", "NOISE", "OUTLIER", "OUTLIER_ROUNDS", "UNTRIED", "LEAST_SHARE", "MOST_OFF",
            "STEPS", "FADE"),
    planner: ("ROUND_BUDGET", "MAX_BUDGET", "CARRIED_BUDGET", "CERTAIN", "CAUTION"),
    acceptance: ("FADE", "FIRST_GUESS rate", "FIRST_GUESS weight"),
}  # fmt: skip
FIRST_RATE = 0.9
"""In place of FIRST_GUESS's rate, which is a probability and cannot be doubled."""


def doubled(name: str, old: Any) -> Any:
    """The changed value of the constant `name`, which is `old`. The distance of `FADE` from 1 doubles."""
    if name == "FADE":
        return 1 - 2 * (1 - old)
    if name == "FIRST_GUESS rate":
        return FIRST_RATE, old[1]
    if name == "FIRST_GUESS weight":
        return old[0], 2 * old[1]
    return tuple(2 * value for value in old) if isinstance(old, tuple) else 2 * old


@contextmanager
def changed(module: Any, name: str) -> Iterator[None]:
    """The constant `name` of `module` is doubled meanwhile."""
    attribute = name.partition(" ")[0]
    old = getattr(module, attribute)
    setattr(module, attribute, doubled(name, old))
    try:
        yield
    finally:
        setattr(module, attribute, old)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Options(__doc__, "control_constants", "--worlds 1 --noises 0% --batches 1")
    parser.add_argument("--worlds", type=int, default=3, help="of each cell, from --seed on")
    parser.add_argument("--noises", nargs="+", default=["5%", "first"], choices=NOISES)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4], help="rows")
    options = parser.read(arguments, "worlds")
    machine, seeds = begin(options), range(options.seed, options.seed + options.worlds)
    worlds = [World(cell, seed) for cell in CELLS if cell.batch in options.batches for seed in seeds]
    bounds, found = [Bounds(world) for world in worlds], list[Finding]()

    def measure(name: str) -> None:
        for noise in options.noises:
            outcomes: list[Outcome] = [run(each, noise, bounds=own) for each, own in zip(worlds, bounds, strict=True)]
            summary = Summary.of(outcomes)
            over = f"{name}, noise {noise}"
            found.append(Finding(f"{over}: mean over worlds", summary.regret, "±%", "an oracle"))
            found.append(Finding(f"{over}: worst eight rollouts", summary.worst_sequence, "×", "no drafts"))
            found.append(Finding(f"{over}: worst rollout", summary.worst_rollout, "×", "no drafts"))

    measure("as it is")
    for module, names in CONSTANTS.items():
        for name in names:
            with changed(module, name):
                measure(f"{module.__name__.rpartition('.')[2]}.{name} doubled")
    write_result(
        options.output, "control_constants", "Constants of the planner, each doubled",
        f"{len(worlds)} simulated worlds, eight rollouts in a row from a fresh start. {FIRST_RATE} replaces "
        "FIRST_GUESS's rate, and 1 - 2 (1 - FADE) each FADE.",
        machine, None, found, {"options": shown(options)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
