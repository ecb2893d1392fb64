"""Prompt lookup, against a search written out in full."""

import pytest
import torch
from transformers import LogitsProcessorList

from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.processors import LogitsPipeline, PrefixView
from spec_trl.generation.engine.rows import Request, Rows


def propose(texts: list[list[int]], ngram_size: int, draft_length: int) -> list[list[int]]:
    """What the drafter proposes behind each text."""
    rows = Rows(len(texts) + 1, max(map(len, texts)) + draft_length + 2, torch.device("cpu"))
    rows.tokens.fill_(9)  # leftovers behind a row's end must not be found
    rows.admit([Request(index, torch.tensor(text), 1000, 0) for index, text in enumerate(texts)])
    pipeline = LogitsPipeline(LogitsProcessorList(), PrefixView(rows, rows.tokens), len(texts))
    drafter = NgramDrafter(ngram_size)
    drafter.begin(DraftSession(rows, pipeline, True, None, False))
    proposal = drafter.propose(draft_length, None)
    found: list[list[int]] = [[] for _ in texts]
    for request, tokens, length in zip(
        rows.requests.tolist(), proposal.tokens.tolist(), proposal.lengths.tolist(), strict=True
    ):
        found[request] = tokens[:length]
    return found


def search(text: list[int], ngram_size: int, draft_length: int) -> list[int]:
    """Behind the newest earlier occurrence of the longest suffix."""
    for n in range(min(ngram_size, len(text) - 1), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + draft_length]
    return []


def test_by_hand() -> None:
    texts = [[1, 2, 3, 4, 1, 2], [1, 2, 3, 1, 4, 2, 3], [1, 2, 3], [5], [5, 5], [7, 1, 2, 8, 1, 2, 6, 1, 2]]
    assert propose(texts, 3, 3) == [[3, 4, 1], [1, 4, 2], [], [], [5], [6, 1, 2]]


@pytest.mark.parametrize("ngram_size", [1, 2, 3, 7])
@pytest.mark.parametrize("draft_length", [1, 4, 20])
def test_equals_a_plain_search(draft_length: int, ngram_size: int) -> None:
    generator = torch.Generator().manual_seed(draft_length)
    texts = [torch.randint(10, (length,), generator=generator).tolist() for length in (1, 2, 3, 5, 8, 30, 31, 60)]
    texts += [torch.randint(2, (length,), generator=generator).tolist() for length in (1, 2, 3, 5, 8, 30, 31, 60)]
    assert propose(texts, ngram_size, draft_length) == [search(text, ngram_size, draft_length) for text in texts]


def test_longer_matches_win() -> None:
    #        2 3 -> 4, and later 3 -> 5
    text = [2, 3, 4, 1, 3, 5, 2, 3]
    assert propose([text], 1, 1) == [[5]]
    assert propose([text], 2, 1) == [[4]]
