"""What a round drafted, computed again with gradient: the same numbers, of its own round, from all that it read."""

import copy
import dataclasses
import threading

import pytest
import torch
from torch import Tensor

from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.papers.test_time_speculation.distillation import distillation_loss
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from tests.generation.calls import generate, pad_left, random_rows
from tests.generation.drafters.eagle3 import reference


KINDS = ["self", "model", "eagle3", "dflash", "mtp"]
BATCH = pad_left(random_rows([5, 9, 1, 12, 7]))
ALONE = pad_left(random_rows([9]))


class Comparing(DistilledDrafter):
    """Learns nothing, and compares each replay with what was drafted."""

    rounds = 0

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self.proposal = super().propose(draft_length, noise)
        return self.proposal

    def learn(self, logits: Tensor, verified: Tensor) -> None:
        proposal, student = self.proposal, self.student
        canvas = student.canvas(logits.shape[1] - 1, snapshot=False)
        replayed = student.replay(student.network, canvas)  # [B, C, draft V]
        drafted = proposal.logits[:, : replayed.shape[1]]  # [B, C, V]
        if student.target_ids is not None:
            drafted = drafted[..., student.target_ids]
        rows = proposal.drafted() > 0
        torch.testing.assert_close(replayed[rows], drafted[rows], rtol=1e-9, atol=1e-9)
        self.rounds += 1


MADE = {
    "pruned": reference.safeai(draft_vocab_size=40),
    "three layers": reference.speculators({"num_hidden_layers": 3}),
}


@pytest.mark.parametrize("kind", [*KINDS, *MADE])
def test_a_replay_gives_what_was_drafted(kind: str, student, tiny, tmp_path) -> None:
    """Over rounds with rejections, rows that end and rows that come in."""
    if kind in MADE:
        own = Eagle3Drafter(reference.make_folder(tmp_path, MADE[kind]), tiny)
    else:
        own = student(kind)
    drafter = Comparing(own, TTSOptions(learning_rate=1e-3, scope="run"))
    result = generate(
        tiny, BATCH, "tts", {"verification": "rejection", "max_batch_size": 3, "draft_length": 4}, drafter=drafter,
        max_new_tokens=30,
    )  # fmt: skip
    assert result.statistics.drafter_failure is None and drafter.rounds > 12


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_replay_of_rows_that_share_a_prompt(kind: str, student, tiny) -> None:
    """A row that comes in late shares its prompt with one that has long forgotten the prompt's features."""
    drafter = Comparing(student(kind), TTSOptions(learning_rate=1e-3, scope="run"))
    prompts = pad_left(random_rows([20]) * 4)
    result = generate(
        tiny, prompts, "tts", {"verification": "rejection", "max_batch_size": 2, "draft_length": 3}, drafter=drafter,
        max_new_tokens=100, eos_token_id=[60],
    )  # fmt: skip
    assert result.statistics.drafter_failure is None and drafter.rounds > 30
    assert max(result.lengths.tolist()) > 70 and len(set(result.lengths.tolist())) > 1


@pytest.mark.parametrize("kind", ["self", "eagle3"])
def test_an_update_during_later_rounds_sees_its_own_round(kind: str, student, tiny) -> None:
    """Later rounds write to the cache and to the target's logits; the update, held back until they have, is of the
    round that it was begun in."""
    expected: list[tuple[Tensor, Tensor]] = []
    checked: list[bool] = []
    gate = threading.Event()

    class HeldBack(DistilledDrafter):
        def learn(self, logits: Tensor, verified: Tensor) -> None:
            canvas = self.student.canvas(logits.shape[1] - 1, snapshot=False)
            expected[:] = [(self.student.replay(self.student.network, canvas), logits.clone())]
            before = self._update
            super().learn(logits, verified)
            if self._update is not before:
                begun.append(expected[0])
            logits.copy_(torch.randn_like(logits) + logits)  # as a captured forward would

        def _finish_update(self) -> None:
            gate.set()
            super()._finish_update()
            gate.clear()

        def _learn_aside(self, learner, canvas, logits, drafted, dispatched) -> float:
            assert gate.wait(20)
            replayed, told = begun.pop(0)
            found = self.student.replay(learner.initial, canvas)
            checked.append(torch.allclose(found[drafted], replayed[drafted], atol=1e-9) and torch.equal(told, logits))
            return 0.0

    begun: list[tuple[Tensor, Tensor]] = []
    how = TTSOptions(learning_rate=1e-3, stride=3, asynchronous=True, scope="run", anchor="initial", anchor_weight=1.0)
    drafter = HeldBack(student(kind), how)
    result = generate(tiny, BATCH, "tts", {"draft_length": 3}, drafter=drafter, max_new_tokens=30)
    assert result.statistics.drafter_failure is None
    assert len(checked) > 2 and all(checked)


def test_a_wider_copy_replays_in_its_own_dtype(tiny, tmp_path) -> None:
    """What learns is float32, and wider than a drafter in bfloat16."""
    dtypes: list[torch.dtype] = []

    class Wide(DistilledDrafter):
        def learn(self, logits: Tensor, verified: Tensor) -> None:
            network = copy.deepcopy(self.student.network).float()
            network.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
            self.student.replay(network, self.student.canvas(logits.shape[1] - 1, snapshot=False))

    own = Eagle3Drafter(reference.make_folder(tmp_path, reference.safeai()), tiny, dtype=torch.bfloat16)
    result = generate(tiny, ALONE, "tts", {"draft_length": 4}, drafter=Wide(own, TTSOptions(learning_rate=1e-3)))
    assert result.statistics.drafter_failure is None and set(dtypes) == {torch.float32}


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_the_projection_of_features_learns(kind: str, student, tiny) -> None:
    """From all columns of the context, which are keys and values of the round."""
    norms: list[tuple[float, float]] = []

    class Gradients(DistilledDrafter):
        def learn(self, logits: Tensor, verified: Tensor) -> None:
            network = self.student.network
            canvas = self.student.canvas(logits.shape[1] - 1, snapshot=False)
            newest = dataclasses.replace(
                canvas, features=canvas.features[:, -1:], tokens=canvas.tokens[:, canvas.context - 1 :]
            )
            found = []
            for seen in (canvas, newest):
                with torch.enable_grad():
                    weight = network.fc.weight.requires_grad_()
                    drafts = self.student.replay(network, seen)
                    loss = distillation_loss(drafts, logits, None, [1.0] * drafts.shape[1])
                    (gradient,) = torch.autograd.grad(loss.sum(), weight)
                found.append(float(gradient.norm()))
            norms.append((found[0], found[1]))

    drafter = Gradients(student(kind), TTSOptions(learning_rate=1e-3))
    result = generate(tiny, ALONE, "tts", {"draft_length": 4}, drafter=drafter, max_new_tokens=30)
    assert result.statistics.drafter_failure is None
    assert norms and all(whole > 0 and newest > 0 and whole != newest for whole, newest in norms[:-1])
