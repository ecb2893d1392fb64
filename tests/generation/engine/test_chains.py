"""Several drafters in one round: which chain a row goes on with is a matter of time alone."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from spec_trl import release
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine import captured
from spec_trl.generation.engine.attention import MaskPlan
from spec_trl.generation.engine.chains import Lanes, draft_lengths
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.rows import Request, Rows
from spec_trl.generation.engine.verification import Proposal, Verdict
from spec_trl.scheduling.control import Candidate, Chain, OneDrafter, Tally
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.tape import Tape
from tests.generation.engine.test_families import build
from tests.generation.races import PROMPTS, ROWS, Fixed, Knowing, RandomPlans, raced


EOS = dict(eos_token_id=[7, 11])


# ---- losslessness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "capacity", "options"),
    [
        (0, None, {}),
        (1, 3, EOS),
        (2, 3, dict(do_sample=False, **EOS)),
        (3, None, dict(repetition_penalty=1.3, temperature=0.8, top_p=0.95, **EOS)),
        (4, 2, dict(no_repeat_ngram_size=3, do_sample=False)),
    ],
)
def test_any_mixture_keeps_the_tokens(
    seed: int, capacity: int | None, options: dict[str, Any], tiny, drafters
) -> None:
    members = drafters()
    control = RandomPlans(len(members), seed)
    config = {"max_batch_size": capacity}
    result = generate(tiny, PROMPTS, config=config, drafter=members, control=control, max_new_tokens=30, **options)
    none = generate(tiny, PROMPTS, max_new_tokens=30, **options)
    assert outputs(result) == outputs(none)
    torch.testing.assert_close(result.logprobs, none.logprobs, rtol=0, atol=1e-6)
    statistics = result.statistics
    assert statistics.drafter_failure is None
    assert raced(control) == statistics.racing.rounds > 2
    assert {name for name, counts in statistics.per_drafter.items() if counts.drafted} >= {"self", "model", "eagle3"}


@pytest.mark.parametrize(
    "family", ["llama", "mistral with window", "gemma3_text", "llama4_text", "gpt2", "deepseek_v3", "gemma2"]
)
def test_families(family: str) -> None:
    """Windows and chunks go by position: long accepted chains cross the borders of both, wherever they lie."""
    model = build(family)
    prompts = pad_left(random_rows([3, 11, 7, 1]))
    expected = generate(model, prompts, max_new_tokens=20)
    members = [Knowing(outputs(expected), seed, f"k{seed}") for seed in range(4)]
    control = RandomPlans(4, 1)
    result = generate(model, prompts, drafter=members, control=control, max_new_tokens=20)
    assert outputs(result) == outputs(expected)
    torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=0, atol=1e-6)
    assert raced(control) > 2 and result.statistics.total.accepted > 20


def test_captured_forwards(tiny, drafters, monkeypatch) -> None:
    """Rounds with one chain per row are replayed, races run eagerly, and all drafters find their own runner again."""
    tape = Tape()
    names = "self", "model", "eagle3", "tts"
    expected = generate(tiny, PROMPTS, drafter=drafters(*names), control=RandomPlans(4, 5), max_new_tokens=60)
    release(tiny)
    monkeypatch.setattr(captured, "recorder_for", lambda device: tape)
    members = drafters(*names)
    for recorded in (10**9, 40):
        before = tape.recorded
        result = generate(
            tiny, PROMPTS, config={"runner": "graph"}, drafter=members, control=RandomPlans(4, 5), max_new_tokens=60
        )
        assert outputs(result) == outputs(expected)
        assert result.statistics.per_drafter["eagle3"] == expected.statistics.per_drafter["eagle3"]
        assert tape.recorded - before < recorded
    assert tape.replayed > 40
    release(tiny)


def test_rejection_verification_is_not_raced(tiny, drafters, monkeypatch) -> None:
    members = drafters("self", "model")
    config = {"verification": "rejection"}
    monkeypatch.setattr(SelfDrafter, "begin", lambda *_: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match='verification="rejection" cannot be raced'):
        generate(tiny, PROMPTS, config=config, drafter=members, control=RandomPlans(2))


def test_rejection_verification_of_rows_with_different_drafters(tiny, drafters) -> None:
    """One chain per row is no race: each row's coins are tossed for the drafter that it had."""

    class Halves(OneDrafter):
        candidates = [Candidate("self", 4, 4.0, 100), Candidate("model", 2, 4.0, 100)]
        tallies = [Tally(), Tally()]

        def begin(self, capacity: int, prompts: Sequence[str]) -> None: ...

        def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]: ...

        def plan(self, requests: Sequence[int], length: float, waiting: int) -> Sequence[Chain]:
            odd = tuple(row for row, request in enumerate(requests) if request % 2)
            even = tuple(row for row, request in enumerate(requests) if not request % 2)
            return (Chain(0, 4, odd), Chain(1, 2, even))

        def record(self, draft_length: int, seconds: float, tokens: int, is_typical: bool = True) -> None: ...

        def drop(self, index: int) -> None: ...

    config = {"verification": "rejection"}
    result = generate(tiny, PROMPTS, config=config, drafter=drafters("self", "model"), control=Halves())
    assert result.statistics.drafter_failure is None and result.lengths.tolist() == [24] * 7
    counts = result.statistics.per_drafter
    assert counts["self"].acceptance_rate > 0.3 < counts["model"].acceptance_rate
    assert result.statistics.racing is None
    assert {point.drafter for point in result.statistics.points if point.batch == 7} == {"self+model"}


