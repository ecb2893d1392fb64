"""Turns of a conversation have the same tokens whether K/V of the turn before was parked, or is computed again."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine import parked_rows
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.parked_rows import ParkedRows
from spec_trl.generation.engine.rollout import RequestQueue
from spec_trl.generation.engine.rows import Request
from spec_trl.generation.generate import SpeculativeOutput
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from tests.conftest import TRANSFORMERS
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.pools import install_pool
from tests.generation.engine.tape import Tape
from tests.tiny_families import make


TURNS = 3
COLUMN = 2 * 2 * 2 * 16 * 8
"""Bytes of a column: of 2 layers x K and V x 2 heads x 16 in float64."""
PROMPTS = [row for row in random_rows([5, 9, 7, 4]) for _ in range(2)]  # with copies, some of them short
TOOLS = random_rows([3, 8, 2, 11, 7, 4, 9, 1] * 2, seed=1)
READ_OF_TURN = [sum(map(len, TOOLS[turn : turn + len(PROMPTS)])) + len(PROMPTS) for turn in range(TURNS - 1)]
"""What later turns must read: what tools say, and the last token of the turn before."""


def converse(
    model: LlamaForCausalLM,
    make: Callable[[], list[Drafter]],
    parked: ParkedRows | None,
    config: dict[str, Any] | None = None,
    stays: Callable[[int, int], bool] = lambda turn, number: True,
    new_tokens: Sequence[int] = [24] * TURNS,
    prompts: Sequence[Tensor] = PROMPTS,
) -> list[SpeculativeOutput]:
    """The outputs of some turns, in which a tool answers every row that `stays`."""
    drafters, texts, found = make(), {number: row.tolist() for number, row in enumerate(prompts)}, []
    for turn in range(TURNS):
        numbers = list(texts)

        def make_queue(requests: list[Request], numbers: list[int] = numbers) -> RequestQueue:
            queue = RequestQueue(requests if parked is None else parked.begin_turn(numbers, requests))
            queue.parked = parked
            return queue

        padded = pad_left([torch.tensor(text) for text in texts.values()])
        given: dict[str, Any] = {"drafter": drafters, "request_ids": [turn << 8 | number for number in numbers]}
        given |= {"eos_token_id": 5, "max_new_tokens": new_tokens[turn], "make_queue": make_queue}
        found.append(generate(model, padded, "none", config, **given))
        new = dict(zip(numbers, outputs(found[-1]), strict=True))
        if parked is not None:
            parked.end_turn({number: (len(texts[number]), len(tokens)) for number, tokens in new.items()})
        texts = {
            number: [*texts[number], *tokens, *TOOLS[number + turn].tolist()]
            for number, tokens in new.items()
            if stays(turn, number)
        }
    return found


def same(found: list[SpeculativeOutput], expected: list[SpeculativeOutput], bits: bool) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.sequences, other.sequences)
        if bits:
            assert torch.equal(one.logprobs, other.logprobs)
        assert one.statistics.drafter_failure is None


def read(outputs: list[SpeculativeOutput]) -> list[int]:
    return [output.statistics.tokens_read for output in outputs]


def drafted(outputs: list[SpeculativeOutput]) -> int:
    return sum(output.statistics.total.drafted for output in outputs)


class NeverParked(ParkedRows):
    """Drops what it is given."""

    def add(self, *_: Any) -> None:
        pass


KINDS = [
    "none", "self", "ngram", "history", "model", "eagle3", "mtp", "dflash", "tts model run", "tts eagle3 run",
    "decoupled",
]  # fmt: skip


def maker(kind: str, drafters: Callable[..., list[Drafter]]) -> Callable[[], list[Drafter]]:
    def make() -> list[Drafter]:
        if kind == "none":
            return []
        made = drafters("self" if kind == "decoupled" else kind)
        return [DecoupledDrafter(DraftThread(made[0]))] if kind == "decoupled" else made

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_turns_have_the_tokens_of_today(
    kind: str, tiny: LlamaForCausalLM, drafters: Callable[..., list[Drafter]]
) -> None:
    """And of drafters, whose caches are parked too, the drafts."""
    plain = converse(tiny, lambda: [], None)
    make, options = maker(kind, drafters), {"draft_length": 3, "sd_toggle": "always"}
    read_again, parked = (converse(tiny, make, rows, options) for rows in (NeverParked(), ParkedRows()))
    same(read_again, plain, bits=False)
    same(parked, plain, bits=False)
    totals = [[output.statistics.total for output in outputs] for outputs in (read_again, parked)]
    if kind != "none":
        assert sum(total.drafted for total in totals[1]) > 100
        assert [total.accepted for total in totals[1]] == [total.accepted for total in totals[0]]
    if kind == "tts eagle3 run":  # it learns from features of the prompts' ends
        assert read(parked) == read(read_again)
    else:
        assert read(parked)[1:] == READ_OF_TURN and sum(read(read_again)[1:]) > 3 * sum(READ_OF_TURN)


@pytest.mark.parametrize("drafts", [False, True])
def test_no_bit_depends_on_parking(drafts: bool, narrow: LlamaForCausalLM) -> None:
    """Nor on drafts, of which other ones are accepted."""
    options = {"draft_length": 3, "sd_toggle": "always"}
    plain = converse(narrow, lambda: [], NeverParked())
    parked = converse(narrow, lambda: [SelfDrafter(narrow, kernel="reference")] * drafts, ParkedRows(), options)
    same(parked, plain, bits=True)
    assert parked[0].statistics.exact and sum(read(parked)) < sum(read(plain)) / 2
    assert drafted(parked) > 100 or not drafts


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "falcon_h1", "jamba"])
@pytest.mark.parametrize("kind", ["none", "self", "model"])
def test_states_are_parked_too(family: str, kind: str) -> None:
    if TRANSFORMERS < (5, 21):
        pytest.skip("such families are refused")
    model, assistant = make(family), make(family)
    drafter: dict[str, Callable[[], list[Drafter]]] = {
        "none": lambda: [],
        "self": lambda: [SelfDrafter(model, kernel="reference")],
        "model": lambda: [SmallModelDrafter(assistant, model)],
    }
    new_tokens = [8] * TURNS
    plain = converse(model, lambda: [], None, new_tokens=new_tokens)
    options = {"draft_length": 3, "sd_toggle": "always", "max_batch_size": 5}
    read_again, parked = (
        converse(model, drafter[kind], rows, options, new_tokens=new_tokens) for rows in (NeverParked(), ParkedRows())
    )
    same(read_again, plain, bits=False)
    same(parked, plain, bits=False)
    assert read(parked)[1:] == READ_OF_TURN
    totals = [[output.statistics.total for output in outputs] for outputs in (read_again, parked)]
    assert [total.accepted for total in totals[1]] == [total.accepted for total in totals[0]]
    assert kind == "none" or sum(total.accepted for total in totals[1]) > 20


def test_a_row_takes_no_states_of_another_row() -> None:
    """Where a drafter has no columns: prompts of one token, which have ended with the next one."""
    if TRANSFORMERS < (5, 21):
        pytest.skip("such families are refused")
    model, assistant = make("jamba"), make("jamba")  # which are equal
    options = {"draft_length": 3, "sd_toggle": "always", "max_batch_size": 1}
    drafter = lambda: [SmallModelDrafter(assistant, model)]  # noqa: E731
    found = converse(model, drafter, ParkedRows(), options, new_tokens=[1, 24, 9], prompts=random_rows([1, 1, 1]))
    total = found[1].statistics.total
    assert total.accepted == total.drafted > 20


def test_some_rows_end_and_few_are_in_flight(tiny: LlamaForCausalLM, drafters: Callable[..., list[Drafter]]) -> None:
    options = {"max_batch_size": 3, "draft_length": 3, "sd_toggle": "always"}
    stays = lambda turn, number: (turn + number) % 3 > 0  # noqa: E731
    plain = converse(tiny, lambda: [], None, stays=stays)
    rows = ParkedRows()
    found = converse(tiny, lambda: drafters("model"), rows, options, stays)
    same(found, plain, bits=False)
    assert found[1].statistics.tokens_read < plain[1].statistics.tokens_read / 2 and drafted(found) > 100
    rows.clear()
    assert rows.drop_oldest() == 0


def test_the_oldest_rows_leave_where_memory_ends(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most half of what is free is taken, here memory for three rows or so."""
    counts = []
    plain = converse(tiny, lambda: [], None)
    for columns in (0, 60, 10_000):
        monkeypatch.setattr(parked_rows, "free_memory", lambda device, columns=columns: columns * COLUMN)
        found = converse(tiny, lambda: [], ParkedRows())
        same(found, plain, bits=False)
        counts.append(sum(read(found)))
    none, some, all_ = counts
    assert all_ < some < none and none - some <= (TURNS - 1) * 60


