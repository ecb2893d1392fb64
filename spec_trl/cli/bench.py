"""Runs `spec-trl bench`: measures gains for a model on this machine, and prints a config to paste."""

import argparse
import math
import time
from collections.abc import Sequence
from statistics import geometric_mean

import torch
import transformers
from tqdm import tqdm
from transformers import PreTrainedConfig, PreTrainedModel

from ..generation.engine.requirements import check_lengths, check_model, position_limit
from ..generation.keyword import install
from ..generation.measuring import find_profile
from ..generation.options import SpeculativeConfig
from ..hardware import hardware_name, instruction_set
from .arguments import MARGIN, table
from .gains import ENOUGH_TOKENS, ENOUGH_VISITS, GENERATE, Gain, Way, Work, make_ways, summarise
from .loading import (
    PROMPTS,
    find_device,
    load_config,
    load_model,
    load_tokenizer,
    random_ids,
    read_prompts,
    token_ids,
)
from .visits import MOST_VISITS, PROBE, NotEnoughTime, measure


PROMPT_TOKENS = 256
"""Most tokens of a prompt; longer ones are cut, since reading prompts takes the same time for every strategy."""
EXACT = "exact here: drafts change no bit of a log-probability"
EXAMINING = 0.1
"""Share of the time to separate near-ties from errors."""
RANDOM_PROMPT = 32
"""Tokens of a random prompt."""
KEEP = 'keep assistant_strategy="auto", which drafts where rounds show that it pays'


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
    check_lengths(model, position_limit(model), list(map(len, prompts)), arguments.length)
    dtype = str(model.dtype).removeprefix("torch.")
    mixed = device.type == "cuda" and dtype == "float32"
    weights = "float32 under autocast to bfloat16, as SpecGRPOConfig(bf16=True) trains" if mixed else dtype
    print(f"{arguments.model}, {weights}, {machine(device)}")
    print(f"{kind}; temperature {arguments.temperature:g}; at most {arguments.seconds:g} s, loading included")
    with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
        gains = _measure(model, prompts, arguments, assistants, until)
    print("\n" + recommend(gains, arguments.model, dtype, mixed))


def _check_length(length: int, longest_prompt: int, config: PreTrainedConfig) -> None:
    """Raises ValueError if completions of `length` exceed the context that `config` names."""
    context = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and longest_prompt + length > context:
        raise ValueError(
            f"--length {length} with a prompt of {longest_prompt} tokens is beyond the model's context of {context}. "
            f"Give at most --length {max(context - longest_prompt, 1)}."
        )


def _prompts(
    arguments: argparse.Namespace, config: PreTrainedConfig, texts: list[str] | None
) -> tuple[list[list[int]], str]:
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
    """Compares strategies at every batch size before `until`, and prints a table per batch size. The smallest batch
    chooses among the candidates. Raises ValueError, with the time that would be enough, if there is too little."""
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
            most_until = until - EXAMINING * (until - now)
            try:
                work, calls = measure(model, ways, wanted, arguments.seed, calls_until, most_until, begin=begin)
            except NotEnoughTime as short:
                seconds = None if short.seconds is None else short.seconds / (1 - EXAMINING)
                if not gains:
                    raise ValueError(_too_short(arguments, batch, now, seconds)) from None
                more = "" if seconds is None else f": it takes about {seconds:.0f} s of its own"
                bar.write(f"\nbatch {batch}: left out for want of time{more}")
                continue
            finally:
                bar.update((number + 1) * most - bar.n)
            end = end if time.perf_counter() < end else until
            measured = summarise(model, work, arguments.seed, calls, profile, end)
            left_out = [way.name for way in ways if way not in calls]
            ways = [way for way in ways if way in calls] or ways
            bar.write(_section(measured, work, wanted, left_out, arguments.seconds))
            gains += measured
            exact += [call.statistics.exact for made in calls.values() for call in made if call.statistics is not None]
    if exact and exact[0]:
        parts = exact[0] if isinstance(exact[0], list) else []
        print(f"not exact here ({'; '.join(parts)}): drafts may change a token at a near-tie" if parts else EXACT)
    for strategy, reason in missing.items():
        print(f"{strategy} is not possible here: {reason}")
    return gains


def _too_short(arguments: argparse.Namespace, batch: int, now: float, seconds: float | None) -> str:
    """The remedy if `seconds` (None: unknown) from `now` on are needed."""
    before = now - arguments.started
    text = f"--seconds {arguments.seconds:g} is too short: "
    if seconds is None:
        return (
            f"{text}loading took {before:.0f} s, and then there was no time for two calls of {PROBE} tokens by "
            f"generate and by none at batch {batch}. Give several times as much."
        )
    least = 10 * math.ceil((before + seconds) / 10)
    return (
        f"{text}to compare generate, none and one more at batch {batch} takes about {least} s, of which loading took "
        f"{before:.0f}. Give --seconds {least} or more{' or a smaller --batch' * (batch > 1)}."
    )


