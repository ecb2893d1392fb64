"""`tts.stride="adaptive"`: a drafter learns where that pays."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.generation.planner.control import AlwaysSpeculate
from spec_trl.papers.test_time_speculation import update_stride
from spec_trl.papers.test_time_speculation.distillation import expected_tokens
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from tests.generation.calls import generate
from tests.generation.drafters.watching import before
from tests.papers.test_time_speculation.learning import ALONE, BATCH, equal, weights_of


def test_expected_tokens_by_hand() -> None:
    torch.manual_seed(0)
    target, ids = torch.randn(2, 4, 5), torch.tensor([0, 2, 4])
    for pruned in (None, ids):
        drafts = torch.randn(2, 3, 5 if pruned is None else 3)
        found, expected = expected_tokens(drafts, target, pruned), torch.ones(2)
        for row in range(2):
            accepted = 1.0
            for k in range(3):
                p = target[row, k].softmax(0)
                accepted *= float(torch.minimum(p if pruned is None else p[pruned], drafts[row, k].softmax(0)).sum())
                expected[row] += accepted
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "kind, scope, prompts", [("self", "run", ALONE), ("eagle3", "request", BATCH), ("model", "request", ALONE)]
)
def test_corrections_do_not_learn_under_an_adaptive_stride(kind, scope, prompts, make, tiny, cheap) -> None:
    """They slow every draft. Weights do, and nothing is copied before they learn."""
    drafter = make(kind, scope=scope, stride="adaptive")
    generate(tiny, prompts, "tts", drafter=drafter, max_new_tokens=2)
    assert drafter.learner is None
    learning = generate(tiny, prompts, "tts", drafter=drafter, max_new_tokens=24).statistics.learning
    learns = kind == "model"
    assert (learning.updates > 0, learning.bytes > 0, drafter.learner is not None) == (learns, learns, learns)


@pytest.mark.parametrize("pays", [True, False])
def test_trials_take_seconds_from_the_control(pays: bool, make, tiny, cheap, monkeypatch) -> None:
    asked: list[float] = []
    monkeypatch.setattr(AlwaysSpeculate, "spend", lambda _, seconds: asked.append(seconds) or pays)
    drafter = make("model", scope="run", stride="adaptive")
    learning = generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=24).statistics.learning
    assert asked and min(asked) > 0 and (learning.updates > 0) is pays


def test_short_calls_pay_for_no_trial(make, tiny) -> None:
    drafter = make("model", scope="run", stride="adaptive")
    result = generate(tiny, BATCH, "tts", drafter=drafter, max_new_tokens=24)
    assert result.statistics.learning.updates == 0 and result.statistics.total.blocks > 10


def test_the_seconds_of_learning_are_not_the_round_s(make, tiny, monkeypatch) -> None:
    told: list[float] = []

    class Slow(DistilledDrafter):
        def learn(self, logits: Tensor, verified: Tensor) -> None:
            super().learn(logits, verified)
            self.learning.waited += 1000.0

    monkeypatch.setattr(AlwaysSpeculate, "record", lambda _, width, seconds, *rest: told.append(seconds))
    drafter = Slow(make("model").student, TTSOptions(stride=1))
    generate(tiny, ALONE, "tts", {"draft_length": 2}, drafter=drafter, max_new_tokens=9)
    assert len(told) > 2 and all(-1000 < seconds < 0 for seconds in told[:-1])


def test_what_was_better_before_it_learned_starts_anew(make, tiny, cheap, monkeypatch) -> None:
    drafter = make("model", scope="run", stride="adaptive")
    first = weights_of(drafter)
    monkeypatch.setattr(update_stride.AdaptiveStride, "is_harmful", True)
    statistics = generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=12).statistics
    assert statistics.learning.updates > 0 and equal(first, weights_of(drafter)) and drafter.adaptive_stride.level == 0


def test_an_adaptive_stride_goes_on_from_a_checkpoint(make, tiny, cheap) -> None:
    """With what was learned and what is known of its worth, and where nothing was learned yet without a warning."""
    drafter, other, third = (make("model", scope="run", stride="adaptive") for _ in range(3))
    untaught = drafter.state_dict()
    generate(tiny, ALONE, "tts", drafter=drafter, max_new_tokens=24)
    starts: list[Any] = []
    before(other.student, "admit", lambda *_: starts.append((weights_of(other), other.adaptive_stride.rounds)))
    for state, expected in ((drafter.state_dict(), weights_of(drafter)), (untaught, weights_of(third))):
        other.load_state_dict(copy.deepcopy(state))
        generate(tiny, ALONE, "tts", drafter=other, max_new_tokens=2)
        weights, rounds = starts[-1]
        assert equal(weights, expected) and rounds == state["price"]["rounds"]
