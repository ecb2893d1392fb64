"""What a row samples depends on its seed and request; and what `test_token_identity.py` cannot say."""

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from spec_trl.generation.engine.runner import EagerRunner
from tests.conftest import DATA
from tests.generation.calls import Prompts, generate, outputs, pad_left
from tests.generation.races import PROMPTS, ROWS


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


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("self", dict(do_sample=False)),
        ("history", dict(top_p=0.9)),
        pytest.param("model", dict(temperature=0.7), marks=pytest.mark.shared),
    ],
)
def test_a_trained_model(strategy: str, options: dict[str, Any], request, stories, story_tokenizer) -> None:
    """It agrees with its drafters more often than a random one; beginnings of 2 to 34 tokens, two of them twice."""
    texts = json.loads((DATA / "stories.json").read_text())[:7]
    rows = [torch.tensor(story_tokenizer(text).input_ids[: 2 + 7 * i % 39]) for i, text in enumerate(texts)]
    prompts, options = pad_left(rows + rows[:2], pad=2), options | dict(pad_token_id=2, max_new_tokens=32)
    assistant = {"assistant_model": request.getfixturevalue("bit_stories")} if strategy == "model" else {}
    result = generate(stories, prompts, strategy, {"max_batch_size": 4}, **assistant, **options)
    assert outputs(result) == outputs(generate(stories, prompts, **options))
    assert result.statistics.drafter_failure is None and result.statistics.total.blocks > 0
    assert strategy == "history" or result.statistics.acceptance_rate > 0.3
