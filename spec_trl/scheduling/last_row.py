"""A rollout ends with its last row: how long that takes where drafts help some rows more than others."""

from collections.abc import Callable, Sequence


def rollout_seconds(rounds: Sequence[float], seconds: Callable[[int], float]) -> float:
    """Seconds of a rollout whose rows stay for `rounds` rounds each; `seconds` gives a round's, by its rows."""
    took, past = 0.0, 0.0
    for ended, end in enumerate(sorted(rounds)):
        if end > past:
            took += (end - past) * seconds(len(rounds) - ended)
            past = end
    return took


def until_last_row(efficiencies: Sequence[float], seconds: Callable[[int], float]) -> float:
    """τ at which rows that are all alike would end as soon as the last of rows with these τ, one per row.

    Rows of much acceptance end early, and rounds of few rows go on: the mean of τ would promise too much.

        τ    4  | ####                  were rounds as cheap as they have rows: the harmonic mean, 1.6
             1  | ################      were all rounds as dear: the smallest, 1.0
                  rounds

    All rows are taken to have the same number of tokens ahead. `seconds` gives a round's, by the number of rows left.
    """
    took = rollout_seconds([1 / efficiency for efficiency in efficiencies], seconds)
    return seconds(len(efficiencies)) / took
