"""Processors and criteria that may look at other rows or keep state meet what `generate` shows them: all rows of the
caller's batch, in the caller's order, once per step."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import EosTokenCriteria, TopKLogitsWarper

from tests.generation.calls import Prompts, generate, pad_left, random_rows


EOS = dict(eos_token_id=[7, 11, 12])


class Row(LogitsProcessor):
    """Each row of the batch has tokens of its own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        row = torch.arange(len(scores))
        scores[row, 3 + (11 * row + input_ids.shape[1]) % 61] += 6.0
        return scores


class Counter(LogitsProcessor):
    """Counts its calls."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + 6.0 * (torch.arange(scores.shape[1]) == (5 * self.calls) % 64)


class Seldom(TopKLogitsWarper):
    """A class of transformers with another behaviour."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(input_ids, scores) if self.calls % 2 else -scores


def by_function(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Each row has tokens of its own, and a row that has ended none at all."""
    ended = torch.isin(input_ids[:, 12:], torch.tensor(EOS["eos_token_id"])).any(1)  # [B], 12: the prompts' width
    return Row()(input_ids, scores).masked_fill(ended[:, None], -torch.inf)


class Grammar(LogitsProcessor):
    """An automaton for each row, which advances by the newest token at each call, as grammar libraries have it."""

    states: list[int] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.states is None:
            self.states = list(range(len(input_ids)))
        else:
            self.states = [3 * s + t for s, t in zip(self.states, input_ids[:, -1].tolist(), strict=True)]
        only = torch.full_like(scores, -torch.inf)
        for row, state in enumerate(self.states):
            only[row, [3 + (state + 7 * i) % 61 for i in range(20)]] = 0
        return scores + only


class Mean(LogitsProcessor):
    """Couples all rows, those that have ended too."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - 2 * scores.mean(0) + (torch.arange(scores.shape[1]) == input_ids.sum() % 64) * 4.0


class Patience(StoppingCriteria):
    """Ends each row after calls of its own number."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        return self.calls >= 3 + 2 * torch.arange(len(input_ids))


class AllAtOnce(StoppingCriteria):
    """Ends all rows, by one bool."""

    calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        self.calls += 1
        return self.calls == 7


class OddEos(EosTokenCriteria):
    """EOS ends rows in odd places alone."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return super().__call__(input_ids, scores) & (torch.arange(len(input_ids)) % 2 == 1)


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "by row": lambda: EOS | dict(logits_processor=LogitsProcessorList([Row()])),
    "counting": lambda: EOS | dict(logits_processor=LogitsProcessorList([Counter()])),
    "grammar": lambda: EOS | dict(logits_processor=LogitsProcessorList([Grammar()])),
    "coupling rows": lambda: EOS | dict(logits_processor=LogitsProcessorList([Mean()])),
    "subclass": lambda: EOS | dict(logits_processor=LogitsProcessorList([Seldom(9)])),
    "function": lambda: EOS | dict(logits_processor=LogitsProcessorList([by_function])),
    "between others": lambda: EOS
    | dict(logits_processor=LogitsProcessorList([Counter(), Row()]), repetition_penalty=1.3, min_new_tokens=5),
    "watermark": lambda: EOS | dict(watermarking_config=SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])),
    "criterion": lambda: EOS | dict(stopping_criteria=StoppingCriteriaList([Patience()])),
    "criterion for all": lambda: EOS | dict(stopping_criteria=StoppingCriteriaList([AllAtOnce()])),
    "criterion of a subclass": lambda: EOS | dict(stopping_criteria=StoppingCriteriaList([OddEos([*range(3, 20)])])),
}  # fmt: skip


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    return pad_left(random_rows([6, 1, 9, 4, 12]))


GREEDY = dict(do_sample=False, max_new_tokens=20, pad_token_id=0)


@pytest.fixture(scope="module")
def plain(tiny: PreTrainedModel, prompts: Prompts) -> list[list[int]]:
    return tiny.generate(**prompts, **GREEDY, **EOS).tolist()


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


class Witness(LogitsProcessor):
    """Writes down what it is shown."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []
        self.scores: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids.tolist())
        self.scores.append(scores.clone())
        return scores.mul_(1.5)  # in place, as some do


class LastWitness(StoppingCriteria):
    """Writes down what it is shown, and ends row b after b + 2 steps."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.prefixes.append(input_ids.tolist())
        return torch.arange(len(input_ids)) + 2 == len(self.prefixes)


@pytest.mark.parametrize(("copies", "eos"), [(1, [7, 11, 12]), (2, None)])
def test_it_is_shown_what_generate_shows(copies: int, eos: Any, tiny: PreTrainedModel, prompts: Prompts) -> None:
    """Call by call: ended rows too, which go on with padding where there is an EOS, and the caller's own padding."""
    prompts = prompts | dict(input_ids=torch.where(prompts["attention_mask"] == 0, 60, prompts["input_ids"]))
    options = dict(do_sample=False, max_new_tokens=9, pad_token_id=0, eos_token_id=eos)
    if copies > 1:  # transformers has copies in sampling only, and always the same ones there at top_k=1
        options |= dict(do_sample=True, top_k=1, num_return_sequences=copies)
    theirs, ours = (Witness(), LastWitness()), (Witness(), LastWitness())
    tiny.generate(**prompts, **options, logits_processor=[theirs[0]], stopping_criteria=[theirs[1]])
    generate(tiny, prompts, **options, logits_processor=[ours[0]], stopping_criteria=[ours[1]])
    assert len(theirs[0].prefixes) == (6 if copies == 1 else 9)
    assert ours[0].prefixes == theirs[0].prefixes and ours[1].prefixes == theirs[1].prefixes
    for own, expected in zip(ours[0].scores, theirs[0].scores, strict=True):
        torch.testing.assert_close(own.float(), expected, rtol=1e-4, atol=1e-4)


def test_statistics_know_when_each_row_ended(tiny: PreTrainedModel, prompts: Prompts) -> None:
    result = generate(tiny, prompts, **KINDS["criterion"](), do_sample=False)
    statistics, ended = result.statistics, result.statistics.ended_in
    assert ended == result.lengths.tolist() and len(set(ended)) > 2
    done = [sum(end <= step for end in ended) for step in sorted(set(ended))]
    assert [count for _, count in statistics.completion_curve] == done
    assert statistics.target_forwards == 1 + max(ended), "a prefill, and one forward for each step"
    (point,) = statistics.points
    assert point.tokens == statistics.tokens == sum(ended) and point.batch == 5
    assert point.length == prompts["attention_mask"].sum() / 5 + (max(ended) - 1) / 2, "ended rows are rows"


@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_all_rows_must_run_at_once(option: str, tiny: PreTrainedModel, prompts: Prompts) -> None:
    own = Counter() if option == "logits_processor" else Patience()
    match = f"{type(own).__name__} .*max_batch_size=2.*5 rows.*prefix_only = True"
    with pytest.raises(ValueError, match=match):
        generate(tiny, prompts, "ngram", {"max_batch_size": 2}, **{option: [own]})


def test_one_warning_says_why_nothing_is_drafted(tiny: PreTrainedModel, prompts: Prompts) -> None:
    with pytest.warns(UserWarning, match="Counter.*drafts nothing.*prefix_only = True") as caught:
        generate(tiny, prompts, "ngram", **KINDS["counting"]())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(tiny, prompts, "none", **KINDS["counting"]())
