"""The default control on this machine: `"auto"` against no drafts and against single methods, from a fresh start.

A cell is a model, a batch and a kind of prompts: stories, or prompts whose completion repeats them. In each repeat
each way starts with all released that is kept for the model, and generates several times in a row, for other prompts
each time. Ways: `"none"`, `"auto"` with its defaults (the planner, without a profile), single methods that draft
always, so that no control costs them time, and with `--rule` `"auto"` under a rule of thirty lines (`control_rule`).
Ways take turns; ratios are medians over repeats of the ratio within one.

    python -m benchmarks.control_machine --prompts ../shared/data/tinystories/tinystories_1000.json
    python -m benchmarks.control_machine --models shape:qwen2.5-0.5b,float32 --tokens 48 --repeats 5 --calls 2 \\
        --single self history --output benchmarks/results/control_machine_05b.json

Rows of a wide float32 model may differ after a near-tie of two tokens: the result is written, and the command fails.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import LogitsProcessorList

from spec_trl import SpeculativeConfig
from spec_trl.generation.planner.control import Candidate

from .calls import Call, Way, forget, identical_rows, ratios, rotated, way
from .control_rule import FastestControl
from .measure import Finding, Options, begin, fresh_cache, shown, spread, write_result
from .models import LoadedModel, check_targets, load_target, model_line, weights_line
from .workload import STORY_MODEL, Copying, Workload, copy_heavy, end_tokens, prompt_source


NONE, AUTO, RULE = "none", "auto", "rule"
SINGLE = ("self", "history", "ngram")
STORY, COPY = "story", "copy-heavy"
PASSAGE = 32  # tokens of a prompt; in copy-heavy ones they come over and over
BEGUN = 4  # tokens of it that such a prompt has begun to repeat
COPYING = Copying(4, 0.95)  # where the model does not; ordinary text repeats three of four tokens rarely
AGAINST_NONE, AGAINST_BETTER, MOST_CELLS = 0.98, 0.95, 0.8  # what should be reached; the second in that share of cells


@dataclass(frozen=True)
class Start:
    """Calls in a row from a fresh start, and the CPU seconds of all threads in each."""

    calls: list[Call]
    cpu_seconds: list[float]


@dataclass
class Cell:
    """One model at one batch size on one kind of prompts; medians over repeats."""

    kind: str  # of prompts
    batch: int  # rows
    new_tokens: int  # of each row in a call
    seconds: dict[str, float]  # of all calls of a start, by way
    # Tokens/s of each way over `none`'s within a repeat: of all calls of a start, of the first, of the later ones, and
    # of all by CPU time.
    to_none: dict[str, dict[str, float]]
    better: str  # the faster one of `none` and the single methods
    to_better: float  # tokens/s of `auto` over its, likewise
    to_none_by_repeat: list[float]  # `auto`'s, all calls
    speculative_share: float  # of the rounds of `auto`
    control_share: float  # of its decisions, in its seconds
    control_microseconds: float  # and per round
    identical_rows: int  # of all other ways' completions, those equal to `none`'s
    rows: int


def summarise(kind: str, work: Workload, starts: dict[str, list[Start]]) -> Cell:
    """Medians and ratios of a cell's starts, by way and repeat."""
    wall = {name: [[call.seconds for call in start.calls] for start in own] for name, own in starts.items()}
    parts = {
        "all": {name: [sum(each) for each in own] for name, own in wall.items()},
        "first": {name: [each[0] for each in own] for name, own in wall.items()},
        "later": {name: [sum(each[1:]) for each in own] for name, own in wall.items()},
        "cpu": {name: [sum(start.cpu_seconds) for start in own] for name, own in starts.items()},
    }
    if not any(parts["later"][NONE]):
        del parts["later"]
    seconds = {name: statistics.median(each) for name, each in parts["all"].items()}
    better = min((name for name in starts if name not in (AUTO, RULE)), key=seconds.__getitem__)
    calls = {name: [call for start in own for call in start.calls] for name, own in starts.items()}
    control = [(call, call.statistics.phase_seconds["control"]) for call in calls[AUTO]]
    same = [identical_rows(made, calls[NONE]) for name, made in calls.items() if name != NONE]
    return Cell(
        kind, len(work.prompts), work.max_new_tokens, seconds,
        to_none={
            name: {part: statistics.median(ratios(taken[NONE], taken[name])) for part, taken in parts.items()}
            for name in starts if name != NONE
        },
        better=better,
        to_better=statistics.median(ratios(parts["all"][better], parts["all"][AUTO])),
        to_none_by_repeat=ratios(parts["all"][NONE], parts["all"][AUTO]),
        speculative_share=statistics.median(call.speculative_share for call in calls[AUTO]),
        control_share=statistics.median(seconds / call.seconds for call, seconds in control),
        control_microseconds=statistics.median(1e6 * seconds / call.statistics.rounds for call, seconds in control),
        identical_rows=sum(equal for equal, _ in same),
        rows=sum(rows for _, rows in same),
    )  # fmt: skip


