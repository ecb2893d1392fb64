"""What the end-to-end benchmark compares: rows of ER Table 2 and the paper's ablations, as SpecGRPOConfig fields."""

from typing import Any


AUTOREGRESSIVE = "autoregressive"
TRL = "trl"
EFFICIENT_ROLLOUT = "efficient-rollout"
ALWAYS_ADAPTIVE = "self-always-adaptive"
AWQ = "awq-always-5"
LEARNED_FROZEN, LEARNED_ADAPTED, LEARNED_TTS = "learned-frozen", "learned-adapted", "learned-tts"

LADDER = [5, 7, 9, 11]
"""Γ (ER §4.1)."""
FIXED = (3, 5, 7)
"""Draft lengths among which the always-on baseline has its best, γ* (ER §4.1)."""

_SELF: dict[str, Any] = {"assistant_strategy": "self", "draft_quantization": "rtn-w4-g128"}
_ALWAYS = _SELF | {"sd_toggle": "always"}
_TOGGLED = _SELF | {"sd_toggle": "roofline", "sd_margin": 0.05}
_ADAPTIVE: dict[str, Any] = {
    "draft_lengths": LADDER, "draft_length_up": 0.94, "draft_length_down": 0.85, "draft_length_patience": 2,
}  # fmt: skip


def always_on(draft_length: int) -> str:
    """Name of the always-on quantized self-drafter at a fixed γ."""
    return f"self-always-{draft_length}"


def always_on_w8(draft_length: int) -> str:
    """The same with 8 bits."""
    return f"w8-always-{draft_length}"


def toggled(draft_length: int) -> str:
    """Name of the toggled one at a fixed γ."""
    return f"self-toggle-{draft_length}"


METHODS: dict[str, dict[str, Any]] = {
    AUTOREGRESSIVE: {"assistant_strategy": "none"},
    TRL: {},  # trl.GRPOTrainer, which knows none of these fields
    # A lookup costs next to nothing, so the paper's history baseline has no toggle either.
    "history": {"assistant_strategy": "history", "sd_toggle": "always"} | _ADAPTIVE,
    **{always_on(length): _ALWAYS | {"draft_lengths": [length]} for length in FIXED},
    EFFICIENT_ROLLOUT: _TOGGLED | _ADAPTIVE,
    "auto": {"assistant_strategy": "auto", "draft_lengths": LADDER},
}
"""Rows of Table 2; the always-on ones become one, at γ*."""


def learned(kind: str, checkpoint: str, learning_rate: float) -> dict[str, dict[str, Any]]:
    """The learned auxiliary drafter of Table 2 (ER App. F.5), always on: kept, adapted to the policy after each
    micro-batch, and learning from each round (TTS).

    Args:
        kind: "eagle3" or "dflash".
        checkpoint: folder of the drafter.
        learning_rate: of the adaptation.
    """
    fields = {"assistant_model": checkpoint, "sd_toggle": "always", "draft_lengths": [5]}
    return {
        LEARNED_FROZEN: fields | {"assistant_strategy": kind, "drafter_adaptation": False},
        LEARNED_ADAPTED: fields | {"assistant_strategy": kind, "drafter_learning_rate": learning_rate},
        LEARNED_TTS: fields | {"assistant_strategy": "tts", "tts_drafter": kind, "tts_scope": "run"},
    }


ABLATIONS: dict[str, dict[str, Any]] = {
    **{toggled(length): _TOGGLED | {"draft_lengths": [length]} for length in LADDER},  # Fig. 4a
    ALWAYS_ADAPTIVE: _ALWAYS | _ADAPTIVE,  # Fig. 5
    **{
        always_on_w8(length): _ALWAYS | {"draft_lengths": [length], "draft_quantization": "rtn-w8"} for length in FIXED
    },  # Tab. 4
    AWQ: _ALWAYS | {"draft_lengths": [5], "draft_quantization": "awq-w4-g128"},  # Fig. 7
}
"""What the paper varies. They are read against rows of `METHODS`."""

ABLATED = (AUTOREGRESSIVE, *map(always_on, FIXED), EFFICIENT_ROLLOUT)
"""Those rows."""


def uses_profile(fields: dict[str, Any]) -> bool:
    """Whether a method needs a calibrated roofline."""
    return fields.get("sd_toggle") == "roofline"
