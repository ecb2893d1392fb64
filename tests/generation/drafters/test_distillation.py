"""Test-Time Speculation: whatever a drafter learns, outputs stay; and it learns what the paper says."""

import copy
import dataclasses
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spec_trl import SpeculativeConfig, release
from spec_trl.generation import graphs, strategies
from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.dflash import DFlashDrafter
from spec_trl.generation.drafters.distillation import DistilledDrafter, distillation_loss, divergence
from spec_trl.generation.drafters.eagle3 import Eagle3Drafter
from spec_trl.generation.drafters.learners import CORRECTION_RATE, WEIGHT_RATE
from spec_trl.generation.drafters.low_rank import RowAdapters
from spec_trl.generation.drafters.self_draft import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.trainable import TrainableDrafter
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters import eagle3_reference
from tests.generation.drafters.test_learned import make_checkpoint
from tests.generation.tape import Tape


KINDS = ["self", "model", "eagle3", "dflash"]
BATCH = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
ALONE = pad_left(random_rows([9]))


@pytest.fixture(scope="module")
def assistant() -> Any:
    """Near the target, so that drafts are accepted now and then."""
    model = tiny_llama()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    return {kind: make_checkpoint(tmp_path_factory.mktemp(kind), kind) for kind in ("eagle3", "dflash")}


@pytest.fixture
def named(assistant, checkpoints) -> dict[str, Any]:
    """`assistant_model` of each kind."""
    return {"self": None, "model": assistant, **checkpoints}


@pytest.fixture
def student(tiny, assistant, checkpoints) -> Any:
    """Makes a drafter of a kind."""

    def make(kind: str) -> TrainableDrafter:
        if kind == "self":
            return SelfDrafter(tiny, "rtn-w4-g32", "reference", "packed")
        if kind == "model":
            return SmallModelDrafter(copy.deepcopy(assistant), tiny)
        return (Eagle3Drafter if kind == "eagle3" else DFlashDrafter)(checkpoints[kind], tiny)

    return make


def options(**changes: Any) -> dict[str, Any]:
    return {"draft_length": 4, "tts_learning_rate": 1e-3} | changes


# ---- losslessness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("scope", "asynchronous", "stride"),
    [
        ("request", False, 1),
        ("request", True, 3),
        ("rollout", False, "adaptive"),
        ("rollout", True, 3),
        ("run", True, 1),
    ],
)
def test_identical_with_none(kind, scope, asynchronous, stride, tiny, named) -> None:
    config = options(tts_drafter=kind, tts_scope=scope, tts_asynchronous=asynchronous, tts_stride=stride)
    before = copy.deepcopy(tiny.state_dict())
    for prompts, rows in ((BATCH, None), (BATCH, 3), (ALONE, None)):
        for greedy in ({}, {"do_sample": False}):
            expected = outputs(generate(tiny, prompts, max_new_tokens=30, **greedy))
            result = generate(
                tiny, prompts, "tts", config | {"max_batch_size": rows}, assistant_model=named[kind],
                max_new_tokens=30, **greedy,
            )  # fmt: skip
            assert outputs(result) == expected
            assert result.statistics.drafter_failure is None
            assert result.statistics.learning.updates > 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in tiny.state_dict().items())


@pytest.mark.parametrize("kind", ["self", "model"])
def test_under_captured_forwards(kind: str, tiny, named, monkeypatch) -> None:
    """What was learned reaches captured draft forwards, which read weights where they lie."""
    config = options(tts_drafter=kind, tts_learning_rate=3e-3)
    batch = pad_left(random_rows([5, 9, 12, 7]))
    calls = (batch, ALONE, batch)  # rows that learn apart, one that learns alone, and new corrections for these rows
    arguments: dict[str, Any] = dict(assistant_model=named[kind], max_new_tokens=80)
    expected = [generate(tiny, prompts, "tts", config, **arguments) for prompts in calls]
    release(tiny)
    tape = Tape()
    monkeypatch.setattr(graphs, "recorder_for", lambda device: tape)
    for prompts, eager in zip(calls, expected, strict=True):
        result = generate(tiny, prompts, "tts", config | {"runner": "graph"}, **arguments)
        assert outputs(result) == outputs(eager) == outputs(generate(tiny, prompts, max_new_tokens=80))
        assert result.statistics.total == eager.statistics.total
    assert tape.replayed > 60
    release(tiny)


