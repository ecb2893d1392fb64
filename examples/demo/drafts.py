"""The demo's second part: drafts on a model whose weights are what takes the time.

A model writes 1 and 4 texts at temperature 1, in float32: with transformers' `generate`, with this library without
drafts ("none"), with drafts of the model's quantized copy in every round ("self"), and with "auto", which begins with
an empty cache and finds out by itself what pays. The model is the one that ``--model`` names, or the shipped story
model made 16 times as wide, which changes its size and not what it computes.
"""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from examples.demo.widen import widen
from spec_trl import SpeculativeConfig
from spec_trl.cli.loading import pad_left, read_prompts, token_ids
from spec_trl.generation.engine.statistics import DraftCounts


DATA = Path(__file__).parents[1] / "data"
# 59 M parameters, 236 MB. A multiple of 8: all layers divide into groups of 32, for 4 bits, without a C++ compiler.
WIDENED_BY = 16
ROWS = (1, 4)  # texts that are written at a time
NEW_TOKENS = 96  # of each text
DRAFT_LENGTH = 3  # drafts of each round of "self"; "auto" chooses by itself
CALLS = 3  # of each method, with other prompts in each; the first one also compiles, packs and tries, and counts apart
GENERATE, NONE = "generate", "none"
METHODS = (GENERATE, NONE, "auto", "self")  # "auto" before "self", whose copy it would find packed
GOODS = "pens cups hats eggs nuts rings books lamps plums bells cards pears shoes keys toys".split()


@dataclass(frozen=True)
class Call:
    """One call of `generate`: its seconds, the tokens of each text, and what was drafted."""

    seconds: float
    texts: list[list[int]]
    drafts: DraftCounts


def load(folder: str | None) -> tuple[PreTrainedModel, list[list[int]], str]:
    """The model, prompts for it as tokens, and what to say of it."""
    source = folder or DATA / "stories260K"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    if folder is None:
        model = widen(model, WIDENED_BY, seed=0)
        prompts = token_ids(read_prompts(DATA / "stories.json"), tokenizer, longest=16)
        name = f"The shipped story model, {WIDENED_BY} times as wide"
    else:
        questions = [f"A shop sells 3 {goods} for 2 euros. How much do 21 {goods} cost?" for goods in GOODS]
        prompts, name = token_ids(questions, tokenizer, longest=64), Path(folder).name
    # Plain sampling, and no end of a text, so that all texts are equally long.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    return model.eval(), prompts, f"{name}: {model.num_parameters() / 1e6:.0f} M parameters, float32, temperature 1"


def write(model: PreTrainedModel, prompts: Sequence[list[int]], method: str, seed: int) -> Call:
    """Writes a text for each prompt."""
    inputs = pad_left(list(prompts), model.device)
    options: dict[str, Any] = {}
    if method != GENERATE:
        drafting: dict[str, Any] = dict(sd_toggle="always", draft_length=DRAFT_LENGTH) if method == "self" else {}
        config = SpeculativeConfig(seed=seed, **drafting)
        options = dict(assistant_strategy=method, speculative_config=config)
    torch.manual_seed(seed)
    started = time.perf_counter()
    output = model.generate(**inputs, **options, return_dict_in_generate=True)
    seconds = time.perf_counter() - started
    texts = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return Call(seconds, texts, DraftCounts() if method == GENERATE else output.statistics.total)


def compare(folder: str | None, cache: Path) -> dict[str, Any]:
    """Runs all methods in turns; returns which model that was, and one row per method and number of texts.

    Args:
        folder: of a model; None takes the widened story model.
        cache: folder where "auto" keeps what it measures; it is emptied first.
    """
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["SPEC_TRL_CACHE"] = str(cache)  # in the place of the user's
    model, prompts, name = load(folder)
    supply = cycle(prompts)
    rows = []
    with tqdm(total=len(ROWS) * CALLS * len(METHODS)) as bar:
        for count in ROWS:
            calls: dict[str, list[Call]] = {method: [] for method in METHODS}
            for seed in range(CALLS):
                chosen = list(islice(supply, count))
                for method in METHODS:
                    bar.set_description(f"part 2 of 2, {texts_of(count)} at a time: {method}")
                    calls[method].append(write(model, chosen, method, seed))
                    bar.update()
            rows += summarize(calls)
    return {"model": name, "widened": folder is None, "rows": rows}


def texts_of(count: int) -> str:
    """The number as words."""
    return f"{count} text{'s' * (count > 1)}"


