"""What a row samples depends on its seed and request; and what `test_token_identity.py` cannot say."""

import json

import pytest
import torch
from transformers import PreTrainedModel

from spec_trl.generation.engine.runner import EagerRunner
from tests.conftest import DATA
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows


ROWS = random_rows([5, 1, 9, 14, 3])


@pytest.fixture(scope="module")
def story_prompts(story_tokenizer) -> Prompts:
    """Nine beginnings of stories of 2 to 34 tokens, two of them twice."""
    texts = json.loads((DATA / "stories.json").read_text())[:7]
    rows = [torch.tensor(story_tokenizer(text).input_ids[: 2 + 7 * i % 39]) for i, text in enumerate(texts)]
    return pad_left(rows + rows[:2], pad=2)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("self", dict(do_sample=False)),
        ("history", dict(top_p=0.9)),
        pytest.param("model", dict(temperature=0.7), marks=pytest.mark.shared),
    ],
)
def test_a_trained_model(strategy: str, options, request, stories, story_prompts) -> None:
    """It agrees with its drafters more often than a random one."""
    options = options | dict(pad_token_id=2, max_new_tokens=32)
    assistant = {"assistant_model": request.getfixturevalue("bit_stories")} if strategy == "model" else {}
    result = generate(stories, story_prompts, strategy, {"max_batch_size": 4}, **assistant, **options)
    assert outputs(result) == outputs(generate(stories, story_prompts, **options))
    assert result.statistics.drafter_failure is None and result.statistics.total.blocks > 0
    if strategy != "history":
        assert result.statistics.acceptance_rate > 0.3


def test_seeds_and_requests_matter(tiny) -> None:
    prompts = pad_left([ROWS[3]] * 3)
    first = outputs(generate(tiny, prompts))
    assert first[0] != first[1] != first[2] != first[0]
    assert outputs(generate(tiny, prompts, config={"seed": 1})) != first
    assert outputs(generate(tiny, prompts, request_ids=[0, 0, 5]))[0:2] == [first[0], first[0]]
    assert outputs(generate(tiny, prompts, request_ids=[-1, 2**62, 7])) != first


def test_without_a_seed_torch_rules(tiny) -> None:
    def call() -> list[list[int]]:
        return outputs(generate(tiny, pad_left(ROWS), "ngram", {"seed": None}))

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert call() == first != second


@pytest.mark.parametrize("strategy", ["none", "self"])
def test_what_lies_under_the_padding_does_not_matter(strategy: str, tiny) -> None:
    prompts = pad_left(ROWS, 20)
    prompts["input_ids"][prompts["attention_mask"] == 0] = 63
    assert outputs(generate(tiny, prompts, strategy)) == outputs(generate(tiny, pad_left(ROWS)))


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
        result = generate(
            fresh.to(dtype), pad_left(ROWS), "self", {"draft_quantization": "rtn-w8"}, temperature=0.3
        )
        assert result.lengths.tolist() == [24] * 5
        assert result.statistics.acceptance_rate > 0.5
        assert result.logprobs.dtype == torch.float32