# ---- who wins -----------------------------------------------------------------------------------------------------


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
            chains: dict[int, int] = {}
            for chain in each["plan"]:
                if chain.rows is None or row in chain.rows:
                    chains[chain.which] = min(chain.draft_length, room - 1)
            assert {which for which in accepted if accepted[which][row] >= 0} == {
                w for w, n in chains.items() if n
            } | {which for which in accepted if which in chains}
            for which, length in chains.items():
                if which in accepted:
                    assert accepted[which][row] == min(right[which][request], length), "its own chain, and no other's"
                    assert drafted[which][row] == length
            found = {which: accepted[which][row] for which in chains if which in accepted}
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
    assert done == [40] * 7
    assert statistics.racing.winners == wins
    assert statistics.racing.wasted == wasted
    chains = {name: statistics.racing.wins[name] + statistics.racing.losses[name] for name in wasted}
    assert all(
        0 < statistics.racing.wins[name] < count <= statistics.per_drafter[name].blocks
        for name, count in chains.items()
    )
    assert statistics.racing.wins == {name: sum(own[name] for own in wins) for name in wasted}
    assert max(statistics.ended_in) == statistics.rounds == len(control.rounds)
    for name, counts in statistics.per_drafter.items():
        which = int(name[1])
        heard = [each for each in control.rounds if which in each["accepted"]]
        pairs = [pair for each in heard for pair in zip(each["accepted"][which], each["drafted"][which], strict=True)]
        rows = [pair for pair in pairs if pair[0] >= 0]
        assert counts.accepted == sum(accepted for accepted, _ in rows)
        assert counts.drafted == sum(drafted for _, drafted in rows)
        assert counts.blocks == len(rows) and counts.committed == counts.accepted + counts.blocks


def test_a_race_needs_no_more_forwards_than_either(tiny, drafters) -> None:
    """Networks: whether they guess a token depends on nothing but its position, so who is ahead stays ahead."""
    prompts, options = pad_left(ROWS[:1]), dict(max_new_tokens=60)
    rounds = {}
    for plan in ([Chain(0, 3)], [Chain(1, 4)], [Chain(0, 3), Chain(1, 4)]):
        members = drafters("self", "model")
        result = generate(tiny, prompts, drafter=members, control=Fixed(*plan), **options)
        rounds[len(plan), plan[0].which] = result.statistics.rounds
    assert rounds[2, 0] < min(rounds[1, 0], rounds[1, 1])


# ---- drafters that fail -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["throws", "form", "ids", "NaN", "NaN of its own"])
def test_a_drafter_that_fails_in_a_race_leaves_the_others(trouble: str, tiny, drafters, fresh) -> None:
    expected = generate(tiny, PROMPTS, max_new_tokens=30)
    (bad,) = drafters("self") if trouble != "NaN of its own" else [SmallModelDrafter(fresh, tiny)]
    if trouble == "NaN":  # into the shared cache
        next(iter(bad.quantized.layers.values())).packed.scales.fill_(torch.nan)
    elif trouble == "NaN of its own":
        fresh.lm_head.weight.data.fill_(torch.nan)
    else:
        propose, calls = bad.propose, []

        def broken(draft_length: int, noise: RoundNoise | None) -> Any:
            calls.append(1)
            proposal = propose(draft_length, noise)
            if len(calls) < 3:
                return proposal
            if trouble == "throws":
                raise KeyError("out of luck")
            if trouble == "form":
                return Proposal(proposal.tokens[:-1], proposal.lengths)
            return Proposal(proposal.tokens + 10**6, proposal.lengths)

        bad.propose = broken
    members = [Knowing(outputs(expected), 0, "k0"), bad, Knowing(outputs(expected), 1, "k1")]
    control = Fixed(Chain(0, 3), Chain(1, 4), Chain(2, 4))
    if trouble == "ids":
        result = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=30)
    else:
        with pytest.warns(UserWarning, match="failed and is not used for the rest") as caught:
            result = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=30)
        assert len(caught) == 1 and control._alive == {0, 2}
        assert set(control.rounds[-1]["accepted"]) <= {0, 2}
    assert outputs(result) == outputs(expected)
    racing = result.statistics.racing
    assert racing.rounds > 4 and racing.wins["k0"] and racing.wins["k1"]


