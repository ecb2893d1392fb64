"""Statistics agree with the output they describe."""

import math
import re
from collections.abc import Sequence

import pytest
import torch

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.statistics import (
    DEPTH_EDGES,
    ChainCounter,
    DraftCounter,
    DraftCounts,
    RoundPoint,
    SpeculationStatistics,
    Tail,
)
from spec_trl.generation.engine.verification import Proposal, Verdict
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate
from spec_trl.scheduling.plain_decoding import PlainRounds
from tests.generation.calls import generate, outputs, pad_left, random_rows


def counted(
    drafted: list[int], accepted: list[int], kept: list[int], ends: list[bool], depths: list[int]
) -> SpeculationStatistics:
    counter = DraftCounter(len(drafted), torch.device("cpu"))
    width = max(drafted, default=0)
    proposal = Proposal(torch.zeros(len(drafted), width).long(), torch.tensor(drafted))
    empty = torch.zeros(len(drafted), width + 1)
    verdict = Verdict(empty.long(), torch.tensor(accepted), empty, None)
    counter.add(
        torch.arange(len(drafted)), torch.tensor(depths), proposal, verdict, torch.tensor(kept), torch.tensor(ends)
    )
    statistics = SpeculationStatistics("self")
    counter.write_to(statistics)
    return statistics


def test_counting_by_hand() -> None:
    # All accepted; one accepted; EOS is the second of three accepted drafts; EOS corrects the second draft; no draft.
    ends = [False, False, True, True, False]
    statistics = counted([3, 3, 3, 3, 0], [3, 1, 3, 1, 0], [4, 2, 2, 2, 1], ends, [0, 63, 64, 64, 40_000])
    assert statistics.per_request == [
        DraftCounts(drafted=3, accepted=3, blocks=1, first_drafted=1, first_accepted=1, committed=4),
        DraftCounts(drafted=3, accepted=1, blocks=1, first_drafted=1, first_accepted=1, committed=2),
        DraftCounts(drafted=2, accepted=2, blocks=1, first_drafted=1, first_accepted=1, committed=2),
        DraftCounts(drafted=2, accepted=1, blocks=1, first_drafted=1, first_accepted=1, committed=2),
        DraftCounts(drafted=0, accepted=0, blocks=1, first_drafted=0, first_accepted=0, committed=1),
    ]
    assert statistics.block_efficiency == 11 / 5
    assert statistics.acceptance_rate == 7 / 10
    assert statistics.first_token_acceptance == 1
    assert list(statistics.per_depth) == [0, 64, 32768]
    assert statistics.per_depth[0].blocks == 2


def test_wins_by_depth() -> None:
    """Two rounds: of rows 0 to 3 with two chains, one and none, of three drafters, two of which have the same name."""
    counter = ChainCounter(4, ["self", "ngram", "self"], torch.device("cpu"))
    drafted = torch.full((2, 4), 2)
    for depths, drafters, winner in (
        ([0, 63, 64, 700], [[0, 1, 0, -1], [1, 2, -1, -1]], [0, 1, 0, 0]),
        ([3, 64, 90, 900], [[0, 0, 2, 1], [1, 1, 1, 0]], [1, 0, 0, 1]),
    ):
        counter.add(
            torch.arange(4), torch.tensor(depths), torch.tensor(drafters), drafted, drafted.clone(),
            torch.full((4,), 3), torch.tensor(winner),
        )  # fmt: skip
    statistics = SpeculationStatistics("best_of_n")
    counter.write_to(statistics)
    racing = statistics.racing
    assert racing is not None
    assert racing.winners_by_depth == {
        0: {"self": 2, "ngram": 1}, 64: {"self": 2, "ngram": 0}, 512: {"self": 1, "ngram": 0},
    }  # fmt: skip
    assert racing.wins == {"self": 5, "ngram": 1}


