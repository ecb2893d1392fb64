"""Never slower: the self-drafter under the toggle against no speculation, and against always speculating.

Three ways to generate the same tokens: `none`, `always` (`self`, speculating in every round that its kernels serve)
and `toggle` (`self` with sd_toggle="roofline"), through `generate` as users call it, for each model and batch size.
They run in turns with a new first one each time (A B C, B C A, ...), so that a slow minute of the machine hits them
alike; ratios are medians over repeats of the ratio within a repeat. The toggle's control is kept from call to call, as
`generate` keeps it. What a first call costs when nothing is known is `benchmarks.first_call`'s question.

    python -m benchmarks.never_slower
    python -m benchmarks.never_slower --models shape:qwen2.5-0.5b,bfloat16 --batch 1 --repeats 9
    python -m benchmarks.never_slower --models "wide:examples/data/stories260K*16,float32"
"""

import argparse
import math
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedModel

from spec_trl import SpeculativeConfig
from spec_trl.generation.engine.requirements import position_limit
from spec_trl.measuring.fill_profile import calibrate

from .bookkeeping import Bookkeeping, measure_bookkeeping
from .calls import Call, Way, identical_rows, in_turns, ratios, way
from .measure import Finding, add_machine_arguments, begin, shown, stopwatch, write_result
from .models import DTYPES, check_model, load_model, model_line, synthetic_line
from .workload import STORY_MODEL, Workload, end_tokens, prompt_source


NONE, ALWAYS, TOGGLE = "none", "always", "toggle"
WAYS = (NONE, ALWAYS, TOGGLE)
TARGETS = [f"{STORY_MODEL},float32", "shape:qwen2.5-0.5b,bfloat16"]
FEWEST_TOKENS, MOST_TOKENS = 32, 256
# Prompts a quarter as long as usual: reading them takes the same time whatever decodes, and would hide differences.
PROMPT_SHARE = 4
AGAINST_NONE, AGAINST_BETTER, OVERHEAD = 0.97, 0.95, 0.01  # what should be reached


def make_ways(model: PreTrainedModel, draft_length: int, profile: Path) -> dict[str, Way]:
    """The three ways to generate, by name."""
    fixed = SpeculativeConfig(draft_length=draft_length, sd_toggle="always")
    toggled = replace(fixed, sd_toggle="roofline", roofline_profile=str(profile), roofline_mismatch="error")
    return {NONE: way(model, "none", fixed), ALWAYS: way(model, "self", fixed), TOGGLE: way(model, "self", toggled)}


@dataclass
class Cell:
    """One model at one batch size; medians over repeats.

    Args:
        batch: rows.
        new_tokens: limit per row.
        tokens_per_second: of each way, whole calls.
        toggle_to_none, toggle_to_better: of the tokens/s within a repeat; the better of `none` and `always` is the one
            with the higher median.
        decoding_toggle_to_none: the same without reading the prompts.
        better: which one that is.
        speculative_share: of each way's rounds.
        block_efficiency: τ of `always`; None where it never speculated.
        control_share: of the toggle's phase "control" in the call.
        bookkeeping: seconds of a round's bookkeeping, measured alone.
        bookkeeping_share: of a mean round of the toggle's calls, draft counts in as many as speculated.
        identical_rows, rows: of the toggle's completions, those equal to `none`'s.
    """

    batch: int
    new_tokens: int
    tokens_per_second: dict[str, float]
    toggle_to_none: float
    toggle_to_better: float
    decoding_toggle_to_none: float
    better: str
    speculative_share: dict[str, float]
    block_efficiency: float | None
    control_share: float
    bookkeeping: Bookkeeping
    bookkeeping_share: float
    identical_rows: int
    rows: int
    toggle_to_none_by_repeat: list[float]

    @property
    def passes(self) -> bool:
        """Whether both ratios are what they should be."""
        return self.toggle_to_none >= AGAINST_NONE and self.toggle_to_better >= AGAINST_BETTER


