"""What the engine's own bookkeeping costs in a decoding round: control, records, counters, clocks, each on its own.

The clock inside a rollout sees the control's decisions as the phase "control". The rest hides in other phases or
between them, so it is timed here with the same objects and made-up rounds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

from spec_trl.generation.engine.counters import DraftCounter, PhaseTimer, RoundLog
from spec_trl.scheduling.control import Candidate
from spec_trl.scheduling.profile import Profile
from spec_trl.scheduling.toggle import SpeculationToggle


PHASES = 6  # that the engine times in each round: control, noise, draft, verify, accept, compact
BLOCKS, ROUNDS = 9, 50  # the median of so many means over so many rounds


@dataclass(frozen=True)
class Bookkeeping:
    """Seconds of one round: the toggle's `decide` and `record`, the log's entry, the draft counts of a round that
    speculates, and the clocks around the phases."""

    control: float
    log: float
    counter: float
    clocks: float

    def seconds(self, speculative_share: float) -> float:
        """Of a mean round, when `speculative_share` of them speculate."""
        return self.control + self.log + self.clocks + speculative_share * self.counter


def measure_bookkeeping(
    batch: int, length: float, draft_length: int, profile: Profile, device: torch.device
) -> Bookkeeping:
    """Times a round's bookkeeping; of what runs on a GPU, the launches, which are what a round waits for.

    Args:
        batch: rows.
        length: mean cached tokens per row.
        draft_length: γ.
        profile: of the toggle.
        device: where rows live.
    """
    candidate = Candidate("self", draft_length, float(draft_length), 1 << 31, profile.roofline)
    toggle = SpeculationToggle([candidate])
    toggle.begin(batch, [""] * batch)
    # As long as a cycle is predicted, and full acceptance: the control looks at its windows and keeps speculating.
    seconds = 0.5 * candidate.cycle_seconds(profile.roofline, batch, length)

    def control() -> None:
        _, chosen = toggle.decide(batch, length, 0)
        toggle.record(chosen, seconds, batch * (chosen + 1))

    log = RoundLog()
    rows = np.arange(batch)  # [B]
    first = np.zeros(batch, np.int64)  # [B], of the drafters and of the lanes
    full = np.full((1, batch), draft_length)  # [1, B]
    counter = DraftCounter(batch, ["self"])
    timer = PhaseTimer(device)

    def clocks() -> None:
        for _ in range(PHASES):
            with timer.phase("noise"):
                pass

    return Bookkeeping(
        control=_seconds(control),
        log=_seconds(lambda: log.add(batch, length, draft_length, "self", 0.01, batch)),
        counter=_seconds(lambda: counter.add(rows.tolist(), rows, [[0] * batch], full, full, full[0] + 1, first)),
        clocks=_seconds(clocks),
    )


def _seconds(work: Callable[[], None]) -> float:
    """Median over blocks of the mean of a call."""
    times = []
    for _ in range(BLOCKS + 1):
        started = time.perf_counter()
        for _ in range(ROUNDS):
            work()
        times.append((time.perf_counter() - started) / ROUNDS)
    return median(times[1:])