def test_an_assistant_of_the_callers_is_not_changed(tiny, assistant) -> None:
    before = copy.deepcopy(assistant.state_dict())
    generate(tiny, ALONE, "tts", options(tts_drafter="model"), assistant_model=assistant)
    assert all(torch.equal(tensor, before[name]) for name, tensor in assistant.state_dict().items())


# ---- replay --------------------------------------------------------------------------------------------------------


class Comparing(DistilledDrafter):
    """Learns nothing, and compares each replay with what was drafted."""

    rounds = 0

    def learn(self, logits: Tensor) -> None:
        proposal, student = self._proposal, self.student
        canvas = student.canvas(logits.shape[1] - 1, snapshot=False)
        replayed = student.replay(student.network, canvas)  # [B, C, draft V]
        drafted = proposal.logits[:, : replayed.shape[1]]  # [B, C, V]
        if student.target_ids is not None:
            drafted = drafted[..., student.target_ids]
        rows = proposal.lengths > 0
        torch.testing.assert_close(replayed[rows], drafted[rows], rtol=1e-9, atol=1e-9)
        self.rounds += 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_gives_what_was_drafted(kind: str, student, tiny) -> None:
    """Over rounds with rejections, rows that end and rows that come in."""
    drafter = Comparing(student(kind), Distillation(1e-3, scope="run"))
    result = generate(
        tiny, BATCH, "tts", {"verification": "rejection", "max_batch_size": 4, "draft_length": 4}, drafter=drafter,
        max_new_tokens=50,
    )  # fmt: skip
    assert result.statistics.drafter_failure is None and drafter.rounds > 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_of_rows_that_share_a_prompt(kind: str, student, tiny) -> None:
    """A row that comes in late shares its prompt with one that has long forgotten the prompt's features."""
    drafter = Comparing(student(kind), Distillation(1e-3, scope="run"))
    prompts = pad_left(random_rows([20]) * 6)
    result = generate(
        tiny, prompts, "tts", {"verification": "rejection", "max_batch_size": 2, "draft_length": 3}, drafter=drafter,
        max_new_tokens=110, eos_token_id=[60],
    )  # fmt: skip
    assert result.statistics.drafter_failure is None and drafter.rounds > 40
    assert sorted(result.lengths.tolist())[-1] > 90 and len(set(result.lengths.tolist())) > 2


def test_a_replay_over_a_pruned_vocabulary(tiny, tmp_path) -> None:
    eagle3_reference.make_folder(tmp_path, eagle3_reference.safeai(draft_vocab_size=40))
    drafter = Comparing(Eagle3Drafter(str(tmp_path), tiny), Distillation(1e-3))
    result = generate(tiny, BATCH, "tts", {"verification": "rejection"}, drafter=drafter)
    assert result.statistics.drafter_failure is None and drafter.rounds > 5


# ---- the loss ------------------------------------------------------------------------------------------------------


def test_loss_by_hand() -> None:
    torch.manual_seed(0)
    drafts, target = (torch.randn(2, n, 5, dtype=torch.float64) for n in (3, 4))
    weights = [1.0, 0.5, 0.25]
    found = distillation_loss(drafts, target, None, weights)
    assert torch.equal(found, divergence(target[:, :3], drafts, weights))
    for row in range(2):
        expected = 0.0
        for k, weight in enumerate(weights):
            p, q = F.softmax(target[row, k], 0), F.softmax(drafts[row, k], 0)
            expected += weight * float(sum(p[v] * (p[v] / q[v]).log() for v in range(5)))
        assert math.isclose(float(found[row]), expected, rel_tol=1e-12)