def summarise(work: Workload, calls: dict[str, list[Call]], bookkeeping: Bookkeeping) -> Cell:
    """Medians and ratios of a cell's calls."""
    rates = {name: [call.tokens_per_second for call in made] for name, made in calls.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    better = max((NONE, ALWAYS), key=medians.__getitem__)
    decoding = ratios(*([call.decoding_tokens_per_second for call in calls[name]] for name in (TOGGLE, NONE)))
    rounds = [call.seconds / call.statistics.rounds for call in calls[TOGGLE]]
    tau = [tau for call in calls[ALWAYS] if not math.isnan(tau := call.statistics.block_efficiency)]
    identical, rows = identical_rows(calls[TOGGLE], calls[NONE])
    shares = {name: statistics.median(call.speculative_share for call in made) for name, made in calls.items()}
    by_repeat = ratios(rates[TOGGLE], rates[NONE])
    return Cell(
        batch=len(work.prompts),
        new_tokens=work.max_new_tokens,
        tokens_per_second=medians,
        toggle_to_none=statistics.median(by_repeat),
        toggle_to_better=statistics.median(ratios(rates[TOGGLE], rates[better])),
        decoding_toggle_to_none=statistics.median(decoding),
        better=better,
        speculative_share=shares,
        block_efficiency=statistics.median(tau) if tau else None,
        control_share=statistics.median(
            call.statistics.phase_seconds["control"] / call.seconds for call in calls[TOGGLE]
        ),
        bookkeeping=bookkeeping,
        bookkeeping_share=bookkeeping.seconds(shares[TOGGLE]) / statistics.median(rounds),
        identical_rows=identical,
        rows=rows,
        toggle_to_none_by_repeat=by_repeat,
    )


def tokens_for(way: Way, work: Workload, seconds: float, most: int) -> int:
    """New tokens per row that `way` needs about `seconds` for, 32 at least and `most` at most.

    With fewer, the few rounds that the control measures at the start of a call would decide the comparison.
    """
    pilot = way(replace(work, max_new_tokens=FEWEST_TOKENS // 2, eos_token_ids=()), 0)
    reading = pilot.statistics.phase_seconds["prefill"]
    per_token = (pilot.seconds - reading) / pilot.statistics.rounds
    return max(FEWEST_TOKENS, min(int((seconds - reading) / per_token), most))


def measure(target: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All cells of one model."""
    spec, dtype = target.rsplit(",", 1)
    loaded = load_model(spec, DTYPES[dtype], options.device, options.agreement, options.seed)
    model, eos = loaded.model, end_tokens(loaded, options.ignore_eos)
    prompts = [
        ids[: max(1, len(ids) // PROMPT_SHARE)]
        for ids in prompt_source(loaded, options.prompts, max(options.batch), options.seed)
    ]
    longest = max(map(len, prompts))
    most = min(options.most_tokens, (position_limit(model) or 1 << 30) - longest)
    path = folder / f"{Path(spec).name.replace(':', '-')}.json"
    with stopwatch(model.device) as watch:
        profile = calibrate(
            model,
            SpeculativeConfig(draft_length=options.draft_length),
            max(options.batch),
            longest + most,
            options.calibration_seconds,
        )
    profile.save(path)
    ways = make_ways(model, options.draft_length, path)
    cells = []
    with tqdm(total=len(options.batch), desc=Path(spec).name) as bar:
        for batch in options.batch:
            work = Workload(prompts[:batch], FEWEST_TOKENS, 1.0, eos, model.generation_config.pad_token_id or 0)
            for way in ways.values():  # the first calls build caches and load kernels
                way(replace(work, max_new_tokens=8), options.seed)
            work = replace(work, max_new_tokens=tokens_for(ways[NONE], work, options.seconds, most))
            calls = in_turns(ways, [work] * options.repeats, options.seed)
            bookkeeping = measure_bookkeeping(batch, float(longest), options.draft_length, profile, model.device)
            cells.append(summarise(work, calls, bookkeeping))
            bar.update()
    return loaded.facts | {
        "calibration_seconds": watch.value,
        "calibration_samples": len(profile.samples),
        "draft_max_rows": profile.draft_max_rows,
        "diagnostics": profile.diagnostics,
        "cells": [asdict(cell) | {"passes": cell.passes} for cell in cells],
    }


def findings(result: dict[str, Any]) -> list[Finding]:
    """The toggle over `none`, and over the better of `none` and `always`."""
    found = []
    for model in result["models"]:
        for cell in model["cells"]:
            what = f"{model_line(model)}, batch {cell['batch']}, {cell['new_tokens']} new tokens"
            repeats = cell["toggle_to_none_by_repeat"]
            found.append(Finding(what, cell["toggle_to_none"], "×", NONE, (min(repeats), max(repeats))))
            found.append(Finding(what, cell["toggle_to_better"], "×", f"the better one: {cell['better']}"))
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured."""
    options = result["options"]
    cells = [cell for model in result["models"] for cell in model["cells"]]
    synthetic = {model["model"]: line for model in result["models"] if (line := synthetic_line(model))}
    return (
        f'"self" with the toggle (sd_toggle="roofline"), γ = {options["draft_length"]}, temperature 1, exact '
        f"verification. Tokens/s of whole `generate` calls within a repeat: median of {options['repeats']} repeats in "
        f"turns after a warm-up, lowest and highest. {sum(cell['passes'] for cell in cells)} of {len(cells)} cells "
        f"reach both {AGAINST_NONE} of `none` and {AGAINST_BETTER} of the better of `none` and always drafting."
        + "".join(f" {name}:{line}" for name, line in synthetic.items())
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=TARGETS, metavar="MODEL,DTYPE", help="folder, wide:FOLDER*k, shape:NAME; dtype "
        "(default: stories260K of examples/data in float32, shape:qwen2.5-0.5b in bfloat16)")  # fmt: skip
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy (%(default)s)")
    add("--batch", type=int, nargs="+", default=[1, 4, 16, 64], help="rows (default: %(default)s)")
    add("--draft-length", type=int, default=5, help="γ (default: %(default)s)")
    add("--repeats", type=int, default=5, help="of each cell (default: %(default)s)")
    add("--seconds", type=float, default=4.0, help="of one call, roughly; decides the new tokens (%(default)s)")
    add("--most-tokens", type=int, default=MOST_TOKENS, help="new ones per row (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="every row gets all new tokens: the batch never shrinks")
    add("--prompts", type=Path, help="JSON list of strings (default: examples/data/stories.json)")
    add("--calibration-seconds", type=float, default=120.0, help="at most, for the sweep (default: %(default)s)")
    add_machine_arguments(parser, "never_slower")
    options = parser.parse_args()
    for model in options.models:
        spec, _, dtype = model.rpartition(",")
        if not spec or dtype not in DTYPES:
            parser.error(f"--models {model}: name a dtype after a comma, one of {', '.join(DTYPES)}")
        try:
            check_model(spec)
        except ValueError as error:
            parser.error(f"--models {error}")
    if min(*options.batch, options.repeats, 1) < 1:
        parser.error(f"--batch {options.batch} and --repeats {options.repeats} must be 1 or more")
    if options.most_tokens < FEWEST_TOKENS:
        parser.error(f"--most-tokens {options.most_tokens} is below {FEWEST_TOKENS}, too few rounds to judge by")
    return options


def main() -> None:
    options = parse_arguments()
    machine, started = begin(options), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        models = [measure(target, options, Path(folder)) for target in options.models]
    result = {"options": shown(options), "models": models, "seconds": time.perf_counter() - started}
    write_result(
        options.output, "never_slower", "Never slower", setup(result), machine, findings(result), result
    )  # fmt: skip


if __name__ == "__main__":
    main()
