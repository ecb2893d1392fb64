"""Test-Time Speculation: whatever a drafter learns, outputs stay; and it learns what the paper says."""

import copy
import itertools
import math
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor

from spec_trl import release
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.session import Session
from spec_trl.papers.test_time_speculation.distillation import distillation_loss
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from spec_trl.papers.test_time_speculation.trained_weights import CORRECTION_RATE
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.watching import before, untouched
from tests.generation.engine.tape import Tape
from tests.option_groups import merged
from tests.papers.test_time_speculation.learning import ALONE, BATCH, equal, weights_of


KINDS = ["self", "model", "eagle3", "dflash"]
EOS = dict(eos_token_id=[7, 11, 12])


def options(**changes: Any) -> dict[str, Any]:
    return merged({"draft_length": 4, "tts": {"learning_rate": 1e-3, "stride": 1}}, changes)


# ---- losslessness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "scope", "asynchronous", "stride"),
    [
        ("self", "request", True, 3), ("model", "run", True, 1), ("eagle3", "request", False, 1),
        ("dflash", "rollout", False, "adaptive"), ("model", "run", True, "adaptive"),
    ],
)  # fmt: skip
def test_nothing_but_the_drafter_changes(kind, scope, asynchronous, stride, tiny, named, cheap) -> None:
    """Tokens are those of "none"; the target and the caller's assistant stay as they are; each round is reported."""
    given = [model for model in (tiny, named[kind]) if isinstance(model, torch.nn.Module)]
    config = options(tts=dict(drafter=kind, scope=scope, asynchronous=asynchronous, stride=stride))
    for prompts, rows, sample in ((BATCH, 3, dict()), (ALONE, None, dict(do_sample=False))):
        config["max_batch_size"] = rows
        with untouched(*given):
            result = generate(tiny, prompts, "tts", config, assistant_model=named[kind], max_new_tokens=20, **sample)
        assert outputs(result) == outputs(generate(tiny, prompts, max_new_tokens=20, **sample))
        statistics, learning = result.statistics, result.statistics.learning
        speculative = sum(point.rounds for point in statistics.points if point.draft_length)
        assert statistics.drafter_failure is None
        assert learning.updates == speculative if stride == 1 else 0 < learning.updates < speculative
        assert 0 < learning.seconds and 0 < learning.waited <= statistics.seconds
        assert learning.seconds <= learning.waited or asynchronous
        assert learning.bytes > 0 and "learn" in statistics.phase_seconds


@pytest.mark.parametrize("kind", ["self", "model"])
def test_under_captured_forwards(kind: str, tiny, named, tape: Tape) -> None:
    """What was learned reaches captured draft forwards, which are kept from call to call and read weights where they
    lie. With the self-drafter, rows that learn apart and one that learns alone have other corrections, which a forward
    captured before them does not know: it would change no token, but what is accepted."""
    config = options(tts=dict(drafter=kind, learning_rate=1e-2))
    batch, found = pad_left(random_rows([5, 9])), {}
    for runner in ("eager", "graph"):
        release(tiny)
        results = [
            generate(tiny, each, "tts", config | {"runner": runner}, assistant_model=named[kind], max_new_tokens=16)
            for each in (batch, ALONE, batch)
        ]
        found[runner] = [(outputs(result), result.statistics.total) for result in results]
    assert found["eager"] == found["graph"] and tape.replayed > 10
    release(tiny)


# ---- the loss ------------------------------------------------------------------------------------------------------


def test_loss_by_hand() -> None:
    """Over a pruned vocabulary p is renormalised; a position whose likeliest token it lacks teaches nothing."""
    torch.manual_seed(0)
    weights, ids = [1.0, 0.5, 0.25], torch.tensor([0, 2, 4])
    target = torch.randn(2, 4, 5, dtype=torch.float64)
    target[0, 1, 3] = target[1, 2, 0] = 9.0
    for pruned in (None, ids):
        drafts = torch.randn(2, 3, 5 if pruned is None else 3, dtype=torch.float64)
        found, expected = distillation_loss(drafts, target, pruned, weights), torch.zeros(2, dtype=torch.float64)
        for row, k in itertools.product(range(2), range(3)):
            scores = target[row, k] if pruned is None else target[row, k][pruned]
            if pruned is None or int(target[row, k].argmax()) in pruned:
                p, q = scores.softmax(0), drafts[row, k].softmax(0)
                expected[row] += weights[k] * (p * (p / q).log()).sum()
        torch.testing.assert_close(found, expected)


