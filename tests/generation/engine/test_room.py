"""Where memory ends rows leave, come back and have the same tokens; memory is simulated, in columns of K/V. And what a
model costs, read off the modules of real configurations."""

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from spec_trl.generation import generate as one_call
from spec_trl.generation.drafters.decoupled.drafter import DecoupledDrafter
from spec_trl.generation.drafters.decoupled.pipe import DraftThread
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine import memory
from spec_trl.generation.engine import room as room_module
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.room import KVRoom, RowNeeds, model_constants
from spec_trl.generation.engine.rows import Request, RequestQueue, Rows
from tests.conftest import tiny_llama
from tests.distributed import test_pool as pools
from tests.generation.calls import generate, outputs, pad_left, random_rows


ENDS: dict[str, Any] = {"eos_token_id": 5, "max_new_tokens": 120}  # lengths with a long tail, 64 without it
PROMPTS = pad_left([row for row in random_rows([5, 9, 7, 4]) for _ in range(2)])
LIMIT = 129


@pytest.fixture
def memory_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has each further generation find memory for so many columns, all rows together."""
    rooms: dict[int, tuple[Rows, RowNeeds]] = {}  # of the generation in each thread
    make = KVRoom.__init__

    def watched(self: KVRoom, rows: Rows, needs: RowNeeds) -> None:
        rooms[threading.get_ident()] = rows, needs
        make(self, rows, needs)

    def limit(columns: int) -> None:
        def free(device: torch.device) -> float:
            rows, needs = rooms[threading.get_ident()]
            return needs.fixed + rows.active * needs.row + (columns - sum(rows.host_lengths)) * needs.column

        monkeypatch.setattr(room_module, "free_memory", free)

    monkeypatch.setattr(KVRoom, "__init__", watched)
    return limit


@pytest.mark.parametrize("kind", ["none", "self", "ngram", "history", "model", "eagle3", "tts self run", "decoupled"])
def test_rows_that_leave_and_come_back_have_the_same_tokens(
    kind: str, tiny: LlamaForCausalLM, drafters: Callable[..., list[Drafter]], memory_of: Callable[[int], None]
) -> None:
    plain = outputs(generate(tiny, PROMPTS, **ENDS))
    own = [] if kind == "none" else drafters("self" if kind == "decoupled" else kind)
    if kind == "decoupled":
        own = [DecoupledDrafter(DraftThread(own[0]))]
    memory_of(330)
    found = generate(tiny, PROMPTS, drafter=own, **ENDS)
    assert outputs(found) == plain
    assert found.statistics.preemptions >= 3 and found.statistics.drafter_failure is None


def test_no_bit_differs_after_they_came_back(narrow: LlamaForCausalLM, memory_of: Callable[[int], None]) -> None:
    """What they had generated is read again as steps computed it, and not as a prompt."""
    plain = generate(narrow, PROMPTS, **ENDS)
    memory_of(330)
    found = generate(narrow, PROMPTS, "ngram", **ENDS)
    assert found.statistics.preemptions >= 3 and found.statistics.total.drafted > 20
    assert outputs(found) == outputs(plain) and torch.equal(found.logprobs, plain.logprobs)


def test_rows_of_a_pool_come_back_too(tiny: LlamaForCausalLM, memory_of) -> None:
    plain = outputs(generate(tiny, PROMPTS, **ENDS))
    memory_of(200)
    texts, _, found = pools.decode(
        2,
        list(range(8)),
        4,
        lambda _, make: generate(tiny, PROMPTS, "none", {"max_batch_size": 4}, make_queue=make, **ENDS),
    )
    assert texts == plain and sum(each.statistics.preemptions for each in found) >= 1


def test_memory_that_lasts_moves_nobody(tiny: LlamaForCausalLM, memory_of) -> None:
    memory_of(8 * (LIMIT + 64))
    assert generate(tiny, PROMPTS, **ENDS).statistics.preemptions == 0


def test_one_row_that_can_never_fit_is_refused(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 9 + 24 + 5 columns of 2 layers x K and V x 2 heads x 16 in float64."""
    needed = 2 * 2 * 2 * 16 * 8 * (9 + 24 + 5)
    monkeypatch.setattr(memory, "LITTLE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    assert generate(tiny, PROMPTS, config={"draft_length": 5}).statistics.preemptions == 0
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match=r"K/V cache.*1 x 38 x 2.* would not fit.*Lower `max_new_tokens`"):
        generate(tiny, PROMPTS, config={"draft_length": 5})