def test_loss_over_a_pruned_vocabulary() -> None:
    """p renormalised on it; a position whose likeliest token it lacks teaches nothing."""
    ids = torch.tensor([0, 2, 4])
    target = torch.tensor([[[3.0, 1, 2, 0, 1], [0.0, 9, 1, 1, 1]]]).double()
    drafts = torch.randn(1, 2, 3, dtype=torch.float64)
    found = distillation_loss(drafts, target, ids, [1.0, 1.0])
    p = F.softmax(target[0, 0, ids], 0)
    torch.testing.assert_close(found[0], (p * (p.log() - F.log_softmax(drafts[0, 0], 0))).sum())


def test_a_token_that_the_target_rules_out_teaches_its_absence() -> None:
    target = torch.tensor([[[1.0, 2.0, -math.inf], [1.0, 2.0, 0.0]]]).double()
    drafts = torch.zeros(1, 2, 3, dtype=torch.float64, requires_grad=True)
    divergence(target, drafts, [1.0, 1.0]).sum().backward()
    p = F.softmax(target, -1)
    torch.testing.assert_close(drafts.grad, torch.full_like(p, 1 / 3) - p)


@pytest.mark.parametrize("kind", ["self", "model", "eagle3"])
def test_weights_of_positions(kind: str, student) -> None:
    """EAGLE-3's training; DFlash's are tested with its loss over sequences."""
    assert student(kind).position_weights(4) == pytest.approx([1.0, 0.8, 0.64, 0.512])


# ---- what learns, and for how long ---------------------------------------------------------------------------------


