"""Declares the options of EfficientRollout."""

from dataclasses import dataclass
from typing import Literal

from ...value_checks import DeclaredOptions, option


@dataclass(frozen=True)
class EfficientRolloutOptions(DeclaredOptions):
    """The roofline (ER §3.2), the controller of the draft length (ER §3.3) and the head of the quantized copy."""

    group = "efficient_rollout"

    profile: str | None = option(
        None,
        'File of the roofline profile; sd_toggle="roofline" calibrates a missing one. None: in the user\'s cache.',
    )
    mismatch: Literal["recalibrate", "error"] = option(
        "recalibrate",
        'A profile of another machine, shape, dtype or kernel: "recalibrate" (with "measured": measure rounds), or '
        '"error".',
    )
    margin: float = option(0.05, "ε, predicted speedup beyond 1 that speculation needs.", low=0)
    initial_draft_length: int | None = option(
        None, "γ₀, the first draft length. None: the first of draft_length.", low=1
    )
    draft_length_up: float = option(0.94, "In trainers, γ rises at a block efficiency of 1 + γ draft_length_up.")
    draft_length_down: float = option(0.85, "In trainers, γ falls at a block efficiency of 1 + γ draft_length_down.")
    draft_length_patience: int = option(2, "Number of rollouts in a row that γ waits for.", low=1)
    lm_head: Literal["auto", "dense", "packed"] = option(
        "auto",
        'Head of the copy: the policy\'s ("dense"), a quantized one ("packed"), or "auto": packed where it is a large '
        "share of a draft.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        up, down = self.draft_length_up, self.draft_length_down
        if not 0 < down < up <= 1:
            raise ValueError(
                f"efficient_rollout.draft_length_down={down} and efficient_rollout.draft_length_up={up} must be "
                "shares, the first the smaller one: 0 < draft_length_down < draft_length_up <= 1."
            )