def test_tail_by_hand() -> None:
    curve = [(1.0, 1), (2.5, 4), (4.0, 5), (9.0, 7)]
    statistics = SpeculationStatistics("self", ended_in=[5, 9, 20, 5, 5, 2, 20], completion_curve=curve)
    tails = {share: statistics.tail(share) for share in (0.0, 0.1, 1 / 7, 0.5, 4 / 7, 0.6, 0.9, 1.0)}
    assert tails == {
        0.0: Tail(9.0, 20), 0.1: Tail(8.0, 18), 1 / 7: Tail(8.0, 18), 0.5: Tail(6.5, 15), 4 / 7: Tail(6.5, 15),
        0.6: Tail(5.0, 11), 0.9: Tail(0.0, 0), 1.0: Tail(0.0, 0),
    }  # fmt: skip
    assert statistics.tail() == tails[0.5]
    rounds = list(range(1, 101))
    hundred = SpeculationStatistics("self", ended_in=rounds, completion_curve=[(n, n) for n in rounds])
    assert hundred.tail(0.07) == Tail(93, 93)  # 0.07 * 100 > 7
    for share in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"share={share} is out of range; it must be 0 to 1"):
            statistics.tail(share)


def test_nothing_drafted_is_nan_not_zero(tiny) -> None:
    statistics = generate(tiny, pad_left(random_rows([3]))).statistics
    assert math.isnan(statistics.acceptance_rate) and math.isnan(statistics.block_efficiency)
    assert statistics.speculating == [(0, 0)]
    assert statistics.rounds == statistics.target_forwards - 1 == 24
    assert statistics.per_depth == {}


@pytest.mark.parametrize("verification", ["exact", "rejection"])
@pytest.mark.parametrize("max_batch_size", [None, 3])
def test_fields_agree_with_the_output(max_batch_size, verification, tiny) -> None:
    prompts = pad_left(random_rows([5, 3, 8, 2, 9, 4, 4]))
    config = {"max_batch_size": max_batch_size, "draft_length": 4, "verification": verification}
    result = generate(tiny, prompts, "self", config, eos_token_id=7, max_new_tokens=90)
    found = result.statistics
    tokens = outputs(result)
    assert found.strategy == "self"
    assert found.tokens == sum(map(len, tokens)) == int(result.lengths.sum())
    assert found.logprob_sum == pytest.approx(float(result.logprobs.double().sum()), rel=1e-6)
    for row, length in enumerate(result.lengths.tolist()):
        assert not result.logprobs[row, length:].any()
        assert (result.logprobs[row, :length] < 0).all()
        assert (result.sequences[row, prompts["input_ids"].shape[1] + length :] == 0).all()
    # Every token comes out of a round; rounds that drafted nothing for a row do not count as blocks of it.
    assert sum(counts.committed for counts in found.per_request) == found.total.committed <= found.tokens
    assert found.total.committed > 0.9 * found.tokens
    for counts in [*found.per_request, found.total, *found.per_depth.values()]:
        assert 0 <= counts.accepted <= counts.drafted <= 4 * counts.blocks
        assert counts.first_accepted <= counts.first_drafted <= counts.blocks <= counts.committed
        assert counts.accepted <= counts.committed <= counts.accepted + counts.blocks
    assert sum(found.per_depth.values(), DraftCounts()) == found.total
    assert set(found.per_depth) <= set(DEPTH_EDGES) and {0, 64} <= set(found.per_depth)
    assert 0 < found.acceptance_rate < 1 < found.block_efficiency <= 5
    assert 0 < found.first_token_acceptance <= 1
    # The curve ends with everybody and never falls.
    seconds, finished = zip(*found.completion_curve, strict=True)
    assert found.tail(0) == Tail(seconds[-1], found.rounds) and found.tail(1) == Tail(0.0, 0)
    assert finished[-1] == 7 and list(finished) == sorted(set(finished)) and list(seconds) == sorted(seconds)
    assert set(found.phase_seconds) == {"prefill", "noise", "draft", "verify", "accept", "compact", "control"}
    assert 0 < sum(found.phase_seconds.values()) <= found.seconds
    assert found.tokens_per_second == found.tokens / found.seconds
    assert found.target_forwards > found.rounds > 0 < found.draft_forwards
    changes = [round_ for round_, _ in found.speculating]
    assert changes == sorted(set(changes)) and changes[0] == 0 and found.speculating[0][1] == 4
    assert found.drafter_failure is None


