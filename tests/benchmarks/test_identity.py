"""The identity study must find a wrong token, and know a near-tie from one."""

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.identity import Tally, compare
from benchmarks.models import build, shape_config
from benchmarks.rollout import ours
from benchmarks.workload import Workload
from spec_trl import SpeculativeConfig
from spec_trl.cli.gains import LogitNoise, measure_logit_noise, reference_scores


@pytest.fixture(scope="module")
def work() -> Workload:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(512, (3 + i,), generator=generator).tolist() for i in range(3)]
    return Workload(prompts, 12, 1.3, (), 0)


@pytest.fixture(scope="module")
def plain(shape: PreTrainedModel, work: Workload) -> list[list[int]]:
    return ours(shape, "none", None, SpeculativeConfig())(work, 5).completions


def test_a_wrong_token_is_unexplained_and_a_close_one_a_tie(
    shape: PreTrainedModel, work: Workload, plain: list[list[int]]
) -> None:
    prefix = work.prompts[1] + plain[1][:4]
    best, second = reference_scores(shape, prefix, work.temperature, 5, 1, 4).topk(2)[1].tolist()
    assert best == plain[1][4]
    scores = reference_scores(shape, prefix, work.temperature, 5, 1, 4)
    gap = (scores[best] - scores[second]).item()
    other = [list(row) for row in plain]
    other[1][4] = second

    strict, loose = Tally(), Tally()
    compare(shape, work, plain, other, LogitNoise(gap * work.temperature * 0.9, 0.0), 5, strict)
    compare(shape, work, plain, other, LogitNoise(gap * work.temperature * 1.1, 0.0), 5, loose)
    assert (strict.near_ties, strict.unexplained) == (0, 1)
    assert (loose.near_ties, loose.unexplained) == (1, 0)
    assert loose.widest_near_tie == pytest.approx(gap)
    assert loose.tokens_compared == 12 + 5 + 12
    assert loose.rows == 3

    other[1][4] = int(scores.argmin())  # the top two may be as close as they like: this token is neither
    third = Tally()
    compare(shape, work, plain, other, LogitNoise(gap * work.temperature * 1.1, 0.0), 5, third)
    assert third.unexplained == 1

    early = Tally()  # a row ends early
    compare(shape, work, plain, [plain[0], plain[1][:7], plain[2]], LogitNoise(1e9, 0.0), 5, early)
    assert (early.near_ties, early.unexplained) == (0, 1)


def test_logit_noise_is_small_in_float64_and_larger_in_bfloat16(shape: PreTrainedModel) -> None:
    texts = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))  # [batch, n]
    fine = measure_logit_noise(shape, texts, draft_length=5)
    half = build(shape_config("tiny"), 0.04, 0, torch.bfloat16, "cpu")
    coarse = measure_logit_noise(half, texts, draft_length=5)
    assert fine.rms <= fine.largest < 1e-10
    assert 1e-3 < coarse.largest < 5
