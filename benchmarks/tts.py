"""Test-Time Speculation (arXiv 2605.09329): drafters that learn while they draft, against the same ones frozen.

    python -m benchmarks.tts drafters --drafters DIR
    python -m benchmarks.tts strides --kinds eagle3 dflash --requests 8

Parts, each with a result file of its own:

    drafters       acceptance length by drafter, temperature and output depth (Tab. 1, 2; Fig. 1, 2, 5)
    strides        S and adaptive, synchronous and asynchronous: acceptance length and throughput (Tab. 3, 7, 8)
    rates          learning rates
    run            scope "run" over many requests
    batch          several requests at a time: per request, per rollout
    defaults       tokens per second with the defaults, where updates run only if they pay: --batch, --scope

Drafters are trained on windows of 64 tokens, outputs are several hundred tokens long: so the drafter is out of its
training range, as the paper's are at thousands. DIR holds eagle3, dflash<block size> and small_lm; what is missing is
trained at first use.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from spec_trl import SpeculativeConfig
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.papers.test_time_speculation.options import TTSOptions

from .calls import Call, rotated
from .measure import RESULTS, TINY_RESULTS, Options, begin, shown, stopwatch, write_result
from .models import DTYPES, LoadedModel, check_targets, load_model
from .tts_drafters import FROZEN, HELD_OUT, KINDS, NONE, TTS, Kind, make_kind
from .tts_report import PART_TITLES, Cell, Record, by_depth, findings, identity, last_quarter, setup, summarise
from .workload import STORIES, STORY_MODEL, common_prefix


STRIDES = [1, 2, 5, 10, 15, 20, 30, 50]
DRAFTERS = Path("bench_output/tts_drafters")
WARM_UP_TOKENS = 8
MOST_PROMPTS = 1000  # requests that a part may come to at most; stories repeat, with other noise


# ---- which ways to learn a part compares ---------------------------------------------------------------------------


Ways = dict[str, TTSOptions | None]
SEQUENCES = ("run", "defaults")
"""Parts whose drafters go on with what they learned, from request to request."""


def strides_ways(kind: Kind, options: argparse.Namespace) -> Ways:
    """Update strides, each synchronous and asynchronous (TTS Tab. 3, 7, 8)."""
    strides = [(f"S={stride}", stride) for stride in options.strides] + [("adaptive", None)]
    ways: Ways = {}
    for name, stride in strides:
        ways[name] = kind.how(stride=stride)
        ways[f"{name} async"] = kind.how(stride=stride, asynchronous=True)
    return ways


WAYS: dict[str, Callable[[Kind, argparse.Namespace], Ways]] = {
    "drafters": lambda kind, options: {TTS: kind.how()},
    "strides": strides_ways,
    "rates": lambda kind, options: {f"η={rate:g}": kind.how(learning_rate=rate) for rate in options.learning_rates},
    # Requests of one batch that learn apart, low-rank corrections, or together, all weights.
    "batch": lambda kind, options: {
        "TTS, per request": kind.how(learning_rate=None),
        "TTS, per rollout": kind.how(scope="rollout"),
    },
}
"""What is compared with the frozen drafter, by part."""
PARTS = (*WAYS, *SEQUENCES)


# ---- calls ---------------------------------------------------------------------------------------------------------


@contextmanager
def committed_by(drafter: Drafter) -> Iterator[list[int]]:
    """Yields a list that gets the number of tokens which each round of one request commits; the first entry is the
    prompt's token."""
    committed, observe = list[int](), drafter.observe

    def observed(tokens: Any, counts: Any) -> None:
        committed.append(int(counts[0]))
        observe(tokens, counts)

    drafter.observe = observed  # type: ignore[method-assign]
    try:
        yield committed
    finally:
        del drafter.observe


