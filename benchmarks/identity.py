"""Losslessness: is every speculative rollout token-identical to "none" with the same seed, over many tokens?

The logits of one position differ in their last bits between forward shapes, so a near-tie of perturbed logits may fall
either way. At the first mismatch of a row the reference scores are recomputed (one unbatched forward of the row's
prefix, same dtype): it is a near-tie when both tokens' scores lie closer to the best than the logit noise between
forward shapes, which is measured first. Any other mismatch is an error, and the exit status says so. After a
mismatch a row is another text, so its remaining tokens are not counted.

Also: block efficiency of exact against rejection verification with the same drafter.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import spec_trl
from spec_trl.cli.gains import LogitNoise, distance, measure_logit_noise, reference_scores
from spec_trl.generation.engine.statistics import DraftCounts

from .measure import Finding, Options, begin, shown, write_result
from .models import DTYPES, LoadedModel, load_model, model_line
from .rollout import max_packed_rows, ours, packed_rows_line
from .workload import Workload, common_prefix, end_tokens, prompt_source


NONE = '"none" with the same seed'
NOISE_LENGTH = 64  # tokens of the texts on which the logit noise is measured
PROMPT_BATCHES = 16  # then the same prompts come again, with other seeds


@dataclass
class Tally:
    """What one strategy did against "none"."""

    rows: int = 0
    tokens_compared: int = 0
    near_ties: int = 0
    unexplained: int = 0
    widest_near_tie: float = 0.0  # largest distance of a near-tie's token from the best score


def compare(
    model: PreTrainedModel, work: Workload, plain: list[list[int]], other: list[list[int]],
    noise: LogitNoise, seed: int, tally: Tally,
) -> None:  # fmt: skip
    """Add one batch to `tally`: rows of `other` against the rows of `plain`."""
    for row, (a, b) in enumerate(zip(plain, other, strict=True)):
        same = common_prefix(a, b)
        tally.rows += 1
        tally.tokens_compared += min(same + 1, max(len(a), len(b)))  # the differing token was compared as well
        if a == b:
            continue
        gap = math.inf  # of a row that only ends early: there is no token to tie with
        if same < min(len(a), len(b)):
            prefix = work.prompts[row] + a[:same]
            scores = reference_scores(model, prefix, work.temperature, seed, row, same)  # [vocab]
            gap = distance(scores, (a[same], b[same]))
        if gap < noise.largest / work.temperature:
            tally.near_ties += 1
            tally.widest_near_tie = max(tally.widest_near_tie, gap)
        else:
            tally.unexplained += 1


def study(loaded: LoadedModel, assistant: PreTrainedModel | None, options: argparse.Namespace) -> dict[str, Any]:
    """The whole study of one model in one dtype, as plain data."""
    model = loaded.model
    eos = end_tokens(loaded, options.ignore_eos)
    pad = model.generation_config.pad_token_id or 0
    prompts = prompt_source(loaded, options.prompts, PROMPT_BATCHES * options.batch, options.seed)
    config = spec_trl.SpeculativeConfig(
        draft_length=options.draft_length, draft_kernel=options.draft_kernel, sd_toggle="always"
    )
    none = ours(model, "none", None, config)
    exact_methods = {strategy: ours(model, strategy, assistant, config) for strategy in options.strategies}
    rejecting = replace(config, verification="rejection")
    others = [strategy for strategy in options.strategies if strategy != "ngram"]  # which has no draft probabilities
    rejection_methods = {strategy: ours(model, strategy, assistant, rejecting) for strategy in others}
    tallies = {strategy: Tally() for strategy in exact_methods}
    exact = {strategy: DraftCounts() for strategy in rejection_methods}
    rejection = {strategy: DraftCounts() for strategy in rejection_methods}
    noise: LogitNoise | None = None
    batch = 0
    with tqdm(total=options.tokens, desc=f"tokens compared, {loaded.facts['dtype']}") as bar:
        while (done := min(tally.tokens_compared for tally in tallies.values())) < options.tokens:
            start = batch % PROMPT_BATCHES * options.batch
            own = prompts[start : start + options.batch]
            work = Workload(own, options.max_new_tokens, options.temperature, eos, pad)
            seed = options.seed + batch
            plain = none(work, seed).completions
            if noise is None:
                texts = [p + c for p, c in zip(work.prompts, plain, strict=True) if len(p + c) >= NOISE_LENGTH]
                if not texts:
                    raise ValueError(f"max_new_tokens={options.max_new_tokens} gives no text of {NOISE_LENGTH} tokens")
                cut = torch.tensor([text[:NOISE_LENGTH] for text in texts], device=model.device)  # [batch, n]
                noise = measure_logit_noise(model, cut, options.draft_length)
            for strategy, method in exact_methods.items():
                run = method(work, seed)
                compare(model, work, plain, run.completions, noise, seed, tallies[strategy])
                if strategy in rejection_methods and batch < options.rejection_batches:
                    exact[strategy] += run.draft_counts
                    rejection[strategy] += rejection_methods[strategy](work, seed).draft_counts
            batch += 1
            bar.update(min(tally.tokens_compared for tally in tallies.values()) - done)
    return {
        "target": loaded.facts,
        "self_drafter_max_rows": max_packed_rows(model, config) if "self" in exact_methods else None,
        "logit_noise": asdict(noise) if noise is not None else None,
        "strategies": {
            name: asdict(tally)
            | (verification_facts(exact[name], rejection[name]) if name in rejection else {})
            for name, tally in tallies.items()
        },
    }


def verification_facts(exact: DraftCounts, rejection: DraftCounts) -> dict[str, float]:
    """Block efficiency of both verifications, on the same batches."""
    one, other = exact.block_efficiency, rejection.block_efficiency
    return {"block_efficiency_exact": one, "block_efficiency_rejection": other, "exact_over_rejection": one / other}


def findings(result: dict[str, Any]) -> list[Finding]:
    """Tokens compared and how they differ; exact over rejection verification."""
    found = []
    for entry in result["studies"]:
        for name, own in entry["strategies"].items():
            what = f'{model_line(entry["target"])}: "{name}"'
            found += [
                Finding(f"{what}, tokens compared", own["tokens_compared"], "tokens", NONE),
                Finding(f"{what}, near-ties that fell the other way", own["near_ties"], "tokens", NONE),
                Finding(f"{what}, other mismatches", own["unexplained"], "tokens", NONE),
            ]
            ratio = own.get("exact_over_rejection")
            if ratio is not None and not math.isnan(ratio):
                found.append(Finding(f"{what}, block efficiency of exact verification", ratio, "×", "rejection"))
    return found


def setup(result: dict[str, Any]) -> str:
    """How it was measured."""
    options = result["options"]
    noise = "".join(
        f" {entry['target']['dtype']}: logit noise between forward shapes at most "
        f"{entry['logit_noise']['largest']:.2g}.{packed_rows_line(entry['self_drafter_max_rows'])}"
        for entry in result["studies"]
    )
    return (
        f"Batch {options['batch']}, up to {options['max_new_tokens']} new tokens, temperature "
        f"{options['temperature']:g}, draft length {options['draft_length']}; tokens of a row up to its first "
        f'difference from "none".{noise}'
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    tiny = "--dtypes float64 --tokens 100 --batch 2 --max-new-tokens 64 --rejection-batches 1"
    parser = Options(__doc__, "identity", tiny)
    add = parser.add_argument
    add("--model", default="shape:tiny", help="folder or shape:NAME")
    add("--agreement", type=float, default=0.93, help="shape models: overlap with their 4-bit copy")
    add("--assistant", help="folder of a small model for strategy model")
    add("--strategies", nargs="+", default=["self", "ngram"], choices=["self", "model", "ngram"])
    add("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=list(DTYPES))
    add("--tokens", type=int, default=5_000, help="to compare, for each strategy and dtype")
    add("--batch", type=int, default=4, help="rows per batch")
    add("--max-new-tokens", type=int, default=128, help="per row")
    add("--temperature", type=float, default=1.0, help="of the sampling")
    add("--draft-length", type=int, default=5, help="draft tokens per round")
    add("--draft-kernel", default="auto", help="of the self-drafter; a fast one serves few rows only")
    add("--rejection-batches", type=int, default=4, help="batches run with rejection too")
    add("--ignore-eos", action="store_true", help="every row gets max-new-tokens")
    add("--prompts", type=Path, help="JSON list of strings; default: examples/data/stories.json")
    options = parser.read(arguments, "tokens", "batch", "max_new_tokens")
    if "model" in options.strategies and options.assistant is None:
        parser.error("strategy model needs --assistant: pass the folder of a small model")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    machine = begin(options)
    studies = []
    for name in options.dtypes:
        dtype = DTYPES[name]
        loaded = load_model(options.model, dtype, options.device, options.agreement, options.seed)
        assistant = load_model(options.assistant, dtype, options.device).model if options.assistant else None
        studies.append(study(loaded, assistant, options))
    result = {"options": shown(options), "studies": studies}
    title = f'Identity with "none": {studies[0]["target"]["model"]}'
    write_result(options.output, "lossless", title, setup(result), machine, None, findings(result), result)
    unexplained = sum(s["unexplained"] for entry in studies for s in entry["strategies"].values())
    if unexplained:
        sys.exit(f"{unexplained} mismatches are no near-ties")


if __name__ == "__main__":
    main()
