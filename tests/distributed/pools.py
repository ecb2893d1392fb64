"""Pools whose ranks help each other for sure, and a control that lets them race."""

import time
from collections.abc import Mapping, Sequence

from spec_trl.distributed.link import Link
from spec_trl.distributed.pool import SharedPool
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.scheduling.control import Chain
from tests.generation.races import Plans


class Patient(SharedPool):
    """The first rank's first round lasts until another rank has nothing left."""

    link: Link

    def after_round(self, rollout: Rollout) -> None:
        while self.link.rank == 0 and not self.link.count("asked"):
            time.sleep(0.001)
        super().after_round(rollout)


class Helped(Plans):
    """Drafts with the first drafter, and lets each free rank race for all rows with the second one, a lookup."""

    def __init__(self) -> None:
        super().__init__(2, [[Chain(0, 2)]])

    def further_method(
        self, requests: Sequence[int], helpers: Mapping[tuple[int, str], int]
    ) -> tuple[str, list[int]] | None:
        wanted = [request for request in requests if (request, "ngram") not in helpers]
        return ("ngram", wanted) if wanted else None


def unfair(texts: list[list[int]]) -> list[int]:
    """An order by which the first of two ranks is dealt the longer half of the requests."""
    longest = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    half = len(texts) // 2
    pairs = list(zip(longest[:half], longest[half:], strict=True))
    return [index for place, pair in enumerate(pairs) for index in (pair if place % 2 == 0 else pair[::-1])]
