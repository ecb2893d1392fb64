"""What a bench's measurements allow to recommend, and the config to paste."""

from collections.abc import Sequence
from statistics import geometric_mean

from .gains import ENOUGH_TOKENS, ENOUGH_VISITS, GENERATE, Gain, Way
from .options import MARGIN


KEEP = 'keep assistant_strategy="auto", which drafts where rounds tell that it pays'


def choose(gains: Sequence[Gain]) -> tuple[Way | None, float]:
    """The way to recommend, and its speedup over "none": the geometric mean over the batches. None: no way is clearly
    faster than "none".

    A way is clearly faster if it gains MARGIN, by more than its measurements spread, and tokens per block explain the
    gain. "auto" is kept unless a drafter that drafts always is faster than it by as much. A way is out whose drafter
    failed, or whose tokens were not all examined, or differ from those of "none" by more than near-ties.
    """
    by_way: dict[Way, list[Gain]] = {}
    for gain in gains:
        by_way.setdefault(gain.way, []).append(gain)
    batches = max(map(len, by_way.values()), default=0)
    scores, lowest = {}, {}
    for way, own in by_way.items():
        is_right = all(
            gain.failure is None and not (gain.identity and (gain.identity.unexplained or gain.identity.unexamined))
            for gain in own
        )
        if way.strategy not in (GENERATE, "none") and is_right and len(own) == batches:
            scores[way] = geometric_mean(gain.explained for gain in own)
            lowest[way] = geometric_mean(max(gain.explained - gain.spread, 1e-9) for gain in own)
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
    """Arguments of generate, and a config of the trainer, as Python text. Both do what was measured."""
    named = f"assistant_strategy={way.strategy!r}"
    if way.assistant is not None:
        named += f", assistant_model={way.assistant!r}"
    call = config = named
    if way.draft_length:
        call += f", speculative_config=SpeculativeConfig(draft_length={way.draft_length}, sd_toggle='always')"
        config += f", draft_lengths=[{way.draft_length}], sd_toggle='always'"
    config += f", bf16={mixed}"
    if dtype != "float32":  # in which TRL loads a model that it is given by name
        config += f", model_init_kwargs={{'dtype': {'torch.float64' if dtype == 'float64' else repr(dtype)}}}"
    return call, f"SpecGRPOConfig({config})"