class Unmarked(LogitsProcessor):
    """Does nothing, but does not say that it looks at each row alone."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def test_rows_in_step_must_fit_together(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay until the last one ends."""
    needed = 8 * 2 * 2 * 2 * 16 * 8 * (9 + 24 + 5)
    options: dict[str, Any] = {"config": {"draft_length": 5}, "logits_processor": LogitsProcessorList([Unmarked()])}
    monkeypatch.setattr(memory, "LITTLE", 0)
    monkeypatch.setattr(memory, "free_memory", lambda device: needed)
    assert generate(tiny, PROMPTS, **options).statistics.preemptions == 0
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(ValueError, match="K/V of 8 rows x 38 columns would not fit.*max_batch_size"):
        generate(tiny, PROMPTS, **options)


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def room(lengths: Sequence[int], needs: RowNeeds, capacity: int = 8) -> KVRoom:
    rows = Rows(capacity, 1000, torch.device("cpu"))
    rows.admit([Request(index, torch.ones(1).long(), 500, 0) for index in range(len(lengths))])
    rows.commit(np.array(lengths), None)
    return KVRoom(rows, needs)


def test_rows_are_admitted_while_each_may_grow_by_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = [Request(index, torch.ones(6).long(), 500, 0) for index in range(4)]
    # Rows of 101 and 21 columns grow by 100 and 64; a new one by 64, from 6.
    needed = 7 + 2 * 3 + 2 * (100 + 64) + 3 * (2 * (6 + 64) + 3)
    for free, count in ((needed, 3), (needed - 1, 2)):
        monkeypatch.setattr(room_module, "free_memory", lambda device, free=free: free)
        own = room([101, 21], RowNeeds(column=2, row=3, fixed=7))
        assert not own.is_full and own.fitting(waiting) == count and not own.is_full
        assert own.fitting(waiting[:1]) == 1
    monkeypatch.setattr(room_module, "free_memory", lambda device: 0)
    assert room([], RowNeeds(2, 3, 7)).fitting(waiting) == 1, "else nobody would ever decode"
    full = room([101, 21], RowNeeds(2, 3, 7))
    assert full.fitting(waiting) == 0 and full.is_full


def test_the_shortest_rows_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def free(device: torch.device) -> int:
        looks.append(1)
        return 2 * 3 * 64 - 1  # one byte short of a page for each of three rows

    monkeypatch.setattr(room_module, "free_memory", free)
    own = room([50, 7, 30], RowNeeds(column=2, row=0, fixed=0))
    assert own.leaving(87) == [1] and len(looks) == 1
    # To spare are now 2 * (64 + 7) - 1 = 141 bytes, or 70 columns.
    assert own.leaving(80 + 35) == [] and len(looks) == 1
    own.leaving(80 + 36)
    assert len(looks) == 2
    monkeypatch.setattr(room_module, "free_memory", lambda device: 0)
    assert room([50, 7, 30], RowNeeds(2, 0, 0)).leaving(87) == [1, 2], "the last one stays"


