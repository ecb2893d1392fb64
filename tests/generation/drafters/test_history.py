"""Drafts from earlier rollouts, against a history kept and searched in the plainest way."""

import io
import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spec_trl import release
from spec_trl.generation.drafters.history import HistoryDrafter, RolloutHistory, Text
from spec_trl.generation.drafters.suffix_index import SuffixIndex
from spec_trl.generation.engine.rows import Request
from spec_trl.generation.planner.control import Chain
from spec_trl.generation.session import Session
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.watching import begin_greedy
from tests.generation.races import Plans


UNBOUNDED = 10**9


# ---- The plain way ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class PlainText:
    """`tokens` are those of the prompt and a completion."""

    prompt: list[int]
    tokens: list[int]


class PlainHistory:
    """Lists of texts, searched from one end to the other."""

    def __init__(self, max_tokens: int = UNBOUNDED) -> None:
        self.max_tokens = max_tokens
        self.texts: list[PlainText] = []
        # Of prompts looked up, every place where a token stands, in the order of arrival: (tokens, position). Before
        # that their texts count as having arrived one after the other.
        self.places: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}

    def start(self, prompt: list[int]) -> PlainText:
        self.texts.append(PlainText(prompt, list(prompt)))
        return self.texts[-1]

    def extend(self, text: PlainText, tokens: list[int]) -> None:
        for token in tokens:
            text.tokens.append(token)
            if text in self.texts and tuple(text.prompt) in self.places:
                self.places[tuple(text.prompt)].append((text.tokens, len(text.tokens) - 1))

    def evict(self) -> None:
        while self.count() > self.max_tokens:
            self.places.pop(tuple(self.texts.pop(0).prompt), None)

    def count(self) -> int:
        prompts = {tuple(text.prompt) for text in self.texts}
        return sum(map(len, prompts)) + sum(len(text.tokens) - len(text.prompt) for text in self.texts)

    def land(self, flying: set[tuple[int, ...]]) -> None:
        """Prompts that are not in flight have not been looked up."""
        self.places = {prompt: places for prompt, places in self.places.items() if prompt in flying}

    def propose(self, text: PlainText, draft_length: int) -> list[int]:
        draft: list[int] = []
        matches: list[tuple[list[int], int]] = []
        while len(draft) < draft_length and text in self.texts:
            matches = matches or self.matches(text, (text.tokens + draft)[-16:])
            if not matches:
                break
            counts = Counter(tokens[i] for tokens, i in matches)
            winner = next(tokens[i] for tokens, i in matches if counts[tokens[i]] == max(counts.values()))
            draft.append(winner)
            matches = [(tokens, i + 1) for tokens, i in matches if tokens[i] == winner and i + 1 < len(tokens)]
        return draft

    def matches(self, text: PlainText, context: list[int]) -> list[tuple[list[int], int]]:
        prompt = text.prompt
        if tuple(prompt) not in self.places:
            texts = [other.tokens for other in self.texts if other.prompt == prompt]
            new = [(tokens, i) for tokens in texts for i in range(len(prompt), len(tokens))]
            self.places[tuple(prompt)] = [*((prompt, i) for i in range(len(prompt))), *new]
        found = []
        for tokens, i in reversed(self.places[tuple(prompt)]):
            length = 0
            while length < min(i, len(context)) and tokens[i - 1 - length] == context[-1 - length]:
                length += 1
            found.append((length, tokens, i))
        for least in (16, 2, 1):  # what costs time is bounded by looking at the 64 newest of a kind
            newest = [match for match in found if match[0] >= least][:64]
            if newest:
                longest = max(match[0] for match in newest)
                return [(tokens, i) for length, tokens, i in newest if length == longest]
        return []


# ---- The index -------------------------------------------------------------------------------------------------


def test_a_lookup_reads_the_64_newest_places() -> None:
    """The longest match is the oldest one."""
    for others, expected in ((63, 7), (64, 6)):
        index = SuffixIndex([1])
        node = index.extend(index.root, [8, 9, 5, 7] + [4, 9, 5, 6] * others + [8, 9, 5])
        assert index.propose(node, 1) == [expected]


@settings(deadline=None, max_examples=25, derandomize=True)
@given(st.sampled_from([1, 2, 3, 8, 50]), st.sampled_from([UNBOUNDED, 300, 60]), st.randoms(use_true_random=True))
def test_drafts_are_those_of_a_plain_search(vocabulary: int, max_tokens: int, rng: random.Random) -> None:
    """Texts of three prompts grow in turns and are evicted; with few tokens every limit of the lookup is met."""
    prompts = [[rng.randrange(vocabulary) for _ in range(length)] for length in (1, 2, 30)]
    history, plain = RolloutHistory(max_tokens), PlainHistory(max_tokens)
    texts: list[tuple[Text, PlainText]] = []
    for step in range(60):
        if step % 6 == 0:
            prompt = rng.choice(prompts)
            texts.append((history.start(array("q", prompt).tobytes()), plain.start(prompt)))
        if step == 30:
            history.drop_indexes({array("q", prompts[2]).tobytes()})
            plain.land({tuple(prompts[2])})
        text, other = rng.choice(texts)
        quoted = rng.choice(texts)[1].tokens
        begin = rng.randrange(len(quoted))
        new = quoted[begin : begin + rng.randrange(20)] + [rng.randrange(vocabulary)]
        history.extend(text, new)
        plain.extend(other, new)
        history.evict()
        plain.evict()
        assert history.propose(text, 7) == plain.propose(other, 7)
        assert len(history) == plain.count() <= max_tokens


