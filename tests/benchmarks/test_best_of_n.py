"""The best-of-N benchmarks: copying, modelled seconds, and the test for a bias."""

import random

import pytest
import torch

from benchmarks.best_of_n_bias import Sample, compare, facts_of, first_words, more_predictable, predictable
from benchmarks.best_of_n_tail import A100, control_on_a100, seconds_on_a100
from benchmarks.copying import Copying, copy_heavy


@pytest.mark.parametrize("begun", [[4, 5, 6], [4, 5, 19], [4, 19, 6], [19, 5, 6]])
def test_a_passage_is_copied_and_other_text_is_left_alone(begun: list[int]) -> None:
    """A token in another's place does not end it."""
    scores = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    texts = torch.tensor([[4, 5, 6, 7, 8, *begun], [1, 2, 3, 4, 9, 9, 5, 6]])
    raised = Copying(3, 0.9)(texts, scores).softmax(-1)
    weights = scores[0].exp()
    share = 9 * weights.sum() / (10 * weights.sum() - weights[7])  # its own weight gives way to 9 times all of them
    assert raised[0, 7] == pytest.approx(share.item(), abs=1e-5) and raised[0].argmax() == 7
    assert raised[1].tolist() == pytest.approx(scores[1].softmax(-1).tolist())
    assert Copying(3, 0.9)(texts[:, :3], scores) is scores


def test_the_newest_of_several_is_copied_and_prompts_say_it_twice() -> None:
    texts = torch.tensor([[4, 5, 6, 7, 4, 5, 6, 9, 4, 5, 6]])
    assert Copying(3, 0.9)(texts, torch.zeros(1, 20)).argmax() == 9
    assert copy_heavy([1, 2, 3, 4, 5, 6], passage=4, begun=2) == [1, 2, 3, 4, 2, 3, 4, 2, 3]


def test_seconds_on_the_a100() -> None:
    plain = A100.target_seconds(4, 256)
    assert seconds_on_a100(4, 256, 0, {}) == plain
    assert seconds_on_a100(4, 256, 5, {"ngram": 5}) == A100.verify_seconds(4, 256, 5)
    assert seconds_on_a100(4, 256, 5, {"self": 5}) == pytest.approx(A100.cycle_seconds(4, 256, 5))
    raced = seconds_on_a100(4, 256, 15, {"model": 5, "ngram": 10})
    assert raced == pytest.approx(A100.verify_seconds(4, 256, 15) + 0.5 * plain)
    control = control_on_a100(("ngram", "model"), (5, 10), 4, race=False)
    control.begin(4, ["a"] * 4)
    plan = control.plan([0, 1, 2, 3], 100.0, 0)
    control.record(plan[0].draft_length if plan else 0, 123.0, 4)
    assert 0 < control.seconds < 1


def test_a_biased_sample_is_told_apart() -> None:
    assert [predictable([1, 2, 3, 4, 1, 2, 3], [token, 1, 2]) for token in (4, 5)] == [1, 0]
    assert first_words("a b a B") == 0.5
    rng = random.Random(0)

    def sample() -> Sample:
        lengths = [rng.randrange(20, 200) for _ in range(1000)]
        # Longer texts repeat more.
        return Sample(lengths, [1 - n / 400 + rng.random() / 10 for n in lengths], [n / 200 for n in lengths])

    one, other = sample(), sample()
    assert min(compare(one, other).values()) > 0.05
    biased = more_predictable(one, other)
    assert biased.lengths == list(map(max, one.lengths, other.lengths))
    assert max(compare(biased, one).values()) < 1e-6
    facts = facts_of(Sample([1, 3, 3], [0.0, 0.5, 1.0], [0, 0, 0], rounds=9, raced=2, wins={"ngram": 2}), 3)
    assert facts["at_the_limit"] == pytest.approx(2 / 3) and facts["mean_reward"] == 0.5
