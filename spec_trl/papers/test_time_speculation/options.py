"""Declares the options of Test-Time Speculation (arXiv 2605.09329)."""

from dataclasses import dataclass
from typing import Literal

from ...value_checks import DeclaredOptions, option


@dataclass(frozen=True)
class TTSOptions(DeclaredOptions):
    """How the drafter of `"tts"` learns from the rounds that it drafts."""

    group = "tts"

    drafter: Literal["self", "model", "eagle3", "dflash", "mtp"] = option(
        "self",
        'Which one learns: "eagle3", "dflash" or "model" in assistant_model, the policy\'s "mtp" head, or low-rank '
        'corrections of the copy, "self".',
    )
    learning_rate: float | None = option(
        None, "η of Adam. None: 3e-4; for drafters wider than 256 proportionally less.", positive=True
    )
    scope: Literal["request", "rollout", "run"] | None = option(
        None,
        'Learned weights serve one "request", one "rollout" (a call of generate), or the "run", checkpoints included. '
        'None: "request"; in trainers "run".',
    )
    steps: int = option(1, "K, optimizer steps per update.", low=1)
    stride: int | Literal["adaptive"] = option(
        "adaptive", 'S, rounds per update. "adaptive": updates where they pay; low-rank corrections then stay.', low=1
    )
    anchor_weight: float = option(0.0, "λ, weight of the loss term that keeps the drafter near the anchor.", low=0)
    anchor: Literal["current", "initial"] = option(
        "current", 'The drafter before the update, "current" (matters for steps > 1), or as loaded, "initial".'
    )
    asynchronous: bool = option(False, "Update during the next S - 1 rounds.")
    rank: int = option(8, "Rank of low-rank corrections.", low=1)
