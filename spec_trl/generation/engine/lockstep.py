"""Rollouts in lockstep, for processors and criteria that may read the whole batch or have state between steps."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .accept import Outcome
from .memory import sent
from .rollout import Rollout


class RolloutInStep(Rollout):
    """A rollout like `generate`: all requests at once, one token per round, no drafts.

    Ended rows stay until the last row ends, so that processors and criteria get all rows at every step: with
    `padding`, or if it is None with tokens of the model, as in `generate` without EOS. The options are those of
    :class:`Rollout`: no drafters, a control that never drafts, and rows for all requests.
    """

    def __init__(self, *options: Any, padding: int | None, **more: Any) -> None:
        super().__init__(*options, **more)
        self._padding = padding

    def _commit(self, outcome: Outcome) -> tuple[list[int], int]:
        rows, drawn = self.rows, outcome.drawn
        ended = [self.record.completions[index] is not None for index in rows.indices]
        tokens, gone = outcome.tokens, np.array(ended)  # [B, 1], [B]
        if self._padding is not None:
            tokens = np.where(gone[:, None], self._padding, tokens)
            drawn = replace(drawn, tokens=sent(torch.from_numpy(tokens), rows.tokens.device))
        sound = np.where(gone, 1, outcome.sound)  # [B]: logits after a row's end may be broken
        finished, _ = super()._commit(replace(outcome, drawn=drawn, tokens=tokens, sound=sound))
        return [row for row in finished if not ended[row]], ended.count(False)

    def _retire(self, finished: list[int]) -> None:
        if finished:
            self._complete(finished)
        if all(completion is not None for completion in self.record.completions):
            self._free(list(range(self.rows.active)))
