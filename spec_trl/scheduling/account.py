"""What a control says about a rollout: its prediction, and why rows drafted or did not."""

import math
from dataclasses import dataclass


INCOME = 0.015  # share of an autoregressive round that each round adds to the account: what trials may cost in the end
MOST_SAVED = 8.0  # autoregressive rounds that the account holds or owes at most: what is long ago counts no more


@dataclass(frozen=True)
class Account:
    """Of one rollout."""

    # Over plain decoding: the mean over the rounds that drafted or, where none did, the largest prediction. None:
    # nothing is predicted.
    predicted_speedup: float | None
    reason: str  # one sentence


FAILED = "the drafter failed"  # the engine has already warned of the error


def too_many_rows(batch: int, max_rows: int) -> str:
    """Why nothing drafts for `batch` rows."""
    return f"more rows ({batch}) than the drafter's kernels serve ({max_rows})"


def promise(name: str, speedup: float, batch: int, length: float, by: str = "predicted") -> str:
    """What `name` promises for a round of `batch` rows of mean length `length`."""
    return f"{name} {by} {speedup:.2f}× at {batch} {'row' if batch == 1 else 'rows'} × {length:.0f} tokens"


def decision(speedup: float, margin: float) -> str:
    """Says what follows from a promise."""
    if speedup >= 1 + margin:
        return "speculating"
    asked = f", since sd_margin asks for {1 + margin:.2f}×" if speedup >= 1 else ""
    return f"decoding plainly{asked}"


def no_budget(worst: float, saved: float) -> str:
    """Says why something that promises enough is not tried: the trial may cost `worst` autoregressive rounds, and the
    account holds `saved`."""
    if worst > MOST_SAVED:
        remedy = 'sd_toggle="always" drafts without trials'
        return f"decoding plainly, since a trial may cost more than {MOST_SAVED:.0f} rounds; {remedy}"
    rounds = math.ceil((worst - saved) / INCOME)
    when = f"for about {rounds} more rounds, until the account covers a trial (longer completions help)"
    return f"decoding plainly {when}"


def first_trial(cost: float, saved: float) -> str:
    """Says when a method is tried for the first time. It may promise little: the prediction may be wrong. The account
    must hold `cost` autoregressive rounds."""
    rounds = max(math.ceil((cost - saved) / INCOME), 1)
    return f"decoding plainly for about {rounds} more rounds, until the account covers a first trial"
