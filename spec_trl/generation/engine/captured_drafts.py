"""Captured draft loops: the γ forwards of a draft, and the draws between them, are launched at once."""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from .accept import Proposal
from .captured_forward import ForwardKey, pad
from .cuda_graphs import Outputs, Recording
from .draft_loop import Forward, NetworkDraft
from .filters import Filters


Record = Callable[[Callable[[], Outputs], Callable[[Recording], tuple[Tensor, Tensor]], str], tuple[Recording, int]]
"""Captures work whose scores, compared with those that are expected, are about the same; also says how many bytes it
took."""


class _Key(NamedTuple):
    shape: ForwardKey
    known: int
    draft_length: int
    samples: bool
    drawn_by: Filters | None

    @classmethod
    def of(cls, draft: NetworkDraft, shape: ForwardKey) -> "_Key":
        return cls(shape, draft.known, draft.draft_length, draft.noise is not None, draft.drawn_by)


@dataclass
class CapturedLoop:
    """A loop over static buffers, of a bucket of rows. It keeps nothing else of the draft it was captured with.

    What it returns lies in the buffers too: other captured work, which is replayed before anybody reads it, writes to
    whatever a capture took.
    """

    tokens: Tensor  # [rows, known + γ]
    columns: Tensor  # [rows, known + γ - 1]
    keys: Tensor | None  # [rows, γ], of the noise
    scores: Tensor  # [rows, γ]
    filled: int  # rows of the buffers that a call has filled; the others stand at column 0
    recording: Recording | None = None
    bytes: int = 0  # that it took

    @classmethod
    def over(cls, draft: NetworkDraft, rows: int, scores: Tensor) -> "CapturedLoop":
        """One that is not recorded yet, for `rows`, filled with `draft`, which gave `scores` `[B, γ]`: warming up
        writes the K/V that it wrote."""
        keys = None if draft.noise is None else pad(draft.noise.keys[:, : draft.draft_length], rows)
        return cls(pad(draft.tokens, rows), pad(draft.columns, rows), keys, pad(scores, rows), len(draft.tokens))

    def run(self, draft: NetworkDraft, forward: Forward) -> Outputs:
        """The loop of `draft` over the buffers: scores and tokens `[rows, γ]`."""
        noise = None if draft.noise is None or self.keys is None else draft.noise.over(self.keys)
        proposal = replace(draft, tokens=self.tokens, columns=self.columns, noise=noise).run(forward)
        assert proposal.scores is not None
        return self.scores.copy_(proposal.scores), self.tokens[:, draft.known :]

    def replay(self, draft: NetworkDraft) -> Proposal:
        """The same as `draft.run`; its tensors hold until the next replay."""
        assert self.recording is not None
        rows, known = len(draft.tokens), draft.known
        self.tokens[:rows, :known] = draft.tokens[:, :known]
        self.columns[:rows] = draft.columns
        if self.keys is not None and draft.noise is not None:
            self.keys[:rows] = draft.noise.keys[:, : draft.draft_length]
        if self.filled > rows:
            self.columns[rows:] = 0  # so that free rows read one column, not many
        self.filled = rows
        self.recording.replay()
        return Proposal(self.tokens[:rows, known:], None, None, self.scores[:rows])


class CapturedLoops:
    """The captured loops of one network, for drafts that were asked for often enough."""

    def __init__(self) -> None:
        self._loops: dict[_Key, CapturedLoop] = {}
        self._asked: Counter[_Key] = Counter()

    def __len__(self) -> int:
        return len(self._loops)

    def get(self, draft: NetworkDraft, shape: ForwardKey) -> CapturedLoop | None:
        """What replays `draft`, if it was captured."""
        return self._loops.get(_Key.of(draft, shape))

    def larger(self, draft: NetworkDraft, shape: ForwardKey) -> CapturedLoop | None:
        """A captured loop into which `draft` fits."""
        fitting = [key for key in self._loops if key.shape.serves(shape) and key == _Key.of(draft, key.shape)]
        return self._loops[min(fitting, key=lambda key: key.shape)] if fitting else None

    def ask(self, draft: NetworkDraft, shape: ForwardKey) -> int:
        """How many times such a draft has been asked for, now included."""
        key = _Key.of(draft, shape)
        self._asked[key] += 1
        return self._asked[key]

    def capture(
        self, draft: NetworkDraft, shape: ForwardKey, expected: Proposal, forward: Forward, record: Record, name: str
    ) -> None:
        """Captures the loop of `draft`, which has just drafted `expected`, with `forward` of the network `name`; goes
        on without it, with a warning, where that fails."""
        assert expected.scores is not None
        try:
            loop = CapturedLoop.over(draft, shape.rows, expected.scores)
            compared = partial(_up_to_the_first_other, expected)
            loop.recording, loop.bytes = record(partial(loop.run, draft, forward), compared, "those of single steps")
        except Exception as error:
            warnings.warn(
                f"the draft loop of {name} could not be captured and goes step by step for {shape.rows} rows x "
                f"{draft.draft_length} drafts, with the same tokens but slower: {type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            self._loops[_Key.of(draft, shape)] = loop

    def drop(self) -> list[int]:
        """Forgets all; returns the bytes that each took."""
        taken = [loop.bytes for loop in self._loops.values()]
        self._loops.clear()
        self._asked.clear()
        return taken


def _up_to_the_first_other(expected: Proposal, recording: Recording) -> tuple[Tensor, Tensor]:
    """Scores `[B, γ]` of a replay, and those that were `expected`; the same from where the replay drew another token
    on, which rounding may do: what follows is another text's."""
    assert expected.scores is not None and recording.features is not None
    same = recording.features[: len(expected.tokens)] == expected.tokens  # [B, γ]
    comparable = F.pad(same.long().cumprod(1), (1, -1), value=1).bool()  # [B, γ], the first other token included
    return recording.logits[: len(same)].where(comparable, expected.scores), expected.scores