# ---- layout and masks ---------------------------------------------------------------------------------------------


def test_layout_by_hand() -> None:
    rows = Rows(3, 40, torch.device("cpu"))
    rows.admit([Request(i, torch.arange(1, 4 + i), 30, i) for i in range(3)])  # lengths 3, 4, 5
    plan = [Chain(4, 2), Chain(7, 3, (1, 2)), Chain(4, 1, (0,)), Chain(9, 1, (1,))]
    lengths = draft_lengths(plan, 3)
    assert lengths == {4: [2, 2, 2], 7: [0, 3, 3], 9: [0, 1, 0]}
    drafted = {
        which: Proposal(10 * which + torch.arange(max(own)).expand(3, -1), torch.tensor([1, 2, 3]))
        for which, own in lengths.items()
    }
    lanes = Lanes.of(rows, lengths, drafted)
    layout = lanes.layout
    assert layout is not None and lanes.width == 6
    assert lanes.drafters.tolist() == [[4, 4, 4], [-1, 7, 7], [-1, 9, -1]]
    assert [p.lengths.tolist() for p in lanes.proposals] == [[1, 2, 2], [0, 2, 3], [0, 1, 0]]
    assert layout.tokens.tolist() == [
        [3, 40, 41, 3, 3, 3, 3],
        [4, 40, 41, 70, 71, 72, 90],
        [5, 40, 41, 70, 71, 72, 5],
    ]
    assert layout.columns.tolist() == [list(range(n - 1, n + 6)) for n in (3, 4, 5)]
    assert layout.positions.tolist() == [[2, 3, 4, 3, 4, 5, 6], [3, 4, 5, 4, 5, 6, 4], [4, 5, 6, 5, 6, 7, 5]]
    assert layout.slots[:, 1].tolist() == [[0, 1, 2, 3], [0, 3, 4, 5], [0, 6, 6, 6]]
    verdicts = [Verdict(torch.zeros(3, 4).long(), torch.tensor([1, 2, 0]), torch.zeros(3, 4), None)] * 3
    outcome = lanes.outcome(verdicts)
    assert outcome.of_each_drafter([[0, 1, 2], [5, 3, 4], [5, 6, 5]]) == {4: [0, 1, 2], 7: [-1, 3, 4], 9: [-1, 6, -1]}


@pytest.mark.parametrize(
    ("kind", "sees"),
    [
        ("full_attention", lambda key, query: True),
        ("sliding_attention", lambda key, query: query - key < 3),
        ("chunked_attention", lambda key, query: key // 4 == query // 4),
    ],
)
def test_a_chain_sees_itself_and_what_is_committed(kind: str, sees: Callable[[int, int], bool]) -> None:
    """Rows of 6 and 3 committed tokens; chains of 3, 2 and 2, and of 1 and 4 and padding."""
    widths = [[3, 2, 2], [1, 4, 0]]
    lengths, width = [6, 3], 7
    columns = torch.tensor([list(range(n - 1, n + width)) for n in lengths])  # [B, W]
    owner = [[0, *(1 + c for c, n in enumerate(own) for _ in range(n))] for own in widths]
    owner = [each + [9] * (width + 1 - len(each)) for each in owner]
    positions = columns.clone()
    for row, n in enumerate(lengths):
        for slot in range(1, width + 1):
            positions[row, slot] = n + owner[row][:slot].count(owner[row][slot])
    mask = MaskPlan((kind,), False, 3, 4).build(positions, 16, torch.float64, columns)[:, 0] == 0  # [B, W, 16]
    for row, n in enumerate(lengths):
        for slot in range(width + 1):
            query = int(positions[row, slot])
            for column in range(16):
                behind = column - n + 1  # its slot
                if behind <= 0:
                    expected = sees(column, query)
                else:
                    own = behind <= slot and owner[row][behind] == owner[row][slot]
                    expected = own and sees(int(positions[row, behind]), query)
                assert bool(mask[row, slot, column]) == expected, (row, slot, column)
