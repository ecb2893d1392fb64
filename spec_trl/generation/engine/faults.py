"""What is said when the target's logits leave no token to draw."""

from typing import TYPE_CHECKING

from .accept import Integers


if TYPE_CHECKING:
    from .rollout import Rollout


def broken_logits(rollout: "Rollout", row: int, sound: Integers, draft_length: int) -> FloatingPointError:
    """The error for `row`, whose tokens of this round are sound up to `sound` `[B]`, after a verification of
    `draft_length` draft tokens. It repeats the forward, to name the module where NaN or infinity begins."""
    rows, count = rollout.rows, draft_length + 1
    # The verified tokens are the row's drafts up to the position.
    tokens, columns = rows.window(-1, count), rows.columns_after(-1, count)  # [B, γ + 1] each
    where = rollout.target.first_broken_module(tokens, columns, rows.longest + draft_length)
    done = sum(each.tokens > 0 for each in rollout.record.rounds)
    return FloatingPointError(
        f"the target's logits leave no token to sample (NaN, or -inf everywhere) for request "
        f"{rows.indices[row]} at generated position {rows.host_generated[row] + sound[row]}, after "
        f"{done} decoding rounds; {where}. Check the weights of the last optimizer step and the logits processors, or "
        "run this model in a wider dtype."
    )
