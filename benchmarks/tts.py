"""Test-Time Speculation (arXiv 2605.09329): drafters that learn while they draft, against the same ones frozen.

    python -m benchmarks.tts drafters --drafters DIR
    python -m benchmarks.tts strides --kinds eagle3 dflash --requests 8

Parts, each with a result file of its own:

    drafters       acceptance length by drafter, temperature and output depth (Tab. 1, 2; Fig. 1, 2, 5)
    strides        S and adaptive, synchronous and asynchronous: acceptance length and throughput (Tab. 3, 7, 8)
    steps          K (Fig. 6a)
    anchors        λ with anchors q_t and q_0
    rates          learning rates
    distributions  target entropy, draft cross-entropy on the target's likeliest token, by output depth (Fig. 4, 6b)
    run            scope "run" over many requests
    batch          several requests at a time: per request, per rollout
    defaults       tokens per second with the defaults, where updates run only if they pay: --batch, --scope

Drafters are trained on windows of 64 tokens, outputs are several hundred tokens long: so the drafter is out of its
training range, as the paper's are at thousands. DIR holds eagle3, dflash<block size> and small_lm; what is missing is
trained at first use. A part that is broken off goes on where it was with the same command.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

from spec_trl.generation.configuration import TTSScope

from .measure import RESULTS, add_machine_arguments, begin, shown, write_result
from .models import DTYPES, check_model, load_model
from .tts_drafters import KINDS, make_kind
from .tts_parts import PARTS, SEQUENCES, last_quarter, make_cells, summarise
from .tts_report import PART_TITLES, findings, setup
from .tts_runs import Bench, fingerprint, held_out_prompts, identity, loads
from .tts_store import Store
from .workload import STORIES, STORY_MODEL


STRIDES = [1, 2, 5, 10, 15, 20, 30, 50]
DRAFTERS, CELLS = Path("bench_output/tts_drafters"), Path("bench_output/tts_cells")
_RUN_PROMPTS = 1000  # requests that a part may come to at most; stories repeat, with other noise


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--target", default=str(STORY_MODEL), help="folder of the target (default: %(default)s)")
    add("--drafters", type=Path, default=DRAFTERS, help="folder of the drafters (default: %(default)s)")
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="drafters (default: all)")
    add("--block-size", type=int, default=16, help="of DFlash (default: %(default)s)")
    add("--quantization", default="rtn-w4-g128", help="of the self-drafter (default: %(default)s)")
    add("--rates", nargs="+", default=[], metavar="KIND=RATE", help="learning rates (default: spec_trl's)")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="default: %(default)s")
    add("--requests", type=int, default=16, help="default: %(default)s")
    add("--new-tokens", type=int, default=420, help="of each request (default: %(default)s)")
    add("--prompt-tokens", type=int, default=24, help="of each request (default: %(default)s)")
    add("--stories", type=Path, default=STORIES, help="JSON list of strings (default: examples/data/stories.json)")
    add("--strides", type=int, nargs="+", default=STRIDES, help="strides: S (default: %(default)s)")
    add("--steps", type=int, nargs="+", default=[1, 2, 4], help="steps: K (default: %(default)s)")
    add("--anchor-weights", type=float, nargs="+", default=[0.1, 1.0], help="anchors: λ but 0 (default: %(default)s)")
    add("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 3e-4, 1e-3], help="rates: η (default: "
        "%(default)s)")  # fmt: skip
    add("--updates", type=int, default=2000, help="run: at least this many (default: %(default)s)")
    add("--run-stride", type=int, default=1, help="run: S (default: %(default)s)")
    add("--run-asynchronous", action="store_true", help="run: update during the next rounds")
    add("--batch", type=int, default=8, help="batch, defaults: requests at a time (default: %(default)s)")
    add("--scope", default="request", choices=get_args(TTSScope), help="defaults: (default: %(default)s)")
    add("--adapter-rate", type=float, help="batch: η of per-request corrections (default: the drafter's)")
    add("--dtype", default="float32", choices=list(DTYPES), help="float64 must be identical (default: %(default)s)")
    add_machine_arguments(parser, "tts")
    parser.set_defaults(output=RESULTS)  # a folder: files are tts_PART....json
    add("--cells", type=Path, default=CELLS, help="folder of what a broken-off part has finished (%(default)s)")
    add("--suffix", default="", help="added to the files' names, for other settings, such as _float64")
    add("--fresh", action="store_true", help="forget the cells that are there")
    options = parser.parse_args()
    _check(parser, options)
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    lowest = {
        "requests": 1,
        "new_tokens": 21,
        "prompt_tokens": 2,
        "updates": 1,
        "batch": 1,
        "block_size": 2,
        "run_stride": 1,
    }
    for name, low in lowest.items():
        if getattr(options, name) < low:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be {low} or more")
    for name in ("strides", "steps"):
        if min(getattr(options, name)) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be 1 or more")
    if min(options.temperatures) < 0:
        parser.error(f"--temperatures {options.temperatures} must be 0 or more")
    for name in ("anchor_weights", "learning_rates"):
        if min(getattr(options, name)) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)} must be above 0")
    if options.adapter_rate is not None and options.adapter_rate <= 0:
        parser.error(f"--adapter-rate {options.adapter_rate} must be above 0")
    rates = {}
    for entry in options.rates:
        kind, _, rate = entry.partition("=")
        if kind not in KINDS or not _is_positive(rate):
            parser.error(f"--rates {entry}: give one of {', '.join(KINDS)}, '=' and a number above 0")
        rates[kind] = float(rate)
    options.rates = rates
    try:
        check_model(options.target)
    except ValueError as error:
        parser.error(f"--target {error}")


def _is_positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def main() -> None:
    options = parse_arguments()
    machine = begin(options)
    loaded = load_model(options.target, DTYPES[options.dtype], options.device)
    before = fingerprint(loaded.model)
    found = held_out_prompts(loaded, options.stories, options.prompt_tokens)
    prompts = [found[i % len(found)] for i in range(max(_RUN_PROMPTS, options.requests + options.batch))]
    settings = {
        "target": loaded.facts["model"], "target_weights": before, "dtype": options.dtype, "device": options.device,
        "threads": options.threads, "new_tokens": options.new_tokens, "prompt_tokens": options.prompt_tokens,
        "batch": options.batch if options.part in ("batch", "defaults") else 1, "seed": options.seed,
    }  # fmt: skip
    name = f"tts_{options.part}{options.suffix}.json"
    store = Store(options.cells / name, settings, options.fresh)
    kinds = [
        make_kind(
            kind, options.drafters, options.target, options.stories, options.block_size, options.rates.get(kind),
            options.quantization,
        )
        for kind in options.kinds
    ]  # fmt: skip
    facts: dict[str, dict[str, Any]] = {kind.name: kind.facts() for kind in kinds}
    bench = Bench(loaded, prompts, options.new_tokens, options.seed)
    cells = make_cells(options.part, bench, kinds, options, store)
    flat = [cell for made in cells.values() for cell in made]
    if options.part in SEQUENCES:
        summary = [
            {"kind": kind, "temperature": temperature, **last_quarter(made, options.seed)}
            for (kind, temperature), made in cells.items()
        ]
    else:
        summary = summarise(cells, options.seed)
    result: dict[str, Any] = {
        "part": options.part,
        "settings": settings,
        "options": shown(options, "target", "drafters", "stories", "cells"),
        "drafters": facts,
        "identity": identity(flat),
        "loads": loads(flat),
        "target_unchanged": fingerprint(loaded.model) == before,
        "summary": summary,
    }
    title = PART_TITLES[options.part]
    write_result(options.output / name, "tts", title, setup(result), machine, findings(result), result)
    if result["identity"]["unexplained"] or not result["target_unchanged"]:
        sys.exit('the output is not that of "none", or the target has changed')


if __name__ == "__main__":
    main()