def test_where_memory_is_taken_at_once_fewer_rows_are_in_flight(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    column, row = 2 * 2 * 2 * 16 * 8, 3 * 6 * 64 * 4  # bytes, as in `test_what_a_row_needs`
    fixed = 16 * 8 * (9 + 24) * 64 * 8  # 8 prompts of 9 tokens and 24 new ones
    capacities = []

    def watched(capacity: int, *options: Any, **more: Any) -> Rows:
        capacities.append(capacity)
        return Rows(capacity, *options, **more)

    plain = outputs(generate(tiny, PROMPTS))
    monkeypatch.setattr(one_call, "takes_memory_late", lambda device: False)
    monkeypatch.setattr(one_call, "Rows", watched)
    monkeypatch.setattr(one_call, "free_for_cache", lambda *_: fixed + 3 * ((9 + 24 + 5) * column + row))
    for config in ({}, {"max_batch_size": 5}):
        assert outputs(generate(tiny, PROMPTS, config={"draft_length": 5} | config)) == plain
    assert capacities == [3, 5], "who names a number gets it"


def test_rows_of_a_cache_that_is_taken_at_once() -> None:
    needs = RowNeeds(column=10, row=100, fixed=1000)
    assert [needs.rows_that_fit(20, free) for free in (0, 1000 + 599, 1000 + 600, 1000 + 900)] == [1, 1, 2, 3]


def test_what_a_row_needs(tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM) -> None:
    """2 layers x K and V x 2 heads x 16 in float64, 64 tokens, hidden size 64."""
    needs = RowNeeds.of(tiny, [], verified=6, prefilled=10)
    assert needs == RowNeeds(column=2 * 2 * 2 * 16 * 8, row=3 * 6 * 64 * 4, fixed=16 * 10 * 64 * 8)


def test_requests_that_are_put_back_come_first() -> None:
    requests = [Request(index, torch.ones(1).long(), 5, 0) for index in range(4)]
    queue = RequestQueue(requests)
    taken = queue.take(3, 0)
    queue.put_back(taken[1:])
    assert queue.waiting == 3 and queue.take(2, 1) == taken[1:] and queue.take(9, 1) == requests[3:]


# ---- what a model costs ---------------------------------------------------------------------------------------------


def costs(config: PreTrainedConfig) -> Any:
    """Of a model on the meta device: shapes without weights."""
    with torch.device("meta"):
        return model_constants(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("config", "published"),
    [("Qwen2.5-7B-Instruct", "qwen257b"), ("Llama-3.1-8B-Instruct", "llama318binstruct")],
)
def test_published_constants(shared: Callable[[str], Path], config: str, published: str) -> None:
    folder = shared(f"configs/target/{config}")
    theirs = json.loads(shared(f"data/efficientrollout/model_constants_{published}.json").read_text())
    ours = costs(AutoConfig.from_pretrained(folder))
    assert (ours.dense_flops, ours.attention_flops) == (theirs["C_dense"], theirs["C_attn"])
    assert ours.kv_bytes == theirs["kappa_theoretical"]
    assert ours.weight_bytes == pytest.approx(theirs["W_t"], rel=2e-5)  # theirs leave the biases out


def test_drafter_bytes_are_those_of_the_packed_layers() -> None:
    policy = tiny_llama(hidden_size=256, intermediate_size=512).to(torch.bfloat16)
    drafter = SelfDrafter(policy, kernel="reference", lm_head="dense")
    constants = model_constants(policy, drafter.quantized)
    packed = sum(layer.weight_count for layer in drafter.quantized.layers.values())
    saved = constants.weight_bytes - constants.draft_weight_bytes
    assert saved == 2 * packed - drafter.quantized.packed_bytes
    assert constants.weight_bytes == sum(2 * p.numel() for p in policy.parameters())
    assert model_constants(policy).draft_weight_bytes == 0


@pytest.mark.parametrize("tied", [True, False])
def test_tied_embeddings_are_one_weight_and_one_product(tied: bool) -> None:
    policy = tiny_llama(tie_word_embeddings=tied)
    constants, table = model_constants(policy), 64 * 64
    body = sum(p.numel() for name, p in policy.named_parameters() if "embed" not in name and "lm_head" not in name)
    norms = sum(p.numel() for p in policy.parameters() if p.ndim == 1)
    assert constants.weight_bytes == 8 * (body + table * (1 if tied else 2))
    assert constants.dense_flops == 2 * (body - norms + table)  # the head's product, never the table's


def test_tables_of_learned_positions_are_not_multiplied() -> None:
    constants = costs(GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=100, n_positions=32))
    assert constants.dense_flops == 2 * (2 * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 64 * 100)
    assert constants.kv_bytes == 2 * 2 * 64 * 2


@pytest.mark.parametrize(("config", "experts", "used"), [(MixtralConfig, 8, 2), (Qwen3MoeConfig, 128, 8)])
def test_experts_count_by_use_in_products_and_all_in_bytes(config: Any, experts: int, used: int) -> None:
    sizes = dict(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=100, decoder_sparse_step=1, num_local_experts=experts, num_experts=experts,
        num_experts_per_tok=used,
    )  # fmt: skip
    one, two = (costs(config(num_hidden_layers=layers, **sizes)) for layers in (1, 2))
    assert (one.experts, one.experts_per_token) == (experts, used)
    matrices, attention = 3 * 64 * 128, 2 * 64 * 64 + 2 * 64 * 32
    assert one.expert_bytes == 2 * experts * matrices
    assert two.dense_flops - one.dense_flops == 2 * (used * matrices + attention + 64 * experts)  # and the router
    assert one.kv_bytes == 2 * 2 * 16 * 2
