"""A planner sets the draft length of vLLM's steps, in simulated seconds."""

import random

import pytest

from spec_trl.vllm.step_planner import StepPlanner


LENGTHS = (2, 4, 8)


def roll_out(planner: StepPlanner, clock: list[float], cost: float, acceptance: float) -> list[int]:
    """Draft lengths of 400 steps of 8 rows: a draft token costs `cost` steps, and is accepted as often as
    `acceptance` says. Drafts are verified in the step after that which makes them."""
    rows, dice, chosen, made = 8, random.Random(0), list[int](), 0
    for step in range(400):
        length = planner.next_length(rows, 100.0 + step, 0)
        chosen.append(length)
        drafted, accepted = [made] * rows if made else [], []
        for _ in drafted:
            right = next((at for at in range(made) if dice.random() > acceptance), made)
            accepted.append(right)
        clock[0] += 1 + cost * length + 0.02 * made
        planner.observe(rows, accepted, drafted, reads_prompts=step == 0)
        made = length
    planner.end()
    planner.observe(0, [], [], False)  # vLLM takes an empty step after the last row
    return chosen


@pytest.mark.parametrize(
    ("strategy", "cost", "acceptance", "drafts"),
    [
        ("self", 0.25, 0.9, True),
        ("self", 1.0, 0.9, False),  # a copy as slow as the policy
        ("self", 0.25, 0.1, False),
        ("history", 0.01, 0.5, True),
    ],
)
def test_it_drafts_where_that_pays(strategy: str, cost: float, acceptance: float, drafts: bool) -> None:
    clock = [0.0]
    planner = StepPlanner(strategy, LENGTHS, 8, lambda: clock[0])
    for _ in range(4):
        chosen = roll_out(planner, clock, cost, acceptance)
    share = sum(length > 0 for length in chosen) / len(chosen)
    assert share > 0.7 if drafts else share < 0.1
    assert set(chosen) <= {0, *LENGTHS}


def test_drafts_end_when_they_stop_to_pay() -> None:
    """As where the policy has moved on, and nothing was pushed; and begin again."""
    clock = [0.0]
    planner = StepPlanner("self", LENGTHS, 8, lambda: clock[0])
    shares = []
    for acceptance in (0.9, 0.9, 0.05, 0.05, 0.9, 0.9, 0.9):
        chosen = roll_out(planner, clock, 0.25, acceptance)
        shares.append(sum(length > 0 for length in chosen) / len(chosen))
    assert shares[1] > 0.7 and shares[3] < 0.2 and shares[-1] > 0.5
