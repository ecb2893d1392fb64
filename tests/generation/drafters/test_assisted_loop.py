"""Drafters are CandidateGenerators: they serve in transformers' own assisted loop at batch 1."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine.drafter import Drafter
from tests.conftest import TRANSFORMERS, tiny_llama
from tests.generation.calls import random_rows
from tests.generation.drafters.watching import check_frequencies


def alone(model: PreTrainedModel, row: Tensor, **options: Any) -> Tensor:
    mask = torch.ones_like(row)[None]
    return model.generate(row[None], attention_mask=mask, pad_token_id=0, **(dict(max_length=40) | options))


def assisted(
    model: PreTrainedModel, drafter: Drafter, row: Tensor, patch: pytest.MonkeyPatch, seed: int = 3, **options: Any
) -> Tensor:
    def candidate_generator(**kwargs: Any) -> Drafter:
        processors = kwargs["logits_processor"] or LogitsProcessorList()
        sample, eos = bool(options.get("do_sample")), options.get("eos_token_id", ())
        return drafter.prepare_assisted_decoding(4, options.get("max_length", 40), sample, processors, seed, eos)

    # transformers has no other place to give it one of ours.
    patch.setattr(model, "_get_candidate_generator", candidate_generator)
    return alone(model, row, prompt_lookup_num_tokens=4, **options)


@pytest.mark.parametrize("kind", ["self", "model", "ngram", "history"])
def test_greedy(kind: str, tiny: PreTrainedModel, drafters: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (drafter,) = drafters(kind)
    drafted: list[int] = []  # by round
    get_candidates = drafter.get_candidates

    def counted(input_ids: Tensor, **kwargs: Any) -> Any:
        candidates, logits = get_candidates(input_ids, **kwargs)
        drafted.append(candidates.shape[1] - input_ids.shape[1])
        return candidates, logits

    monkeypatch.setattr(drafter, "get_candidates", counted)
    for row in random_rows([1, 6]):  # one drafter, several generations
        drafted.clear()
        plain = alone(tiny, row, do_sample=False)
        assert assisted(tiny, drafter, row, monkeypatch, do_sample=False).tolist() == plain.tolist()
        assert any(drafted)
        assert (40 - len(row)) / len(drafted) > 1.2, "tokens per round"
    if kind == "ngram" and TRANSFORMERS < (5, 23):
        return  # whose loop takes an end in the prompt for the text's
    options = dict(do_sample=False, repetition_penalty=1.3, eos_token_id=[7, 11])
    assert assisted(tiny, drafter, row, monkeypatch, **options).tolist() == alone(tiny, row, **options).tolist()


def test_candidates_end_with_the_text(tiny: PreTrainedModel, tiny_assistant: PreTrainedModel) -> None:
    """Not every version of transformers' loop looks for an end among candidates that all match."""
    row = random_rows([6])[0][None]

    def candidates(eos_token_ids: list[int]) -> list[int]:
        drafter = SmallModelDrafter(tiny_assistant, tiny)
        drafter.prepare_assisted_decoding(8, 40, False, LogitsProcessorList(), 0, eos_token_ids)
        return drafter.get_candidates(row)[0][0, row.shape[1] :].tolist()

    whole = candidates([])
    assert len(whole) == 8
    assert candidates([whole[3], whole[5]]) == whole[: min(whole.index(whole[3]), whole.index(whole[5])) + 1]


def test_sampling_follows_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """First-token counts over many runs against the target's distribution; the drafter's own is another one."""
    model = tiny_llama(seed=4, initializer_range=0.06)
    drafter = SmallModelDrafter(tiny_llama(seed=4, initializer_range=0.045), model)
    row, counts = random_rows([5])[0], torch.zeros(64, dtype=torch.int64)
    torch.manual_seed(1)
    options = dict(max_length=8, do_sample=True, top_k=0, temperature=0.5)
    for seed in range(250):
        counts[assisted(model, drafter, row, monkeypatch, seed, **options)[0, 5]] += 1
    with torch.no_grad():
        check_frequencies(counts, (model(row[None]).logits[0, -1] / 0.5).softmax(-1))
