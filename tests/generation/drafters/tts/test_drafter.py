"""Test-Time Speculation: whatever a drafter learns, outputs stay; and it learns what the paper says."""

import copy
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spec_trl import SpeculativeConfig, release
from spec_trl.generation import kept
from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter, distillation_loss
from spec_trl.generation.engine import captured
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.tape import Tape


KINDS = ["self", "model", "eagle3", "dflash"]
BATCH = pad_left(random_rows([5, 9, 1, 12, 7, 4]))
ALONE = pad_left(random_rows([9]))


def options(**changes: Any) -> dict[str, Any]:
    return {"draft_length": 4, "tts_learning_rate": 1e-3} | changes


# ---- losslessness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "scope", "asynchronous", "stride"),
    [
        ("self", "request", True, 3), ("model", "run", True, 1), ("eagle3", "request", False, 1),
        ("dflash", "rollout", False, "adaptive"),
    ],
)  # fmt: skip
def test_nothing_but_the_drafter_changes(kind, scope, asynchronous, stride, tiny, named) -> None:
    """Tokens are those of "none"; the target and the caller's assistant stay as they are; each round is reported."""
    given = [model for model in (tiny, named[kind]) if isinstance(model, torch.nn.Module)]
    before = [copy.deepcopy(model.state_dict()) for model in given]
    config = options(tts_drafter=kind, tts_scope=scope, tts_asynchronous=asynchronous, tts_stride=stride)
    for prompts, rows, greedy in ((BATCH, 3, False), (ALONE, None, True)):
        result = generate(
            tiny, prompts, "tts", config | {"max_batch_size": rows}, assistant_model=named[kind], max_new_tokens=12,
            do_sample=not greedy,
        )  # fmt: skip
        assert outputs(result) == outputs(generate(tiny, prompts, max_new_tokens=12, do_sample=not greedy))
        statistics, learning = result.statistics, result.statistics.learning
        speculative = sum(point.rounds for point in statistics.points if point.draft_length)
        assert statistics.drafter_failure is None
        assert learning.updates == speculative if stride == 1 else 0 < learning.updates < speculative
        assert 0 < learning.seconds and 0 < learning.waited <= statistics.seconds
        assert learning.seconds <= learning.waited or asynchronous
        assert learning.bytes > 0 and "learn" in statistics.phase_seconds
    for model, states in zip(given, before, strict=True):
        assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", ["self", "model"])
def test_under_captured_forwards(kind: str, tiny, named, monkeypatch) -> None:
    """What was learned reaches captured draft forwards, which are kept from call to call and read weights where they
    lie. With the self-drafter, rows that learn apart and one that learns alone have other corrections, which a forward
    captured before them does not know: it would change no token, but what is accepted."""
    config = options(tts_drafter=kind, tts_learning_rate=1e-2)
    batch = pad_left(random_rows([5, 9]))

    def run(**changes: Any) -> list[Any]:
        release(tiny)
        calls = (batch, ALONE, batch)
        return [
            generate(tiny, prompts, "tts", config | changes, assistant_model=named[kind], max_new_tokens=16)
            for prompts in calls
        ]

    expected, tape = run(), Tape()
    monkeypatch.setattr(captured, "recorder_for", lambda device: tape)
    for result, eager in zip(run(runner="graph"), expected, strict=True):
        assert outputs(result) == outputs(eager)
        assert result.statistics.total == eager.statistics.total
    assert tape.replayed > 10
    release(tiny)


# ---- the loss ------------------------------------------------------------------------------------------------------


def test_loss_by_hand() -> None:
    torch.manual_seed(0)
    drafts, target = (torch.randn(2, n, 5, dtype=torch.float64) for n in (3, 4))
    weights = [1.0, 0.5, 0.25]
    found = distillation_loss(drafts, target, None, weights)
    assert found.shape == (2,)
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
    distillation_loss(drafts, target, None, [1.0, 1.0]).sum().backward()
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


def learned_by(drafter: DistilledDrafter) -> list[Tensor]:
    learner = drafter.learner
    assert learner is not None
    return learner.tensors


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_an_update_brings_the_drafter_nearer(kind: str, student, tiny) -> None:
    """On the canvas that it learned from, by every kind of update, the loss falls."""
    falls: list[bool] = []

    class Watching(DistilledDrafter):
        def learn(self, logits: Tensor, verified: Tensor) -> None:
            canvas = self.student.canvas(logits.shape[1] - 1, snapshot=True)

            def loss() -> float:
                with torch.no_grad():
                    replayed = self.student.replay(self.learner.network, canvas)
                weights = self.student.position_weights(replayed.shape[1])
                return float(distillation_loss(replayed, logits, self.student.target_ids, weights)[verified].sum())

            before = loss()
            super().learn(logits, verified)
            falls.append(loss() < before)

    for scope, prompts in (("request", BATCH), ("request", ALONE), ("rollout", BATCH)):
        drafter = Watching(student(kind), Distillation(1e-4, scope=scope))
        generate(tiny, prompts, "tts", drafter=drafter, max_new_tokens=12)
    assert len(falls) > 6 and sum(falls) > 0.9 * len(falls)


