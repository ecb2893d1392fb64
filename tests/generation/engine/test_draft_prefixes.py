"""Processors that refuse a prefix which they forbid: drafts are shown to them only as far as they allow them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria

from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.processors import LogitsPipeline, PrefixView
from spec_trl.generation.engine.rows import Request, Rows
from spec_trl.scheduling.control import Chain
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows
from tests.generation.drafters.eagle3.reference import make_folder, safeai
from tests.generation.races import Fixed, Knowing, raced


WIDTH = 14
EOS = 7
OPTIONS: dict[str, Any] = dict(max_new_tokens=20, eos_token_id=EOS)


class Refused(Exception):
    """A prefix that is no text of the grammar."""


class Processor(LogitsProcessor):
    """A function as a processor."""

    prefix_only = True

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.function(input_ids, scores)


def allowed(row: int, last: int) -> list[int]:
    """Tokens that may follow `last` in an output of row `row`."""
    return [EOS, *(8 + (last + row + step) % 20 for step in (1, 2, 3))]


def follow(row: int, output: list[int]) -> list[int]:
    """What may follow `output` there; nothing where it is no text of the grammar, or has ended."""
    text = [0, *output]
    is_text = all(token in allowed(row, before) for before, token in zip(text, output, strict=False))
    return allowed(row, text[-1]) if is_text and EOS not in output else []


class Trie:
    """A `prefix_allowed_tokens_fn`: `[]` for prefixes that it does not know, of which transformers makes an error.

    Args:
        raises: an error of its own instead.
        lenient: rows that have ended, which `generate` goes on to show, may go on with padding.
    """

    def __init__(self, raises: bool, lenient: bool) -> None:
        self.raises, self.lenient = raises, lenient
        self.shown: list[tuple[int, list[int]]] = []

    def __call__(self, row: int, prefix: Tensor) -> list[int]:
        output = prefix[WIDTH:].tolist()
        self.shown.append((row, output))
        if self.lenient and EOS in output:
            return [0]
        found = follow(row, output)
        if self.raises and not found:
            raise Refused(output)
        return found

    def check(self) -> None:
        """It was shown nothing after a token that it forbids, or after an end."""
        assert all(not output or output[-1] in follow(row, output[:-1]) for row, output in self.shown)


def make(kind: str, lenient: bool = False) -> tuple[Trie, dict[str, Any]]:
    """The grammar, and the option that passes it; a processor has the grammar of row 0 for all rows."""
    trie = Trie(kind != "function", lenient)
    if kind != "processor":
        return trie, dict(prefix_allowed_tokens_fn=trie)

    def act(input_ids: Tensor, scores: Tensor) -> Tensor:
        only = torch.full_like(scores, -torch.inf)
        for row, prefix in enumerate(input_ids):
            only[row, trie(0, prefix)] = 0
        return scores + only

    return trie, dict(logits_processor=LogitsProcessorList([Processor(act)]))


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """Full of tokens of the grammar that do not follow one another in it."""
    rows = [torch.cat([row, row, row])[: len(row) + 5] % 28 for row in random_rows([6, 1, 9, 4, 2])]
    return pad_left([row.clamp(min=3) for row in rows], WIDTH)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("none", "function"), ("ngram", "raising function"), ("history", "processor"), ("self", "function")],
)
def test_greedy_equals_transformers(strategy: str, kind: str, tiny: PreTrainedModel, prompts: Prompts) -> None:
    options = OPTIONS | dict(do_sample=False, pad_token_id=0)
    expected = tiny.generate(**prompts, **options, **make(kind, lenient=True)[1])
    result = generate(tiny, prompts, strategy, {"max_batch_size": 3, "draft_length": 4}, **options, **make(kind)[1])
    assert result.sequences.tolist() == expected.tolist()
    assert result.statistics.drafter_failure is None
    assert strategy == "none" or result.statistics.total.drafted > 0


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("ngram", "processor"), ("history", "function"), ("self", "raising function"), ("self", "processor")],
)
def test_sampling_equals_none(strategy: str, kind: str, tiny: PreTrainedModel, prompts: Prompts) -> None:
    """Three samples of each prompt: a sibling's text is a draft, and another row's grammar forbids it."""
    options = OPTIONS | dict(num_return_sequences=3)
    expected = outputs(generate(tiny, prompts, **options, **make(kind)[1]))
    trie, processors = make(kind)
    result = generate(tiny, prompts, strategy, {"max_batch_size": 7, "draft_length": 4}, **options, **processors)
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert result.statistics.total.accepted > 0
    trie.check()
    if strategy != "self":  # whose drafts are shown while it draws them
        for row, output in trie.shown:
            texts = expected if kind == "processor" else [expected[row]]
            assert any(output == text[: len(output)] for text in texts), "shown a draft that the target did not take"


def test_races(tiny: PreTrainedModel, prompts: Prompts) -> None:
    """Two chains for each row, one of them mostly illegal."""
    expected = outputs(generate(tiny, prompts, **OPTIONS, **make("raising function")[1]))
    drafters, control = [NgramDrafter(1), SelfDrafter(tiny, kernel="reference")], Fixed(Chain(0, 3), Chain(1, 3))
    more = dict(drafter=drafters, control=control, config={"max_batch_size": 3})
    result = generate(tiny, prompts, **more, **OPTIONS, **make("raising function")[1])
    assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert raced(control) > 1 and result.statistics.racing.wins["self"] > 0


@pytest.mark.parametrize("strategy", ["none", "ngram", "self"])
def test_what_raises_on_the_rows_own_text_reaches_the_user(strategy: str, tiny, prompts: Prompts) -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == WIDTH + 9:
            raise Refused
        return scores

    with warnings.catch_warnings(), pytest.raises(Refused):
        warnings.simplefilter("error")
        generate(tiny, prompts, strategy, logits_processor=[Processor(broken)])


def test_rejection_keeps_the_targets_distribution(tiny: PreTrainedModel, tiny_assistant: PreTrainedModel) -> None:
    """Where a draft ends a text, nothing may be drawn after it; that must not make ends rarer."""

    def ends_at_eos(input_ids: Tensor, scores: Tensor) -> Tensor:
        if (input_ids == EOS).any():
            raise Refused
        scores = scores.clone()
        scores[:, EOS] = scores.amax(1)  # likely, so that drafts have it
        return scores

    prompt, count = random_rows([4])[0], 300
    options = dict(logits_processor=[Processor(ends_at_eos)], max_new_tokens=3, eos_token_id=EOS)
    config = {"verification": "rejection", "draft_length": 2}
    result = generate(tiny, pad_left([prompt] * count), "model", config, assistant_model=tiny_assistant, **options)
    with torch.no_grad():
        logits = tiny(prompt[None]).logits[0, -1]  # [V]
    logits[EOS] = logits.max()
    p = float(logits.softmax(-1)[EOS])
    ended = sum(tokens[0] == EOS for tokens in outputs(result))
    assert abs(ended - p * count) < 4 * (p * (1 - p) * count) ** 0.5 and 0.1 < p < 0.5
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


def test_a_pruned_vocabulary(tiny: PreTrainedModel, prompts: Prompts, tmp_path: Path) -> None:
    """It has none of the tokens that a grammar allows now and then, and what it drafts then is no text of it."""
    drafter = Eagle3Drafter(make_folder(tmp_path, safeai()), tiny)
    trie, processors = make("processor")
    result = generate(tiny, prompts, drafter=drafter, **OPTIONS, **processors)
    assert outputs(result) == outputs(generate(tiny, prompts, **OPTIONS, **make("processor")[1]))
    trie.check()
    assert result.statistics.drafter_failure is None and result.statistics.draft_forwards > 0


class EndsOnce(StoppingCriteria):
    """Ends a row at a token of the upper half, and knows no text that goes on after one."""

    prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if (input_ids[:, WIDTH:-1] > 32).any():
            raise Refused
        return input_ids[:, -1] > 32


def test_criteria_are_shown_no_text_after_its_end(tiny: PreTrainedModel, prompts: Prompts) -> None:
    options = dict(stopping_criteria=[EndsOnce()])
    expected = outputs(generate(tiny, prompts, **options))
    assert 1 < max(map(len, expected)) < 24
    drafter = Knowing(outputs(generate(tiny, prompts)), seed=0)
    assert outputs(generate(tiny, prompts, drafter=drafter, **options)) == expected


def test_processors_that_refuse_no_prefix_act_on_all_positions_at_once(tiny, prompts: Prompts, monkeypatch) -> None:
    calls: list[int] = []
    original = LogitsPipeline.__call__

    def watch(self: LogitsPipeline, logits: Tensor, offset: int = 0) -> Tensor:
        calls.append(logits.shape[1])
        return original(self, logits, offset)

    monkeypatch.setattr(LogitsPipeline, "__call__", watch)
    result = generate(tiny, prompts, "ngram", {"draft_length": 3}, repetition_penalty=1.2, temperature=0.8)
    assert 4 in calls and len(calls) == result.statistics.target_forwards - 1
