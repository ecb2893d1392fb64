"""``spec-trl bench``: what speculation gains for a model on this machine, and a config to paste."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ..generation.configuration import SpeculativeConfig
from ..generation.engine.requirements import check_lengths, check_model
from ..generation.generate import install
from ..measuring.calibrated import find_profile
from ..measuring.machine import hardware_name
from .gains import MOST_VISITS, Gain, Way, Work, make_ways, measure, summarise
from .loading import find_device, load_config, load_model, load_tokenizer
from .options import table
from .prompts import PROMPTS, random_ids, read_prompts, token_ids
from .recommendation import recommend


PROMPT_TOKENS = 256
"""A longer prompt is cut: reading prompts takes the same time whatever decodes."""
EXACT = "exact here: drafts change no bit of a log-probability"
EXAMINING = 0.1
"""Part of the time that is left for telling near-ties from errors."""
RANDOM_PROMPT = 32
"""Tokens of a random prompt."""
_FLAGS = ("avx512_bf16", "amx_bf16")
"""What makes bfloat16 fast on a CPU, by name in /proc/cpuinfo."""


def run(arguments: argparse.Namespace) -> None:
    until = arguments.started + arguments.seconds
    for gamma in arguments.draft_length:
        SpeculativeConfig(draft_length=gamma)
    assistants = dict(arguments.assistant)
    if len(assistants) < len(arguments.assistant):
        raise ValueError("--assistant names two drafters of one kind; give one of each.")
    texts = None if arguments.prompts is None else read_prompts(arguments.prompts)
    device = find_device(arguments.device)
    config = load_config(arguments.model)
    prompts, kind = _prompts(arguments, config, texts)
    _check_length(arguments.length, max(map(len, prompts)), config)
    install()  # as `import spec_trl` would
    model = load_model(arguments.model, arguments.dtype, device)
    check_model(model)
    check_lengths(model, list(map(len, prompts)), arguments.length)
    dtype = str(model.dtype).removeprefix("torch.")
    mixed = device.type == "cuda" and dtype == "float32"
    weights = "float32 under autocast to bfloat16, as SpecGRPOConfig(bf16=True) trains" if mixed else dtype
    print(f"{arguments.model}, {weights}, {machine(device)}")
    print(f"{kind}; temperature {arguments.temperature:g}; at most {arguments.seconds:g} s, loading included")
    with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
        gains = _measure(model, prompts, arguments, assistants, until)
    print("\n" + recommend(gains, arguments.model, dtype, mixed))


def _check_length(length: int, longest_prompt: int, config: PreTrainedConfig) -> None:
    """Raises ValueError where completions of `length` go beyond the context that `config` names."""
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and longest_prompt + length > context:
        raise ValueError(
            f"--length {length} with a prompt of {longest_prompt} tokens is beyond the model's context of {context}. "
            f"Give at most --length {max(context - longest_prompt, 1)}."
        )


def _prompts(
    arguments: argparse.Namespace, config: PreTrainedConfig, texts: list[str] | None
) -> tuple[list[list[int]], str]:
    """Tokens of the prompts, and what they are in words."""
    tokenizer = load_tokenizer(arguments.model)
    if tokenizer is not None:
        kind = "built-in prompts" if texts is None else f"prompts of {arguments.prompts}"
        return token_ids(texts or PROMPTS, tokenizer, PROMPT_TOKENS), kind
    if texts is not None:
        raise ValueError(f"--prompts {arguments.prompts} needs a tokenizer, and {arguments.model} has none.")
    vocabulary = config.get_text_config(decoder=True).vocab_size
    prompts = random_ids(max(arguments.batch), RANDOM_PROMPT, vocabulary, arguments.seed)
    return prompts, f"random prompts ({arguments.model} has no tokenizer): on text other drafts are accepted"


def _measure(
    model: PreTrainedModel, prompts: list[list[int]], arguments: argparse.Namespace, assistants: dict[str, str],
    until: float,
) -> list[Gain]:  # fmt: skip
    """Measures all ways at each batch size before `until`, and prints a table for each."""
    ways, missing = make_ways(model, sorted(set(arguments.draft_length)), assistants)
    longest = max(map(len, prompts)) + arguments.length
    profile = find_profile(model, SpeculativeConfig(), max(arguments.batch), longest)
    gains: list[Gain] = []
    exact: list[bool | list[str] | None] = []
    batches = sorted(set(arguments.batch))
    most = (2 + MOST_VISITS) * len(ways)  # calls for one batch
    with tqdm(total=len(batches) * most, unit="call") as bar:

        def begin(way: Way) -> None:
            bar.set_postfix_str(way.name)
            bar.update()

        for number, batch in enumerate(batches):
            bar.set_description(f"batch {batch}")
            rows = [prompts[i % len(prompts)] for i in range(batch)]
            wanted = Work(rows, arguments.length, arguments.temperature)
            now = time.perf_counter()
            end = now + (until - now) / (len(batches) - number)
            calls_until = end - EXAMINING * (end - now)
            work, calls = measure(model, ways, wanted, arguments.seed, calls_until, begin=begin)
            bar.update((number + 1) * most - bar.n)
            found = summarise(model, work, arguments.seed, calls, profile, end)
            bar.write(_section(found, work, wanted, [way.name for way in ways if way not in calls], arguments.seconds))
            gains += found
            exact += [call.statistics.exact for made in calls.values() for call in made if call.statistics is not None]
    if exact and exact[0]:
        parts = exact[0] if isinstance(exact[0], list) else []
        print(f"not exact here ({'; '.join(parts)}): drafts may change a token at a near-tie" if parts else EXACT)
    for strategy, reason in missing.items():
        print(f"{strategy} is not possible here: {reason}")
    return gains


def _section(found: Sequence[Gain], work: Work, wanted: Work, left_out: Sequence[str], seconds: float) -> str:
    """What was measured at one batch size."""
    head = f"\nbatch {len(work.prompts)}"
    if not found:
        return f"{head}: not measured, generate and none did not end within --seconds {seconds:g}"
    fewer = f" (more do not fit into --seconds {seconds:g})" if work != wanted else ""
    calls = "1 call" if found[0].visits == 1 else f"{found[0].visits} calls"
    head += f", up to {work.new_tokens} tokens per row{fewer}, median of {calls} each"
    if any(gain.is_thin for gain in found):
        head += ". Thin: too little to compare"
    out = f"\nleft out for want of time: {'; '.join(left_out)}" if left_out else ""
    return f"{head}:\n{_table(found)}{out}"


def _table(gains: Sequence[Gain]) -> str:
    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    header = ["", "tokens/s", "of generate", "of none", "predicted", "rounds drafted", "accepted", "tokens per block"]
    rows = [
        [gain.way.name, f"{gain.tokens_per_second:.1f}", f"{gain.of_generate:.2f}"]
        + [f"{gain.of_none:.2f} ± {gain.spread:.2f}"]
        + [number(gain.predicted, ".2f"), number(gain.drafting, ".0%")]
        + [number(gain.acceptance_rate, ".2f"), number(gain.block_efficiency, ".2f"), _identity(gain)]
        for gain in gains
    ]
    header.append('rows as "none"')
    known = [place for place in range(len(header)) if place == 0 or any(row[place] != "-" for row in rows)]
    return table([header[place] for place in known], [[row[place] for place in known] for row in rows])


def _identity(gain: Gain) -> str:
    if gain.failure is not None:
        return f"drafter failed: {gain.failure}"
    if gain.identity is None:
        return "-"
    found = gain.identity
    ties = f", {found.near_ties} near-ties" if found.near_ties else ""
    errors = f", {found.unexplained} UNEXPLAINED" if found.unexplained else ""
    left = f", {found.unexamined} not examined for want of time" if found.unexamined else ""
    return f"{found.identical} of {found.rows}{ties}{errors}{left}"


def machine(device: torch.device) -> str:
    """Device, instruction set of a CPU, and versions."""
    where = hardware_name(device)
    if device.type == "cpu":
        cpuinfo = Path("/proc/cpuinfo")
        flags = cpuinfo.read_text().split() if cpuinfo.exists() else []
        where = " ".join([f"{where}, {torch.backends.cpu.get_cpu_capability()}", *(f for f in _FLAGS if f in flags)])
    return f"{where}, torch {torch.__version__}, transformers {transformers.__version__}"
