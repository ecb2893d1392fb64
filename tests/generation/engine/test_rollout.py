"""The lossless contract: exact verification gives, token by token, what the engine gives without a drafter."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import DATA
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows


STRATEGIES = ("self", "model", "ngram", "history")
DRAFT_LENGTHS = (1, 3, 5, 8)
BATCHES = (1, 7, 32)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "T=0.7": dict(temperature=0.7),
    "T=1": dict(temperature=1.0),
    "top_p": dict(top_p=0.9),
}
# Sixteen cases, one for each strategy and draft length; the other axes are laid over them so that every strategy and
# every draft length meet every batch, model and way of sampling. The second model lies in ../shared.
CASES = [
    pytest.param(
        strategy, draft_length, BATCHES[(i + j) % 3], model := (i // 2 + j) % 2, list(SAMPLING)[(i + j) % 4],
        marks=[pytest.mark.shared] if model == 1 or strategy == "model" else [],
    )
    for i, strategy in enumerate(STRATEGIES)
    for j, draft_length in enumerate(DRAFT_LENGTHS)
]  # fmt: skip


@pytest.fixture(scope="module")
def story_prompts(story_tokenizer) -> Prompts:
    """32 beginnings of stories of 2 to 40 tokens, four of them twice."""
    texts = json.loads((DATA / "stories.json").read_text())[:28]
    rows = [torch.tensor(story_tokenizer(text).input_ids[: 2 + 7 * i % 39]) for i, text in enumerate(texts)]
    return pad_left(rows + rows[:4], pad=2)


def first(prompts: Prompts, batch: int) -> Prompts:
    return {name: tensor[:batch] for name, tensor in prompts.items()}


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> Callable[[int], PreTrainedModel]:
    """The first or the second trained model."""
    return lambda model: request.getfixturevalue(("stories", "bit_stories")[model])


@pytest.fixture(scope="module")
def plain(trained, story_prompts):
    """The engine without a drafter, each case run once."""
    done: dict[tuple[int, int, str], list[list[int]]] = {}

    def run(model: int, batch: int, sampling: str) -> list[list[int]]:
        key = (model, batch, sampling)
        if key not in done:
            result = generate(
                trained(model), first(story_prompts, batch), pad_token_id=2, max_new_tokens=40, **SAMPLING[sampling]
            )
            done[key] = outputs(result)
        return done[key]

    return run


@pytest.mark.parametrize("strategy, draft_length, batch, model, sampling", CASES)
def test_trained_models_draft_without_changing_a_token(
    strategy, draft_length, batch, model, sampling, plain, trained, story_prompts
) -> None:
    result = generate(
        trained(model),
        first(story_prompts, batch),
        strategy,
        {"draft_length": draft_length, "max_batch_size": {1: None, 7: 3, 32: None}[batch]},
        assistant_model=trained(1 - model) if strategy == "model" else None,
        pad_token_id=2,
        max_new_tokens=40,
        **SAMPLING[sampling],
    )
    assert outputs(result) == plain(model, batch, sampling)
    assert result.statistics.drafter_failure is None
    if strategy not in ("ngram", "history"):
        assert result.statistics.acceptance_rate > 0.3  # else few drafts were ever put to the test
    assert result.statistics.total.blocks > 0


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("model", [0, pytest.param(1, marks=pytest.mark.shared)])
def test_trained_models_do_not_see_the_batch_size(sampling: str, model: int, plain) -> None:
    assert plain(model, 1, sampling) == plain(model, 32, sampling)[:1]
    assert plain(model, 7, sampling) == plain(model, 32, sampling)[:7]


# ---- What a row samples depends on nothing around it ---------------------------------------------------------------

LENGTHS = (5, 1, 9, 14, 3, 9, 7, 2, 11)
OWN_EOS = dict(eos_token_id=[7, 11, 12])  # rows end at different times


@pytest.fixture(scope="module")
def rows() -> list[torch.Tensor]:
    """Nine prompts; prompts 6 to 8 are the same as prompt 3."""
    rows = random_rows(LENGTHS)
    return rows[:6] + [rows[3]] * 3


@pytest.fixture(scope="module")
def expected(tiny, rows) -> list[list[int]]:
    """Every row generated alone, without a drafter."""
    return [
        outputs(generate(tiny, pad_left([row]), request_ids=[index], **OWN_EOS))[0] for index, row in enumerate(rows)
    ]


@pytest.fixture(params=["none", *STRATEGIES])
def draft(request, tiny, tiny_assistant):
    """Calls the engine on the tiny model with each strategy."""

    def call(prompts: Prompts, **options: Any) -> list[list[int]]:
        assistant = tiny_assistant if request.param == "model" else None
        result = generate(tiny, prompts, request.param, assistant_model=assistant, **OWN_EOS, **options)
        assert result.statistics.drafter_failure is None
        return outputs(result)

    return call


def test_rows_end_at_different_times(expected) -> None:
    assert len({len(tokens) for tokens in expected}) > 3, "the tests below would not see compaction at work"
    assert max(map(len, expected)) == 24


def test_a_row_does_not_see_its_batch(draft, rows, expected) -> None:
    assert draft(pad_left(rows)) == expected


@pytest.mark.parametrize("draft_length", [1, 2, 4, 13, 64])
def test_draft_length(draft_length, draft, rows, expected) -> None:
    assert draft(pad_left(rows), config={"draft_length": draft_length}) == expected


def test_order_of_the_batch(draft, rows, expected) -> None:
    order = [4, 8, 0, 2, 7, 1, 6, 3, 5]
    result = draft(pad_left([rows[i] for i in order]), request_ids=order)
    assert result == [expected[i] for i in order]


def test_split_batch(draft, rows, expected) -> None:
    halves = [draft(pad_left(rows[span]), request_ids=list(range(9))[span]) for span in (slice(4), slice(4, 9))]
    assert halves[0] + halves[1] == expected


@pytest.mark.parametrize("max_batch_size", [1, 2, 4, 8, 100])
def test_refill(max_batch_size, draft, rows, expected) -> None:
    assert draft(pad_left(rows), config={"max_batch_size": max_batch_size}) == expected


@pytest.mark.parametrize("width", [14, 15, 40])
def test_padding(width, draft, rows, expected) -> None:
    assert draft(pad_left(rows, width)) == expected


def test_what_lies_under_the_padding(draft, rows, expected) -> None:
    prompts = pad_left(rows, 20)
    prompts["input_ids"][prompts["attention_mask"] == 0] = 63
    assert draft(prompts) == expected


def test_seeds_and_requests_matter(tiny, rows) -> None:
    prompts = pad_left([rows[3]] * 3)
    first = outputs(generate(tiny, prompts))
    assert first[0] != first[1] != first[2] != first[0]
    assert outputs(generate(tiny, prompts, config={"seed": 1})) != first
    assert outputs(generate(tiny, prompts, request_ids=[0, 0, 5]))[0:2] == [first[0], first[0]]
    assert outputs(generate(tiny, prompts, request_ids=[-1, 2**62, 7])) != first


def test_without_a_seed_torch_rules(tiny, rows) -> None:
    def call() -> list[list[int]]:
        return outputs(generate(tiny, pad_left(rows), "ngram", {"seed": None}))

    torch.manual_seed(3)
    first, second = call(), call()
    torch.manual_seed(3)
    assert call() == first != second


def test_copies_of_a_prompt_are_prefilled_once(tiny, rows, monkeypatch) -> None:
    from spec_trl.generation.engine.runner import EagerRunner

    fed = []
    original = EagerRunner.prefill

    def count(self: EagerRunner, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        fed.append(tokens.shape[0])
        original(self, tokens, *args, **kwargs)

    monkeypatch.setattr(EagerRunner, "prefill", count)
    generate(tiny, pad_left([rows[2], rows[3]] * 4), max_new_tokens=2)
    assert sum(fed) == 2


def test_copies_admitted_later_share_too(tiny, rows, monkeypatch) -> None:
    """A refilled copy takes the K/V of a row that has long been decoding, and gets its own tokens all the same."""
    prompts = pad_left([rows[3]] * 6 + [rows[2]])
    alone = [outputs(generate(tiny, pad_left([rows[3]]), request_ids=[i], **OWN_EOS))[0] for i in range(6)]
    together = outputs(generate(tiny, prompts, "self", {"max_batch_size": 3}, **OWN_EOS))
    assert together[:6] == alone


def test_long_prompts_are_prefilled_in_pieces(tiny, rows, monkeypatch) -> None:
    """The limits of one prefill forward are lowered, so that small prompts meet all of its borders."""
    from spec_trl.generation.engine import runner

    prompts = pad_left(rows[:6])
    whole = outputs(generate(tiny, prompts, "self"))
    for queries, tokens in ((1, 1), (4, 8), (4, 16), (5, 1000), (1000, 9)):
        monkeypatch.setattr(runner, "_QUERIES_PER_FORWARD", queries)
        monkeypatch.setattr(runner, "_TOKENS_PER_FORWARD", tokens)
        assert outputs(generate(tiny, prompts, "self")) == whole, (queries, tokens)


@pytest.mark.parametrize("new_tokens", [1, 2, 5, 6, 7])
def test_short_outputs(new_tokens, draft, rows, expected) -> None:
    """Around γ + 1 = 6 tokens the length limit cuts into the first round."""
    assert draft(pad_left(rows), max_new_tokens=new_tokens) == [tokens[:new_tokens] for tokens in expected]


def test_float32_and_bfloat16_run(fresh: PreTrainedModel, rows) -> None:
    """Near-ties may flip here, so only lengths and acceptance are looked at; a broken path shows in the latter."""
    for dtype in (torch.float32, torch.bfloat16):
        model = fresh.to(dtype)
        result = generate(model, pad_left(rows), "self", {"draft_quantization": "rtn-w8"}, temperature=0.3)
        assert result.lengths.tolist() == [24] * 9
        assert result.statistics.acceptance_rate > 0.5
        assert result.logprobs.dtype == torch.float32
