"""TRL's other ways into a rollout: rollout_func, tools, images; and the ids that key the noise."""

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from PIL import Image
from transformers import PreTrainedTokenizerFast

from examples.demo.task import build_tokenizer
from spec_trl import SpecGRPOTrainer
from spec_trl.trainers.run_log import read_run
from tests.trainers.harness import Run, make_trainer, tiny_dataset, train


CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'user' %}{{ m.content }}="
    "{% elif m.role == 'tool' %}{{ m.content }};"
    "{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<eos>"
    "{% endif %}"
    "{% endfor %}"
)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Request ids of each generate call, as they come."""
    calls: list[list[int]] = []
    original = SpecGRPOTrainer._request_ids

    def remember(trainer: SpecGRPOTrainer, count: int) -> list[int]:
        calls.append(original(trainer, count))
        return calls[-1]

    monkeypatch.setattr(SpecGRPOTrainer, "_request_ids", remember)
    return calls


def assert_unique(calls: list[list[int]]) -> None:
    ids = [request for call in calls for request in call]
    assert len(set(ids)) == len(ids)
    assert all(0 <= request < 2**63 for request in ids)


def test_no_two_requests_share_noise(tmp_path: Path, requested: list[list[int]]) -> None:
    train(
        tmp_path, max_steps=3, gradient_accumulation_steps=2, steps_per_generation=1, eval_strategy="steps",
        eval_steps=1, per_device_eval_batch_size=4, trainer={"eval_dataset": tiny_dataset(2)},
    )  # fmt: skip
    assert [len(call) for call in requested] == 3 * [8, 8, 4, 4]  # two generations within each step
    assert_unique(requested)


def test_rollout_func_is_left_alone(tmp_path: Path, requested: list[list[int]]) -> None:
    def roll_out(prompts: list[str], trainer: SpecGRPOTrainer) -> dict[str, Any]:
        prompt_ids = trainer.processing_class(prompts).input_ids
        completion_ids = [[4 + row, 2] for row in range(len(prompts))]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": [[-1.0, -1.0]] * len(prompts)}

    trainer, run = make_trainer(tmp_path, trainer={"rollout_func": roll_out})
    trainer.train()
    assert run.completions == 3 * [[[4 + row, 2] for row in range(8)]]
    assert requested == []
    assert trainer._drafters is None
    assert not [name for entry in run.logs for name in entry if name.startswith("rollout/")]


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Every completion with a "7" or "8" in it, or with an "a", is read as a call of the tool `add`."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = {"read by": "parse_response below"}

    def parse_response(ids: list[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": text.count("a"), "b": 1}}}
        return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if set(text) & set("78a") else {})

    tokenizer.parse_response = parse_response
    return tokenizer


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b


def test_tool_loop(
    tmp_path: Path,
    requested: list[list[int]],
    chat_tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generated: list[int] = []  # tokens of each turn
    turn = SpecGRPOTrainer._generate_single_turn

    def count(*args: Any, **kwargs: Any) -> Any:
        result = turn(*args, **kwargs)
        generated.append(sum(map(len, result[0])))
        return result

    monkeypatch.setattr(SpecGRPOTrainer, "_generate_single_turn", count)
    questions = [[{"role": "user", "content": text}] for text in ("a3+b8", "c5", "f2")]
    prompts = Dataset.from_list([{"prompt": question} for question in questions * 8])

    def run(strategy: str) -> Run:
        return train(
            tmp_path, strategy, tokenizer=chat_tokenizer, max_steps=2, max_completion_length=48,
            max_tool_calling_iterations=3, trainer={"train_dataset": prompts, "tools": [add]},
        )  # fmt: skip

    none = run("none")
    rows = [len(call) for call in requested]
    assert rows[0] == 8
    assert len(rows) > 3 and min(rows) < 8  # later turns, of some of the rows
    assert none.metric("tools/call_frequency")[0] > 0
    assert_unique(requested)
    requested.clear()
    generated.clear()
    drafted = run("self")
    assert [len(call) for call in requested] == rows
    assert drafted.completions == none.completions
    assert drafted.losses == none.losses
    # One entry per rollout, over all of its turns.
    seconds, rates = (drafted.metric(f"rollout/{name}") for name in ("seconds", "tokens_per_second"))
    assert len(seconds) == 2
    assert sum(s * rate for s, rate in zip(seconds, rates, strict=True)) == pytest.approx(sum(generated))
    # One lane per request and turn, each behind the turns before it.
    for record in read_run(tmp_path).of("train"):
        lanes = sorted(record.timeline, key=lambda lane: lane.request)
        assert [lane.request for lane in lanes] == list(range(record.requests)) and record.requests > 8
        assert max(lane.ended for lane in lanes[:8]) < min(lane.changes[0][0] for lane in lanes[8:])
        assert lanes[-1].changes[0][1] > max(lane.changes[-1][1] for lane in lanes[:8])


def test_images_are_refused(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast) -> None:
    picture = Image.new("RGB", (2, 2))
    prompt = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "a3"}]}]
    trainer, _ = make_trainer(tmp_path, tokenizer=chat_tokenizer)
    with pytest.raises(ValueError, match="the prompts carry images; SpecGRPOTrainer generates from text"):
        trainer._generate([prompt] * 4)
