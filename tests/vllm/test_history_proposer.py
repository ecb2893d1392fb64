"""The history drafts inside vLLM, which names no requests and moves rows."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spec_trl.vllm import step_planner
from spec_trl.vllm.history import HistoryProposer


PROMPT = [5, 6, 7, 8]
TEXT = [11, 12, 13, 14, 15, 16, 17, 18]


def make(most: int = 4, longest: int = 64) -> HistoryProposer:
    return HistoryProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=most),
            model_config=SimpleNamespace(max_model_len=longest),
            additional_config={"spec_trl": {"history_max_tokens": 1000}},
        )
    )


def step(proposer: HistoryProposer, rows: list[tuple[list[int], list[int]]]) -> list[list[int]]:
    """Of each row: its text before, and its newest tokens."""
    tokens, ends = np.zeros((len(rows), 64), np.int32), np.zeros(len(rows), np.int32)
    for at, (before, newest) in enumerate(rows):
        text = before + newest
        tokens[at, : len(text)], ends[at] = text, len(text)
    return proposer.propose([newest for _, newest in rows], ends, tokens)


def test_a_later_rollout_drafts_the_earlier_text() -> None:
    proposer = make()
    for at, token in enumerate(TEXT):
        step(proposer, [(PROMPT + TEXT[:at], [token])])
    assert step(proposer, [(PROMPT, TEXT[:1])]) == [TEXT[1:5]]
    assert step(proposer, [(PROMPT + TEXT[:1], TEXT[1:4])]) == [TEXT[4:8]]


def test_siblings_draft_for_each_other_also_after_rows_moved() -> None:
    proposer = make()
    step(proposer, [(PROMPT, TEXT[:1]), (PROMPT, [30])])
    step(proposer, [(PROMPT + TEXT[:1], TEXT[1:6]), (PROMPT + [30], [31])])
    assert step(proposer, [(PROMPT + [30, 31], [12]), (PROMPT + TEXT[:6], [17])])[0] == TEXT[2:6]
    other = [50, 51]
    assert step(proposer, [(other, [12]), (PROMPT + [30, 31, 12], [40])])[0] == [], "of another prompt"


def test_rows_whose_prompt_is_read_have_no_drafts_and_texts_end() -> None:
    proposer = make(longest=6)
    step(proposer, [(PROMPT, TEXT[:1])])
    assert step(proposer, [(PROMPT, []), (PROMPT, TEXT[:1])])[0] == []
    step(make(), [(PROMPT, TEXT[:3])])
    assert all(len(draft) <= 1 for draft in step(proposer, [(PROMPT, TEXT[:1])])), "of six positions one is left"


def test_the_planner_sets_the_length(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer: Any = make()
    step(proposer, [(PROMPT, TEXT)])
    for length in (0, 2, 9):
        monkeypatch.setattr(step_planner, "newest_length", length)
        assert step(proposer, [(PROMPT, TEXT[:1])]) == [TEXT[1 : 1 + min(length, 4)]]