def weights_of(drafter: DistilledDrafter) -> list[Tensor]:
    student = drafter.student
    return [parameter.detach().clone() for parameter in student.trained(student.network)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_update_brings_the_drafter_nearer(kind: str, student, tiny) -> None:
    """On the canvas that it learned from, by every kind of update, the loss falls."""
    falls: list[bool] = []

    class Watching(DistilledDrafter):
        def _learn_from(self, learner, canvas, logits, drafted) -> float:
            def loss() -> float:
                replayed = self.student.replay(learner.network, canvas)
                weights = self.student.position_weights(replayed.shape[1])
                losses = distillation_loss(replayed, logits, self.student.target_ids, weights)
                return float(losses[drafted].sum())

            before = loss()
            seconds = super()._learn_from(learner, canvas, logits, drafted)
            falls.append(loss() < before)
            return seconds

    for scope, prompts in (("request", BATCH), ("request", ALONE), ("rollout", BATCH)):
        drafter = Watching(student(kind), Distillation(1e-4, scope=scope))
        generate(tiny, prompts, "tts", drafter=drafter, max_new_tokens=40)
    assert len(falls) > 20 and sum(falls) > 0.9 * len(falls)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_scopes(kind: str, student, tiny) -> None:
    """A run goes on with what it learned; a rollout and a request start anew."""
    drafter = DistilledDrafter(student(kind), Distillation(1e-3, scope="run"))
    first = weights_of(drafter)
    generate(tiny, BATCH, "tts", drafter=drafter)
    learned = weights_of(drafter)
    assert not equal(first, learned)

    starts: list[list[Tensor]] = []

    class Starting(DistilledDrafter):
        def admit(self, admission) -> None:
            starts.append(weights_of(self))
            super().admit(admission)

    for scope, prompts, rows in (("run", BATCH, None), ("rollout", BATCH, 3), ("request", BATCH, 1)):
        starts.clear()
        drafter = Starting(student(kind), Distillation(1e-3, scope=scope))
        for _ in range(2):
            generate(tiny, prompts, "tts", {"max_batch_size": rows}, drafter=drafter)
        same = [equal(first, weights) for weights in starts]
        if scope == "run":
            assert same == [True, False]
        elif scope == "request":
            assert same == [True] * 14
        else:  # the rows that a rollout admits later find what the earlier ones taught
            second = len(same) // 2
            assert same[0] and same[second] and not any(same[1:second])


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_the_projection_of_features_learns(kind: str, student, tiny) -> None:
    """From all columns of the context, which are keys and values of the round."""
    norms: list[tuple[float, float]] = []

    class Gradients(DistilledDrafter):
        def learn(self, logits: Tensor) -> None:
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

    drafter = Gradients(student(kind), Distillation(1e-3))
    result = generate(tiny, ALONE, "tts", {"draft_length": 4}, drafter=drafter, max_new_tokens=30)
    assert result.statistics.drafter_failure is None
    assert norms and all(whole > 0 and newest > 0 and whole != newest for whole, newest in norms[:-1])


@pytest.mark.parametrize("kind", ["self", "dflash"])
def test_requests_of_a_batch_learn_apart(kind: str, tiny, named) -> None:
    """How much of a request's drafts is accepted does not depend on the batch it came in.

    The other two feed some tokens again, with the weights of then, where a neighbour lags behind."""
    prompts = pad_left(random_rows([5, 9, 6, 12, 7, 7, 3]))
    found = []
    for rows in (7, 2):  # one at a time all weights would learn
        result = generate(
            tiny, prompts, "tts", options(tts_drafter=kind, max_batch_size=rows), assistant_model=named[kind],
            max_new_tokens=30,
        )  # fmt: skip
        found.append([(counts.drafted, counts.accepted) for counts in result.statistics.per_request])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_starts_without_what_its_row_learned_before(kind: str, asynchronous: bool, student, tiny) -> None:
    admitted: list[float] = []
    learned: list[bool] = []

    class Starting(DistilledDrafter):
        def admit(self, admission) -> None:
            rows = slice(admission.first, self.session.rows.active)
            admitted.append(sum(float(up[rows].abs().sum()) for up in self._learner._drafting.up.values()))
            super().admit(admission)

        def move(self, *arguments: Any) -> None:
            learned.append(any(bool(up.any()) for up in self._learner._drafting.up.values()))
            super().move(*arguments)

    drafter = Starting(student(kind), Distillation(1e-3, asynchronous=asynchronous, stride=2 if asynchronous else 1))
    generate(tiny, BATCH, "tts", {"max_batch_size": 2}, drafter=drafter)
    assert len(admitted) > 3 and not any(admitted) and all(learned)


def test_synchronous_and_asynchronous_agree_at_stride_one(tiny, named) -> None:
    """There is no round to overlap with: the same updates at the same places."""
    for kind in KINDS:
        found = [
            generate(
                tiny, ALONE, "tts", options(tts_drafter=kind, tts_asynchronous=asynchronous),
                assistant_model=named[kind], max_new_tokens=60,
            ).statistics.total
            for asynchronous in (False, True)
        ]  # fmt: skip
        assert found[0] == found[1]


def test_an_asynchronous_update_is_taken_over_before_the_next_canvas_of_its_stride(student, tiny) -> None:
    """Round r's update changes the drafting weights before round r + S drafts, and not before."""
    seen: list[list[Tensor]] = []

    class Recording(SmallModelDrafter):
        def propose(self, *arguments: Any) -> Any:
            seen.append([parameter.detach().clone() for parameter in self.network.parameters()])
            return super().propose(*arguments)

    inner = student("model")
    inner.__class__ = Recording
    drafter = DistilledDrafter(inner, Distillation(1e-3, scope="run", stride=3, asynchronous=True))
    result = generate(tiny, ALONE, "tts", {"draft_length": 2}, drafter=drafter, max_new_tokens=60)
    changes = [i for i in range(1, len(seen)) if not equal(seen[i - 1], seen[i])]
    assert changes == list(range(3, len(seen), 3)) and len(changes) > 3
    assert result.statistics.learning.updates == -(-len(seen) // 3)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_beside_later_rounds_sees_its_own_round(kind: str, student, tiny) -> None:
    """Later rounds write to the cache and to the target's logits; the update, held back until they have, is of the
    round that it was begun in."""
    expected: list[tuple[Tensor, Tensor]] = []
    checked: list[bool] = []
    gate = threading.Event()

    class HeldBack(DistilledDrafter):
        def learn(self, logits: Tensor) -> None:
            canvas = self.student.canvas(logits.shape[1] - 1, snapshot=False)
            expected[:] = [(self.student.replay(self.student.network, canvas), logits.clone())]
            before = self._update
            super().learn(logits)
            if self._update is not before:
                begun.append(expected[0])
            logits.copy_(torch.randn_like(logits) + logits)  # as a captured forward would

        def _take_over(self) -> None:
            gate.set()
            super()._take_over()
            gate.clear()

        def _learn_aside(self, learner, canvas, logits, drafted, dispatched) -> float:
            assert gate.wait(20)
            replayed, told = begun.pop(0)
            found = self.student.replay(learner.initial(), canvas)
            checked.append(torch.allclose(found[drafted], replayed[drafted], atol=1e-9) and torch.equal(told, logits))
            return 0.0

    begun: list[tuple[Tensor, Tensor]] = []
    how = Distillation(1e-3, stride=3, asynchronous=True, scope="run", anchor="initial", anchor_weight=1.0)
    drafter = HeldBack(student(kind), how)
    result = generate(tiny, BATCH, "tts", {"draft_length": 3}, drafter=drafter, max_new_tokens=40)
    assert result.statistics.drafter_failure is None
    assert len(checked) > 2 and all(checked)


def test_steps_and_anchors(student, tiny) -> None:
    """K and λ have their effects; λ with the drafter itself as anchor has none at K = 1, as TTS's formula says."""

    def learned(**how: Any) -> list[Tensor]:
        drafter = DistilledDrafter(student("eagle3"), Distillation(1e-3, scope="run", **how))
        generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=12)
        return weights_of(drafter)

    plain = learned()
    assert equal(plain, learned(anchor_weight=5.0))
    assert not equal(plain, learned(anchor_weight=5.0, anchor="initial"))
    twice = learned(steps=2)
    assert not equal(plain, twice)
    assert not equal(twice, learned(steps=2, anchor_weight=5.0))


def test_an_anchor_holds_the_drafter_back(student, tiny) -> None:
    def way(anchor_weight: float, kind: str) -> float:
        drafter = DistilledDrafter(
            student(kind), Distillation(1e-3, scope="run", anchor_weight=anchor_weight, anchor="initial")
        )
        first = weights_of(drafter)
        generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=60)
        return float(sum((a - b).square().sum() for a, b in zip(first, weights_of(drafter), strict=True)))

    for kind in ("model", "eagle3", "dflash"):
        assert way(1e4, kind) < way(0.0, kind)


