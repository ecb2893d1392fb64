"""Never slower: the self-drafter under the toggle against no speculation, and against always speculating.

Three ways to generate the same tokens: `none`, `always` (`self`, speculating in every round that its kernels serve)
and `toggle` (`self` with sd_toggle="roofline"), through `generate` as users call it, for each model and batch size.
They run in turns with a new first one each time (A B C, B C A, ...), so that a slow minute of the machine hits them
alike; ratios are medians over repeats of the ratio within a repeat. The toggle's control is kept from call to call, as
`generate` keeps it. What a first call costs when nothing is known is `benchmarks.first_call`'s question.

    python -m benchmarks.never_slower
    python -m benchmarks.never_slower --models shape:qwen2.5-0.5b,bfloat16 --batch 1 --repeats 9
"""

import argparse
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from spec_trl import SpeculativeConfig
from spec_trl.generation.engine.requirements import position_limit
from spec_trl.generation.engine.statistics import SpeculationStatistics
from spec_trl.measuring.fill_profile import calibrate
from spec_trl.scheduling.profile import Profile

from .bookkeeping import Bookkeeping, measure_bookkeeping
from .measure import RESULTS, describe_machine, machine_line, markdown_table, stopwatch, write_result
from .models import DTYPES, SHAPE_PREFIX, load_model
from .rollout import sampling
from .workload import STORY_MODEL, Workload, end_tokens, prompt_source


NONE, ALWAYS, TOGGLE = "none", "always", "toggle"
WAYS = (NONE, ALWAYS, TOGGLE)
TARGETS = [f"{STORY_MODEL},float32", "shape:qwen2.5-0.5b,bfloat16"]
FEWEST_TOKENS, MOST_TOKENS = 32, 256
# Prompts a quarter as long as usual: reading them takes the same time whatever decodes, and would hide differences.
PROMPT_SHARE = 4
AGAINST_NONE, AGAINST_BETTER, OVERHEAD = 0.97, 0.95, 0.01  # what should be reached


@dataclass(frozen=True)
class Call:
    """One `generate` call: seconds on the caller's clock, and the call's statistics."""

    seconds: float
    completions: list[list[int]]
    statistics: SpeculationStatistics

    @property
    def tokens_per_second(self) -> float:
        """Of the whole call."""
        return sum(map(len, self.completions)) / self.seconds

    @property
    def decoding_tokens_per_second(self) -> float:
        """Without reading the prompts."""
        return sum(map(len, self.completions)) / (self.seconds - self.statistics.phase_seconds["prefill"])

    @property
    def speculative_share(self) -> float:
        """Of the decoding rounds, those with a draft."""
        spans, rounds = self.statistics.speculating, self.statistics.rounds
        ends = [start for start, _ in spans[1:]] + [rounds]
        return sum(end - start for (start, length), end in zip(spans, ends, strict=True) if length) / rounds


Way = Callable[[Workload, int], Call]


def make_ways(model: PreTrainedModel, draft_length: int, profile: Path) -> dict[str, Way]:
    """The three ways to generate, by name."""
    fixed = SpeculativeConfig(draft_length=draft_length, sd_toggle="always")
    toggled = replace(fixed, sd_toggle="roofline", roofline_profile=str(profile), roofline_mismatch="error")

    def way(strategy: str, config: SpeculativeConfig) -> Way:
        def call(work: Workload, seed: int) -> Call:
            inputs = work.padded(model.device)
            with stopwatch(model.device) as watch:
                output = model.generate(
                    **inputs,
                    **sampling(work),
                    assistant_strategy=strategy,
                    speculative_config=replace(config, seed=seed),
                    return_dict_in_generate=True,
                )
            if output.statistics.drafter_failure is not None:
                raise RuntimeError(f"the drafter failed: {output.statistics.drafter_failure}")
            new = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
            rows = [row[:length] for row, length in zip(new, output.lengths.tolist(), strict=True)]
            return Call(watch.value, rows, output.statistics)

        return call

    return {NONE: way("none", fixed), ALWAYS: way("self", fixed), TOGGLE: way("self", toggled)}


def in_turns(ways: dict[str, Way], work: Workload, repeats: int, seed: int) -> dict[str, list[Call]]:
    """Each way `repeats` times, the first of a repeat being the second of the one before it; seed + i in repeat i."""
    names = list(ways)
    calls: dict[str, list[Call]] = {name: [] for name in names}
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            calls[name].append(ways[name](work, seed + repeat))
    return calls


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
    decoding = [
        ours.decoding_tokens_per_second / none.decoding_tokens_per_second
        for ours, none in zip(calls[TOGGLE], calls[NONE], strict=True)
    ]
    rounds = [call.seconds / call.statistics.rounds for call in calls[TOGGLE]]
    tau = [tau for call in calls[ALWAYS] if not math.isnan(tau := call.statistics.block_efficiency)]
    pairs = [
        (ours, theirs)
        for toggle, none in zip(calls[TOGGLE], calls[NONE], strict=True)
        for ours, theirs in zip(toggle.completions, none.completions, strict=True)
    ]
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
        identical_rows=sum(ours == theirs for ours, theirs in pairs),
        rows=len(pairs),
        toggle_to_none_by_repeat=by_repeat,
    )


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Within each repeat."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


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
            calls = in_turns(ways, work, options.repeats, options.seed)
            bookkeeping = measure_bookkeeping(batch, float(longest), options.draft_length, profile, model.device)
            cells.append(summarise(work, calls, bookkeeping))
            bar.update()
    return loaded.facts | {
        "calibration_seconds": watch.value,
        "calibration_samples": len(profile.samples),
        "profile": profile_facts(profile),
        "cells": [asdict(cell) | {"passes": cell.passes} for cell in cells],
    }


