"""Conversations in which the policy calls a tool now and then."""

from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from examples.demo.task import build_tokenizer


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}={% elif m.role == 'tool' %};{% else %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<eos>"
    "{% endif %}{% endfor %}"
)


def make_chat_tokenizer() -> PreTrainedTokenizerFast:
    """Every completion with a "7" or "8" in it, or with an "a", is read as a call of the tool `add`; `asked` says of
    each completion so far whether it is."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = {"read by": "parse_response below"}

    def parse_response(ids: list[int], **_: Any) -> dict[str, Any]:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": text.count("a"), "b": 1}}}
        tokenizer.asked.append(bool(set(text) & set("78a")))
        return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if tokenizer.asked[-1] else {})

    tokenizer.asked = []
    tokenizer.parse_response = parse_response
    return tokenizer


def conversations(*texts: str) -> Dataset:
    """One of a single message for each text."""
    return Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in texts])


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b
