"""Best-of-N: does the first choice pick what measures best, and is the whole rollout faster for it (SA §4.2)?

One cell is a model, a batch and a kind of prompts: stories, or prompts whose completion copies them. In each cell
`best_of_n` first generates for other prompts of that kind, which is its history. Then its choice at the start of each
rollout is compared with what the members measure by themselves, and with autoregressive decoding. By themselves they
run in two ways: always on, at the γ that history and ladder give them, and watched, as the control of `best_of_n` runs
the one it has chosen, with the same history, which turns them off where they stop paying. `best_of_n` as a whole is
compared with `none` and with `self` under its toggle. All ways run in turns, with new prompts and a new seed in each
repeat; ratios are medians of those within one.

    python -m benchmarks.copying --model ../shared/models/bit-stories3M --output copier
    python -m benchmarks.best_of_n --models copier,float32 --assistant ../shared/models/stories260K
    python -m benchmarks.best_of_n --models shape:qwen2.5-0.5b,bfloat16 --output benchmarks/results/best_of_n_05b.json

`copier` is bit-stories3M that has learned to repeat passages. For a shape there is no small LM, and copying is a
logits processor.
"""

import argparse
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import spec_trl
from spec_trl import SpeculativeConfig
from spec_trl.generation.engine.rows import prompt_key
from spec_trl.generation.strategies import acceptance_history_of, make_control
from spec_trl.scheduling.ladder import Choice
from spec_trl.scheduling.selection import OPTIMISTIC, AcceptanceHistory

from .best_of_n_subject import BEST_OF_N, COPY, NONE, SELF, STORY, Subject, add_arguments, make_subject
from .calls import Call, Way, identical_rows, in_turns, ratios
from .measure import Finding, begin, shown, write_result
from .models import model_line, synthetic_line
from .workload import prompt_source


TOGGLED = "self, toggled"
WATCHED = "watched "  # and the member's name
BEGINNING = 5  # rounds in which a rollout's first choice shows: the first ones may measure the baseline
TOGETHER = 0.97  # a method this close to the best one is as good: repeats of one method differ as much


@dataclass
class Cell:
    """One model at one batch size on one kind of prompts; medians over repeats.

    Args:
        kind: of prompts.
        batch: rows.
        new_tokens: of each row.
        tokens_per_second: of each way, whole calls; members are always on at the ladder's γ, and watched.
        draft_lengths: that γ.
        block_efficiency: τ of each member by itself.
        expected_efficiency: τ by history of each member; None: it never drafted.
        expected_speedup: of each member over "none", by the ladder at that τ, or at that of p = 0.9.
        choices: how often which method drafted at the start of a rollout.
        best, best_watched: what measured best, of members and "none".
        chosen_to_best, chosen_to_best_watched: ratios of tokens/s within a repeat, of what was chosen most.
        self_to_none, to_none, to_self: likewise, of `self` under its toggle, and of `best_of_n` to "none" and to that
            `self`.
        to_none_by_repeat: the same, each.
        control_share: of `best_of_n`'s decisions in its seconds.
        speculative_share: of its rounds.
        races: rounds of it with a race.
        identical_rows, rows: of its completions, those equal to `none`'s.
    """

    kind: str
    batch: int
    new_tokens: int
    tokens_per_second: dict[str, float]
    draft_lengths: dict[str, int]
    block_efficiency: dict[str, float]
    expected_efficiency: dict[str, float | None]
    expected_speedup: dict[str, float]
    choices: dict[str, int]
    best: str
    best_watched: str
    chosen_to_best: float
    chosen_to_best_watched: float
    self_to_none: float
    to_none: float
    to_self: float
    to_none_by_repeat: list[float]
    control_share: float
    speculative_share: float
    races: int
    identical_rows: int
    rows: int

    @property
    def chosen(self) -> str:
        """At the start of most rollouts."""
        return max(self.choices, key=self.choices.__getitem__)

    @property
    def is_best(self) -> bool:
        """Whether the choice measured best of all that are always on, or as well as what did."""
        return self.chosen == self.best or self.chosen_to_best >= TOGETHER

    @property
    def is_best_watched(self) -> bool:
        """The same of all that are watched."""
        return self.chosen == self.best_watched or self.chosen_to_best_watched >= TOGETHER