def test_a_token_that_the_target_rules_out_teaches_its_absence() -> None:
    target = torch.tensor([[[1.0, 2.0, -math.inf], [1.0, 2.0, 0.0]]]).double()
    drafts = torch.zeros(1, 2, 3, dtype=torch.float64, requires_grad=True)
    distillation_loss(drafts, target, None, [1.0, 1.0]).sum().backward()
    p = F.softmax(target, -1)
    torch.testing.assert_close(drafts.grad, torch.full_like(p, 1 / 3) - p)


# ---- what learns, and for how long ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_default_rates_and_weights_of_positions(kind: str, student, tiny) -> None:
    """The rate: less where the drafter is wider; relative to the layer where corrections learn. The weights are those
    of EAGLE-3's training; DFlash's are tested with its loss over sequences."""
    drafter = DistilledDrafter(student(kind), TTSOptions(scope="run", stride=1))
    generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=4)
    expected = CORRECTION_RATE if kind == "self" else drafter.student.weight_rate / 64
    assert drafter.learner.learning_rate == expected
    assert kind == "dflash" or drafter.student.position_weights(4) == pytest.approx([1.0, 0.8, 0.64, 0.512])


def test_bfloat16_weights_learn_at_small_rates() -> None:
    """Steps below the spacing of bfloat16 numbers add up on a wider copy."""
    target = tiny_llama().bfloat16()
    drafter = DistilledDrafter(
        SmallModelDrafter(copy.deepcopy(target), target), TTSOptions(learning_rate=1e-5, scope="run", stride=1)
    )
    first = weights_of(drafter)
    generate(target, ALONE, "tts", {"draft_length": 2}, drafter=drafter, max_new_tokens=60)
    # Alone, a step of 1e-5 is less than half the spacing at weights above 0.01.
    pairs = zip(first, weights_of(drafter), strict=True)
    assert sum(int((old != new)[old.abs() > 0.01].sum()) for old, new in pairs) > 500


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

            old = loss()
            super().learn(logits, verified)
            falls.append(loss() < old)

    for scope, prompts in (("request", BATCH), ("request", ALONE), ("rollout", BATCH)):
        drafter = Watching(student(kind), TTSOptions(learning_rate=1e-4, scope=scope, stride=1))
        generate(tiny, prompts, "tts", drafter=drafter, max_new_tokens=12)
    assert len(falls) > 6 and sum(falls) > 0.9 * len(falls)


@pytest.mark.parametrize("scope, rows", [("run", None), ("rollout", 3), ("request", 1)])
def test_scopes(scope: str, rows: int | None, make, tiny) -> None:
    """A run goes on with what it learned; a rollout and a request start anew."""
    drafter, starts, ends = make("model", scope=scope), [], []
    first = weights_of(drafter)
    before(drafter, "admit", lambda _: starts.append(equal(first, weights_of(drafter))))
    for _ in range(2):
        generate(tiny, BATCH, "tts", {"max_batch_size": rows}, drafter=drafter, max_new_tokens=6)
        ends.append([tensor.detach().clone() for tensor in drafter.learner.tensors])
    assert equal(*ends) is (scope != "run")  # Adam's moments start anew too
    if scope == "run":
        assert starts == [True, False]
    elif scope == "request":
        assert starts == [True] * 12
    else:  # the rows that a rollout admits later find what the earlier ones taught
        second = len(starts) // 2
        assert starts[0] and starts[second] and not any(starts[1:second])


@pytest.mark.parametrize("kind", ["self", "dflash"])
def test_requests_of_a_batch_learn_apart(kind: str, tiny, named) -> None:
    """How much of a request's drafts is accepted does not depend on the batch it came in.

    The other two feed some tokens again, with the weights of then, where a neighbour lags behind."""
    prompts, found = pad_left(random_rows([5, 9, 6, 12])), []
    for rows in (4, 2):  # one at a time all weights would learn
        config = options(tts=dict(drafter=kind, learning_rate=2e-2), max_batch_size=rows)
        result = generate(tiny, prompts, "tts", config, assistant_model=named[kind], **EOS)
        found.append([(counts.drafted, counts.accepted) for counts in result.statistics.per_request])
    assert found[0] == found[1]


