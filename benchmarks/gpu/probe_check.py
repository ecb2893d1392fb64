"""What the planner believes before its first round, next to what rounds take: T_p, a draft step T_q, and T_V.

The probe runs twice: in a process that has compiled nothing, and again. Its belief decides whether anything is drafted
at all, so what counts is how far it is off, either way, and how far T_q / T_p is.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.measure import stopwatch
from spec_trl import SpeculativeConfig
from spec_trl.efficient_rollout.fill_profile import _Bench
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.measuring.probe import probe
from spec_trl.scheduling.round_costs import ProbedRounds

from .part import Part
from .rounds import DRAFT_LENGTH, LENGTH, MARGIN, time_cells
from .shapes import config_of, random_model


BATCHES = (1, 8)
STRATEGY = "self"

Seconds = dict[str, dict[int, float]]
"""Of "target", "draft" and "verify", by batch."""


def believed(rounds: ProbedRounds, batches: Sequence[int], length: int) -> Seconds:
    """What `rounds` predicts."""
    found: Seconds = {"target": {}, "draft": {}, "verify": {}}
    for batch in batches:
        verify = rounds({}, DRAFT_LENGTH, batch, length)
        found["target"][batch] = rounds({}, 0, batch, length)
        found["verify"][batch] = verify
        whole = rounds({STRATEGY: DRAFT_LENGTH}, DRAFT_LENGTH, batch, length)
        found["draft"][batch] = (whole - verify) / DRAFT_LENGTH
    return found


def probed(
    part: Part, model: PreTrainedModel, drafter: SelfDrafter, batches: Sequence[int], length: int
) -> dict[str, Any]:
    """One probe, and how long it took."""
    with stopwatch(part.device) as watch:
        rounds = probe(model, [drafter], SpeculativeConfig())
    return {"seconds": watch.value, "believed": believed(rounds, batches, length)}


def measured(
    part: Part, model: PreTrainedModel, drafter: SelfDrafter, batches: Sequence[int], length: int
) -> Seconds:
    """The same by rounds of the engine."""
    drafter.refresh()  # the copy is packed when it first drafts
    bench = _Bench(model, drafter, max(batches), [length], MARGIN, SpeculativeConfig())
    try:
        return time_cells(part, bench, batches, length)
    finally:
        bench.close()


def over(believed: Seconds, taken: Seconds) -> dict[str, dict[int, float]]:
    """Believed over taken, and T_q / T_p believed over T_q / T_p taken, by batch."""
    found = {
        mode: {batch: cells[batch] / taken[mode][batch] for batch in cells}
        for mode, cells in believed.items()
        if mode in taken
    }
    if "draft" in found:
        found["T_q / T_p"] = {batch: share / found["target"][batch] for batch, share in found["draft"].items()}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    part = Part("probe_check", __doc__, arguments)
    length, batches = (64, (1, 2)) if part.is_smoke else (LENGTH, BATCHES)
    part.state(dtype="bfloat16", length=length, draft_length=DRAFT_LENGTH)
    model = random_model(config_of(part.shape), part.device, torch.bfloat16, part.seed)
    with torch.no_grad():
        drafter = SelfDrafter(model, packs_later=True)
        beliefs = {
            name: part.measure(f"probe, {name}", partial(probed, part, model, drafter, batches, length))
            for name in ("first", "second")
        }
        taken = part.measure("rounds", partial(measured, part, model, drafter, batches, length))
    for name, belief in beliefs.items():
        if belief is not None and taken is not None:
            part.record(f"believed over taken, {name}", over(belief["believed"], taken))
    return part.finish()


if __name__ == "__main__":
    raise SystemExit(main())
