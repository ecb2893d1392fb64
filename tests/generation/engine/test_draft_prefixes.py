"""Processors that refuse a prefix which they forbid. That they change no token, and are shown drafts only as far as
they allow them, `test_token_identity.py` says."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.rows import PrefixView, Request, Rows
from spec_trl.generation.engine.sampling.processors import LogitsPipeline
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.grammars import EOS, WIDTH, Processor, Refused


PROMPTS = pad_left(random_rows([6, 1, 9, 4, 2]), WIDTH)


@pytest.mark.parametrize("strategy", ["none", "ngram", "self"])
def test_what_raises_on_the_rows_own_text_reaches_the_user(strategy: str, tiny) -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == WIDTH + 9:
            raise Refused
        return scores

    with warnings.catch_warnings(), pytest.raises(Refused):
        warnings.simplefilter("error")
        generate(tiny, PROMPTS, strategy, logits_processor=[Processor(broken)])


def test_rejection_keeps_the_targets_distribution(tiny: PreTrainedModel, tiny_assistant: PreTrainedModel) -> None:
    """Where a draft ends a text, nothing may be drawn after it; that must not make ends rarer."""

    def ends_at_eos(input_ids: Tensor, scores: Tensor) -> Tensor:
        if (input_ids == EOS).any():
            raise Refused
        scores = scores.clone()
        scores[:, EOS] = scores.amax(1) + 1  # likely, so that drafts have it
        return scores

    prompt, count = random_rows([4])[0], 300
    options = dict(logits_processor=[Processor(ends_at_eos)], max_new_tokens=4, eos_token_id=EOS)
    config = {"verification": "rejection", "draft_length": 2}
    result = generate(tiny, pad_left([prompt] * count), "model", config, assistant_model=tiny_assistant, **options)
    going = [tokens[:2] for tokens in outputs(result) if tokens[0] != EOS]  # the first token is not drafted
    with torch.no_grad():
        logits = tiny(torch.stack([torch.cat([prompt, torch.tensor(first)]) for *first, _ in going])).logits[:, -1]
    logits[:, EOS] = logits.amax(1) + 1  # [n, V]
    p = logits.softmax(-1)[:, EOS]  # [n]
    ended = sum(second == EOS for _, second in going)
    assert abs(ended - p.sum()) < 4 * (p * (1 - p)).sum() ** 0.5 and 0.1 < p.mean() < 0.5 and len(going) > count / 2
    assert result.statistics.drafter_failure is None and result.statistics.acceptance_rate > 0.5


@pytest.mark.parametrize("keeps_logits", [False, True])
def test_a_row_drafts_as_far_as_processors_let_it(keeps_logits: bool) -> None:
    """The processor raises on rows whose newest token is 5, and leaves nothing where it is 6."""
    shown: list[int] = []

    def picky(input_ids: Tensor, scores: Tensor) -> Tensor:
        newest = input_ids[:, -1]
        if (newest == 5).any():
            raise Refused
        shown.extend(newest.tolist())
        return scores.masked_fill((newest == 6)[:, None], -torch.inf)

    rows = Rows(4, 9, torch.device("cpu"))
    rows.admit([Request(b, torch.tensor([prompt]), 9, b) for b, prompt in enumerate([5, 6, 7, 8])])
    view = PrefixView(rows, torch.tensor([[5], [6], [7], [8]]))
    session = DraftSession(
        rows, LogitsPipeline(LogitsProcessorList([Processor(picky)]), view, 4), False, None, keeps_logits
    )
    drawn, sound = None, []
    for step, likely in enumerate([[9, 9, 9, 5], [9, 9, 9, 9], [9, 9, 9, 9]]):
        logits = torch.nn.functional.one_hot(torch.tensor(likely), 16).double()[:, None]  # [B, 1, V]
        drawn, processed = session.draw(logits, None, step, drawn)
        assert (processed is not None) == keeps_logits
        rows.write(step, drawn.tokens)
        sound.append((drawn.scores[:, 0] > -torch.inf).tolist())
    # Row 0 cannot begin, row 1 finds nothing to say, row 2 goes on, row 3 says what may not be continued.
    assert sound == [[False, False, True, True], [False, False, True, False], [False, False, True, False]]
    assert sorted(shown) == [6, 7, 8, 9, 9]


def test_processors_that_refuse_no_prefix_act_on_all_positions_at_once(tiny, monkeypatch) -> None:
    calls: list[int] = []
    original = LogitsPipeline.__call__

    def watch(self: LogitsPipeline, logits: Tensor, *given: Any, **more: Any) -> Tensor:
        calls.append(logits.shape[1])
        return original(self, logits, *given, **more)

    monkeypatch.setattr(LogitsPipeline, "__call__", watch)
    result = generate(tiny, PROMPTS, "ngram", {"draft_length": 3}, repetition_penalty=1.2, temperature=0.8)
    assert 4 in calls and len(calls) == result.statistics.target_forwards