def measure_cell(loaded: LoadedModel, kind: str, batch: int, options: argparse.Namespace) -> Cell:
    """Starts of all ways in turns."""
    model, repeats = loaded.model, options.repeats
    prompts = [
        copy_heavy(ids, PASSAGE, BEGUN) if kind == COPY else ids[:PASSAGE]
        for ids in prompt_source(loaded, options.prompts, batch * repeats * options.calls, options.seed)
    ]
    pad = model.generation_config.pad_token_id or 0
    works = [Workload(prompts[i : i + batch], options.tokens, 1.0, (), pad) for i in range(0, len(prompts), batch)]
    always = SpeculativeConfig(sd_toggle="always")
    processors = LogitsProcessorList([COPYING] if kind == COPY else [])
    ways = {
        name: way(model, name, SpeculativeConfig() if name == AUTO else always, logits_processor=processors)
        for name in (NONE, AUTO, *options.single)
    }

    def ruled() -> Way:
        candidates = [Candidate("self", 10, 1.0, 1 << 30), Candidate("history", 10, 1.0, 1 << 30, is_network=False)]
        rule = FastestControl(candidates, SpeculativeConfig().choice_of_draft_lengths())
        return way(model, AUTO, SpeculativeConfig(), logits_processor=processors, control=rule)

    if options.rule:
        ways[RULE] = ruled()
    for each in ways.values():  # what the process prepares once
        each(replace(works[0], max_new_tokens=4), options.seed)
    starts: dict[str, list[Start]] = {name: [] for name in ways}
    for repeat in tqdm(range(repeats), f"{loaded.facts['model']}, {kind}, batch {batch}"):
        first = repeat * options.calls
        for name in rotated(list(ways), repeat):
            forget(model)
            if name == RULE:  # it keeps its measurements for the calls of a start
                ways[name] = ruled()
            starts[name].append(start(ways[name], works[first : first + options.calls], options.seed + first))
    forget(model)
    return summarise(kind, works[0], starts)


def start(own: Way, works: Sequence[Workload], seed: int) -> Start:
    """One call after the other."""
    calls, cpu_seconds = [], []
    for number, work in enumerate(works):
        began = time.process_time()
        calls.append(own(work, seed + number))
        cpu_seconds.append(time.process_time() - began)
    return Start(calls, cpu_seconds)


def measure(target: str, options: argparse.Namespace) -> dict[str, Any]:
    """All cells of one model."""
    loaded = load_target(target, options.device, options.agreement, options.seed)
    end_tokens(loaded, ignore_eos=True)  # rows of one length are the same work in every way
    cells = [asdict(measure_cell(loaded, kind, batch, options)) for batch in options.batches for kind in options.kinds]
    return loaded.facts | {"cells": cells}


