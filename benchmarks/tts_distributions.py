"""What target and draft think of the first token of each block, by output depth (TTS Fig. 4 and 6b)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.canvas import TrainableDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.noise import Draw, RoundNoise

from .tts_numbers import BINS, Record, depth_bin


SUMS = ("count", "entropy", "cross_entropy", "seen", "seen_cross_entropy", "agreed", "unknown")
"""By depth bin: positions; the target's entropy and the draft's cross-entropy on the target's likeliest token (nats);
positions whose likeliest token stood in the text before, and their cross-entropy; positions at which the draft's
likeliest token is the same; and those whose likeliest token the draft's vocabulary lacks, which count nowhere else."""


@dataclass(frozen=True)
class WatchedSession(DraftSession):
    """A session that keeps the raw logits of each round's first draft token, `[B, V]`."""

    first: list[Tensor] = field(default_factory=list)

    def draw(
        self, logits: Tensor, noise: RoundNoise | None, step: int, previous: Draw | None = None
    ) -> tuple[Draw, Tensor | None]:
        if step == 0:
            self.first[:] = [logits[:, 0].detach().clone()]  # a runner's next forward may overwrite its logits
        return super().draw(logits, noise, step, previous)


class WatchedDrafter(DistilledDrafter):
    """Notes p and q, as they were when the round drafted, of the first draft token of each round; batch 1.

    Args:
        student: drafts.
        how: it learns; None: it stays frozen.
        new_tokens: of a request.
    """

    def __init__(self, student: TrainableDrafter, how: Distillation | None, new_tokens: int) -> None:
        super().__init__(student, how or Distillation(1.0))
        self._is_frozen, self._new_tokens = how is None, new_tokens

    def begin(self, session: DraftSession) -> None:
        watched = WatchedSession(**{each.name: getattr(session, each.name) for each in fields(DraftSession)})
        self._first, self.sums = watched.first, {name: [0.0] * BINS for name in SUMS}
        super().begin(watched)

    def learn(self, logits: Tensor, verified: Tensor) -> None:
        rows = self.session.rows
        where = depth_bin(int(rows.generated[0]), self._new_tokens)
        text = rows.tokens[0, : int(rows.lengths[0])]  # [n]
        for name, value in observe_position(logits[0, 0], self._first[0][0], text).items():
            self.sums[name][where] += value
        if not self._is_frozen:
            super().learn(logits, verified)


def observe_position(target: Tensor, draft: Tensor, text: Tensor) -> dict[str, float]:
    """What one position adds to `SUMS`.

    Args:
        target: `[V]` raw logits of p.
        draft: `[V]` raw logits of q; -inf outside its vocabulary.
        text: `[n]` int64, the tokens before.
    """
    p, q = target.double().log_softmax(-1), draft.double().log_softmax(-1)  # [V]
    likeliest = int(p.argmax())
    cross_entropy = -float(q[likeliest])
    if math.isinf(cross_entropy):
        return {"unknown": 1.0}
    seen = float((text == likeliest).any())
    return {
        "count": 1.0,
        "entropy": float(torch.special.entr(p.exp()).sum()),
        "cross_entropy": cross_entropy,
        "seen": seen,
        "seen_cross_entropy": seen * cross_entropy,
        "agreed": float(int(q.argmax()) == likeliest),
    }


def means(records: Sequence[Record], bins: slice) -> dict[str, float | None]:
    """Means of records' sums over depth bins: entropy, cross-entropy in all, on seen and on unseen tokens, agreement.

    None where there was no such position.
    """
    total: dict[str, Any] = {name: sum(sum(record["sums"][name][bins]) for record in records) for name in SUMS}

    def mean(amount: float, count: float) -> float | None:
        return amount / count if count else None

    unseen = total["count"] - total["seen"]
    return {
        "entropy": mean(total["entropy"], total["count"]),
        "cross_entropy": mean(total["cross_entropy"], total["count"]),
        "cross_entropy_seen": mean(total["seen_cross_entropy"], total["seen"]),
        "cross_entropy_unseen": mean(total["cross_entropy"] - total["seen_cross_entropy"], unseen),
        "agreement": mean(total["agreed"], total["count"]),
        "positions": total["count"],
        "unseen_positions": unseen,
    }