@pytest.mark.parametrize(("kind", "asynchronous"), [("self", False), ("model", True)])
def test_a_request_starts_without_what_its_row_learned_before(kind: str, asynchronous: bool, make, tiny) -> None:
    drafter = make(kind, asynchronous=asynchronous, stride=2 if asynchronous else 1)
    admitted: list[bool] = []
    learned: list[bool] = []

    def look(admission: Any) -> None:
        rows = slice(admission.first, drafter.session.rows.active)
        admitted.append(any(bool(up[rows].any()) for up in drafter.learner.tensors))

    before(drafter, "admit", look)
    before(drafter.student, "move", lambda *_: learned.append(any(bool(up.any()) for up in drafter.learner.tensors)))
    generate(tiny, BATCH, "tts", {"max_batch_size": 2}, drafter=drafter, max_new_tokens=12, **EOS)
    assert len(admitted) > 3 and not any(admitted)
    assert any(learned)  # by the rows that stayed, after updates under way have been taken over


def test_synchronous_and_asynchronous_agree_at_stride_one(make, tiny) -> None:
    """There is no round to overlap with: the same updates at the same places."""
    drafters = [make("model", asynchronous=asynchronous) for asynchronous in (False, True)]
    one, other = (generate(tiny, BATCH, "tts", drafter=drafter, max_new_tokens=16) for drafter in drafters)
    assert one.statistics.total == other.statistics.total


def test_an_asynchronous_update_is_taken_over_before_the_next_canvas_of_its_stride(make, tiny) -> None:
    """Round r's update changes the drafting weights before round r + S drafts, and not before."""
    drafter, seen = make("model", scope="run", stride=3, asynchronous=True), []
    before(drafter.student, "propose", lambda *_: seen.append(weights_of(drafter)))
    result = generate(tiny, ALONE, "tts", {"draft_length": 2}, drafter=drafter, max_new_tokens=40)
    changes = [i for i in range(1, len(seen)) if not equal(seen[i - 1], seen[i])]
    assert changes == list(range(3, len(seen), 3)) and len(changes) > 3
    assert result.statistics.learning.updates == -(-len(seen) // 3)


@pytest.mark.parametrize("kind", ["model", "dflash"])
def test_steps_and_anchors(kind: str, make, tiny) -> None:
    """K and λ have their effects; λ with the drafter itself as anchor has none at K = 1, as TTS's formula says."""
    first = weights_of(make(kind))

    def learned(**how: Any) -> list[Tensor]:
        drafter = make(kind, scope="run", **how)
        generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=12)
        return weights_of(drafter)

    def way(weights: list[Tensor]) -> float:
        return float(sum((a - b).square().sum() for a, b in zip(first, weights, strict=True)))

    plain, twice = learned(), learned(steps=2)
    assert equal(plain, learned(anchor_weight=5.0))
    assert not equal(plain, learned(anchor_weight=5.0, anchor="initial"))
    assert not equal(plain, twice) and not equal(twice, learned(steps=2, anchor_weight=5.0))
    assert way(learned(anchor_weight=1e4, anchor="initial")) < way(plain)  # it is held back


def test_the_quantized_copy_follows_its_policy(fresh) -> None:
    """Corrections stay, the packed weights under them are made anew when the policy has changed."""
    config = options(tts=dict(drafter="self", scope="run"), draft_quantization="rtn-w4-g32")
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
def test_learning_that_fails_changes_no_token(asynchronous: bool, make, tiny) -> None:
    drafter = make("eagle3", asynchronous=asynchronous)
    before(drafter.student, "replay", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="ZeroDivisionError") as caught:
        result = generate(tiny, BATCH, "tts", drafter=drafter, max_new_tokens=8)
    assert len(caught) == 1 and outputs(result) == outputs(generate(tiny, BATCH, max_new_tokens=8))
    assert not any(thread.name.startswith("tts") for thread in threading.enumerate())