def findings(result: dict[str, Any]) -> list[Finding]:
    """`auto` over `none` and over the better one."""
    found = []
    for model in result["models"]:
        for cell in model["cells"]:
            what = f"{model_line(model)}, {cell['kind']}, batch {cell['batch']}"
            own, repeats = cell["to_none"][AUTO], cell["to_none_by_repeat"]
            found += [
                Finding(what, own["all"], "×", NONE, spread(repeats)),
                Finding(f"{what}: first call", own["first"], "×", NONE),
                Finding(f"{what}: CPU time", own["cpu"], "×", NONE),
                Finding(what, cell["to_better"], "×", f"the better one: {cell['better']}"),
            ]
            if RULE in cell["to_none"]:
                found.append(Finding(f"{what}: the rule", cell["to_none"][RULE]["all"], "×", NONE))
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured, and in how many cells it is as it should be."""
    cells = [cell for model in result["models"] for cell in model["cells"]]
    options, count = result["options"], len(cells)
    slower = [cell["to_none"][AUTO]["all"] < AGAINST_NONE for cell in cells]
    better = sum(cell["to_better"] >= AGAINST_BETTER for cell in cells)
    shares, micros = ([cell[f"control_{name}"] for cell in cells] for name in ("share", "microseconds"))
    same, rows = (sum(cell[name] for cell in cells) for name in ("identical_rows", "rows"))
    single = f" and {', '.join(options['single'])} that draft always" if options["single"] else ""
    return (
        f'"auto" with its defaults against "none"{single}, from a fresh '
        f"start {options['calls']} calls in a row of {options['tokens']} new tokens per row, temperature 1. "
        f"Tokens/s of all calls of a start: median of {options['repeats']} repeats in "
        f"turns, lowest and highest. At least {AGAINST_NONE} of `none` in {count - sum(slower)} of {count} cells "
        f"(wanted: all), {AGAINST_BETTER} of the better of `none` and a single method in {better} (wanted: "
        f"{MOST_CELLS:.0%}). {same} of {rows} completions are `none`'s. "
        f"Decisions took {min(shares):.2%} to {max(shares):.2%} of a call, {min(micros):.0f} to {max(micros):.0f} "
        "microseconds a round."
        + "".join(weights_line(model) for model in result["models"])
    )


def main(arguments: Sequence[str] | None = None) -> None:
    tiny = "--models shape:tiny,float64 --batches 2 --kinds copy-heavy --single history --repeats 1 --calls 2 --rule"
    parser = Options(__doc__, "control_machine", f"{tiny} --tokens 4")
    add = parser.add_argument
    add("--models", nargs="+", default=[f"{STORY_MODEL},float32"], metavar="MODEL,DTYPE", help="folder or shape:NAME")
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy")
    add("--batches", type=int, nargs="+", default=[1, 4, 16], help="rows")
    add("--kinds", nargs="+", choices=[STORY, COPY], default=[STORY, COPY], help="of prompts")
    add("--single", nargs="*", choices=SINGLE, default=SINGLE, help="methods to compare with")
    add("--rule", action="store_true", help="measures the rule of thirty lines too")
    add("--tokens", type=int, default=192, help="new ones per row and call")
    add("--calls", type=int, default=3, help="in a row from a fresh start")
    add("--repeats", type=int, default=10, help="of each cell")
    add("--prompts", type=Path, help="JSON list of strings; default: examples/data/stories.json")
    options = parser.read(arguments, "batches", "repeats", "tokens", "calls")
    check_targets(parser, options.models)
    machine, started = begin(options), time.perf_counter()
    with fresh_cache():  # no profile and no ladder of an earlier run
        models = [measure(target, options) for target in options.models]
    result = {"options": shown(options), "models": models, "seconds": time.perf_counter() - started}
    title = "The default control on this machine"
    write_result(
        options.output, "never_slower", title, setup(result), machine, options.repeats, findings(result), result
    )
    if differing := sum(cell["rows"] - cell["identical_rows"] for model in models for cell in model["cells"]):
        raise SystemExit(f'{differing} completions differ from those of "none"')


if __name__ == "__main__":
    main()