# ---- Checkpoints -----------------------------------------------------------------------------------------------


def drafts_of(drafter: HistoryDrafter, prompts: list[list[int]], answers: list[list[int]]) -> list[Any]:
    """What it proposes along a generation that does not follow any of it."""
    rows, found = begin_greedy(drafter, len(prompts), 100), []
    drafter.admit(rows.admit([Request(i, torch.tensor(prompt), 200, 0) for i, prompt in enumerate(prompts)]))
    for step in range(max(map(len, answers))):
        proposal = drafter.propose(5, None)
        found.append((proposal.tokens.tolist(), proposal.lengths.tolist()))
        new = [answers[i][step % len(answers[i])] for i in rows.requests.tolist()]
        rows.write(0, torch.tensor(new)[:, None])
        rows.commit(rows.host_lengths + 1, None)
        drafter.observe(np.array(new)[:, None], np.ones(len(new), int))
    return found


def saved(drafter: HistoryDrafter) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(drafter.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def task(seed: int, copies: int) -> tuple[list[list[int]], list[list[int]]]:
    """Three prompts, `copies` times each, and an answer to each over few tokens."""
    rng = random.Random(seed)
    prompts = [prompt for n in (4, 19, 11) for prompt in [[rng.randrange(5) for _ in range(n)]] * copies]
    return prompts, [[rng.randrange(5) for _ in range(rng.randrange(30, 60))] for _ in prompts]


def filled(max_tokens: int = UNBOUNDED) -> HistoryDrafter:
    drafter = HistoryDrafter(max_tokens)
    drafts_of(drafter, *task(3, 4))
    return drafter


@pytest.mark.parametrize("max_tokens", [UNBOUNDED, 300])
def test_the_state_gives_the_same_drafts(max_tokens: int) -> None:
    drafter, restored = filled(max_tokens), HistoryDrafter(max_tokens)
    drafts_of(restored, [[1, 2]], [[3, 4, 5]])  # goes when the state comes
    restored.load_state_dict(saved(drafter))
    assert len(restored.history) == len(drafter.history) > 100
    for name, part in drafter.state_dict().items():
        assert torch.equal(part, restored.state_dict()[name])
    prompts, answers = task(3, 4)[0][::2], task(4, 2)[1]
    expected = drafts_of(drafter, prompts, answers)
    assert drafts_of(restored, prompts, answers) == expected
    assert expected != drafts_of(HistoryDrafter(max_tokens), prompts, answers)


@pytest.mark.parametrize("max_tokens", [200, 1])
def test_a_smaller_bound_keeps_the_newest(max_tokens: int) -> None:
    restored, state = HistoryDrafter(max_tokens), filled().state_dict()
    assert state["texts"].dtype == state["prompts"].dtype == torch.int32  # four bytes per token
    restored.load_state_dict(state)
    texts = restored.state_dict()["texts"]
    assert len(restored.history) <= max_tokens
    assert texts.tolist() == state["texts"].tolist()[len(state["texts"]) - len(texts) :]
    assert (len(texts) > 0) == (max_tokens == 200)
    restored.load_state_dict(saved(HistoryDrafter(100)))  # an empty one
    assert len(restored.history) == 0 and not any(len(part) for part in restored.state_dict().values())


BROKEN_STATES: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "none": (lambda state: None, "it is NoneType"),
    "a part missing": (lambda state: {k: v for k, v in state.items() if k != "texts"}, "instead of tensors .*'texts'"),
    "a list": (lambda state: state | {"texts": [1, 2]}, "texts is not a one-dimensional torch.int32 tensor"),
    "another dtype": (lambda state: state | {"texts": state["texts"].float()}, "texts is not"),
    "another shape": (lambda state: state | {"texts": state["texts"][None]}, "texts is not"),
    "truncated texts": (lambda state: state | {"texts": state["texts"][:-1]}, r"text_lengths ask for \d+ tokens"),
    "truncated prompts": (lambda state: state | {"prompts": state["prompts"][1:]}, "prompt_lengths ask for"),
    "negative lengths": (lambda state: state | {"text_lengths": state["text_lengths"] - 5}, "text_lengths ask for"),
    "negative tokens": (lambda state: state | {"texts": state["texts"] - 9}, "texts holds negative tokens"),
    "no prompts": (
        lambda state: state | {"prompts": state["prompts"][:0], "prompt_lengths": state["prompt_lengths"][:0]},
        "text_prompts names .* of 12 texts, of 0",
    ),
    "too few owners": (lambda state: state | {"text_prompts": state["text_prompts"][1:]}, "as prompts of 12 texts"),
    "wrong owners": (lambda state: state | {"text_prompts": state["text_prompts"] - 1}, "names .-1, .* of 3"),
}


