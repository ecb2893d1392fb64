"""What ranks agree on between two turns."""

from typing import TypeVar

from spec_trl.distributed.shared_rollouts import SharedRollouts
from spec_trl.generation.engine.statistics import SpeculationStatistics


T = TypeVar("T")


class Alike(SharedRollouts):
    """All ranks bring and report the same."""

    def _gather(self, own: T) -> list[T]:
        return [own] * self._ranks


def test_copies_are_spread_while_reading_them_is_cheap() -> None:
    sharing = Alike(True, 0, 8, 60.0)

    def spreads_after(reading: float) -> bool:
        sharing.begin()
        turn = sharing.gather([[1, 2, 3], [4]])  # with eight ranks, eight copies each
        statistics = SpeculationStatistics("none", seconds=1.0, phase_seconds={"prefill": reading})
        sharing.exchange(turn, {place: [7] for place in range(len(turn.rows))}, statistics)
        return sharing.spreads

    assert not sharing.spreads  # nothing is known
    assert spreads_after(0.01)  # 0.07 when spread
    assert spreads_after(0.08)  # 0.07 more than together
    assert not spreads_after(0.16)
    assert not spreads_after(0.02)
