"""What the verifier tells a drafter that runs on its own, and how it is answered.

A message is a kind and a flat int64 tensor in host memory, the same within a process and between ranks. They are a few
hundred bytes per round, so their way costs next to nothing beside a forward.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum

from torch import Tensor

from ...engine.drafter import DraftCost, DraftSession


class Kind(IntEnum):
    """The messages, in the order in which a generation has them: BEGIN, then ADMIT, DRAFT, COMMIT and MOVE again and
    again, END. B: rows in flight."""

    BEGIN = 1
    """A generation begins; its content is the link's own business."""
    ADMIT = 2
    """Requests came in, in the order of their rows; of each: index, limit, noise key, tokens of the prompt, tokens
    that another rank has generated, and all these tokens."""
    DRAFT = 3
    """`[B]`: how many more tokens to draft for each row, after those it has drafted already. Answered by WINDOW."""
    COMMIT = 4
    """`[B]` tokens k that a round committed, or that follow prompts, `[B]` whether they are the first k of the row's
    drafts, and the tokens `[B, max k]`. Where they are, the drafts after them stay; else all of the row's drafts are
    dropped."""
    MOVE = 5
    """Rows that ended, as of :meth:`Rows.drop`."""
    END = 6
    """The generation is over."""
    WINDOW = 7
    """Answer: `[B]` tokens drafted, and `[B, max asked]` tokens."""
    FAILED = 8
    """Answer: the drafter raised; the UTF-8 bytes of what it said."""
    CLOSE = 9
    """To a drafter rank: there is nothing more to come."""


class DraftLink(ABC):
    """The way to a drafter on its own thread or rank, and what it tells of that drafter.

    All but `begin` and `close` move what :class:`Kind` names. Any failure raises; none takes longer than the link's
    timeout.
    """

    strategy: str
    max_rows: int
    cost: DraftCost | None

    def claim(self) -> AbstractContextManager[None]:
        """Reserves the drafter for one generation, where it is in this process."""
        return nullcontext()

    @abstractmethod
    def begin(self, session: DraftSession, vocabulary: int) -> None:
        """Has the drafter begin a generation like `session`, over rows of its own."""

    @abstractmethod
    def send(self, kind: Kind, values: Tensor) -> None:
        """Sends a message; does not wait until it is carried out."""

    @abstractmethod
    def receive(self) -> Tensor:
        """Waits for the answer to the newest DRAFT: a WINDOW's content."""

    @abstractmethod
    def end(self) -> None:
        """Has the drafter let go of the generation."""

    @property
    def forwards(self) -> int:
        """Draft network forwards since `begin`, as far as known here."""
        return 0

    @property
    def cache_bytes(self) -> int:
        """Bytes of the drafter's K/V cache in this process."""
        return 0