def test_bfloat16_weights_learn_at_small_rates(tiny) -> None:
    """Steps below the spacing of bfloat16 numbers add up on a wider copy."""
    target = tiny_llama().bfloat16()
    inner = SmallModelDrafter(copy.deepcopy(target), target)
    drafter = DistilledDrafter(inner, Distillation(1e-5, scope="run"))
    first = weights_of(drafter)
    generate(target, BATCH, "tts", {"draft_length": 2}, drafter=drafter, max_new_tokens=100)
    # Alone, a step of 1e-5 is less than half the spacing at weights above 0.01.
    pairs = zip(first, weights_of(drafter), strict=True)
    assert sum(int((before != after)[before.abs() > 0.01].sum()) for before, after in pairs) > 1000


def test_the_quantized_copy_follows_its_policy(fresh) -> None:
    """Corrections stay, the packed weights under them are made anew when the policy has changed."""
    config = options(tts_drafter="self", tts_scope="run", draft_quantization="rtn-w4-g32")
    generate(fresh, BATCH, "tts", config)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.copy_(parameter.roll(1, 0))
    result = generate(fresh, BATCH, "tts", config)
    other = tiny_llama()
    other.load_state_dict(fresh.state_dict())
    assert outputs(result) == outputs(generate(fresh, BATCH))
    expected = generate(other, BATCH, "self", {"draft_quantization": "rtn-w4-g32"})
    assert result.statistics.acceptance_rate > 0.8 * expected.statistics.acceptance_rate


