"""Several drafters in one round: each row goes on with the longest accepted chain, and drafters draft as if no other
chain had been verified. That no token depends on it is what `test_token_identity.py` says."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.tts.distilled_drafter import DistilledDrafter
from spec_trl.generation.engine.accept import Proposal
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.scheduling.control import Chain
from tests.generation.calls import generate, outputs
from tests.generation.races import PROMPTS, Knowing, Plans, random_plans


def test_the_longest_accepted_chain_wins(tiny) -> None:
    """How chains are counted, `test_statistics.py` says; how far a round gets, `test_token_identity.py`."""
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=40))
    members = [Knowing(expected, seed, f"k{seed}") for seed in range(4)]
    control = random_plans(4, 2)
    statistics = generate(tiny, PROMPTS, drafter=members, control=control, max_new_tokens=40).statistics
    asked = [iter(member.right) for member in members]
    wins: list[Counter[str]] = [Counter() for _ in expected]
    done = [1] * 7  # first tokens
    for each in control.rounds:
        right = {which: next(asked[which]) for which in each["accepted"]}
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
    assert list(map(Counter, statistics.racing.winners)) == wins
    assert all(statistics.racing.wins[name] > 0 < statistics.racing.losses[name] for name in statistics.per_drafter)


def test_rejection_verification_is_not_raced(tiny, drafters, monkeypatch) -> None:
    monkeypatch.setattr(SelfDrafter, "begin", lambda *_: pytest.fail("work was begun"))
    options = dict(config={"verification": "rejection"}, drafter=drafters("self", "model"), control=random_plans(2))
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


def watched(drafter: Drafter, found: dict[tuple[int, ...], list[int]], drafts: bool) -> Drafter:
    """`drafter`, of which is written down what it proposes by request and text; unless it `drafts`, it stays there."""
    propose = drafter.propose

    def watch(draft_length: int, noise: RoundNoise | None) -> Proposal:
        proposal, rows = propose(draft_length, noise), drafter.session.rows
        for row, length in enumerate(rows.lengths.tolist()):
            text = (rows.indices[row], *rows.tokens[row, :length].tolist())
            found[text] = proposal.tokens[row, : int(proposal.drafted()[row])].tolist()
        return proposal if drafts else replace(proposal, lengths=torch.zeros_like(proposal.drafted()))

    drafter.propose = watch  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("kind", ["self", "model", "eagle3", "dflash"])
def test_drafts_depend_on_the_committed_text_alone(kind: str, tiny, drafters: Callable[..., list[Drafter]]) -> None:
    """In races over rows that come and go, a drafter says what it says where each round commits a single token."""
    alone: dict[tuple[int, ...], list[int]] = {}
    among: dict[tuple[int, ...], list[int]] = {}
    plain = generate(tiny, PROMPTS, drafter=watched(*drafters(kind), alone, False), control=Plans(1, [[Chain(0, 4)]]))
    expected = outputs(plain)
    members = [watched(*drafters(kind), among, True), Knowing(expected, 0), Knowing(expected, 1)]
    result = generate(tiny, PROMPTS, config={"max_batch_size": 3}, drafter=members, control=random_plans(3, 1))
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

    learner = Comparing(*drafters("eagle3"), Distillation(1e-3, scope="rollout", stride=1))
    expected = outputs(generate(tiny, PROMPTS, max_new_tokens=20))
    members = [learner, Knowing(expected, 0), Knowing(expected, 1)]
    result = generate(tiny, PROMPTS, drafter=members, control=random_plans(3, 3), max_new_tokens=20)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert len(checked) > 10 and max(checked) > 0