@dataclass(frozen=True)
class Bench:
    """What all runs share. An end of sequence before `new_tokens` is suppressed; the noise of a request is that of
    `seed` and its number."""

    loaded: LoadedModel
    prompts: list[list[int]]
    new_tokens: int
    seed: int

    def generate(
        self, drafter: Drafter | None, draft_length: int, requests: Sequence[int], temperature: float,
        new_tokens: int | None = None,
    ) -> tuple[Call, list[int]]:  # fmt: skip
        """Generates `requests` as one batch; of a single request also the tokens that each round committed.

        Raises:
            RuntimeError: the drafter failed, which the engine survives and a measurement does not.
        """
        model, count = self.loaded.model, new_tokens or self.new_tokens
        ids = torch.tensor([self.prompts[request] for request in requests], device=model.device)  # [B, prompt]
        sampling: dict[str, object] = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        counted = nullcontext([1] * count) if drafter is None else committed_by(drafter)
        with counted as counts, stopwatch(model.device) as watch:
            output = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), **sampling, min_new_tokens=count,
                max_new_tokens=count, pad_token_id=model.generation_config.pad_token_id or 0,
                assistant_strategy="none" if drafter is None else drafter.strategy,
                drafter=[] if drafter is None else drafter, request_ids=list(requests), return_dict_in_generate=True,
                speculative_config=SpeculativeConfig(draft_length=draft_length, seed=self.seed, sd_toggle="always"),
            )  # fmt: skip
        if output.statistics.drafter_failure is not None:
            raise RuntimeError(f"the drafter failed: {output.statistics.drafter_failure}")
        made = Call(watch.value, output.sequences[:, ids.shape[1] :].tolist(), output.statistics)
        return made, counts[1:] if len(requests) == 1 else []

    def record(self, made: Call, rounds: list[int]) -> Record:
        """What a result keeps of one call, as plain data."""
        facts, total = made.statistics, made.statistics.total
        record: Record = {
            "seconds": round(made.seconds, 4), "tokens": facts.tokens, "is_batch": len(made.completions) > 1,
        }  # fmt: skip
        if not record["is_batch"]:
            record["blocks"], record["committed"] = by_depth(rounds, self.new_tokens)
            if total.blocks not in (0, sum(record["blocks"])):
                raise RuntimeError(f"rounds {rounds} do not add up to the engine's {total}")
        else:
            record["blocks"] = [counts.blocks for counts in facts.per_request]
            record["committed"] = [counts.committed for counts in facts.per_request]
        if facts.learning is not None:
            learned = facts.learning
            record |= {
                "updates": learned.updates, "update_seconds": round(learned.seconds, 4),
                "waited": round(learned.waited, 4),
            }  # fmt: skip
        return record


def with_identity(record: Record, made: Call, plain: Call) -> Record:
    """`record` with "same", tokens up to the first that differs from "none"'s, and the number of rows that differ."""
    pairs = list(zip(made.completions, plain.completions, strict=True))
    return record | {"same": sum(common_prefix(*pair) for pair in pairs), "differ": sum(a != b for a, b in pairs)}


def held_out_prompts(loaded: LoadedModel, stories: Path, tokens: int) -> list[list[int]]:
    """Beginnings, `tokens` long, of the stories that no drafter is trained on; the last story first.

    Raises:
        ValueError: there is no story, or none is long enough.
    """
    if not stories.exists():
        raise ValueError(f"--stories {stories.name} does not exist: pass a JSON list of strings")
    texts = json.loads(stories.read_text())[-HELD_OUT:][::-1]
    assert loaded.tokenizer is not None
    found = [ids[:tokens] for ids in loaded.tokenizer(texts)["input_ids"] if len(ids) >= tokens]
    if not found:
        raise ValueError(f"--prompt-tokens {tokens}: no story is that long")
    return found