def test_what_plain_decoding_would_have_taken(tiny) -> None:
    """A stand-in of a second per plain round, two with more than three rows: the rows and the rounds are those of the
    call without drafts."""

    class Seconds(AlwaysSpeculate):
        def decide(self, batch: int, length: float, waiting: int) -> tuple[int, int]:
            self.rounds += 1
            index, draft_length = super().decide(batch, length, waiting)
            return index, 0 if self.rounds <= 6 else draft_length

        def begin(self, capacity: int, prompts: Sequence[str]) -> None:
            super().begin(capacity, prompts)
            self.rounds = 0

        def plain_seconds(self, rounds: Sequence[PlainRounds]) -> float | None:
            self.asked = list(rounds)
            return 1e6 * sum(each.rounds * (2 if each.batch > 3 else 1) for each in rounds)

    prompts = pad_left(random_rows([5, 3, 8, 2, 9, 4, 4]))
    options = dict(eos_token_id=7, max_new_tokens=90)
    plain = generate(tiny, prompts, config={"max_batch_size": 5}, **options).statistics
    control = Seconds(Candidate("self", 4, 4.0, 100))
    found = generate(
        tiny, prompts, "self", {"max_batch_size": 5}, drafter=SelfDrafter(tiny), control=control, **options
    ).statistics
    batches = [each.batch for each in control.asked for _ in range(each.rounds)]
    assert len(batches) == plain.rounds - 6 and max(batches) == 5
    alive = [sum(point.rounds for point in plain.points if point.batch == batch) for batch in range(1, 5)]
    assert [batches.count(batch) for batch in range(1, 5)] == alive
    whole = 1e6 * sum(2 if batch > 3 else 1 for batch in batches)
    assert whole < found.plain_seconds < whole + found.seconds
    # Without a draft the call is what plain decoding took; where no round can tell, nothing is said.
    assert plain.plain_seconds == plain.seconds
    assert generate(tiny, prompts, "self", **options).statistics.plain_seconds is None


def test_the_summary_is_short_and_says_why(tiny) -> None:
    prompts = pad_left(random_rows([5, 3]))
    drafted = str(generate(tiny, prompts, "self").statistics).splitlines()
    assert len(drafted) == 3
    assert re.fullmatch(r"self: 48 tokens in \d+\.\d\d s, \d+\.\d tokens/s", drafted[0])
    assert re.fullmatch(r"drafting in \d+% of \d+ rounds: sd_toggle=always", drafted[1])
    assert re.fullmatch(r"block efficiency \d\.\d\d, acceptance rate \d\.\d\d", drafted[2])
    never = str(generate(tiny, prompts, "self", {"sd_toggle": "never"}).statistics).splitlines()
    assert never[1:] == ["drafting in 0% of 24 rounds: sd_toggle=never"]
    assert str(generate(tiny, prompts).statistics).endswith("\ndrafting in 0% of 24 rounds: no drafter")
    known = SpeculationStatistics(
        "self", tokens=300, seconds=2.0, rounds=10, points=[RoundPoint(4, 9.0, 5, "self", 4)], reason="why",
        predicted_speedup=1.3, measured_speedup=1.25, plain_seconds=2.2,
    )  # fmt: skip
    assert str(known).splitlines() == [
        "self: 300 tokens in 2.00 s, 150.0 tokens/s",
        "drafting in 40% of 10 rounds: why",
        "speedup over plain decoding: predicted 1.30×, measured 1.25×, whole call 1.10×",
    ]


def test_cache_bytes(tiny, tiny_assistant) -> None:
    """K and V of 2 layers x 2 heads x 16 in float64 for 3 rows of 9 + 24 + γ columns; a small model adds its own."""
    prompts = pad_left(random_rows([9, 4, 4]))

    def cache_bytes(strategy: str, **options: object) -> int:
        return generate(tiny, prompts, strategy, {"draft_length": 5}, **options).statistics.cache_bytes

    row_bytes = 2 * 2 * 2 * 16 * 8 * (9 + 24 + 5)
    assert cache_bytes("none") == cache_bytes("ngram") == cache_bytes("self") == 3 * row_bytes
    assert cache_bytes("model", assistant_model=tiny_assistant) == 6 * row_bytes


def test_logprobs_cost_nothing_when_not_asked_for(tiny) -> None:
    sequences = generate(tiny, pad_left(random_rows([3, 4])), "self", return_dict_in_generate=False)
    assert isinstance(sequences, torch.Tensor) and sequences.shape == (2, 28)