def _section(gains: Sequence[Gain], work: Work, wanted: Work, left_out: Sequence[str], seconds: float) -> str:
    head = f"\nbatch {len(work.prompts)}"
    if not gains:
        return f"{head}: not measured, generate and none did not end within --seconds {seconds:g}"
    fewer = f" (more do not fit into --seconds {seconds:g})" if work != wanted else ""
    calls = "1 call" if gains[0].visits == 1 else f"{gains[0].visits} calls"
    head += f", up to {work.new_tokens} tokens per row{fewer}, median of {calls} each"
    if any(gain.is_thin for gain in gains):
        head += ". Thin: too little to compare"
    out = f"\nslower in a probe, or not tried for want of time: {'; '.join(left_out)}" if left_out else ""
    return f"{head}:\n{_table(gains)}{out}"


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
    identity = gain.identity
    ties = f", {identity.near_ties} near-ties" if identity.near_ties else ""
    errors = f", {identity.unexplained} UNEXPLAINED" if identity.unexplained else ""
    left = f", {identity.unexamined} not examined for want of time" if identity.unexamined else ""
    return f"{identity.identical} of {identity.rows}{ties}{errors}{left}"


def machine(device: torch.device) -> str:
    """Device, instruction set of a CPU, and versions."""
    where = hardware_name(device)
    if device.type == "cpu":
        where += f", {instruction_set()}"
    return f"{where}, torch {torch.__version__}, transformers {transformers.__version__}"


# ---- what the measurements recommend --------------------------------------------------------------------------------


def choose(gains: Sequence[Gain]) -> tuple[Way | None, float]:
    """Returns the strategy to recommend, and its speedup over "none", the geometric mean over the batches. None: no
    strategy is clearly faster than "none".

    A strategy is clearly faster if it gains MARGIN, more than its measurements spread, and tokens per block explain
    the gain. "auto" is recommended unless a drafter that always drafts is faster by as much. Excluded are strategies
    with a failed drafter, unexamined tokens, or tokens that differ from those of "none" by more than near-ties.
    """
    by_way: dict[Way, list[Gain]] = {}
    for gain in gains:
        by_way.setdefault(gain.way, []).append(gain)
    batches = max(map(len, by_way.values()), default=0)
    scores, lowest = {}, {}
    for way, of_way in by_way.items():
        is_right = all(
            gain.failure is None and not (gain.identity and (gain.identity.unexplained or gain.identity.unexamined))
            for gain in of_way
        )
        if way.strategy not in (GENERATE, "none") and is_right and len(of_way) == batches:
            scores[way] = geometric_mean(gain.explained for gain in of_way)
            lowest[way] = geometric_mean(max(gain.explained - gain.spread, 1e-9) for gain in of_way)
    chosen, best = None, 1.0
    for way in sorted(scores, key=lambda way: (way.strategy != "auto", -scores[way])):
        if scores[way] >= (1 + MARGIN) * best and lowest[way] > best:
            chosen, best = way, scores[way]
    return chosen, best


def recommend(gains: Sequence[Gain], model: str, dtype: str, mixed: bool) -> str:
    """The recommendation, in words and as Python text.

    Args:
        gains: of all batches.
        model: path or hub id.
        dtype: of its weights.
        mixed: whether it was measured under autocast to bfloat16.
    """
    batches = {gain.rows: not any(other.is_thin for other in gains if other.rows == gain.rows) for gain in gains}
    enough = [gain for gain in gains if batches[gain.rows]]
    if not enough:
        return (
            f"no recommendation, too little was measured: it needs {ENOUGH_VISITS} calls each of at least "
            f"{ENOUGH_TOKENS} tokens per row. Give more --seconds, one --batch, a longer --length, or prompts with "
            "longer answers.\n"
            f"Until then {KEEP}"
        )
    way, speedup = choose(enough)
    left = "" if all(batches.values()) else f" (of {_listed(batches, True)} alone; {_listed(batches, False)} is thin)"
    plain = geometric_mean(gain.of_generate for gain in enough if gain.way.strategy == "none")
    engine = f'\n"none", decoding without drafts, is {plain:.2f} times as fast as generate'
    if plain * speedup * (1 + MARGIN) < 1:
        engine += ": outside of a trainer leave assistant_strategy out"
    if way is None:
        return f"nothing here is clearly faster than decoding without drafts{left}; {KEEP}{engine}"
    call, config = config_to_paste(way, dtype, mixed)
    within = "with torch.autocast('cuda', torch.bfloat16):\n      " if mixed else ""
    torch = "  import torch\n" if "torch." in within + config else ""
    return (
        f"recommended: {way.name}, {speedup:.2f} times as fast as decoding without drafts{left}{engine}\n"
        f"{torch}  from spec_trl import SpecGRPOConfig, SpeculativeConfig\n"
        f"  from transformers import AutoModelForCausalLM\n"
        f"  model = AutoModelForCausalLM.from_pretrained({model!r}, dtype={dtype!r})\n"
        f"  {within}model.generate(**inputs, {call})\n"
        f"  {config}"
    )


def _listed(batches: dict[int, bool], wanted: bool) -> str:
    return "batch " + ", ".join(str(rows) for rows, enough in batches.items() if enough is wanted)


def config_to_paste(way: Way, dtype: str, mixed: bool) -> tuple[str, str]:
    """Arguments of generate, and a config of the trainer, as Python text, for what was measured."""
    named = f"assistant_strategy={way.strategy!r}"
    if way.assistant is not None:
        named += f", assistant_model={way.assistant!r}"
    if way.draft_length:
        named += f", speculative_config=SpeculativeConfig(draft_length={way.draft_length}, sd_toggle='always')"
    config = f"{named}, bf16={mixed}"
    if dtype != "float32":  # TRL's dtype of a model loaded by name
        config += f", model_init_kwargs={{'dtype': {'torch.float64' if dtype == 'float64' else repr(dtype)}}}"
    return named, f"SpecGRPOConfig({config})"
