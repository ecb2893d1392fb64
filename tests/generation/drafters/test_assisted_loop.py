"""Drafters are CandidateGenerators: they serve in transformers' own assisted loop at batch 1."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.drafter import Drafter
from tests.conftest import tiny_llama
from tests.generation.calls import random_rows


DRAFT_LENGTH = 4
MAX_LENGTH = 40


@pytest.fixture(params=["self", "model", "ngram", "history"])
def make(request: pytest.FixtureRequest, tiny_assistant: PreTrainedModel) -> Callable[[PreTrainedModel], Drafter]:
    def build(model: PreTrainedModel) -> Drafter:
        if request.param == "self":
            return SelfDrafter(model, kernel="reference")
        if request.param == "model":
            return SmallModelDrafter(tiny_assistant, model)
        return NgramDrafter(2) if request.param == "ngram" else HistoryDrafter(10_000)

    return build


class Counting(CandidateGenerator):
    """Counts how often transformers asks and how many candidates came."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.rounds, self.drafted = drafter, 0, 0

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.rounds += 1
        candidates, logits = self.drafter.get_candidates(input_ids, **kwargs)
        self.drafted += candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def update_candidate_strategy(self, *args: Any) -> None:
        self.drafter.update_candidate_strategy(*args)


def assisted(
    model: PreTrainedModel, drafter: Drafter, row: torch.Tensor, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[torch.Tensor, Counting]:
    counting = Counting(drafter)

    def candidate_generator(**kwargs: Any) -> Counting:
        processors = kwargs["logits_processor"] or LogitsProcessorList()
        drafter.prepare_assisted_decoding(
            DRAFT_LENGTH, MAX_LENGTH, bool(options.get("do_sample")), processors, 3, options.get("eos_token_id", ())
        )
        return counting

    # transformers has no other place to give it one of ours.
    monkeypatch.setattr(model, "_get_candidate_generator", candidate_generator)
    return alone(model, row, prompt_lookup_num_tokens=DRAFT_LENGTH, **options), counting


def alone(model: PreTrainedModel, row: torch.Tensor, **options: Any) -> torch.Tensor:
    mask = torch.ones_like(row)[None]
    return model.generate(row[None], attention_mask=mask, max_length=MAX_LENGTH, pad_token_id=0, **options)


def test_greedy(make: Callable[[PreTrainedModel], Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    drafter = make(model)
    for row in random_rows([1, 6]):  # one drafter, several generations
        plain = alone(model, row, do_sample=False)
        sequences, counting = assisted(model, drafter, row, monkeypatch, do_sample=False)
        assert sequences.tolist() == plain.tolist()
        assert counting.drafted > 0
        assert (MAX_LENGTH - len(row)) / counting.rounds > 1.2, "tokens per round"
    options = dict(do_sample=False, repetition_penalty=1.3, eos_token_id=[7, 11])
    sequences, _ = assisted(model, drafter, row, monkeypatch, **options)
    assert sequences.tolist() == alone(model, row, **options).tolist()


def test_candidates_end_with_the_text(tiny_assistant: PreTrainedModel) -> None:
    """Not every version of transformers' loop looks for an end among candidates that all match."""
    model, row = tiny_llama(), random_rows([6])[0][None]

    def candidates(eos_token_ids: list[int]) -> list[int]:
        drafter = SmallModelDrafter(tiny_assistant, model)
        drafter.prepare_assisted_decoding(8, MAX_LENGTH, False, LogitsProcessorList(), 0, eos_token_ids)
        return drafter.get_candidates(row)[0][0, row.shape[1] :].tolist()

    whole = candidates([])
    assert len(whole) == 8
    assert candidates([whole[3], whole[5]]) == whole[: min(whole.index(whole[3]), whole.index(whole[5])) + 1]


def test_sampling_follows_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """First-token counts over many runs against the target's distribution; the drafter's own is another one."""
    model = tiny_llama(seed=4, initializer_range=0.06)
    drafter = SmallModelDrafter(tiny_llama(seed=4, initializer_range=0.045), model)
    row = random_rows([5])[0]
    with torch.no_grad():
        expected = (model(row[None]).logits[0, -1] / 0.5).softmax(-1)  # [V]
    counts = torch.zeros(64, dtype=torch.float64)
    torch.manual_seed(1)
    runs = 250
    for seed in range(runs):

        def candidate_generator(seed: int = seed, **kwargs: Any) -> Drafter:
            return drafter.prepare_assisted_decoding(2, 8, True, kwargs["logits_processor"], seed=seed)

        monkeypatch.setattr(model, "_get_candidate_generator", candidate_generator)
        sequence = model.generate(
            row[None], attention_mask=torch.ones_like(row)[None], prompt_lookup_num_tokens=2, max_length=8,
            pad_token_id=0, do_sample=True, top_k=0, temperature=0.5,
        )  # fmt: skip
        counts[sequence[0, 5]] += 1
    likely = expected * runs >= 5
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None]]) * runs
    freedom = len(wanted) - 1
    assert freedom >= 3
    assert float(((observed - wanted) ** 2 / wanted).sum()) < freedom + 5 * (2 * freedom) ** 0.5