def summarize(calls: dict[str, list[Call]]) -> list[dict[str, Any]]:
    """One row per method, in the order of `METHODS`."""

    def rate(some: Sequence[Call]) -> float:
        return sum(len(text) for call in some for text in call.texts) / sum(call.seconds for call in some)

    def over(own: Sequence[Call], other: Sequence[Call]) -> float:
        """Median over the calls after the first, which took turns."""
        return median(rate([one]) / rate([its]) for one, its in zip(own[1:], other[1:], strict=True))

    rows = []
    for method, own in calls.items():
        drafts = sum((call.drafts for call in own[1:]), DraftCounts())
        texts, plain = ([text for call in some for text in call.texts] for some in (own, calls[NONE]))
        rows.append(
            {
                "at_a_time": len(own[0].texts),
                "method": method,
                "tokens_per_second": rate(own[1:]),
                "over_generate": over(own, calls[GENERATE]),
                "over_none": over(own, calls[NONE]),
                "first_call": rate(own[:1]),
                "drafted": drafts.drafted,
                "accepted": drafts.accepted,
                "tokens_per_block": drafts.block_efficiency if drafts.blocks else None,
                "same": None if method == GENERATE else sum(map(eq, texts, plain)),
                "texts": len(texts),
            }
        )
    return rows


def format_table(result: dict[str, Any]) -> str:
    """The comparison as text."""
    titles = "  tokens/s  over generate  first call   drafted  accepted     τ  same"
    lines = [f"{result['model']}, {NEW_TOKENS} tokens per text", f"{'':23}{titles}"]
    for row in result["rows"]:
        texts = f"{texts_of(row['at_a_time'])}, {row['method']}"
        tau = "-" if row["tokens_per_block"] is None else f"{row['tokens_per_block']:.2f}"
        same = "-" if row["same"] is None else f"{row['same']} of {row['texts']}"
        lines.append(
            f"{texts:23}{row['tokens_per_second']:10.0f}{row['over_generate']:14.2f}x{row['first_call']:12.0f}"
            f"{row['drafted']:10}{row['accepted']:10}{tau:>6}  {same}"
        )
    if result["widened"]:
        lines.append("A model trained at this size has fewer drafts accepted: here errors of the copy average out.")
    return "\n".join(lines) + (
        "\nfirst call: tokens/s of a method's first call, which compiles, packs the quantized copy and tries drafters;"
        f"\nall columns but it and the last: the {CALLS - 1} calls after it; τ: tokens per text and round with drafts;"
        f'\n"self" drafts {DRAFT_LENGTH} tokens in each round, "auto" as many as pay, or none;'
        '\nsame: texts of all calls that are those of "none", token for token. generate draws other texts.'
    )


def conclude(result: dict[str, Any]) -> str:
    """What came out for one text at a time, in one sentence that claims what these calls have shown."""
    by_method = {row["method"]: row for row in result["rows"] if row["at_a_time"] == 1}
    ours = [by_method[method] for method in METHODS if method != GENERATE]
    best = max(ours, key=lambda row: row["tokens_per_second"])
    speed = f"{best['over_generate']:.2f} times as many tokens per second as generate"
    if best["over_generate"] <= 1:
        claim = f'nothing was faster than generate here: "{best["method"]}" was the fastest of ours and wrote {speed}'
    elif best["method"] == NONE:
        claim = f'drafts did not pay here: "{NONE}" was the fastest and wrote {speed}'
    else:
        claim = f'drafts of "{best["method"]}" wrote {speed} and {best["over_none"]:.2f} times as many as "{NONE}"'
    drafting = [row for row in ours if row["method"] != NONE]
    same, texts = sum(row["same"] for row in drafting), sum(row["texts"] for row in drafting)
    how_many = f"all {texts}" if same == texts else f"{same} of {texts}"
    return f'On one stream {claim}; with drafts {how_many} texts were those of "{NONE}", token for token.'


def plot(result: dict[str, Any], path: Path) -> None:
    """Draws tokens/s of each method as bars, for each number of texts at a time."""
    figure, axes = plt.subplots(1, len(ROWS), figsize=(4.5 * len(ROWS), 4), layout="constrained", squeeze=False)
    for axis, count in zip(axes[0], ROWS, strict=True):
        rows = [row for row in result["rows"] if row["at_a_time"] == count]
        bars = axis.bar([row["method"] for row in rows], [row["tokens_per_second"] for row in rows])
        axis.bar_label(bars, [f"{row['over_generate']:.2f}x" for row in rows])
        axis.set(title=f"{texts_of(count)} at a time", ylabel="tokens/s", ylim=(0, None))
    figure.suptitle(result["model"])
    figure.savefig(path, dpi=120)
    plt.close(figure)
