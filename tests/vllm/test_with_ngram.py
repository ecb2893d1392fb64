"""Prompt lookup inside vLLM. In a file that is read last: after its numba no other engine starts in this process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.vllm.conftest import HAS_VLLM
from tests.vllm.test_engine import ALWAYS, PROMPTS, check_samples, counts, distributions, greedy, sample


pytestmark = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")


def repeating(model: PreTrainedModel) -> list[int]:
    """A prompt that its most likely next token continues as it began, so that a lookup drafts what follows."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5000):
        first, second, third = torch.randint(3, 48, (3,), generator=generator).tolist()
        prompt = [first, second, third, first, second]
        if int(distributions(model, prompt, 1.0)[0].argmax()) == third:
            return prompt
    raise AssertionError("no such prompt")


def test_ngram_changes_no_distribution(engine: Callable[..., Any], plain: PreTrainedModel) -> None:
    llm = engine("ngram", **ALWAYS)
    assert [tokens for tokens, _ in sample(llm, PROMPTS, 48)] == greedy(plain, 48)
    assert counts(llm).accepted > 5
    check_samples(llm, plain, repeating(plain), 5)
