"""Processors and criteria that may look at other rows or keep state meet what `generate` shows them: all rows of the
caller's batch, in the caller's order, once per step."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria, SynthIDTextWatermarkingConfig
from transformers.generation import EosTokenCriteria, TopKLogitsWarper

from tests.generation.calls import Prompts, generate, pad_left, random_rows


EOS = dict(eos_token_id=[7, 11, 12])
WIDTH = 12


class Counting:
    """Calls `function` with the number of calls so far, from 1 on, the prefixes and the scores."""

    def __init__(self, function: Callable[[int, Tensor, Any], Any]) -> None:
        self.function, self.calls = function, 0

    def act(self, input_ids: Tensor, scores: Any) -> Any:
        self.calls += 1
        return self.function(self.calls, input_ids, scores)


class Processor(Counting, LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.act(input_ids, scores)


class Criterion(Counting, StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Any:
        return self.act(input_ids, scores)


class Seldom(TopKLogitsWarper):
    """A class of transformers with another behaviour."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(input_ids, scores) if self.calls % 2 else -scores


class OddEos(EosTokenCriteria):
    """EOS ends rows in odd places alone."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return super().__call__(input_ids, scores) & (torch.arange(len(input_ids)) % 2 == 1)


def by_row(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    """Each row of the batch has tokens of its own."""
    scores, row = scores.clone(), torch.arange(len(scores))
    scores[row, 3 + (11 * row + input_ids.shape[1]) % 61] += 6.0
    return scores


def by_function(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A row that has ended has no tokens at all."""
    ended = torch.isin(input_ids[:, WIDTH:], torch.tensor(EOS["eos_token_id"])).any(1)  # [B]
    return by_row(0, input_ids, scores).masked_fill(ended[:, None], -torch.inf)


def by_call(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
    return scores + 6.0 * (torch.arange(scores.shape[1]) == (5 * call) % 64)


def grammar() -> Processor:
    """An automaton for each row, which advances by the newest token at each call, as grammar libraries have it."""
    states: list[int] = []

    def advance(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
        newest = input_ids[:, -1].tolist()
        states[:] = [3 * s + t for s, t in zip(states, newest, strict=True)] if states else range(len(newest))
        only = torch.full_like(scores, -torch.inf)
        for row, state in enumerate(states):
            only[row, [3 + (state + 7 * i) % 61 for i in range(20)]] = 0
        return scores + only

    return Processor(advance)


def patience(call: int, input_ids: Tensor, scores: Any) -> Tensor:
    """Ends each row after calls of its own number."""
    return call >= 3 + 2 * torch.arange(len(input_ids))


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "counting": lambda: dict(logits_processor=[Processor(by_call)]),
    "grammar": lambda: dict(logits_processor=[grammar()]),
    "subclass": lambda: dict(logits_processor=[Seldom(9)]),
    "function": lambda: dict(logits_processor=[by_function]),
    "between others": lambda: dict(
        logits_processor=[Processor(by_call), Processor(by_row)], repetition_penalty=1.3, min_new_tokens=5),
    "watermark": lambda: dict(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])),
    "criterion": lambda: dict(stopping_criteria=[Criterion(patience)]),
    "criterion for all": lambda: dict(stopping_criteria=[Criterion(lambda call, *_: call == 7)]),
    "criterion of a subclass": lambda: dict(stopping_criteria=[OddEos([*range(3, 20)])]),
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([6, 1, 9, 4, WIDTH]))


GREEDY = EOS | dict(do_sample=False, max_new_tokens=20, pad_token_id=0)


@pytest.fixture(scope="module")
def plain(tiny: PreTrainedModel, prompts: Prompts) -> list[list[int]]:
    return tiny.generate(**prompts, **GREEDY).tolist()