def measure_cell(subject: Subject, kind: str, batch: int, tokens: int, options: argparse.Namespace) -> Cell:
    """Rollouts that fill the history, then all ways in turns."""
    model, ladder, seed = subject.loaded.model, subject.ladder, options.seed
    members = [name for name, drafter in subject.drafters.items() if batch <= drafter.max_rows]
    count = options.repeats + options.rollouts
    prompts = prompt_source(subject.loaded, None, batch * count, seed)
    works = [subject.work(prompts[i : i + batch], [kind] * batch, tokens) for i in range(0, batch * count, batch)]
    spec_trl.release(model)  # what other cells taught
    ours = subject.way(BEST_OF_N, list(subject.drafters))
    for rollout in range(options.rollouts):
        ours(works.pop(), seed - 1 - rollout)
    known = acceptance_history_of(model)
    # None of the prompts that are left was drafted for, so that all have the same expectation.
    keys = [prompt_key(torch.tensor(ids)) for ids in works[0].prompts]
    expected = {name: known.expected(name, keys) for name in members}
    planned = {
        name: Choice(name, *ladder.best_draft_length(name, own or OPTIMISTIC.block_efficiency, batch))
        for name, own in expected.items()
    }
    ways = {
        NONE: subject.way(NONE),
        **{
            name: subject.way(name, [name], SpeculativeConfig(draft_length=choice.draft_length, sd_toggle="always"))
            for name, choice in planned.items()
        },
        **{WATCHED + name: watched(subject, name, known) for name in members},
        TOGGLED: subject.way(SELF, [SELF]),
        BEST_OF_N: ours,
    }
    calls = in_turns(ways, works, seed)
    efficiencies = {name: own and own(planned[name].draft_length) for name, own in expected.items()}
    return summarise(kind, batch, tokens, planned, efficiencies, calls)


def watched(subject: Subject, name: str, known: AcceptanceHistory) -> Way:
    """A member by itself, under a control that knows what is known so far, and learns for itself alone."""
    history = AcceptanceHistory()
    history.load_state_dict(known.state_dict())
    control = make_control([subject.drafters[name]], subject.config, subject.profile, subject.ladder, history)
    return subject.way(BEST_OF_N, [name], control=control)


def first_choice(call: Call) -> str:
    """What drafted when the rollout had begun."""
    begun = [names for _, round_, names in call.statistics.timeline[0].changes if round_ < BEGINNING]
    return (begun[-1] or [NONE])[0]


def summarise(
    kind: str,
    batch: int,
    tokens: int,
    planned: dict[str, Choice],
    expected: dict[str, float | None],
    calls: dict[str, list[Call]],
) -> Cell:
    """Medians and ratios of a cell's calls."""
    speeds = {name: [call.tokens_per_second for call in made] for name, made in calls.items()}
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max([NONE, *planned], key=medians.__getitem__)
    as_watched = {NONE: NONE} | {name: WATCHED + name for name in planned}
    best_watched = max(as_watched, key=lambda name: medians[as_watched[name]])

    def ratio(ours: str, theirs: str) -> float:
        return statistics.median(ratios(speeds[ours], speeds[theirs]))

    ours = calls[BEST_OF_N]
    choices = Counter(map(first_choice, ours))
    chosen = choices.most_common(1)[0][0]
    identical, rows = identical_rows(ours, calls[NONE])
    return Cell(
        kind, batch, tokens, medians,
        draft_lengths={name: choice.draft_length for name, choice in planned.items()},
        block_efficiency={
            name: statistics.median(call.statistics.block_efficiency for call in calls[name]) for name in planned
        },
        expected_efficiency=expected,
        expected_speedup={name: choice.speedup for name, choice in planned.items()},
        choices=dict(choices),
        best=best,
        best_watched=best_watched,
        chosen_to_best=ratio(chosen, best),
        chosen_to_best_watched=ratio(as_watched[chosen], as_watched[best_watched]),
        self_to_none=ratio(TOGGLED, NONE),
        to_none=ratio(BEST_OF_N, NONE),
        to_self=ratio(BEST_OF_N, TOGGLED),
        to_none_by_repeat=ratios(speeds[BEST_OF_N], speeds[NONE]),
        control_share=statistics.median(call.statistics.phase_seconds["control"] / call.seconds for call in ours),
        speculative_share=statistics.median(call.speculative_share for call in ours),
        races=sum(0 if (racing := call.statistics.racing) is None else racing.rounds for call in ours),
        identical_rows=identical,
        rows=rows,
    )  # fmt: skip