def fingerprint(model: PreTrainedModel) -> str:
    """Of all parameters, bit for bit."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def in_turns(
    bench: Bench, drafters: Mapping[str, Drafter | None], draft_length: int, requests: Sequence[int],
    temperature: float, shift: int, beside_frozen: bool = False,
) -> Cell:  # fmt: skip
    """Every way once on the same requests as one batch, a different one first each time (`shift`).

    A slow minute of the machine then hits all of them alike. "none" must be among them. With `beside_frozen` the
    frozen drafter runs once more right before each way that learns, or in every other cell right after it:
    "frozen_seconds". Many ways take minutes, in which a machine's load changes.
    """
    made: dict[str, tuple[Call, list[int]]] = {}
    paired: dict[str, float] = {}
    for name in rotated(list(drafters), shift):
        order = [name]
        if beside_frozen and name not in (NONE, FROZEN):
            order = [name, FROZEN] if shift % 2 else [FROZEN, name]
        for each in order:
            run = bench.generate(drafters[each], draft_length, requests, temperature)
            if each == name:
                made[name] = run
            else:
                paired[name] = run[0].seconds
    records = {name: with_identity(bench.record(*run), run[0], made[NONE][0]) for name, run in made.items()}
    for name, seconds in paired.items():
        records[name]["frozen_seconds"] = round(seconds, 4)
    return records


# ---- cells ---------------------------------------------------------------------------------------------------------


def make_cells(
    part: str, bench: Bench, kinds: Sequence[Kind], options: argparse.Namespace
) -> dict[tuple[str, float], list[Cell]]:
    """All cells of a part, in the order of requests, by drafter and temperature."""
    model, cells = bench.loaded.model, dict[tuple[str, float], list[Cell]]()
    batch = options.batch if part in ("batch", "defaults") else 1
    for kind in kinds:
        if part not in SEQUENCES:
            ways = {FROZEN: None} | WAYS[part](kind, options)
            drafters = {NONE: None} | {name: kind.drafter(model, how) for name, how in ways.items()}
            for drafter in drafters.values():  # makes what is kept from call to call
                bench.generate(drafter, kind.draft_length, range(batch), 1.0, min(WARM_UP_TOKENS, bench.new_tokens))
        for temperature in options.temperatures:
            found = cells[kind.name, temperature] = []
            if part in SEQUENCES:  # one drafter for all requests, which goes on with what it learned
                how = kind.how(scope=options.scope, stride=None)
                if part == "run":
                    how = kind.how(scope="run", stride=options.run_stride, asynchronous=options.run_asynchronous)
                ways = {FROZEN: None, TTS: how}
                drafters = {NONE: None} | {name: kind.drafter(model, own) for name, own in ways.items()}
            most = options.updates if part == "run" else options.requests
            with tqdm(total=most, desc=f"{part}, {kind.name}, T={temperature:g}") as bar:
                while (done := progress(part, found, batch)) < most:
                    bar.update(done - bar.n)
                    first = len(found) * batch
                    requests = [(first + i) % len(bench.prompts) for i in range(batch)]
                    beside = part == "strides"  # whose throughput matters
                    found.append(
                        in_turns(bench, drafters, kind.draft_length, requests, temperature, len(found), beside)
                    )
    return cells


def progress(part: str, found: Sequence[Cell], batch: int) -> int:
    """Updates where those are counted ("run"), else requests."""
    return sum(cell[TTS]["updates"] for cell in found) if part == "run" else len(found) * batch


# ---- the command ---------------------------------------------------------------------------------------------------


TINY = "drafters --kinds self --temperatures 1 --requests 1 --new-tokens 21 --prompt-tokens 4 --dtype float64"
TINY += " --quantization rtn-w4-g32"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Options(__doc__, "tts", TINY)
    add = parser.add_argument
    add("part", choices=PARTS)
    add("--target", default=str(STORY_MODEL), help="folder of the target")
    add("--drafters", type=Path, default=DRAFTERS, help="folder of the drafters")
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS, help="drafters (default: all)")
    add("--block-size", type=int, default=16, help="of DFlash")
    add("--quantization", default="rtn-w4-g128", help="of the self-drafter")
    add("--learning-rate", type=float, help="η; default: spec_trl's")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    add("--requests", type=int, default=16)
    add("--new-tokens", type=int, default=420, help="of each request")
    add("--prompt-tokens", type=int, default=24, help="of each request")
    add("--stories", type=Path, default=STORIES, help="JSON list of strings (default: examples/data/stories.json)")
    add("--strides", type=int, nargs="+", default=STRIDES, help="strides: S")
    add("--learning-rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-4, 3e-4, 1e-3], help="rates: η")
    add("--updates", type=int, default=2000, help="run: at least this many")
    add("--run-stride", type=int, default=1, help="run: S")
    add("--run-asynchronous", action="store_true", help="run: update during the next rounds")
    add("--batch", type=int, default=8, help="batch, defaults: requests at a time")
    add("--scope", default="request", choices=("request", "rollout", "run"), help="defaults:")
    add("--dtype", default="float32", choices=list(DTYPES), help="float64 must be identical")
    parser.set_defaults(output=RESULTS)  # a folder: files are tts_PART....json
    add("--suffix", default="", help="added to the files' names, for other settings, such as _float64")
    counts = "requests", "updates", "batch", "run_stride", "strides"
    options = parser.read(arguments, *counts)
    parser.at_least(2, options, "prompt_tokens", "block_size")
    parser.at_least(21, options, "new_tokens")
    options.output = TINY_RESULTS if options.tiny else options.output  # a folder: files are tts_PART....json
    if min(options.temperatures) < 0:
        parser.error(f"--temperatures {options.temperatures} must be 0 or more")
    if min(*options.learning_rates, options.learning_rate or 1) <= 0:
        parser.error("--learning-rates and --learning-rate must be above 0")
    check_targets(parser, [f"{options.target},{options.dtype}"])
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    machine = begin(options)
    loaded = load_model(options.target, DTYPES[options.dtype], options.device)
    before = fingerprint(loaded.model)
    found = held_out_prompts(loaded, options.stories, options.prompt_tokens)
    prompts = [found[i % len(found)] for i in range(max(MOST_PROMPTS, options.requests + options.batch))]
    settings = {
        "target": loaded.facts["model"], "target_weights": before, "dtype": options.dtype, "device": options.device,
        "threads": options.threads, "new_tokens": options.new_tokens, "prompt_tokens": options.prompt_tokens,
        "batch": options.batch if options.part in ("batch", "defaults") else 1, "seed": options.seed,
    }  # fmt: skip
    name = f"tts_{options.part}{options.suffix}.json"
    places = options.drafters, options.target, options.stories, options.block_size
    kinds = [make_kind(kind, *places, options.learning_rate, options.quantization) for kind in options.kinds]
    bench = Bench(loaded, prompts, options.new_tokens, options.seed)
    cells = make_cells(options.part, bench, kinds, options)
    flat = [cell for made in cells.values() for cell in made]
    if options.part in SEQUENCES:
        summary = [
            {"kind": kind, "temperature": temperature, **last_quarter(made, options.seed)}
            for (kind, temperature), made in cells.items()
        ]
    else:
        summary = summarise(cells, options.seed)
    result: dict[str, Any] = {
        "part": options.part, "settings": settings, "options": shown(options, "target", "drafters", "stories"),
        "drafters": {kind.name: kind.facts() for kind in kinds}, "identity": identity(flat),
        "target_unchanged": fingerprint(loaded.model) == before, "summary": summary,
    }  # fmt: skip
    title = PART_TITLES[options.part]
    write_result(
        options.output / name, "tts", title, setup(result), machine, options.requests, findings(result), result
    )
    if result["identity"]["differ"] or not result["target_unchanged"]:
        sys.exit('the output is not that of "none", or the target has changed')


if __name__ == "__main__":
    main()
