"""Rollout speed: transformers' ways to generate against ours, same prompts, lengths and temperature, in one process.

Methods run in alternation (A B C A B C ...), so that a slow minute of the machine hits all of them; the first pass
has prompts of its own, warms up, and is not timed. Ratios are medians over passes of the ratio
within a pass. At temperature 1 the methods draw different texts (only ours share their noise, so only they can be
identical): compare tokens/s, not seconds, unless --ignore-eos makes all rows equally long.

Each batch size begins with nothing known of the model and an empty cache, so the first pass is the first call of
"auto" with its defaults, and the timed ones are its next calls. All other strategies draft in each round. A history is
emptied before each call: other methods have written the same texts, and it is to see the rows of its own call alone.
docs/performance.md has the commands of a real chat model.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import spec_trl
from spec_trl.generation.engine.statistics import DraftCounts
from spec_trl.generation.registry import strategies
from spec_trl.generation.session import Session
from spec_trl.generation.strategies import make_drafters
from spec_trl.papers.efficient_rollout.options import EfficientRolloutOptions

from .calls import forget, ratios, sampling, way
from .measure import (
    Finding,
    Options,
    begin,
    fresh_cache,
    shown,
    spread,
    stopwatch,
    write_result,
)
from .models import DTYPES, load_model, model_line, weights_line
from .workload import Workload, end_tokens, prompt_source


GENERATE = "transformers generate"
ASSISTED = "transformers assisted (batch 1)"
PLAIN, AUTO = "ours none", "ours auto"
BASELINES = (GENERATE, ASSISTED, PLAIN)
SYNTHETIC_COPY = "rtn-w4-g128"  # of synthetic and wide models, whose overlap is that of a 4-bit copy


@dataclass
class Run:
    """One method, one batch, once. `seconds` is filled in by the caller."""

    completions: list[list[int]]
    block_efficiency: float = math.nan
    acceptance_rate: float = math.nan
    phase_seconds: dict[str, float] = field(default_factory=dict)
    draft_counts: DraftCounts = field(default_factory=DraftCounts)
    rounds: int = 0
    drafted_rounds: int = 0
    seconds: float = math.nan

    @property
    def tokens(self) -> int:
        return sum(map(len, self.completions))

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


Method = Callable[[Workload, int], Run]


def transformers_generate(model: PreTrainedModel) -> Method:
    """`generate` on the left-padded batch."""

    def run(work: Workload, seed: int) -> Run:
        inputs = work.padded(model.device)
        torch.manual_seed(seed)
        sequences = model.generate(**inputs, **sampling(work))  # [batch, longest + new]
        return Run([work.trimmed(row) for row in sequences[:, inputs["input_ids"].shape[1] :].tolist()])

    return run


def transformers_assisted(model: PreTrainedModel, assistant: PreTrainedModel, draft_length: int) -> Method:
    """`generate(assistant_model=...)`, which knows batch 1 only: one row after the other."""
    assistant.generation_config.num_assistant_tokens = draft_length
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0  # as ours: draft_length tokens each round

    def run(work: Workload, seed: int) -> Run:
        torch.manual_seed(seed)
        completions = []
        for prompt in work.prompts:
            ids = torch.tensor([prompt], device=model.device)  # [1, prompt]
            mask = torch.ones_like(ids)
            sequence = model.generate(ids, attention_mask=mask, assistant_model=assistant, **sampling(work))
            completions.append(work.trimmed(sequence[0, len(prompt) :].tolist()))  # of [1, prompt + new]
        return Run(completions)

    return run


def ours(
    model: PreTrainedModel, strategy: str, assistant: PreTrainedModel | None, config: spec_trl.SpeculativeConfig
) -> Method:
    """Our engine with one strategy; the run's seed replaces the config's."""
    call = way(model, strategy, config, assistant_model=assistant if strategy == "model" else None)

    def run(work: Workload, seed: int) -> Run:
        Session.of(model).drafters.pop("history", None)  # other methods have written the same texts
        made = call(work, seed)
        facts = made.statistics
        return Run(
            made.completions, facts.block_efficiency, facts.acceptance_rate, dict(facts.phase_seconds), facts.total,
            facts.rounds, facts.drafted_rounds,
        )  # fmt: skip

    return run


def max_packed_rows(model: PreTrainedModel, config: spec_trl.SpeculativeConfig) -> int:
    """Rows up to which the self-drafter drafts."""
    with Session.lend(model) as session:  # the run's calls will ask for it
        (drafter,) = make_drafters(session, "self", model, None, config)
    return drafter.max_rows


def packed_rows_line(rows: int | None) -> str:
    """A sentence about `max_packed_rows`; empty without a self-drafter or a limit."""
    if rows is None or rows >= 1 << 31:
        return ""
    return f" The self-drafter's kernel serves up to {rows} rows; with more in flight, rounds decode autoregressively."


@dataclass
class Summary:
    """Medians of one method over the timed passes; sums of what is counted: rows, drafted tokens and rounds. NaN where
    a quantity does not apply."""

    method: str
    tokens_per_second: float
    tokens: float
    block_efficiency: float
    acceptance_rate: float
    rounds: int
    drafted_rounds: int
    identical_rows: int | None
    rows: int
    ratio_to: dict[str, float]
    phase_seconds: dict[str, float]
    tokens_per_second_by_pass: list[float]


def compare(
    methods: dict[str, Method], works: list[Workload], device: torch.device, seed: int, advance: Callable[[], object],
    warm_up_tokens: int | None = None,
) -> list[Summary]:  # fmt: skip
    """Run every method on every workload in alternation; `works[0]` is the warm-up.

    Pass i draws with seed + i, and `advance` is called after each run. The warm-up has `warm_up_tokens` per row, but
    of `auto`, whose first call is as long as the next ones.
    """
    for name, method in methods.items():
        tokens = works[0].max_new_tokens if warm_up_tokens is None or name == AUTO else warm_up_tokens
        method(replace(works[0], max_new_tokens=tokens), seed)
        advance()
    runs: dict[str, list[Run]] = {name: [] for name in methods}
    for index, work in enumerate(works[1:], 1):
        for name, method in methods.items():
            with stopwatch(device) as watch:
                run = method(work, seed + index)
            run.seconds = watch.value
            runs[name].append(run)
            advance()
    return [summarise(name, runs) for name in methods]


def summarise(name: str, runs: dict[str, list[Run]]) -> Summary:
    """Medians of `name`'s runs, and their ratios to and agreement with the other methods' runs of the same pass."""
    own = runs[name]
    compared = name != PLAIN and name.startswith("ours") and PLAIN in runs
    pairs = zip(own, runs[PLAIN] if compared else (), strict=compared)
    same = [a == b for run, plain in pairs for a, b in zip(run.completions, plain.completions, strict=True)]
    return Summary(
        name, median([run.tokens_per_second for run in own]), median([run.tokens for run in own]),
        median([run.block_efficiency for run in own]), median([run.acceptance_rate for run in own]),
        sum(run.rounds for run in own), sum(run.drafted_rounds for run in own),
        identical_rows=sum(same) if compared else None,
        rows=sum(len(run.completions) for run in own),
        ratio_to={
            other: median([a.tokens_per_second / b.tokens_per_second for a, b in zip(own, runs[other], strict=True)])
            for other in BASELINES
            if other in runs and other != name
        },
        phase_seconds={phase: median([run.phase_seconds[phase] for run in own]) for phase in own[0].phase_seconds},
        tokens_per_second_by_pass=[run.tokens_per_second for run in own],
    )  # fmt: skip


def median(values: list[float]) -> float:
    """Median of the values that are not NaN; NaN if there are none."""
    return statistics.median([value for value in values if not math.isnan(value)] or [math.nan])


def findings(result: dict[str, Any]) -> list[Finding]:
    """Our ways over every other way, what their rounds gave, and `auto` over the best of the others of ours."""
    name = model_line(result["target"])
    found = []
    for batch, summaries in result["batches"].items():
        by_pass = {each["method"]: each["tokens_per_second_by_pass"] for each in summaries}
        for each in summaries:
            for other, ratio in each["ratio_to"].items() if each["method"].startswith("ours") else ():
                passes = ratios(by_pass[each["method"]], by_pass[other])
                what = f"{name}, batch {batch}: {each['method']}"
                found.append(Finding(what, ratio, "×", other, spread(passes)))
        what = f"{name}, batch {batch}: "
        for each in summaries:
            if each["drafted_rounds"]:
                tau, share = each["block_efficiency"], each["drafted_rounds"] / each["rounds"]
                found.append(Finding(f"{what}{each['method']}, block efficiency", tau, "tokens per round"))
                found.append(Finding(f"{what}{each['method']}, rounds that drafted", share, "%"))
        if AUTO in by_pass and (better := best_of_the_others(summaries)) is not None:
            passes = ratios(by_pass[AUTO], by_pass[better])
            against = f"the best of the others: {better}"
            found.append(Finding(f"{what}{AUTO}", median(passes), "×", against, spread(passes)))
    return found


def best_of_the_others(summaries: list[dict[str, Any]]) -> str | None:
    """The method of ours, other than `auto`, with the most tokens/s; None: there is no other."""
    rates = {each["method"]: each["tokens_per_second"] for each in summaries if each["method"].startswith("ours")}
    return max((name for name in rates if name != AUTO), key=rates.__getitem__, default=None)


def rows_of(prompts: list[list[int]], batch: int, group: int, turn: int) -> list[list[int]]:
    """The prompts of a batch: `group` copies of each if these fill the batch, else each once; others in each turn."""
    copies = group if batch % group == 0 else 1
    distinct = batch // copies
    return [prompt for prompt in prompts[turn * distinct : (turn + 1) * distinct] for _ in range(copies)]


def setup(result: dict[str, Any]) -> str:
    """How it was measured."""
    options, (shortest, longest) = result["options"], result["prompt_tokens"]
    prompts = f"{options['prompts']} in the chat template," if options["chat"] else "prompts"
    ran_auto = any(own["method"] == AUTO for own in next(iter(result["batches"].values())))
    defaults = f' "{AUTO}" has its defaults, the other drafters draft in each round;' if ran_auto else ""
    passes = f"median of {options['repeats']} passes after a warm-up, lowest and highest"
    if options["repeats"] == 1:
        passes = "one pass after a warm-up"
    packed = f" The self-drafter is {SYNTHETIC_COPY}." if "agreement" in result["target"] else ""
    ignored = ", end of sequence ignored" if options["ignore_eos"] else ""
    group = options["group"]
    grouped = f" Batches that are a multiple of {group} hold so many rows of each prompt." if group > 1 else ""
    return (
        f"Up to {options['max_new_tokens']} new tokens, temperature {options['temperature']:g}, draft length "
        f"{options['draft_length']}, {options['verification']} verification, {prompts} of {shortest} to {longest} "
        f"tokens{ignored}.{grouped} Each batch size starts from an empty cache with nothing known of the model;"
        f"{defaults} a history is empty before each call. Tokens/s over the baseline's in the same pass: {passes}."
        + weights_line(result["target"])
        + packed
        + packed_rows_line(result["self_drafter_max_rows"])
    )


TINY = "--model shape:tiny --dtype float64 --batch 1 2 --group 2 --repeats 1 --max-new-tokens 4 --baselines generate "
TINY += "--strategies none self ngram auto"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Options(__doc__, "rollout", TINY)
    add, baselines = parser.add_argument, ["generate", "assisted"]
    add("--model", default="shape:qwen2.5-0.5b", help="folder, or shape:NAME: synthetic weights")
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy")
    add("--assistant", help="folder of a small model, for strategy model and assisted")
    add("--strategies", nargs="+", default=["none", "self"], choices=strategies())
    add("--baselines", nargs="*", default=baselines, choices=baselines, help="assisted runs with --assistant only")
    add("--batch", type=int, nargs="+", default=[1, 4], help="rows per batch; each is measured")
    add("--max-new-tokens", type=int, default=48, help="per row")
    add("--temperature", type=float, default=1.0, help="of the sampling")
    add("--draft-length", type=int, default=5, help="draft tokens per round")
    add("--verification", default="exact", choices=["exact", "rejection"], help="of the drafts")
    add("--draft-kernel", default="auto", help="of the self-drafter")
    add("--draft-lm-head", default="auto", choices=["auto", "dense", "packed"], help="likewise")
    add("--runner", default="auto", choices=["auto", "eager", "graph", "compiled"], help="of ours")
    add("--ignore-eos", action="store_true", help="every row gets max-new-tokens")
    add("--prompts", type=Path, help=".json with strings, .jsonl with questions; default: examples/data/stories.json")
    add("--chat", action="store_true", help="whole prompts, in the model's chat template")
    add("--group", type=int, default=1, help="rows of one prompt, as in GRPO, where they fill the batch")
    add("--dtype", default="bfloat16", choices=list(DTYPES))
    add("--repeats", type=int, default=3, help="timed passes; each has its own prompts and seed")
    add("--warm-up-tokens", type=int, help="new ones of a row in the first pass of all but auto; default: as many")
    options = parser.read(arguments, "batch", "group", "repeats", "max_new_tokens")
    if "model" in options.strategies and options.assistant is None:
        parser.error("strategy model needs --assistant: pass the folder of a small model")
    if "ngram" in options.strategies and options.verification == "rejection":
        parser.error("strategy ngram has no draft probabilities: leave it out, or use --verification exact")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    machine = begin(options)
    dtype = DTYPES[options.dtype]
    loaded = load_model(options.model, dtype, options.device, options.agreement, options.seed)
    model = loaded.model
    assistant = load_model(options.assistant, dtype, options.device).model if options.assistant else None

    methods: dict[str, Method] = {}
    if "generate" in options.baselines:
        methods[GENERATE] = transformers_generate(model)
    if "assisted" in options.baselines and assistant is not None:
        methods[ASSISTED] = transformers_assisted(model, assistant, options.draft_length)
    quantization = SYNTHETIC_COPY if "agreement" in loaded.facts else "auto"
    config = spec_trl.SpeculativeConfig(
        draft_quantization=quantization, draft_kernel=options.draft_kernel, verification=options.verification,
        runner=options.runner, efficient_rollout=EfficientRolloutOptions(lm_head=options.draft_lm_head),
    )  # fmt: skip
    always = replace(config, sd_toggle="always", draft_length=options.draft_length)
    for strategy in options.strategies:
        methods[f"ours {strategy}"] = ours(model, strategy, assistant, config if strategy == "auto" else always)

    eos = end_tokens(loaded, options.ignore_eos)
    pad = model.generation_config.pad_token_id or 0
    turns = options.repeats + 1  # the first one warms up
    prompts = prompt_source(loaded, options.prompts, max(options.batch) * turns, options.seed, chat=options.chat)
    batches: dict[str, list[dict[str, object]]] = {}
    with tqdm(total=len(options.batch) * len(methods) * turns, desc="rollouts") as bar, fresh_cache():
        for batch in options.batch:
            forget(model)  # nor of another batch size
            rows = [rows_of(prompts, batch, options.group, turn) for turn in range(turns)]
            works = [Workload(own, options.max_new_tokens, options.temperature, eos, pad) for own in rows]
            summaries = compare(methods, works, model.device, options.seed, bar.update, options.warm_up_tokens)
            batches[str(batch)] = [asdict(summary) for summary in summaries]
        packed_rows = max_packed_rows(model, config) if "self" in options.strategies else None
    result: dict[str, Any] = {
        "options": shown(options), "target": loaded.facts, "self_drafter_max_rows": packed_rows, "batches": batches,
        "prompt_tokens": [min(map(len, prompts)), max(map(len, prompts))],
    }  # fmt: skip
    title = f"Rollout: {model_line(loaded.facts)}"
    write_result(options.output, "rollouts", title, setup(result), machine, options.repeats, findings(result), result)


if __name__ == "__main__":
    main()
