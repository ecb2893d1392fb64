"""The demo's task, its reward, its tokenizer and its shipped policy."""

import random

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.pretrain import POLICY, accuracy
from examples.demo.task import (
    MAX_COMPLETION_LENGTH,
    MAX_TERMS,
    build_dataset,
    build_tokenizer,
    draw_terms,
    exact_match,
    write_prompt,
    write_working,
)


def test_working_adds_the_terms_from_the_left() -> None:
    rng = random.Random(0)
    assert write_prompt([3, 8, 5, 9]) == "a3+b8+c5+d9="
    assert write_working([3, 8, 5, 9], rng) == "a3+b8=11;11+c5=16;16+d9=25"
    assert write_working([3, 8, 5, 9], rng, guess=1.0).startswith("=")


def test_working_is_right_without_slips_and_wrong_with_them() -> None:
    rng = random.Random(0)
    for _ in range(100):
        terms = draw_terms(rng)
        answer = [str(sum(terms))]
        assert exact_match([write_working(terms, rng)], answer) == [1.0]
        assert exact_match([write_working(terms[:2], rng, slip=1.0)], [str(sum(terms[:2]))]) == [0.0]


def test_lengths_have_a_long_tail_that_fits() -> None:
    rng = random.Random(0)
    lengths = sorted(len(write_working(draw_terms(rng), rng, guess=0.5)) + 1 for _ in range(2000))
    median = lengths[len(lengths) // 2]
    assert lengths[-1] > 5 * median
    assert len(write_working([9] * MAX_TERMS, rng)) + 1 <= MAX_COMPLETION_LENGTH


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("11+c5=16", 1.0), ("16", 1.0), ("11+c5=17", 0.0), ("11+c5=16;", 0.0), ("11+c5=160", 0.0), ("", 0.0)],
)
def test_reward_is_exact_match_of_the_last_number(completion: str, reward: float) -> None:
    assert exact_match([completion], answer=["16"], prompts=["a3+b8+c5="]) == [reward]


def test_dataset_is_fixed_by_its_seed() -> None:
    first, again, other = build_dataset(64, seed=1), build_dataset(64, seed=1), build_dataset(64, seed=2)
    assert first.to_dict() == again.to_dict()
    assert first.to_dict() != other.to_dict()
    for row in first:
        terms = row["prompt"].removesuffix("=").split("+")
        assert str(sum(int(term[1:]) for term in terms)) == row["answer"]


def test_tokenizer_gives_the_text_back_from_disk(tmp_path) -> None:
    build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["a3+b8+c5+d9=", "a1+b2="]
    batch = tokenizer(texts, padding=True)
    assert tokenizer.batch_decode(batch.input_ids, skip_special_tokens=True) == texts
    assert [sum(mask) for mask in batch.attention_mask] == [13, 7]  # BOS and one token per character
    assert batch.input_ids[1][0] == tokenizer.pad_token_id  # padded on the left


@pytest.mark.slow
def test_shipped_policy_is_small_and_solves_some() -> None:
    assert sum(file.stat().st_size for file in POLICY.iterdir()) <= 4 * 2**20
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    policy = AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32")
    assert policy.num_parameters() <= 2_000_000
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert 0.25 < accuracy(policy, tokenizer, seed=5) < 0.7  # GRPO needs both outcomes
