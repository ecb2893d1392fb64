"""What races leave behind: caches, hidden states and drafters are as if no other chain had ever been verified."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.checkpoints import read_checkpoint
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.engine.drafter import Drafter, DraftSession
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.verification import Proposal
from spec_trl.scheduling.control import AlwaysSpeculate, Candidate, NeverSpeculate
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs
from tests.generation.drafters.eagle3 import reference
from tests.generation.races import PROMPTS, Knowing, RandomPlans, raced


EAGLE3 = reference.safeai(vocab_size=64, draft_vocab_size=64)


# ---- what a race leaves behind ------------------------------------------------------------------------------------


class Spy(Drafter):
    """Never drafts, and looks: K/V and hidden states of the target, as long as all rows are there."""

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
        rows, layers = self.session.rows, self.session.target.cache.layers
        if rows.active == rows.capacity and self.on:
            self.lengths = rows.lengths.tolist()
            self.kept = torch.stack([torch.stack([layer.keys, layer.values]) for layer in layers]).clone()
            self.seen = self.features.clone()

    def move(self, source: list[int], destination: list[int], columns: int) -> None:
        self.on = False


@pytest.mark.parametrize("seed", range(3))
def test_cache_and_hidden_states_are_those_of_a_plain_run(seed: int, tiny, drafters) -> None:
    options = dict(max_new_tokens=40)
    plain, spy = Spy(), Spy()
    expected = generate(tiny, PROMPTS, drafter=[plain], control=NeverSpeculate(), **options)
    members = [
        *drafters("self", "model", "eagle3", "ngram"),
        Knowing(outputs(expected), 1),
        Knowing(outputs(expected), 2),
    ]
    control = RandomPlans(6, seed, chains=5)
    result = generate(tiny, PROMPTS, drafter=[*members, spy], control=control, **options)
    assert outputs(result) == outputs(expected) and result.statistics.drafter_failure is None
    assert raced(control) > 3 and min(spy.lengths) > 20
    for row, (ours, theirs) in enumerate(zip(spy.lengths, plain.lengths, strict=True)):
        count = min(ours, theirs) - 1
        kept, other = (each.kept[:, :, row, :, :count] for each in (spy, plain))  # [layers, 2, kv, count, d]
        torch.testing.assert_close(kept, other, rtol=0, atol=1e-9)
        # NaN: of a prompt that is there twice, nobody is told again.
        heard, told = spy.seen[row, :count], plain.seen[row, :count]  # [count, F]
        torch.testing.assert_close(heard, told, rtol=0, atol=1e-9, equal_nan=True)


# ---- drafters whose drafts were not taken -------------------------------------------------------------------------


@torch.no_grad()
def test_a_small_model_drafts_as_from_scratch(tiny, tiny_assistant, monkeypatch) -> None:
    """Greedy, so that a full forward over the committed text says what it should draft."""
    seen: list[tuple[Tensor, Tensor]] = []
    propose = SmallModelDrafter.propose

    def watch(self: SmallModelDrafter, draft_length: int, noise: RoundNoise | None) -> Proposal:
        proposal, rows = propose(self, draft_length, noise), self.session.rows
        for row, length in enumerate(rows.lengths.tolist()):
            seen.append((rows.tokens[row, :length].clone(), proposal.tokens[row].clone()))
        return proposal

    monkeypatch.setattr(SmallModelDrafter, "propose", watch)
    options = dict(do_sample=False, max_new_tokens=30)
    expected = outputs(generate(tiny, PROMPTS, **options))
    other = tiny_llama(seed=1)  # agrees with the target hardly ever: what it was fed is not what is committed
    members = [SmallModelDrafter(other, tiny), SmallModelDrafter(tiny_assistant, tiny), Knowing(expected, 0)]
    for seed in range(2):
        seen.clear()
        config = {"max_batch_size": 3}
        result = generate(
            tiny, PROMPTS, config=config, drafter=[members[seed], members[2]], control=RandomPlans(2, seed), **options
        )
        assert outputs(result) == expected
        assistant = (other, tiny_assistant)[seed]
        for committed, drafts in seen[::3]:
            logits = assistant(torch.cat([committed, drafts])[None]).logits[0]  # [n, V]
            assert logits[len(committed) - 1 : -1].argmax(-1).tolist() == drafts.tolist()


@torch.no_grad()
def test_eagle3_drafts_as_from_scratch(tiny, drafters, checkpoints) -> None:
    (drafter,) = drafters("eagle3")
    seen = reference.watch(drafter)
    expected = generate(tiny, PROMPTS, max_new_tokens=30)
    members = [drafter, Knowing(outputs(expected), 0), Knowing(outputs(expected), 1)]
    config = {"max_batch_size": 3}
    result = generate(tiny, PROMPTS, config=config, drafter=members, control=RandomPlans(3, 1), max_new_tokens=30)
    assert outputs(result) == outputs(expected) and len(seen) > 20
    expected_of = reference.Reference(EAGLE3, read_checkpoint(Path(checkpoints["eagle3"]))[1], tiny)
    for tokens, drafts, logits in seen[:: max(len(seen) // 12, 1)]:
        torch.testing.assert_close(logits, expected_of.logits(tokens, drafts), rtol=0, atol=1e-5)


def test_dflash_drafts_as_if_alone(tiny, drafters) -> None:
    """After any round a block depends on the committed text alone: what is drafted in a race is what is drafted when
    nothing else ever drafts, text by text."""
    expected = generate(tiny, PROMPTS, max_new_tokens=30)
    seen: dict[tuple[int, ...], list[int]] = {}

    def watched(collect: dict[tuple[int, ...], list[int]]) -> Drafter:
        (drafter,) = drafters("dflash")
        propose = drafter.propose

        def watch(draft_length: int, noise: RoundNoise | None) -> Proposal:
            proposal, rows = propose(draft_length, noise), drafter.session.rows
            for row, length in enumerate(rows.lengths.tolist()):
                text = (rows.indices[row], *rows.tokens[row, :length].tolist())
                collect[text] = proposal.tokens[row, : int(proposal.lengths[row])].tolist()
            return proposal

        drafter.propose = watch  # type: ignore[method-assign]
        return drafter

    generate(
        tiny,
        PROMPTS,
        drafter=watched(seen),
        control=AlwaysSpeculate(Candidate("dflash", 4, 1.0, 99)),
        max_new_tokens=30,
    )
    raced_: dict[tuple[int, ...], list[int]] = {}
    members = [watched(raced_), Knowing(outputs(expected), 0), Knowing(outputs(expected), 1)]
    result = generate(tiny, PROMPTS, drafter=members, control=RandomPlans(3, 1), max_new_tokens=30)
    assert outputs(result) == outputs(expected)
    shared = [text for text in raced_ if text in seen]
    assert len(shared) > 15
    for text in shared:
        count = min(len(raced_[text]), len(seen[text]))
        assert raced_[text][:count] == seen[text][:count]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_a_learner_hears_of_its_own_chain(kind: str, tiny, drafters) -> None:
    """What the target would say to the committed text and its own drafts, whatever was drafted beside it."""
    (student,) = drafters(kind)
    checked = []

    class Comparing(DistilledDrafter):
        def learn(self, logits: Tensor, verified: Tensor) -> None:
            rows = self.session.rows
            for row in verified.nonzero().flatten().tolist():
                text = rows.tokens[row, : int(rows.lengths[row])]
                drafts = self._proposal.tokens[row, : logits.shape[1] - 1]
                said = tiny(torch.cat([text, drafts])[None]).logits[0, len(text) - 1 :]  # [γ + 1, V]
                torch.testing.assert_close(logits[row], said, rtol=0, atol=1e-9)
                canvas = self.student.canvas(logits.shape[1] - 1, snapshot=False)
                assert canvas.tokens_behind(0, len(drafts))[row].tolist() == drafts.tolist()
                checked.append(len(verified) - int(verified.sum()))

    learner = Comparing(student, Distillation(1e-3, scope="rollout"))
    expected = generate(tiny, PROMPTS, max_new_tokens=20)
    members = [learner, Knowing(outputs(expected), 0), Knowing(outputs(expected), 1)]
    result = generate(tiny, PROMPTS, drafter=members, control=RandomPlans(3, 3), max_new_tokens=20)
    assert outputs(result) == outputs(expected) and result.statistics.drafter_failure is None
    assert len(checked) > 10 and max(checked) > 0
