"""Several drafters in one round: each row goes on with the longest accepted chain, and drafters find hidden states and
drafts as if no other chain had been verified. That no token depends on it is what `test_token_identity.py` says."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal
from spec_trl.scheduling.control import Chain, NeverSpeculate
from tests.generation.calls import generate, outputs, pad_left
from tests.generation.races import PROMPTS, ROWS, Fixed, Knowing, Plans, RandomPlans, raced


def test_the_longest_accepted_chain_wins(tiny) -> None:
    """How chains are counted, `test_statistics.py` says."""
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=40))
    members = [Knowing(expected, seed, f"k{seed}") for seed in range(4)]
    control = RandomPlans(4, 2)
    result = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=40)
    assert outputs(result) == expected
    asked = [iter(member.right) for member in members]
    wins: list[Counter[str]] = [Counter() for _ in expected]
    done = [0] * 7
    for each in control.rounds:
        right = {which: next(asked[which]) for which in each["accepted"]}
        before = sum(done)
        for row, request in enumerate(each["requests"]):
            found = {}
            for chain in each["plan"]:
                if chain.which in right and (chain.rows is None or row in chain.rows):
                    length = min(chain.draft_length, 40 - done[request] - 1)
                    own = each["accepted"][chain.which][row], each["drafted"][chain.which][row]
                    assert own == (min(right[chain.which][request], length), length), "its own chain, and no other's"
                    found[chain.which] = own[0]
            assert {which for which in right if each["accepted"][which][row] >= 0} == found.keys()
            if len(found) > 1:
                wins[request][f"k{max(found, key=found.__getitem__)}"] += 1  # the first of the longest
            done[request] += 1 + max(found.values(), default=0)
        assert each["tokens"] == sum(done) - before
    statistics = result.statistics
    assert done == [40] * 7 and max(statistics.ended_in) == statistics.rounds == len(control.rounds)
    assert list(map(Counter, statistics.racing.winners)) == wins
    assert all(statistics.racing.wins[name] > 0 < statistics.racing.losses[name] for name in statistics.per_drafter)


def test_a_race_needs_no_more_forwards_than_either(tiny, drafters) -> None:
    """Networks: whether they guess a token depends on nothing but its position, so who is ahead stays ahead."""
    rounds = []
    for plan in ([Chain(0, 3)], [Chain(1, 4)], [Chain(0, 3), Chain(1, 4)]):
        members = drafters("self", "model")
        result = generate(tiny, pad_left(ROWS[:1]), drafter=members, control=Fixed(*plan), max_new_tokens=60)
        rounds.append(result.statistics.rounds)
    assert rounds[2] < min(rounds[:2])


def test_rejection_verification_is_not_raced(tiny, drafters, monkeypatch) -> None:
    monkeypatch.setattr(SelfDrafter, "begin", lambda *_: pytest.fail("work was begun"))
    options = dict(config={"verification": "rejection"}, drafter=drafters("self", "model"), control=RandomPlans(2))
    with pytest.raises(ValueError, match='verification="rejection" cannot be raced'):
        generate(tiny, PROMPTS, **options)


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


# ---- what they leave to drafters ------------------------------------------------------------------------------------


class Spy(Drafter):
    """Never drafts, and looks at the hidden states of the target, as long as all rows are there."""

    has_probabilities = False

    def begin(self, session: DraftSession) -> None:
        super().begin(session)
        rows = session.rows
        self.features = torch.full((rows.capacity, rows.columns, 3 * 64), torch.nan, dtype=torch.float64)
        session.target.listen([2, 0, 1], self.hear)
        self.on = True

    def hear(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        if self.on:
            self.features[torch.arange(first_row, first_row + len(positions))[:, None], positions] = features

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        raise NotImplementedError

    def observe(self, tokens: int) -> None:
        if self.session.rows.active == self.session.rows.capacity and self.on:
            self.lengths = self.session.rows.lengths.tolist()
            self.seen = self.features.clone()

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        self.on = False


def test_hidden_states_are_those_of_a_plain_run(tiny) -> None:
    plain, spy, options = Spy(), Spy(), dict(max_new_tokens=40)
    expected = outputs(generate(tiny, PROMPTS, drafter=[plain], control=NeverSpeculate(), **options))
    control = RandomPlans(4, 1)
    members = [Knowing(expected, seed, f"k{seed}") for seed in range(4)]
    result = generate(tiny, PROMPTS, drafter=[*members, spy], control=control, **options)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert raced(control) > 3 and min(spy.lengths) > 20
    for row, lengths in enumerate(zip(spy.lengths, plain.lengths, strict=True)):
        heard, told = (each.seen[row, : min(lengths) - 1] for each in (spy, plain))  # [n, F]
        # NaN: of a prompt that is there twice, nobody is told again.
        torch.testing.assert_close(heard, told, rtol=0, atol=1e-9, equal_nan=True)


def watched(drafter: Drafter, found: dict[tuple[int, ...], list[int]], drafts: bool) -> Drafter:
    """`drafter`, of which is written down what it proposes by request and text; unless it `drafts`, it stays there."""
    propose = drafter.propose

    def watch(draft_length: int, noise: RoundNoise | None) -> Proposal:
        proposal, rows = propose(draft_length, noise), drafter.session.rows
        for row, length in enumerate(rows.lengths.tolist()):
            text = (rows.indices[row], *rows.tokens[row, :length].tolist())
            found[text] = proposal.tokens[row, : int(proposal.lengths[row])].tolist()
        return proposal if drafts else replace(proposal, lengths=torch.zeros_like(proposal.lengths))

    drafter.propose = watch  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("kind", ["self", "model", "eagle3", "dflash"])
def test_drafts_depend_on_the_committed_text_alone(kind: str, tiny, drafters: Callable[..., list[Drafter]]) -> None:
    """In races over rows that come and go, a drafter says what it says where each round commits a single token."""
    alone: dict[tuple[int, ...], list[int]] = {}
    among: dict[tuple[int, ...], list[int]] = {}
    plain = generate(tiny, PROMPTS, drafter=watched(*drafters(kind), alone, False), control=Fixed(Chain(0, 4)))
    expected = outputs(plain)
    members = [watched(*drafters(kind), among, True), Knowing(expected, 0), Knowing(expected, 1)]
    result = generate(tiny, PROMPTS, config={"max_batch_size": 3}, drafter=members, control=RandomPlans(3, 1))
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    shared = among.keys() & alone.keys()  # nobody drafts where one token is left unless other rows have more
    assert len(shared) > 15 and len(shared) > 0.8 * len(among)
    for text in shared:
        count = min(len(among[text]), len(alone[text]))
        assert among[text][:count] == alone[text][:count]


@torch.no_grad()
def test_a_learner_hears_of_its_own_chain(tiny, drafters) -> None:
    """What the target would say to the committed text and its own drafts, whatever else was drafted."""
    checked = []

    class Comparing(DistilledDrafter):
        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            self.proposal = super().propose(draft_length, noise)
            return self.proposal

        def learn(self, logits: Tensor, verified: Tensor) -> None:
            rows = self.session.rows
            for row in verified.nonzero().flatten().tolist():
                text = rows.tokens[row, : int(rows.lengths[row])]
                drafts = self.proposal.tokens[row, : logits.shape[1] - 1]
                said = tiny(torch.cat([text, drafts])[None]).logits[0, len(text) - 1 :]  # [γ + 1, V]
                torch.testing.assert_close(logits[row], said, rtol=0, atol=1e-9)
                canvas = self.student.canvas(logits.shape[1] - 1, snapshot=False)
                assert canvas.tokens_after(0, len(drafts))[row].tolist() == drafts.tolist()
                checked.append(len(verified) - int(verified.sum()))

    learner = Comparing(*drafters("eagle3"), Distillation(1e-3, scope="rollout"))
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=20))
    members = [learner, Knowing(expected, 0), Knowing(expected, 1)]
    result = generate(tiny, PROMPTS, drafter=members, control=RandomPlans(3, 3), max_new_tokens=20)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert len(checked) > 10 and max(checked) > 0