def test_scopes(student, tiny) -> None:
    """A run goes on with what it learned; a rollout and a request start anew."""
    starts: list[list[Tensor]] = []

    class Starting(DistilledDrafter):
        def admit(self, admission) -> None:
            starts.append(weights_of(self))
            super().admit(admission)

    for scope, rows in (("run", None), ("rollout", 3), ("request", 1)):
        starts.clear()
        ends = []
        drafter = Starting(student("model"), Distillation(1e-3, scope=scope))
        first = weights_of(drafter)
        for _ in range(2):
            generate(tiny, BATCH, "tts", {"max_batch_size": rows}, drafter=drafter, max_new_tokens=6)
            ends.append([tensor.detach().clone() for tensor in learned_by(drafter)])
        same = [equal(first, weights) for weights in starts]
        assert equal(*ends) is (scope != "run")  # Adam's moments start anew too
        if scope == "run":
            assert same == [True, False]
        elif scope == "request":
            assert same == [True] * 12
        else:  # the rows that a rollout admits later find what the earlier ones taught
            second = len(same) // 2
            assert same[0] and same[second] and not any(same[1:second])


@pytest.mark.parametrize("kind", ["self", "dflash"])
def test_requests_of_a_batch_learn_apart(kind: str, tiny, named) -> None:
    """How much of a request's drafts is accepted does not depend on the batch it came in.

    The other two feed some tokens again, with the weights of then, where a neighbour lags behind."""
    prompts = pad_left(random_rows([5, 9, 6, 12]))
    found = []
    for rows in (4, 2):  # one at a time all weights would learn
        result = generate(
            tiny, prompts, "tts", options(tts_drafter=kind, max_batch_size=rows, tts_learning_rate=2e-2),
            assistant_model=named[kind], eos_token_id=[7, 11, 12],
        )  # fmt: skip
        found.append([(counts.drafted, counts.accepted) for counts in result.statistics.per_request])
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "asynchronous"), [("self", False), ("model", True)])
def test_a_request_starts_without_what_its_row_learned_before(kind: str, asynchronous: bool, student, tiny) -> None:
    admitted: list[float] = []
    learned: list[bool] = []

    class Starting(DistilledDrafter):
        def admit(self, admission) -> None:
            rows = slice(admission.first, self.session.rows.active)
            admitted.append(sum(float(up[rows].abs().sum()) for up in learned_by(self)))
            super().admit(admission)

        def move(self, *arguments: Any) -> None:
            learned.append(any(bool(up.any()) for up in learned_by(self)))
            super().move(*arguments)

    drafter = Starting(student(kind), Distillation(1e-3, asynchronous=asynchronous, stride=2 if asynchronous else 1))
    generate(tiny, BATCH, "tts", {"max_batch_size": 2}, drafter=drafter, max_new_tokens=12, eos_token_id=[7, 11, 12])
    assert len(admitted) > 3 and not any(admitted)
    assert sum(learned) >= len(learned) - 1  # what was asynchronously learned first may come after the first move


