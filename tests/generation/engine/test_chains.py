"""Several drafters in one round: each row goes on with the longest accepted chain. That no token depends on it is what
`test_token_identity.py` says."""

import pytest

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.scheduling.control import Chain
from tests.generation.calls import generate, outputs, pad_left
from tests.generation.races import PROMPTS, ROWS, Fixed, Knowing, Plans, RandomPlans


def test_the_longest_accepted_chain_wins(tiny) -> None:
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=40))
    members = [Knowing(expected, seed, f"k{seed}") for seed in range(4)]
    control = RandomPlans(4, 2)
    result = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=40)
    assert outputs(result) == expected
    asked = [iter(member.right) for member in members]
    wins = [dict.fromkeys([f"k{i}" for i in range(4)], 0) for _ in range(7)]
    wasted = dict.fromkeys(wins[0], 0)
    done = [0] * 7
    for each in control.rounds:
        accepted, drafted = each["accepted"], each["drafted"]
        right = {which: next(asked[which]) for which in accepted}
        total = 0
        for row, request in enumerate(each["requests"]):
            room = 40 - done[request]
            chains = {
                chain.which: min(chain.draft_length, room - 1)
                for chain in each["plan"]
                if chain.which in accepted and (chain.rows is None or row in chain.rows)
            }
            assert {which for which in accepted if accepted[which][row] >= 0} == chains.keys()
            for which, length in chains.items():
                assert accepted[which][row] == min(right[which][request], length), "its own chain, and no other's"
                assert drafted[which][row] == length
            found = {which: accepted[which][row] for which in chains}
            best = max(found, key=found.__getitem__, default=None)  # the first of the largest
            if len(found) > 1:
                wins[request][f"k{best}"] += 1
                for which, count in found.items():
                    wasted[f"k{which}"] += drafted[which][row] - (count if which == best else 0)
            kept = 1 + (0 if best is None else found[best])
            done[request] += kept
            total += kept
        assert each["tokens"] == total
    statistics = result.statistics
    racing = statistics.racing
    assert done == [40] * 7
    assert racing.winners == wins and racing.wasted == wasted
    assert racing.wins == {name: sum(own[name] for own in wins) for name in wasted}
    assert max(statistics.ended_in) == statistics.rounds == len(control.rounds)
    for which, (name, counts) in enumerate(statistics.per_drafter.items()):
        heard = [each for each in control.rounds if which in each["accepted"]]
        pairs = [pair for each in heard for pair in zip(each["accepted"][which], each["drafted"][which], strict=True)]
        rows = [pair for pair in pairs if pair[0] >= 0]
        assert counts.accepted == sum(accepted for accepted, _ in rows)
        assert counts.drafted == sum(drafted for _, drafted in rows)
        assert counts.blocks == len(rows) and counts.committed == counts.accepted + counts.blocks
        assert 0 < racing.wins[name] < racing.wins[name] + racing.losses[name] <= counts.blocks


def test_a_race_needs_no_more_forwards_than_either(tiny, drafters) -> None:
    """Networks: whether they guess a token depends on nothing but its position, so who is ahead stays ahead."""
    rounds = {}
    for plan in ([Chain(0, 3)], [Chain(1, 4)], [Chain(0, 3), Chain(1, 4)]):
        members = drafters("self", "model")
        result = generate(tiny, pad_left(ROWS[:1]), drafter=members, control=Fixed(*plan), max_new_tokens=60)
        rounds[len(plan), plan[0].which] = result.statistics.rounds
    assert rounds[2, 0] < min(rounds[1, 0], rounds[1, 1])


def test_rejection_verification_is_not_raced(tiny, drafters, monkeypatch) -> None:
    monkeypatch.setattr(SelfDrafter, "begin", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match='verification="rejection" cannot be raced'):
        generate(
            tiny, PROMPTS, config={"verification": "rejection"}, drafter=drafters("self", "model"),
            control=RandomPlans(2),
        )  # fmt: skip


def test_rejection_verification_of_rows_with_different_drafters(tiny, drafters) -> None:
    """One chain per row is no race: each row's coins are tossed for the drafter that it had."""
    control = Plans(2, [(Chain(0, 4, (0, 2, 4, 6)), Chain(1, 2, (1, 3, 5)))])
    control.races = False
    config = {"verification": "rejection"}
    result = generate(tiny, PROMPTS, config=config, drafter=drafters("self", "model"), control=control)
    assert result.statistics.drafter_failure is None and result.lengths.tolist() == [24] * 7
    counts = result.statistics.per_drafter
    assert counts["self"].acceptance_rate > 0.3 < counts["model"].acceptance_rate
    assert result.statistics.racing is None
    assert {point.drafter for point in result.statistics.points if point.batch == 7} == {"self+model"}
