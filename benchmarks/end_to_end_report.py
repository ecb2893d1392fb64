"""What the end-to-end benchmark finds: the paper's Table 2, and its ablations."""

from typing import Any

from .configurations import (
    ALWAYS_ADAPTIVE,
    AUTOREGRESSIVE,
    AWQ,
    EFFICIENT_ROLLOUT,
    FIXED,
    LADDER,
    LEARNED_ADAPTED,
    LEARNED_FROZEN,
    LEARNED_TTS,
    METHODS,
    TRL,
    always_on,
    always_on_w8,
    toggled,
)
from .measure import Finding
from .models import model_line, weights_line
from .paper.breakdown import Shape, idealized_draft_ratio


OURS = "autoregressive (ours)"
_NAMES = {
    AUTOREGRESSIVE: OURS,
    TRL: "trl.GRPOTrainer (transformers generate)",
    "history": "history-based, lossless",
    "auto": "auto",
    EFFICIENT_ROLLOUT: "EfficientRollout: toggle, adaptive γ",
    LEARNED_FROZEN: "learned auxiliary, as it came",
    LEARNED_ADAPTED: "learned auxiliary, adapted after each micro-batch",
    LEARNED_TTS: "learned auxiliary, learning from each round (TTS)",
    ALWAYS_ADAPTIVE: "always on, adaptive γ (Fig. 5)",
    AWQ: "always on, γ = 5, AWQ W4 (Fig. 7)",
    **{always_on(length): f"quantized self, always on, γ = {length}" for length in FIXED},
    **{toggled(length): f"toggle, γ = {length} (Fig. 4a, 5)" for length in LADDER},
    **{always_on_w8(length): f"always on, γ = {length}, RTN W8 (Tab. 4)" for length in FIXED},
}
ORDER = [*METHODS, LEARNED_FROZEN, LEARNED_ADAPTED, LEARNED_TTS, *map(toggled, LADDER), ALWAYS_ADAPTIVE]
ORDER += [*map(always_on_w8, FIXED), AWQ]


def findings(result: dict[str, Any]) -> list[Finding]:
    """Each method against TRL's own trainer and against autoregressive decoding: Table 2, then the ablations."""
    methods, model, found = result["methods"], model_line(result["target"]), []
    base, trl = methods[AUTOREGRESSIVE], methods.get(TRL)
    for name in (name for name in ORDER if name in methods and name != TRL):
        own, what = methods[name], f"{model}: {_NAMES[name]}" + " = γ*" * (name == result["best_fixed"])
        if trl is not None:  # which draws other texts, so times alone would not compare
            faster = own["tokens_per_second"] / trl["tokens_per_second"]
            found.append(Finding(f"{what}, rollout tokens/s", faster, "×", _NAMES[TRL]))
            own_rate, trl_rate = (each["tokens"] / each["step_seconds"] for each in (own, trl))
            found.append(Finding(f"{what}, tokens/s of a whole step", own_rate / trl_rate, "×", _NAMES[TRL]))
        if name != AUTOREGRESSIVE:
            for part in ("rollout", "step"):
                change = own[f"{part}_seconds"] / base[f"{part}_seconds"] - 1
                found.append(Finding(f"{what}, time of a {part}", change, "±%", OURS))
        if own["block_efficiency"] is not None:
            found.append(Finding(f"{what}, block efficiency", own["block_efficiency"], "tokens per round"))
    return found


def idealized(result: dict[str, Any], shape: dict[str, Any]) -> dict[str, float]:
    """T_q over T_p of one row where memory alone counts, 16-bit weights and dense embeddings (ER App. C.3)."""
    length = result["options"]["longest_prompt"] + result["options"]["max_completion_length"]
    return {
        f"W{bits}, {length} tokens": idealized_draft_ratio(Shape.from_config(shape), bits, 1, length)
        for bits in (8, 4)
    }


def setup(result: dict[str, Any]) -> str:
    """How it was measured, and whether completions were the same."""
    options = result["options"]
    text = (
        f"GRPO, {options['steps']} steps of {options['rows']} completions ({options['group']} of a prompt) of up to "
        f"{options['max_completion_length']} tokens at temperature 1, {options['questions']} prompts of up to "
        f"{options['longest_prompt']} tokens, the same seeds for each method. Times: mean over the steps but the "
        f"first of the median over {options['repeats']} repeats; making the drafter counts in a step's time alone."
        + weights_line(result["target"])
    )
    if file := options.get("questions_file"):  # results of before have no such field
        text += f" Prompts are questions of {file}; the reward is whether the answer is right."
    if (calibration := result["calibration"]) is not None:
        text += f" Calibration, in none of the times: {calibration['seconds']:.1f} s."
    compared = {n: m for n, m in result["methods"].items() if m["identical_steps"] is not None and n != AUTOREGRESSIVE}
    same = sum(m["identical_steps"] == m["steps"] for m in compared.values())
    return text + f" Completions identical in every step: {same} of {len(compared)} configurations."
