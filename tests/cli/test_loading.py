"""Prompts as the command and the examples read them."""

from pathlib import Path

import pytest
import torch

from examples.demo.task import build_tokenizer
from spec_trl.cli.loading import pad_left, random_ids, read_prompts, token_ids


CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}={% endfor %}"


@pytest.mark.parametrize(
    ("suffix", "text", "refusal"),
    [
        ("txt", "one\n\ntwo\n", None),
        ("json", '["one", "two"]', None),
        ("jsonl", '{"question": "one"}\n{"prompt": "two", "text": "other"}\n', None),
        ("txt", "\n", "holds no prompts"),
        ("json", "{}", "holds no prompts"),
        ("json", "[1]", "holds no prompts"),
        ("json", "[", "Expecting value"),
        ("jsonl", '{"prompt": "one"}\n{"answer": "two"}\n', r"entry 2 has \['answer'\]; it needs 'prompt'"),
        ("jsonl", "3", "entry 1 has int"),
    ],
)
def test_files(suffix: str, text: str, refusal: str | None, tmp_path: Path) -> None:
    path = tmp_path / f"prompts.{suffix}"
    path.write_text(text)
    if refusal is None:
        assert read_prompts(path) == ["one", "two"]
    else:
        with pytest.raises(ValueError, match=rf"prompts file .*prompts\.{suffix}.*{refusal}"):
            read_prompts(path)


def test_prompts_are_cut_within_their_template() -> None:
    tokenizer = build_tokenizer()
    plain = pad_left(token_ids(["a3+b8+c5", "a3"], tokenizer, longest=3), torch.device("cpu"))
    assert tokenizer.batch_decode(plain["input_ids"], skip_special_tokens=True) == ["a3+", "a3"]
    tokenizer.chat_template = CHAT_TEMPLATE
    chat = pad_left(token_ids(["a3+b8+c5", "a3"], tokenizer, longest=3), torch.device("cpu"))
    assert tokenizer.batch_decode(chat["input_ids"], skip_special_tokens=True) == ["a3+=", "a3="]
    assert chat["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]  # no BOS that the template did not put


def test_random_prompts_repeat_with_their_seed() -> None:
    first = random_ids(3, 5, 64, seed=1)
    assert first == random_ids(3, 5, 64, seed=1) != random_ids(3, 5, 64, seed=2)
    assert {len(row) for row in first} == {5} and all(0 <= token < 64 for row in first for token in row)