def profile_facts(profile: Profile) -> dict[str, Any]:
    """What a reader needs to judge the toggle's decisions."""
    return {
        "coefficients": asdict(profile.roofline.coefficients),
        "draft_max_rows": profile.draft_max_rows,
        "diagnostics": profile.diagnostics,
    }


def report(result: dict[str, Any]) -> str:
    """`result` as Markdown."""
    options = result["options"]
    lines = [
        "# Never slower",
        "",
        machine_line(result["machine"]),
        "",
        f"γ = {options['draft_length']}, temperature 1, exact verification, {options['repeats']} repeats in turns "
        f"after a warm-up. Ratios are medians of tokens/s of whole `generate` calls within a repeat; wanted are "
        f"{AGAINST_NONE} of `none` and {AGAINST_BETTER} of the better of `none` and `always`. Control: the toggle's "
        "decisions as timed inside the calls. Bookkeeping: decisions, records of rounds, draft counters and clocks "
        f"of one round, timed alone, as a share of a mean round; wanted is below {OVERHEAD:.0%}. The whole benchmark "
        f"took {result['seconds']:.0f} s.",
        "",
    ]
    header = ["model", "batch", "new tokens", "none tok/s", "always", "toggle", "toggle/none", "toggle/better"]
    header += ["decoding alone", "rounds speculating (always)", "τ always", "control", "bookkeeping", "rows as none"]
    rows = []
    for model in result["models"]:
        for cell in model["cells"]:
            rates, share, tau = cell["tokens_per_second"], cell["speculative_share"], cell["block_efficiency"]
            bookkeeping = Bookkeeping(**cell["bookkeeping"]).seconds(share[TOGGLE])
            rows.append(
                [f"{model['model']}, {model['dtype']}", str(cell["batch"]), str(cell["new_tokens"])]
                + [f"{rates[name]:.1f}" for name in WAYS]
                + [f"{cell['toggle_to_none']:.3f}", f"{cell['toggle_to_better']:.3f} ({cell['better']})"]
                + [f"{cell['decoding_toggle_to_none']:.3f}", f"{share[TOGGLE]:.0%} ({share[ALWAYS]:.0%})"]
                + ["–" if tau is None else f"{tau:.2f}", f"{cell['control_share']:.2%}"]
                + [f"{cell['bookkeeping_share']:.2%} ({1e6 * bookkeeping:.0f} µs)"]
                + [f"{cell['identical_rows']}/{cell['rows']}"]
            )
    lines += [markdown_table(header, rows), ""]
    cells = [cell for model in result["models"] for cell in model["cells"]]
    lines.append(f"{sum(cell['passes'] for cell in cells)} of {len(cells)} cells reach both ratios.")
    for model in result["models"]:
        diagnostics = model["profile"]["diagnostics"]
        lines.append(
            f"Calibration of {model['model']}: {model['calibration_seconds']:.1f} s, {model['calibration_samples']} "
            f"samples, error of the fit {diagnostics['target_mape']:.1%} (target), {diagnostics['cycle_mape']:.1%} "
            "(cycle)."
        )
        if model["synthetic_weights"]:
            overlap = model["agreement"]["overlap_packed_head"]
            lines.append(f"{model['model']} has synthetic weights, overlap with the 4-bit copy {overlap:.3f}.")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--models", nargs="+", default=TARGETS, metavar="MODEL,DTYPE", help="folder or shape:NAME, and a dtype "
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
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    add("--threads", type=int, default=torch.get_num_threads(), help="of torch (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights, prompts and sampling (default: %(default)s)")
    add("--output", type=Path, default=RESULTS / "never_slower.json", help="the .md goes beside it (%(default)s)")
    options = parser.parse_args()
    for model in options.models:
        spec, _, dtype = model.rpartition(",")
        if not spec or dtype not in DTYPES:
            parser.error(f"--models {model}: name a dtype behind a comma, one of {', '.join(DTYPES)}")
        if not spec.startswith(SHAPE_PREFIX) and not Path(spec).is_dir():
            parser.error(f"--models {spec}: no such folder; name one, or {SHAPE_PREFIX}NAME for synthetic weights")
    if min(*options.batch, options.repeats, 1) < 1:
        parser.error(f"--batch {options.batch} and --repeats {options.repeats} must be 1 or more")
    if options.most_tokens < FEWEST_TOKENS:
        parser.error(f"--most-tokens {options.most_tokens} is below {FEWEST_TOKENS}, too few rounds to judge by")
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    # transformers says that a story model's own limit on the length yields to max_new_tokens.
    warnings.filterwarnings("ignore", message=".*max_new_tokens.*")
    started = time.perf_counter()
    machine = describe_machine(torch.device(options.device))
    with tempfile.TemporaryDirectory() as folder:
        models = [measure(target, options, Path(folder)) for target in options.models]
    shown = {name: value for name, value in vars(options).items() if name not in ("output", "prompts", "models")}
    result: dict[str, Any] = {
        "machine": machine, "options": shown, "models": models, "seconds": time.perf_counter() - started,
    }  # fmt: skip
    write_result(options.output, result, report(result))


if __name__ == "__main__":
    main()