def test_goes_on_after_a_generation_that_was_broken_off(make, tiny) -> None:
    """In the second round, while the first one's update is under way: it is not due before the fifth."""
    drafter, unused = (make("model", stride=4, asynchronous=True) for _ in range(2))
    rounds: list[int] = []

    def interrupt(*_: Any) -> None:
        rounds.append(1)
        if len(rounds) == 2:
            raise KeyboardInterrupt

    before(drafter, "observe", interrupt)
    with pytest.raises(KeyboardInterrupt):
        generate(tiny, ALONE, "tts", drafter=drafter)
    found, expected = (generate(tiny, ALONE, "tts", drafter=each, max_new_tokens=30) for each in (drafter, unused))
    assert found.statistics.total == expected.statistics.total and outputs(found) == outputs(expected)
    assert equal(weights_of(drafter), weights_of(unused))


@pytest.mark.parametrize("of_gradient", [False, True])
def test_what_is_no_number_teaches_nothing(of_gradient: bool, make, tiny, monkeypatch) -> None:
    drafter = make("eagle3", scope="run")
    replay = drafter.student.replay

    def broken(*arguments: Any) -> Tensor:
        logits = replay(*arguments)
        if of_gradient:
            logits.register_hook(lambda gradient: gradient * math.nan)
        return logits if of_gradient else logits * math.nan

    monkeypatch.setattr(drafter.student, "replay", broken)
    first = weights_of(drafter)
    result = generate(tiny, BATCH, "tts", drafter=drafter, max_new_tokens=8)
    assert result.statistics.drafter_failure is None and equal(first, weights_of(drafter))


def test_rows_that_drafted_nothing_teach_nothing(make, tiny) -> None:
    drafter = make("model", scope="run")
    propose, first = drafter.student.propose, weights_of(drafter)

    def nothing(*arguments: Any) -> Proposal:
        proposal = propose(*arguments)
        return replace(proposal, lengths=torch.zeros_like(proposal.drafted()))

    drafter.student.propose = nothing
    statistics = generate(tiny, BATCH, "tts", drafter=drafter, max_new_tokens=8).statistics
    assert statistics.drafter_failure is None and statistics.learning.updates > 3
    assert equal(first, weights_of(drafter))


def test_memory_of_learning_is_bounded(make, tiny) -> None:
    """Features are kept for a few columns, however long the output; a canvas grows with the cache only."""
    drafter = make("eagle3")
    few, many = (generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=n).statistics for n in (12, 48))
    assert many.learning.bytes - few.learning.bytes <= 2 * many.cache_bytes


def test_the_assistant_must_fit_the_drafter(tiny, tiny_assistant, checkpoints) -> None:
    for kind, given, message in (
        ("self", checkpoints["eagle3"], "Drop it, or say what it is: tts.drafter='eagle3'"),
        ("eagle3", None, "give the folder or hub id"),
        ("dflash", tiny_assistant, "give the folder or hub id"),
        ("model", None, "needs assistant_model"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(tiny, ALONE, "tts", {"tts": {"drafter": kind}}, assistant_model=given)


def test_what_is_kept_follows_what_it_was_made_of(fresh, checkpoints, tmp_path: Path) -> None:
    """Other weights in the assistant, an adapter on the policy, another folder: a new drafter; released: forgotten."""
    assistant, config = tiny_llama(seed=1), options(tts=dict(drafter="model"))

    def drafter(given: Any = assistant, **more: Any) -> DistilledDrafter:
        generate(fresh, ALONE, "tts", config | more, assistant_model=given, max_new_tokens=4)
        return Session.of(fresh).drafters.get("tts")

    first = drafter()
    assert drafter() is first
    with torch.no_grad():
        next(assistant.parameters()).mul_(1.0)
    second = drafter()
    assert second is not first
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), fresh)
    assert drafter() is not second
    copied = str(shutil.copytree(checkpoints["eagle3"], tmp_path / "other"))
    one, other = (drafter(folder, tts=dict(drafter="eagle3")) for folder in (checkpoints["eagle3"], copied))
    assert one is not other and drafter(copied, tts=dict(drafter="eagle3")) is other
    release(fresh)
    assert Session.of(fresh).drafters.get("tts") is None
