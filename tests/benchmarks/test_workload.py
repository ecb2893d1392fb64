"""Padding, trimming and counting: mistakes here would falsify every tokens/s."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.models import LoadedModel, build, shape_config
from benchmarks.workload import (
    LONGEST_PROMPT,
    SHORTEST_PROMPT,
    STORIES,
    STORY_MODEL,
    Workload,
    common_prefix,
    end_tokens,
    prompt_source,
)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(build(shape_config("tiny"), 0.0, 0, torch.float32, "cpu"), None, {})


def test_defaults_lie_in_the_repository(stories, story_tokenizer) -> None:
    for path in (STORY_MODEL / "LICENSE", STORIES):
        assert path.is_relative_to(Path(__file__).parents[2]) and path.exists()
    prompts = prompt_source(LoadedModel(stories, story_tokenizer, {}), None, 64, seed=0)
    assert len(set(map(tuple, prompts))) == 64  # equal ones would be read once


def test_padding_is_on_the_left() -> None:
    inputs = Workload([[5, 6, 7], [8]], 4, 1.0, (), pad_token_id=2).padded(torch.device("cpu"))
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [2, 2, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_the_end_of_sequence_counts_and_padding_does_not() -> None:
    work = Workload([[1]], 8, 1.0, (3, 9), pad_token_id=3)
    assert work.trimmed([4, 9, 3, 3]) == [4, 9]
    assert work.trimmed([4, 5]) == [4, 5]
    assert Workload([[1]], 8, 1.0, (), pad_token_id=0).trimmed([4, 0, 0]) == [4, 0, 0]


def test_common_prefix() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


def test_prompts_are_unequal_and_repeatable(loaded: LoadedModel) -> None:
    prompts = prompt_source(loaded, None, 14, seed=1)
    lengths = [len(p) for p in prompts]
    assert (min(lengths), max(lengths)) == (SHORTEST_PROMPT, LONGEST_PROMPT)
    assert lengths[:7] == lengths[7:]
    assert prompts == prompt_source(loaded, None, 14, seed=1) != prompt_source(loaded, None, 14, seed=2)


def test_prompts_from_a_file_are_beginnings_of_texts(loaded: LoadedModel, story_tokenizer, tmp_path) -> None:
    texts = ["Once upon a time there was a little dog who loved to run in the park with his friends. " * 5, "One day"]
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(texts))
    with_tokenizer = LoadedModel(loaded.model, story_tokenizer, {})
    prompts = prompt_source(with_tokenizer, path, 3, seed=0)
    encoded = story_tokenizer(texts)["input_ids"]
    assert prompts[0] == encoded[0][: len(prompts[0])]
    assert prompts[1] == encoded[1]  # shorter than asked for: whole
    assert prompts[2] == encoded[0][: len(prompts[2])]  # texts start again
    with pytest.raises(ValueError, match="absent.json does not exist"):
        prompt_source(with_tokenizer, tmp_path / "absent.json", 3, seed=0)


def test_ignoring_the_end_of_sequence_reaches_the_generation_config(loaded: LoadedModel) -> None:
    config = loaded.model.generation_config
    config.eos_token_id = [3, 4]
    assert end_tokens(loaded, ignore_eos=False) == (3, 4)
    assert end_tokens(loaded, ignore_eos=True) == ()
    assert config.eos_token_id is None