def test_broken_states() -> None:
    """The drafter keeps what it has."""
    with pytest.raises(ValueError, match="history_max_tokens=0.*at least 1"):
        HistoryDrafter(0)
    drafter = filled()
    before = drafter.state_dict()
    for damage, message in BROKEN_STATES.values():
        with pytest.raises(ValueError, match=f"state is not a whole rollout history: .*{message}.*Load what"):
            drafter.load_state_dict(damage(dict(before)))
        assert all(torch.equal(part, before[key]) for key, part in drafter.state_dict().items())


# ---- In generate -----------------------------------------------------------------------------------------------


def test_epochs_with_one_drafter(tiny) -> None:
    """Rows that end, move and are refilled: what is kept is what was generated, also where nothing was drafted."""
    rows = [row for row in random_rows([5, 9]) for _ in range(3)]
    drafter, all_outputs = HistoryDrafter(UNBOUNDED), []
    for seed in (0, 1):
        control = Plans(1, [[Chain(0, length)] if length else [] for length in (7, 1, 4, 0, 2)])
        result = generate(
            tiny, pad_left(rows), config={"seed": seed, "max_batch_size": 4}, drafter=drafter, control=control,
            temperature=0.3, eos_token_id=[7, 11, 12],
        )  # fmt: skip
        assert result.statistics.drafter_failure is None
        all_outputs += outputs(result)
        state = drafter.state_dict()
        texts = [text.tolist() for text in state["texts"].split(state["text_lengths"].tolist())]
        assert sorted(texts) == sorted(all_outputs)


def test_the_second_time_all_is_accepted(tiny) -> None:
    """Greedily, each row finds all that it needs in the first epoch's text of its own prompt."""
    drafter, prompts = HistoryDrafter(UNBOUNDED), pad_left(random_rows([5, 9, 3, 12, 7]))
    options = dict(do_sample=False, eos_token_id=[7, 11, 12], max_new_tokens=40)
    first, second = (
        generate(tiny, prompts, "history", {"max_batch_size": 2}, drafter=drafter, **options) for _ in range(2)
    )
    assert outputs(first) == outputs(second)
    assert len(set(second.lengths.tolist())) > 2
    assert second.statistics.acceptance_rate == 1 > first.statistics.acceptance_rate
    assert second.statistics.block_efficiency > 3


def test_calls_on_one_model_remember(tiny) -> None:
    """Greedily a second call drafts what the first one wrote; released, or with another bound, it knows nothing."""
    prompts, options = pad_left(random_rows([5, 9])), dict(do_sample=False, max_new_tokens=40)
    expected = outputs(generate(tiny, prompts, "none", **options))
    release(tiny)
    rates = []
    for config, first in [({}, True), ({}, False), ({"history_max_tokens": 1000}, True), ({}, True), ({}, False)]:
        result = generate(tiny, prompts, "history", config, **options)
        assert outputs(result) == expected and result.statistics.total.drafted > 0
        rates.append(result.statistics.acceptance_rate)
        assert (rates[-1] == rates[0]) is first
    assert rates[1] == 1 > rates[0]
    release(tiny)
    assert generate(tiny, prompts, "history", **options).statistics.acceptance_rate == rates[0]
    release(tiny)


def test_prompts_of_32_bits_are_those_of_64(tiny) -> None:
    rates = []
    for dtype in (torch.int64, torch.int32):
        prompts = pad_left(random_rows([5, 9]))
        prompts["input_ids"] = prompts["input_ids"].to(dtype)
        calls = [generate(tiny, prompts, "history", max_new_tokens=20, do_sample=False) for _ in range(2)]
        rates.append([call.statistics.total for call in calls])
        release(tiny)
    assert rates[0] == rates[1] and rates[0][1].accepted > 20


def test_what_calls_remember_is_bounded(tiny) -> None:
    for seed in range(4):
        generate(tiny, pad_left(random_rows([5], seed=seed)), "history", {"history_max_tokens": 60}, max_new_tokens=40)
    history = Session.of(tiny).drafters["history"].history
    assert 40 <= len(history) <= 60
    release(tiny)
    assert Session.of(tiny).drafters.get("history") is None


def test_a_prompt_that_is_asked_often_is_looked_up_in_its_newest_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spec_trl.generation.drafters.history.MOST_INDEXED", 8)
    history, key = RolloutHistory(UNBOUNDED), array("q", [1, 2]).tobytes()
    texts = [history.start(key) for _ in range(3)]
    for text, follow in zip(texts, (50, 60, 70), strict=True):
        history.extend(text, [7, 8, 9, follow, follow + 1])
    text, older = history.start(key), texts[0]
    history.extend(text, [7, 8, 9])
    assert history.propose(text, 2) == [70, 71]
    newer = history.start(key)
    history.extend(newer, [50])  # stands in the oldest text alone
    assert history.propose(newer, 1) != [51]
    index = text.prompt.index
    history.extend(older, [70])  # in flight yet, and not in the index: it goes on from where it is
    assert history.propose(older, 1) == [71] and text.prompt.index is index