def measure(target: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cells of one model."""
    subject = make_subject(target, options, folder)
    cells = []
    with tqdm(total=len(options.kinds) * len(options.batch), desc=str(subject.loaded.facts["model"])) as bar:
        for batch, tokens in zip(options.batch, options.new_tokens, strict=True):
            for kind in options.kinds:
                cells.append(measure_cell(subject, kind, batch, tokens, options))
                bar.update()
    return subject.loaded.facts | {
        "ladder_seconds": subject.ladder_seconds,
        "cells": [
            asdict(cell) | {"chosen": cell.chosen, "is_best": cell.is_best, "is_best_watched": cell.is_best_watched}
            for cell in cells
        ],
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, ["copier,float32"], "best_of_n")
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 4, 16], help="rows (default: %(default)s)")
    add("--new-tokens", type=int, nargs="+", default=[256, 256, 256], help="per row, by batch (%(default)s)")
    add("--kinds", nargs="+", choices=[STORY, COPY], default=[STORY, COPY], help="of prompts (default: both)")
    add("--rollouts", type=int, default=8, help="that fill the history (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each cell (default: %(default)s)")
    options = parser.parse_args()
    if len(options.batch) != len(options.new_tokens):
        parser.error(f"--new-tokens {options.new_tokens} must be as many as --batch {options.batch}")
    return options


def findings(result: dict[str, Any]) -> list[Finding]:
    """The first choice over the best method, and whole rollouts over `none` and `self`."""
    found = []
    for model in result["models"]:
        for cell in model["cells"]:
            what = f"{model_line(model)}, {cell['kind']}, batch {cell['batch']}, {cell['new_tokens']} new tokens"
            repeats = cell["to_none_by_repeat"]
            chosen = f"{what}: first choice {cell['chosen']}"
            found += [
                Finding(f"{what}: best_of_n", cell["to_none"], "×", "none", (min(repeats), max(repeats))),
                Finding(f"{what}: best_of_n", cell["to_self"], "×", "self, toggled"),
                Finding(chosen, cell["chosen_to_best"], "×", f"the best one, always on: {cell['best']}"),
                Finding(chosen, cell["chosen_to_best_watched"], "×", f"the best one, watched: {cell['best_watched']}"),
            ]
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured, and how often the choice was right."""
    options = result["options"]
    cells = [cell for model in result["models"] for cell in model["cells"]]
    count, share = len(cells), max(cell["control_share"] for cell in cells)
    return (
        f"γ = {options['draft_length']}, half and twice it in the ladder; temperature 1; {options['rollouts']} "
        f"rollouts fill the history. Tokens/s of whole `generate` calls within a repeat: median of "
        f"{options['repeats']} repeats in turns, lowest and highest. Watched: a method by itself under the control of "
        f"`best_of_n`, which turns it off where it stops paying. The first choice is the best method, or within "
        f"{1 - TOGETHER:.0%} of it, in {sum(cell['is_best'] for cell in cells)} of {count} cells; `best_of_n` is at "
        f"least as fast as `none` in {sum(cell['to_none'] >= 1 for cell in cells)} and as `self` in "
        f"{sum(cell['to_self'] >= 1 for cell in cells)}. Decisions took at most {share:.2%} of a rollout."
        + "".join(synthetic_line(model) for model in result["models"])
    )


def main() -> None:
    options = parse_arguments()
    machine, started = begin(options), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        models = [measure(target, options, Path(folder)) for target in options.models]
    result = {"options": shown(options), "models": models, "seconds": time.perf_counter() - started}
    title = "Best-of-N: the first choice, and whole rollouts"
    write_result(options.output, "best_of_n", title, setup(result), machine, findings(result), result)


if __name__ == "__main__":
    main()
