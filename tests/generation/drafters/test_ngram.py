"""Prompt lookup, against a search written out in full."""

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.engine.rows import Request
from tests.generation.drafters.watching import begin_greedy


Texts = list[list[int]]


def propose(texts: Texts, ngram_size: int, draft_length: int) -> Texts:
    """What the drafter proposes after each text."""
    drafter = NgramDrafter(ngram_size)
    rows = begin_greedy(drafter, len(texts) + 1, max(map(len, texts)) + draft_length + 2)
    rows.admit([Request(index, torch.tensor(text), 1000, 0) for index, text in enumerate(texts)])
    proposal = drafter.propose(draft_length, None)
    assert proposal.tokens.shape == (len(texts), draft_length)
    found = zip(rows.requests.tolist(), proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True)
    return [tokens[:length] for _, tokens, length in sorted(found)]


def search(text: list[int], ngram_size: int, draft_length: int) -> list[int]:
    """What follows the newest earlier occurrence of the longest suffix."""
    for n in range(min(ngram_size, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + draft_length]
    return []


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=5), st.integers(1, 7),
    st.integers(1, 20),
)  # fmt: skip
@example([[2, 3, 4, 1, 3, 5, 2, 3]], 1, 1)  # 3 was followed by 5 last,
@example([[2, 3, 4, 1, 3, 5, 2, 3]], 2, 1)  # and 2 3 by 4: the longer match wins
def test_equals_a_plain_search(texts: Texts, ngram_size: int, draft_length: int) -> None:
    assert propose(texts, ngram_size, draft_length) == [search(text, ngram_size, draft_length) for text in texts]