@pytest.mark.filterwarnings("ignore:.*prefix_only")
@pytest.mark.parametrize(
    ("strategy", "kind"), [("ngram", kind) for kind in KINDS] + [("self", "grammar"), ("none", "criterion")]
)
def test_greedy_equals_transformers(
    strategy: str, kind: str, tiny: PreTrainedModel, prompts: Prompts, plain: list[list[int]]
) -> None:
    expected = tiny.generate(**prompts, **GREEDY, **KINDS[kind]()).tolist()
    result = generate(tiny, prompts, strategy, **GREEDY, **KINDS[kind]())
    assert result.sequences.tolist() == expected != plain
    assert result.statistics.total.drafted == 0 and result.statistics.tokens == int(result.lengths.sum())


@pytest.mark.parametrize(("copies", "eos"), [(1, [7, 11, 12]), (2, None)])
def test_it_is_shown_what_generate_shows(copies: int, eos: Any, tiny: PreTrainedModel, prompts: Prompts) -> None:
    """Call by call: ended rows too, which go on with padding where there is an EOS, and the caller's own padding."""
    prompts = prompts | dict(input_ids=torch.where(prompts["attention_mask"] == 0, 60, prompts["input_ids"]))
    options = dict(do_sample=False, max_new_tokens=9, pad_token_id=0, eos_token_id=eos)
    if copies > 1:  # transformers has copies in sampling only, and always the same ones there at top_k=1
        options |= dict(do_sample=True, top_k=1, num_return_sequences=copies)

    def shown(run: Callable[..., Any]) -> tuple[list[Any], list[Tensor], list[Any]]:
        """Prefixes and scores that a processor was shown, and prefixes that a criterion was."""
        prefixes, all_scores, last = [], [], []

        def see(call: int, input_ids: Tensor, scores: Tensor) -> Tensor:
            prefixes.append(input_ids.tolist())
            all_scores.append(scores.clone().float())
            return scores.mul_(1.5)  # in place, as some do

        def end(call: int, input_ids: Tensor, scores: Any) -> Tensor:
            last.append(input_ids.tolist())
            return torch.arange(len(input_ids)) + 2 == call

        run(**options, logits_processor=[Processor(see)], stopping_criteria=[Criterion(end)])
        return prefixes, all_scores, last

    theirs = shown(lambda **more: tiny.generate(**prompts, **more))
    ours = shown(lambda **more: generate(tiny, prompts, **more))
    assert len(theirs[0]) == (6 if copies == 1 else 9)
    assert (ours[0], ours[2]) == (theirs[0], theirs[2])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)


def test_statistics_know_when_each_row_ended(tiny: PreTrainedModel, prompts: Prompts) -> None:
    result = generate(tiny, prompts, **KINDS["criterion"](), **EOS, do_sample=False)
    statistics, ended = result.statistics, result.statistics.ended_in
    assert ended == (result.lengths - 1).tolist() and len(set(ended)) > 2
    done = [sum(end <= step for end in ended) for step in sorted(set(ended))]
    assert [count for _, count in statistics.completion_curve] == done
    assert statistics.target_forwards == int(result.lengths.max()), "a prefill, and one for each further step"
    (point,) = statistics.points
    assert point.tokens == statistics.tokens - 5 == sum(ended) and point.batch == 5
    assert point.length == prompts["attention_mask"].sum() / 5 + (max(ended) + 1) / 2, "ended rows are rows"


@pytest.mark.parametrize(
    "options", [{"logits_processor": [Processor(by_call)]}, {"stopping_criteria": [Criterion(patience)]}]
)
def test_all_rows_must_run_at_once(options: dict[str, Any], tiny: PreTrainedModel, prompts: Prompts) -> None:
    with pytest.raises(ValueError, match="(Processor|Criterion) .*max_batch_size=2.*5 rows.*prefix_only = True"):
        generate(tiny, prompts, "ngram", {"max_batch_size": 2}, **options)


def test_one_warning_says_why_nothing_is_drafted(tiny: PreTrainedModel, prompts: Prompts) -> None:
    with pytest.warns(UserWarning, match="Processor.*drafts nothing.*prefix_only = True") as caught:
        generate(tiny, prompts, "ngram", **KINDS["counting"]())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(tiny, prompts, "none", **KINDS["counting"]())
