"""What a row samples depends on its seed and request; and what `test_token_identity.py` cannot say."""

import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spec_trl.generation.drafters.decoupled.drafter import DecoupledDrafter
from spec_trl.generation.drafters.decoupled.pipe import DraftThread
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.accept import Proposal
from spec_trl.generation.engine.cache import RaggedCache
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.runner import EagerRunner
from tests.generation.calls import Prompts, generate, outputs, pad_left
from tests.generation.races import PROMPTS, ROWS


class Failing(SelfDrafter):
    """Raises in its second window."""

    windows = 0

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self.windows += 1
        if self.windows == 2:
            raise KeyError
        return super().propose(draft_length, noise)


THREE = pad_left([ROWS[3]] * 3)


def test_seeds_and_requests_matter(tiny) -> None:
    def call(seed: int | None = 0, prompts: Prompts = THREE, **options: Any) -> list[list[int]]:
        return outputs(generate(tiny, prompts, config={"seed": seed}, **options))

    first = call()
    assert first[0] != first[1] != first[2] != first[0] and call(1) != first
    assert call(request_ids=[0, 0, 5])[0:2] == [first[0], first[0]]
    assert call(request_ids=[-1, 2**62, 7]) != first
    under_padding = pad_left([ROWS[3]] * 3, 20, pad=63)
    assert call(prompts=under_padding) == first
    torch.manual_seed(3)
    unseeded = call(None), call(None)
    torch.manual_seed(3)
    assert call(None) == unseeded[0] != unseeded[1]


@pytest.mark.parametrize("drafter", [None, SelfDrafter, Failing])
@pytest.mark.parametrize("link", [None, DraftThread])
@pytest.mark.filterwarnings("ignore:the drafter")
def test_memory_is_free_when_a_generation_is_over(drafter: Any, link: Any, tiny, monkeypatch) -> None:
    """Not when the garbage collector finds it: on a GPU the training step needs it first."""
    made, make = [], RaggedCache.__init__

    def watched(self: RaggedCache, *arguments: Any) -> None:
        make(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(RaggedCache, "__init__", watched)
    given = [] if drafter is None else [drafter(tiny, kernel="reference")]
    gc.disable()
    try:
        generate(tiny, PROMPTS, drafter=given if link is None else [DecoupledDrafter(link(each)) for each in given])
        assert made and not any(cache() for cache in made)
    finally:
        gc.enable()


def test_copies_of_a_prompt_are_prefilled_once(tiny, monkeypatch) -> None:
    fed, prefill = [], EagerRunner.prefill

    def count(self: EagerRunner, tokens: torch.Tensor, *args, **kwargs) -> None:
        fed.append(tokens.shape[0])
        prefill(self, tokens, *args, **kwargs)

    monkeypatch.setattr(EagerRunner, "prefill", count)
    generate(tiny, pad_left([ROWS[2], ROWS[3]] * 4), max_new_tokens=2)
    assert sum(fed) == 2


def test_float32_and_bfloat16_run(fresh: PreTrainedModel) -> None:
    """Near-ties may flip here, so only lengths and acceptance are looked at; a broken path shows in the latter."""
    for dtype in (torch.float32, torch.bfloat16):
        result = generate(fresh.to(dtype), PROMPTS, "self", {"draft_quantization": "rtn-w8"}, temperature=0.3)
        assert result.lengths.tolist() == [24] * 7 and result.logprobs.dtype == torch.float32
        assert result.statistics.acceptance_rate > 0.5
