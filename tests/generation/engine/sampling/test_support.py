"""A generation returns the tokens that top-k, top-p and min-p kept at each position, whoever drafted there."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from spec_trl.generation.engine.sampling.support import pack, unpack
from tests.generation.calls import generate, pad_left, random_rows


class Watching(LogitsProcessor):
    """Makes all rows decode in step; changes nothing."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("vocabulary", [1, 7, 48, 50])
def test_packed_supports(vocabulary: int) -> None:
    kept = torch.rand(3, 2, vocabulary) > 0.5
    packed = pack(kept)
    assert packed.shape == (3, 2, -(-vocabulary // 8)) and packed.dtype == torch.uint8
    assert torch.equal(unpack(packed, vocabulary), kept)


@pytest.mark.parametrize(
    ("strategy", "config", "options"),
    [
        ("none", {"max_batch_size": 2}, {}),
        ("self", {"draft_length": 3}, {}),
        ("self", {"draft_length": 3, "verification": "rejection"}, {}),
        ("self", {"draft_length": 3}, {"logits_processor": LogitsProcessorList([Watching()])}),
        ("best_of_n", {"specactor": {"drafters": ("self", "ngram")}, "draft_length": 3}, {}),
    ],
    ids=["none", "self", "rejection", "in step", "races"],
)
def test_supports_of_all_tokens(
    tiny: LlamaForCausalLM, strategy: str, config: dict[str, Any], options: dict[str, Any]
) -> None:
    prompts = pad_left(random_rows([4, 6, 9]))
    cut: Any = dict(top_k=20, top_p=0.8, min_p=0.02)
    out = generate(tiny, prompts, strategy, config, keep_supports=True, **cut, **options)
    plain = generate(tiny, prompts, strategy, config, **cut, **options)
    assert torch.equal(out.sequences, plain.sequences) and plain.supports == [None] * 3
    assert strategy == "none" or out.statistics.total.accepted or strategy == "best_of_n"
    width = prompts["input_ids"].shape[1]
    for row, mask, packed, logprobs in zip(
        out.sequences, prompts["attention_mask"], out.supports, out.logprobs, strict=True
    ):
        text, new = row[width - int(mask.sum()) :][None], row[width:]  # without padding
        scores = tiny(text).logits[0, -len(new) - 1 : -1]  # [n, V]
        for warper in (TopKLogitsWarper(20), TopPLogitsWarper(0.8), MinPLogitsWarper(0.02)):
            scores = warper(None, scores)
        kept = unpack(packed, 64)
        assert torch.equal(kept, scores > -torch.inf) and 1 < kept.float().sum(1).mean() < 20
        torch.testing.assert_close(logprobs, scores.log_softmax(-1).gather(1, new[:, None])[:, 0].float())