# ---- faults and reports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_learning_that_fails_changes_no_token(asynchronous: bool, student, tiny, monkeypatch) -> None:
    inner = student("eagle3")
    monkeypatch.setattr(inner, "replay", lambda *_: 1 / 0)
    drafter = DistilledDrafter(inner, Distillation(1e-3, asynchronous=asynchronous))
    with pytest.warns(UserWarning, match="ZeroDivisionError") as caught:
        result = generate(tiny, BATCH, "tts", drafter=drafter)
    assert len(caught) == 1 and outputs(result) == outputs(generate(tiny, BATCH))
    assert not any(thread.name.startswith("tts") for thread in threading.enumerate())


def test_goes_on_after_a_generation_that_was_broken_off(student, tiny) -> None:
    """While an update was under way; the next generation starts anew all the same."""
    drafter = DistilledDrafter(student("model"), Distillation(1e-3, stride=4, asynchronous=True))

    def interrupt(*_: Any, **__: Any) -> None:
        if drafter._update is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tiny, ALONE, "tts", drafter=drafter, stopping_criteria=[interrupt], max_new_tokens=60)
    result = generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=60)
    again = DistilledDrafter(student("model"), Distillation(1e-3, stride=4, asynchronous=True))
    assert result.statistics.total == generate(tiny, ALONE, "tts", drafter=again, max_new_tokens=60).statistics.total
    assert outputs(result) == outputs(generate(tiny, ALONE, max_new_tokens=60))


@pytest.mark.parametrize("of_gradient", [False, True])
def test_what_is_no_number_teaches_nothing(of_gradient: bool, student, tiny, monkeypatch) -> None:
    inner = student("eagle3")
    replay = inner.replay

    def broken(*arguments: Any) -> Tensor:
        logits = replay(*arguments)
        if of_gradient:
            logits.register_hook(lambda gradient: gradient * math.nan)
            return logits
        return logits * math.nan

    monkeypatch.setattr(inner, "replay", broken)
    drafter = DistilledDrafter(inner, Distillation(1e-3, scope="run"))
    first = weights_of(drafter)
    result = generate(tiny, BATCH, "tts", drafter=drafter)
    assert result.statistics.drafter_failure is None and equal(first, weights_of(drafter))


def test_reports(tiny, named) -> None:
    for kind in KINDS:
        result = generate(tiny, ALONE, "tts", options(tts_drafter=kind), assistant_model=named[kind])
        learning = result.statistics.learning
        speculative = sum(point.rounds for point in result.statistics.points if point.draft_length)
        assert learning.updates == speculative
        assert 0 < learning.seconds <= learning.waited <= result.statistics.seconds
        assert learning.bytes > 0 and "learn" in result.statistics.phase_seconds
    assert generate(tiny, ALONE, "self").statistics.learning is None