@pytest.mark.parametrize("kind", ["none", "self", "model", "eagle3"])
def test_pages_are_parked_too(
    kind: str, tiny: LlamaForCausalLM, drafters: Callable[..., list[Drafter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = converse(tiny, lambda: [], None)
    caches = install_pool(monkeypatch)
    options = {"max_batch_size": 5, "draft_length": 3, "sd_toggle": "always"}
    found = converse(tiny, maker(kind, drafters), ParkedRows(), options)
    same(found, plain, bits=False)
    assert caches and sum(read(found)[1:]) < sum(read(plain)[1:]) / 3
    assert kind == "none" or drafted(found) > 100


@pytest.mark.parametrize("kind", ["none", "self", "model", "eagle3"])
def test_captured_forwards_read_parked_rows(
    kind: str, tiny: LlamaForCausalLM, drafters: Callable[..., list[Drafter]], tape: Tape
) -> None:
    plain = converse(tiny, lambda: [], None)
    options = {"runner": "graph", "draft_length": 3, "sd_toggle": "always"}
    found = converse(tiny, maker(kind, drafters), ParkedRows(), options)
    same(found, plain, bits=False)
    assert tape.replayed > 8 and sum(read(found)[1:]) < sum(read(plain)[1:]) / 3
    assert kind == "none" or drafted(found) > 100
