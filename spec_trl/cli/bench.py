"""``spec-trl bench``: what speculation gains for a model on this machine, and a config to paste."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedModel

from ..generation.calibrating import hardware_name
from ..generation.configuration import SpeculativeConfig
from ..generation.integration import install
from ..generation.requirements import check_lengths, check_model
from .gains import (
    GENERATE,
    MOST_VISITS,
    PROBE,
    Gain,
    Way,
    Work,
    choose,
    config_to_paste,
    fitting_length,
    in_turns,
    make_ways,
    profile_in_cache,
    summarise,
)
from .loading import find_device, load_model, load_tokenizer
from .options import table
from .prompts import PROMPTS, random_ids, read_prompts, token_ids


PROMPT_TOKENS = 256
"""A longer prompt is cut: reading prompts takes the same time whatever decodes."""
RANDOM_PROMPT = 32
"""Tokens of a random prompt."""
_FLAGS = ("avx512_bf16", "amx_bf16")
"""What makes bfloat16 fast on a CPU, by name in /proc/cpuinfo."""


def run(arguments: argparse.Namespace) -> None:
    for gamma in arguments.draft_length:
        SpeculativeConfig(draft_length=gamma)
    assistants = dict(arguments.assistant)
    if len(assistants) < len(arguments.assistant):
        raise ValueError("--assistant names two drafters of one kind; give one of each.")
    texts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    device = find_device(arguments.device)
    install()  # as `import spec_trl` would
    model = load_model(arguments.model, arguments.dtype, device)
    check_model(model)
    prompts, kind = _prompts(arguments, model, texts)
    check_lengths(model, max(map(len, prompts)), max(map(len, prompts)) + arguments.length)
    print(f"{arguments.model}, {str(model.dtype).removeprefix('torch.')}, {machine(device)}")
    print(f"{kind}; temperature {arguments.temperature:g}, up to {arguments.length} tokens per row")
    gains = measure(model, prompts, arguments, assistants)
    print(_recommendation(gains, arguments.draft_length))


def _prompts(
    arguments: argparse.Namespace, model: PreTrainedModel, texts: list[str] | None
) -> tuple[list[list[int]], str]:
    """Tokens of the prompts, and what they are in words."""
    tokenizer = load_tokenizer(arguments.model)
    if tokenizer is not None:
        kind = "built-in prompts" if texts is None else f"prompts of {arguments.prompts}"
        return token_ids(texts or PROMPTS, tokenizer, PROMPT_TOKENS), kind
    if texts is not None:
        raise ValueError(f"--prompts {arguments.prompts} needs a tokenizer, and {arguments.model} has none.")
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    prompts = random_ids(max(arguments.batch), RANDOM_PROMPT, vocabulary, arguments.seed)
    return prompts, f"random prompts ({arguments.model} has no tokenizer): on text other drafts are accepted"


def measure(
    model: PreTrainedModel, prompts: list[list[int]], arguments: argparse.Namespace, assistants: dict[str, str]
) -> list[Gain]:
    """Measures all ways at each batch size within `arguments.seconds`, and prints a table for each."""
    deadline = time.perf_counter() + arguments.seconds
    ways, missing = make_ways(model, arguments.draft_length, assistants)
    profile = profile_in_cache(model, SpeculativeConfig())
    none = next(way for way in ways if way.strategy == "none")
    gains: list[Gain] = []
    batches = sorted(set(arguments.batch))
    with tqdm(total=len(batches) * MOST_VISITS * len(ways), unit="call") as bar:

        def begin(way: Way) -> None:
            bar.set_postfix_str(way.name)
            bar.update()

        for number, batch in enumerate(batches):
            bar.set_description(f"{batch} rows")
            rows = [prompts[i % len(prompts)] for i in range(batch)]
            share = (deadline - time.perf_counter()) / (len(batches) - number)
            end = time.perf_counter() + share
            probe = Work(rows, min(PROBE, arguments.length), arguments.temperature)
            none(model, probe, arguments.seed, time.perf_counter)  # loads and prepares
            second = none(model, probe, arguments.seed, time.perf_counter)
            length = fitting_length(arguments.length, share, len(ways), second)
            work = Work(rows, length, arguments.temperature)
            calls = in_turns(model, ways, work, arguments.seed, end, begin=begin)
            bar.update((number + 1) * MOST_VISITS * len(ways) - bar.n)
            found = summarise(model, work, arguments.seed, calls, profile)
            visits = len(calls[none]) - 1
            bar.write(f"\n{batch} rows of {length} tokens at most, median of {visits} visits{_cut(length, arguments)}:")
            bar.write(_table(found))
            gains += found
    for strategy, reason in missing.items():
        print(f"{strategy} is not possible here: {reason}")
    return gains


def _cut(length: int, arguments: argparse.Namespace) -> str:
    if length == arguments.length:
        return ""
    return f" (--length {arguments.length} does not fit into --seconds {arguments.seconds:g})"


def _table(gains: Sequence[Gain]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    header = ["", "tokens/s", "of generate", "of none", "predicted", "rounds drafted", "accepted", "tokens per block"]
    rows = [
        [gain.way.name, f"{gain.tokens_per_second:.1f}", f"{gain.of_generate:.2f}", f"{gain.of_none:.2f}"]
        + [number(gain.predicted, ".2f"), number(gain.drafting, ".0%")]
        + [number(gain.acceptance_rate, ".2f"), number(gain.block_efficiency, ".2f"), _identity(gain)]
        for gain in gains
    ]
    return table([*header, 'rows as "none"'], rows)


def _identity(gain: Gain) -> str:
    if gain.failure is not None:
        return f"drafter failed: {gain.failure}"
    if gain.identity is None:
        return "-"
    found = gain.identity
    text = f"{found.identical} of {found.rows}"
    text += f", {found.near_ties} near-ties" if found.near_ties else ""
    return text + (f", {found.unexplained} UNEXPLAINED" if found.unexplained else "")


def _recommendation(gains: Sequence[Gain], draft_lengths: Sequence[int]) -> str:
    way, speedup = choose(gains)
    if way.strategy == GENERATE:
        return "\nNothing gains 5 % over transformers' generate here: leave assistant_strategy out, and use TRL's trainer."
    call, config = config_to_paste(way, draft_lengths)
    return (
        f"\nrecommended: {way.name}, {speedup:.2f} times as fast as generate (geometric mean over the batches)\n"
        f"  from spec_trl import SpecGRPOConfig, SpeculativeConfig\n"
        f"  model.generate(**inputs, {call})\n"
        f"  {config}"
    )


def machine(device: torch.device) -> str:
    """Device, instruction set of a CPU, and versions."""
    where = hardware_name(device)
    if device.type == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
        extensions = [torch.backends.cpu.get_cpu_capability(), *(flag for flag in _FLAGS if flag in flags)]
        where += f", {' '.join(extensions)}"
    return f"{where}, torch {torch.__version__}, transformers {transformers.__version__}"