def test_synchronous_and_asynchronous_agree_at_stride_one(tiny, named) -> None:
    """There is no round to overlap with: the same updates at the same places."""
    found = [
        generate(
            tiny, BATCH, "tts", options(tts_drafter="model", tts_asynchronous=asynchronous),
            assistant_model=named["model"], max_new_tokens=16,
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
    result = generate(tiny, ALONE, "tts", {"draft_length": 2}, drafter=drafter, max_new_tokens=40)
    changes = [i for i in range(1, len(seen)) if not equal(seen[i - 1], seen[i])]
    assert changes == list(range(3, len(seen), 3)) and len(changes) > 3
    assert result.statistics.learning.updates == -(-len(seen) // 3)


def test_steps_and_anchors(student, tiny) -> None:
    """K and λ have their effects; λ with the drafter itself as anchor has none at K = 1, as TTS's formula says."""

    def learned(**how: Any) -> list[Tensor]:
        drafter = DistilledDrafter(student("model"), Distillation(1e-3, scope="run", **how))
        generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=12)
        return weights_of(drafter)

    plain = learned()
    assert equal(plain, learned(anchor_weight=5.0))
    assert not equal(plain, learned(anchor_weight=5.0, anchor="initial"))
    twice = learned(steps=2)
    assert not equal(plain, twice)
    assert not equal(twice, learned(steps=2, anchor_weight=5.0))


@pytest.mark.parametrize("kind", ["model", "dflash"])
def test_an_anchor_holds_the_drafter_back(kind: str, student, tiny) -> None:
    def way(anchor_weight: float) -> float:
        how = Distillation(1e-3, scope="run", anchor_weight=anchor_weight, anchor="initial")
        drafter = DistilledDrafter(student(kind), how)
        first = weights_of(drafter)
        generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=12)
        return float(sum((a - b).square().sum() for a, b in zip(first, weights_of(drafter), strict=True)))

    assert way(1e4) < way(0.0)


def test_the_quantized_copy_follows_its_policy(fresh) -> None:
    """Corrections stay, the packed weights under them are made anew when the policy has changed."""
    config = options(tts_drafter="self", tts_scope="run", draft_quantization="rtn-w4-g32")
    generate(fresh, ALONE, "tts", config, max_new_tokens=8)
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
        result = generate(tiny, BATCH, "tts", drafter=drafter, max_new_tokens=8)
    assert len(caught) == 1 and outputs(result) == outputs(generate(tiny, BATCH, max_new_tokens=8))
    assert not any(thread.name.startswith("tts") for thread in threading.enumerate())


def test_goes_on_after_a_generation_that_was_broken_off(student, tiny) -> None:
    """In the second round, while the first one's update is under way: it is not due before the fifth."""

    class Interrupted(DistilledDrafter):
        rounds = 0

        def observe(self, tokens: int) -> None:
            self.rounds += 1
            if self.rounds == 2:
                raise KeyboardInterrupt
            super().observe(tokens)

    how = Distillation(1e-3, stride=4, asynchronous=True)
    drafter = Interrupted(student("model"), how)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny, ALONE, "tts", drafter=drafter)
    fresh = DistilledDrafter(student("model"), how)
    found, expected = (generate(tiny, ALONE, "tts", drafter=each, max_new_tokens=30) for each in (drafter, fresh))
    assert found.statistics.total == expected.statistics.total and outputs(found) == outputs(expected)
    assert all(torch.equal(a, b) for a, b in zip(weights_of(drafter), weights_of(fresh), strict=True))


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
    result = generate(tiny, BATCH, "tts", drafter=drafter, max_new_tokens=8)
    assert result.statistics.drafter_failure is None and equal(first, weights_of(drafter))


def test_memory_of_learning_is_bounded(student, tiny) -> None:
    """Features are kept for a few columns, however long the output; a canvas grows with the cache only."""
    drafter = DistilledDrafter(student("eagle3"), Distillation(1e-3))
    found = [generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=n).statistics for n in (12, 48)]
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


def test_the_assistant_must_fit_the_drafter(tiny, tiny_assistant, checkpoints) -> None:
    for kind, given, message in (
        ("self", checkpoints["eagle3"], "Say what the assistant is: tts_drafter='eagle3'"),
        ("eagle3", None, "give the folder or hub id"),
        ("dflash", tiny_assistant, "give the folder or hub id"),
        ("model", None, "needs assistant_model"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(tiny, ALONE, "tts", {"tts_drafter": kind}, assistant_model=given)


def test_what_is_kept_follows_what_it_was_made_of(fresh) -> None:
    """Other weights in the assistant, an adapter on the policy: a new drafter; released: forgotten."""
    from peft import LoraConfig

    assistant, config = tiny_llama(seed=1), options(tts_drafter="model")

    def drafter() -> DistilledDrafter:
        generate(fresh, ALONE, "tts", config, assistant_model=assistant, max_new_tokens=4)
        return kept.look(fresh, "tts")

    first = drafter()
    assert drafter() is first
    with torch.no_grad():
        next(assistant.parameters()).mul_(1.0)
    second = drafter()
    assert second is not first
    fresh.add_adapter(LoraConfig(target_modules=["q_proj"]))
    assert drafter() is not second
    release(fresh)
    assert kept.look(fresh, "tts") is None


def test_two_folders_of_one_model_are_kept_apart(tiny, checkpoints, tmp_path: Path) -> None:
    """The kept drafter is that of the same call; another checkpoint is loaded."""
    config = options(tts_drafter="eagle3", tts_scope="run")
    other = str(shutil.copytree(checkpoints["eagle3"], tmp_path / "other"))
    totals = [
        generate(tiny, ALONE, "tts", config, assistant_model=folder, max_new_tokens=12).statistics.total
        for folder in (checkpoints["eagle3"], other, checkpoints["eagle3"])
    ]
    assert totals[0] == totals[2]
