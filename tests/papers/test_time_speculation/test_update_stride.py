"""When a drafter learns, with a fixed and with an adaptive stride: on simulated drafters, without a clock."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from spec_trl.papers.test_time_speculation.update_stride import TRIAL, UPDATES, AdaptiveStride, FixedStride


DRAFT_LENGTH = 7


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_the_first_round_and_every_sth_after_it(rounds: int) -> None:
    stride = FixedStride(rounds)
    for _ in range(2):
        assert [i for i in range(40) if stride.is_due()] == list(range(0, 40, rounds))
        stride.begin()


@dataclass
class Drafter:
    """Its log τ rises to `most` more than `tau` has, at first by `slope` per update; a round takes a second."""

    tau: float = 1.8
    most: float = 0.7
    slope: float = 0.0025
    update_seconds: float = 1.0
    updates: int = 0
    rounds: int = 0
    seconds: float = 0.0
    frozen_seconds: float = 0.0
    spent: float = 0.0

    def rise(self) -> float:
        """By what was learned so far."""
        return self.most * (1 - math.exp(-self.updates * self.slope / self.most)) if self.most else 0.0

    def run(
        self,
        price: AdaptiveStride,
        rounds: int,
        ahead: Callable[[int], float] = float,
        spend: Callable[[float], bool] = lambda _: True,
    ) -> float:
        """Drafts, and learns where `price` says so; `ahead` tells rounds ahead from those so far. Returns how many
        times as fast as frozen it was."""
        noise = random.Random(0)

        def pays(seconds: float) -> bool:
            agreed = spend(seconds)
            self.spent += seconds * agreed
            return agreed

        for _ in range(rounds):
            rise, self.rounds = self.rise(), self.rounds + 1
            self.seconds += 1
            self.frozen_seconds += math.exp(rise)
            tau = self.tau * math.exp(rise)
            scatter = noise.choice([-1, 1]) * min(tau - 1, DRAFT_LENGTH + 1 - tau)
            price.observe(tau + scatter, DRAFT_LENGTH, 1.0)
            if price.is_due(ahead(self.rounds), pays):
                price.learned(self.update_seconds, rise + noise.gauss(0, 0.1 + 0.7 * abs(rise)) * (self.updates > 0))
                self.updates += 1
                self.seconds += self.update_seconds
                if price.is_harmful:
                    price.forget()
                    self.updates = 0
        return self.frozen_seconds / self.seconds


def test_one_that_learns_goes_on_until_it_has_learned() -> None:
    """It pays for its updates by what they save."""
    drafter, price = Drafter(), AdaptiveStride()
    assert drafter.run(price, 10_000) > 1.2
    assert drafter.updates > 500 and drafter.updates * drafter.update_seconds > 2 * drafter.spent
    before = drafter.updates
    drafter.run(price, 10_000)
    assert drafter.rise() > 0.8 * drafter.most and drafter.updates - before < before  # then it learns less


@pytest.mark.parametrize("scale", [1 / 64, 64.0])
def test_only_ratios_of_seconds_count(scale: float) -> None:
    found = []
    for unit in (1.0, scale):
        price, due = AdaptiveStride(), []
        for index in range(3000):
            price.observe(2.0, DRAFT_LENGTH, unit)
            if price.is_due(float(index), lambda _: True):
                due.append(index)
                price.learned(unit, 0.001 * len(due))
        found.append(due)
    assert found[0] == found[1] and len(found[0]) > 10


@pytest.mark.parametrize(
    ("drafter", "rounds", "ahead", "updates"),
    [
        (Drafter(tau=7.95, most=0.0), 10_000, float, (0, 0)),  # without room
        (Drafter(tau=7.99, most=0.0), 10_000, float, (0, 0)),
        (Drafter(update_seconds=100.0), 10_000, float, (1, 1)),  # costs more than it gains, as it finds out
        (Drafter(), 3000, lambda _: 100.0, (0, 0)),  # has few rounds ahead
        (Drafter(), 3000, lambda _: 1e5, (1, 3000)),
        (Drafter(most=0.0), 20_000, float, (1, 400)),  # gains nothing
        (Drafter(most=0.0, update_seconds=5.0), 20_000, float, (1, 80)),
    ],
)
def test_how_often_it_learns(
    drafter: Drafter, rounds: int, ahead: Callable[[int], float], updates: tuple[int, int]
) -> None:
    price = AdaptiveStride()
    drafter.run(price, rounds, ahead)
    assert updates[0] <= drafter.updates <= updates[1]
    if drafter.updates and not drafter.most:
        assert drafter.frozen_seconds / drafter.seconds > 0.98 and price.share < 1 / UPDATES / 2


def test_one_that_gets_worse_stops_and_starts_anew() -> None:
    drafter, price = Drafter(most=-5.0, slope=-0.001), AdaptiveStride()
    assert drafter.run(price, 30_000) > 0.96
    assert drafter.updates == 0 and price.share < 0
    assert not price.is_harmful and drafter.run(price, 5000) and drafter.updates == 0


def test_trials_are_paid_from_the_budget() -> None:
    """Never more than a small share of the rounds; and an empty budget allows none."""
    empty, full = Drafter(), Drafter(most=0.0)
    empty.run(AdaptiveStride(), 5000, spend=lambda _: False)
    assert empty.updates == 0
    full.run(AdaptiveStride(), 5000)
    assert full.updates > 5
    assert full.spent <= TRIAL * 5000 and full.updates * full.update_seconds < 1.5 * full.spent


def test_what_took_longer_than_expected_is_paid_later() -> None:
    """The first update took as long as 30 rounds: the next one waits until trials have paid for it."""
    price, due = AdaptiveStride(), []
    for index in range(8000):
        price.observe(2.0, DRAFT_LENGTH, 1.0)
        if price.is_due(1e6, lambda _: True):
            due.append(index)
            price.learned(30.0 if len(due) == 1 else 2.0, math.nan)
    assert due[1] - due[0] >= 30 / TRIAL and len(due) < 90


def test_one_measurement_tells_what_an_unknown_checkpoint_has_learned() -> None:
    price = AdaptiveStride()
    price.load_state_dict(None)
    price.observe(2.0, DRAFT_LENGTH, 1.0)
    price.learned(1.0, 0.5)
    assert price.level == pytest.approx(0.5, abs=0.05)


def test_goes_on_from_a_checkpoint_and_forgets() -> None:
    """What rows have learned that start anew is forgotten; what learning is worth is not."""
    drafter, price, other = Drafter(), AdaptiveStride(), AdaptiveStride()
    drafter.run(price, 6000)
    other.load_state_dict(price.state_dict())
    assert (other.level, other.share, other.rounds, other.tau) == (price.level, price.share, price.rounds, price.tau)
    assert price.level > 0.1
    price.forget()
    assert price.level == 0 and price.share == other.share