def test_memory_of_learning_is_bounded(student, tiny) -> None:
    """Features are kept for a few columns, however long the output; a canvas grows with the cache only."""
    drafter = DistilledDrafter(student("eagle3"), Distillation(1e-3))
    found = [generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=n).statistics for n in (30, 200)]
    kept = [statistics.learning.bytes for statistics in found]
    assert kept[1] - kept[0] <= 2 * found[1].cache_bytes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tts_learning_rate": 0}, "tts_learning_rate=0 is out of range"),
        ({"tts_learning_rate": -1e-4}, "tts_learning_rate=-0.0001"),
        ({"tts_stride": 0}, "tts_stride=0 is out of range"),
        ({"tts_stride": "sometimes"}, "tts_stride='sometimes'"),
        ({"tts_steps": 0}, "tts_steps=0"),
        ({"tts_anchor_weight": -1}, "tts_anchor_weight=-1"),
        ({"tts_anchor_weight": math.nan}, "tts_anchor_weight=nan"),
        ({"tts_rank": 0}, "tts_rank=0"),
        ({"tts_scope": "week"}, "tts_scope='week' is unknown"),
        ({"tts_drafter": "ngram"}, "tts_drafter='ngram' is unknown"),
        ({"tts_asynchronous": "no"}, "tts_asynchronous='no' is no bool"),
        ({"tts_anchor": "old"}, "tts_anchor='old' is unknown"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**changes)


def test_the_assistant_must_fit_the_drafter(tiny, assistant, checkpoints) -> None:
    for kind, given, message in (
        ("self", checkpoints["eagle3"], "Say what the assistant is: tts_drafter='eagle3'"),
        ("eagle3", None, "give the folder or hub id"),
        ("dflash", assistant, "give the folder or hub id"),
        ("model", None, "needs assistant_model"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(tiny, ALONE, "tts", {"tts_drafter": kind}, assistant_model=given)


def test_what_is_kept_follows_what_it_was_made_of(fresh) -> None:
    """Other weights in the assistant, an adapter on the policy: a new drafter; released: forgotten."""
    from peft import LoraConfig

    assistant, config, kept = tiny_llama(seed=1), options(tts_drafter="model"), strategies._kept

    def drafter() -> DistilledDrafter:
        generate(fresh, ALONE, "tts", config, assistant_model=assistant, max_new_tokens=4)
        return kept[fresh].drafter

    first = drafter()
    assert drafter() is first
    with torch.no_grad():
        next(assistant.parameters()).mul_(1.0)
    second = drafter()
    assert second is not first
    fresh.add_adapter(LoraConfig(target_modules=["q_proj"]))
    assert drafter() is not second
    release(fresh)
    assert fresh not in kept


def test_layers_that_see_no_rows() -> None:
    """Corrections of rows need inputs by row; one correction for all does not."""
    x = torch.randn(6, 4)
    for rows in (1, 3):
        layer = nn.Linear(4, 5)
        RowAdapters({"layer": layer}, rows, rank=2).attach({"layer": layer}, lambda: 0)
        if rows == 1:
            assert layer(x).shape == (6, 5)
        else:
            with pytest.raises(ValueError, match='use tts_scope="rollout"'):
                layer(x)


def test_two_folders_of_one_model_are_kept_apart(tiny, checkpoints, tmp_path: Path) -> None:
    """The kept drafter is that of the same call; another checkpoint is loaded."""
    config = options(tts_drafter="eagle3", tts_scope="run")
    other = make_checkpoint(tmp_path, "eagle3")
    totals = [
        generate(tiny, ALONE, "tts", config, assistant_model=folder, max_new_tokens=60).statistics.total
        for folder in (checkpoints["eagle3"], other, checkpoints["eagle3"])
    ]
    assert totals[0] == totals[2]


@pytest.mark.parametrize("kind", KINDS)
def test_default_learning_rate(kind: str, student, tiny) -> None:
    """Less where the drafter is wider; relative to the layer where corrections learn."""
    drafter = DistilledDrafter(student(kind), Distillation(scope="run"))
    generate(tiny, ALONE, "tts", drafter=drafter)
    learner = drafter._learner
    if kind == "self":
        assert learner._adam._learning_rate == CORRECTION_RATE
    else:
        assert learner._optimizer.param_groups[0]["lr"] == WEIGHT_RATE / 64
