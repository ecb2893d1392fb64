"""K/V in the pages of a pool: who owns a page, and that rows have the same tokens whoever does. Pages of few columns
are taken, shared and given back often; a tape stands for captured forwards."""

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from spec_trl import release
from spec_trl.generation import generate as one_call
from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv import pages, row_memory
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.kv.pages import Change, PagedCache, Pages
from spec_trl.generation.engine.kv.row_memory import PagedRowMemory, RowNeeds
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.rows import Request, Rows
from spec_trl.generation.engine.saved_row import SavedRow
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from tests.conftest import tiny_llama
from tests.distributed import test_pool as ranks
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine import test_families as families
from tests.generation.engine.pools import install_pool
from tests.generation.races import random_plans


ENDS: dict[str, Any] = {"eos_token_id": 5, "max_new_tokens": 120}  # lengths with a long tail, 64 without it
PROMPTS = pad_left([row for row in random_rows([5, 9, 7, 4]) for _ in range(2)])
CPU = torch.device("cpu")


# ---- pages ---------------------------------------------------------------------------------------------------------


def test_pages_are_taken_shared_and_given_back() -> None:
    pages = Pages(6, rows=3)
    pages.grow(0, 3)
    pages.grow(0, 2)  # it has them
    pages.share(0, 2, 2)
    pages.grow(2, 3)
    assert pages.of_row == [[1, 2, 3], [], [1, 2, 4]] and pages.shared == [2, 0, 2]
    assert pages.free == 2 and pages.most == 4
    changes = [(0, 0, 1, 7), (0, 1, 2, 7), (0, 2, 3, 3), (2, 0, 1, 7), (2, 1, 2, 7), (2, 2, 4, 4)]
    assert pages.changes() == [Change(*each) for each in changes] and pages.changes() == []
    assert pages.only_of([0]) == 1 and pages.only_of([0, 2]) == 4
    pages.release(0)
    assert pages.free == 3, "two are still the other row's"
    pages.move(2, 0)
    assert pages.of_row == [[1, 2, 4], [], []] and pages.shared == [2, 0, 0]
    assert Change(2, 2, 0, 7) in pages.changes()
    with pytest.raises(RuntimeError, match="row 1 needs 4 more pages of K/V, and 3 are free"):
        pages.grow(1, 4)
    pages.release(0, kept=1)
    assert pages.shared[0] == 1 and pages.free == 5 and pages.most == 4


def test_any_order_of_what_rows_do() -> None:
    """No page is lost or given twice; the changes, put together, are the tables."""
    chance = random.Random(0)
    pages, tables = Pages(30, rows=6), np.zeros((2, 6, 30), int)
    tables[1] = pages.waste
    for _ in range(3000):
        row, other = chance.sample(range(6), 2)
        action = chance.choice(["grow", "release", "share", "move"])
        if action == "grow":
            pages.grow(row, len(pages.of_row[row]) + chance.randint(0, min(pages.free, 4)))
        elif action == "release":
            pages.release(row, chance.randint(0, 3))
        else:
            pages.release(other)
            count = chance.randint(0, len(pages.of_row[row]))
            pages.share(row, other, count) if action == "share" else pages.move(row, other)
        for row, place, read, written in pages.changes():
            tables[:, row, place] = read, written
        owners = Counter(page for own in pages.of_row for page in own)
        assert len(owners) + pages.free == 30 and 0 not in owners
        for row, own in enumerate(pages.of_row):
            assert tables[0, row, : len(own)].tolist() == own and not tables[0, row, len(own) :].any()
            assert (tables[1, row, len(own) :] == pages.waste).all()
        written = tables[1][tables[1] != pages.waste].tolist()
        assert len(set(written)) == len(written) and all(owners[page] == 1 for page in written)


# ---- a cache -------------------------------------------------------------------------------------------------------


def filled(cache: RaggedCache, seed: int = 0) -> RaggedCache:
    """Rows 1 to 3 of 70, 130 and 64 columns, and the last twice, of one layer."""
    generator = torch.Generator().manual_seed(seed)
    cache.reserve([70, 130, 64], first_row=1)
    keys, values = torch.randn(2, 3, 2, 130, 8, generator=generator).unbind(0)
    cache.point_at(torch.arange(130).expand(3, -1), 130, first_row=1)  # shorter rows write after their ends
    cache.layers[0].update(keys, values)
    cache.copy_rows([3, 2], [4, 5], [64, 130])
    return cache


def test_rows_hold_what_those_of_a_ragged_cache_hold() -> None:
    ragged, paged = filled(RaggedCache(1, 6, 192)), filled(PagedCache(1, 6, 192, pages=12))
    lengths = {1: 70, 2: 130, 3: 64, 4: 64, 5: 130}

    def compare() -> None:
        for row, length in lengths.items():
            (expected,), (found,) = (cache.export_row(row, 3, length).values() for cache in (ragged, paged))
            assert all(map(torch.equal, found, expected)) and found[0].shape == (2, length - 3, 8)

    compare()
    columns = torch.tensor([[128, 129]]), torch.tensor([[129, 128]])  # of row 5 alone
    for cache in (ragged, paged):
        states = cache.export_row(1, 10, 70)
        cache.move_rows([5], [1], [130], 5)
        assert cache.column_bytes == 2 * 2 * 8 * 4
        cache.import_row(4, 64, states)
        cache.move_rows([1], [0], [130], 5)
        cache.move_columns(*columns)
    lengths = {0: 130, 2: 130, 3: 64, 4: 124}
    compare()
    assert isinstance(paged, PagedCache) and paged.pages.most == 2 + 3 + 1 + 0 + 1 < 12
    paged.clear()
    assert paged.pages.free == 12 and paged.tables is not None and not paged.tables[0].any()
    assert paged.bytes_of([]) == 0 and paged.held_bytes == 14 * 64 * paged.column_bytes


def test_what_is_fed_again_leaves_shared_pages_alone() -> None:
    cache = filled(PagedCache(1, 6, 192, pages=12))
    before = cache.export_row(5, 0, 128)[0]
    cache.point_at(torch.arange(100, 130)[None], 130, first_row=2)
    cache.layers[0].update(torch.ones(1, 2, 30, 8), torch.ones(1, 2, 30, 8))
    assert all(map(torch.equal, cache.export_row(5, 0, 128)[0], before)), "of another row"
    keys, _ = cache.export_row(2, 0, 130)[0]
    assert torch.equal(keys[:, :128], before[0]) and (keys[:, 128:] == 1).all()


def test_completions_of_a_prompt_share_its_pages(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 200 tokens: 199 columns in three whole pages, once, and a fourth for each row, which ends in it."""
    caches = install_pool(monkeypatch, columns=64)
    prompt = pad_left([random_rows([200])[0]] * 8)
    expected = outputs(generate(tiny, prompt, config={"max_batch_size": 1}, max_new_tokens=20))
    found = generate(tiny, prompt, max_new_tokens=20)
    assert outputs(found) == expected and len({tuple(text) for text in expected}) == 8
    assert caches[-1].pages.most == 3 + 8
    assert found.statistics.cache_bytes == (3 + 8) * 64 * caches[-1].column_bytes


def test_rows_take_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows, an eighth of the limit long on average: a quarter of rows x limit is enough, also with refill."""
    caches = install_pool(monkeypatch, columns=64)
    model = tiny_llama(max_position_embeddings=1024, num_hidden_layers=1)
    prompts = pad_left(random_rows([4] * 128))
    found = generate(model, prompts, config={"max_batch_size": 64}, eos_token_id=5, max_new_tokens=512)
    assert 512 / 12 < found.lengths.double().mean() < 512 / 6
    assert found.statistics.cache_bytes <= 0.25 * 64 * (4 + 512) * caches[-1].column_bytes


# ---- tokens ---------------------------------------------------------------------------------------------------------


KINDS = ["none", "self", "ngram", "history", "model", "eagle3", "dflash", "mtp", "decoupled"]
KINDS += ["tts self run", "tts model rollout"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_leave_a_pool_come_back(
    kind: str, tiny: LlamaForCausalLM, drafters: Callable[..., list[Drafter]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = outputs(generate(tiny, PROMPTS, **ENDS))
    caches = install_pool(monkeypatch, most=45)
    own = [] if kind == "none" else drafters("self" if kind == "decoupled" else kind)
    if kind == "decoupled":
        own = [DecoupledDrafter(DraftThread(own[0]))]
    found = generate(tiny, PROMPTS, drafter=own, **ENDS)
    assert outputs(found) == plain
    assert found.statistics.preemptions >= 2 and found.statistics.drafter_failure is None
    assert 40 < caches[0].pages.most <= caches[0].pages.count == 45
    assert all(cache.pages.free == cache.pages.count for cache in caches), "all have been given back"


def test_no_bit_differs_after_they_came_back(narrow: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = generate(narrow, PROMPTS, **ENDS)
    install_pool(monkeypatch, most=45)
    found = generate(narrow, PROMPTS, "ngram", **ENDS)
    assert found.statistics.preemptions >= 2 and found.statistics.total.drafted > 20
    assert found.statistics.exact is True and torch.equal(found.logprobs, plain.logprobs)


@pytest.mark.parametrize("strategy", ["none", "self", "model"])
def test_captured_forwards_outlive_rollouts(
    strategy: str, tiny_assistant: LlamaForCausalLM, tape, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool stays where it is, and so do they; in a pool that ends rows leave. More rows get another pool."""
    caches = install_pool(monkeypatch, most=60)
    model = tiny_llama()
    more = {"assistant_model": tiny_assistant} if strategy == "model" else {}
    expected = outputs(generate(model, PROMPTS, config={"runner": "eager"}, **ENDS))
    caches.clear()
    taken = []
    for _ in range(2):
        found = generate(model, PROMPTS, strategy, {"runner": "graph"}, **more, **ENDS)
        assert outputs(found) == expected and found.statistics.preemptions > 0
        taken.append((tape.recorded, len(caches), caches[0].layers[0].keys.data_ptr(), found.statistics.cache_bytes))
    assert taken[0][1:] == taken[1][1:] and taken[1][0] < 2 * taken[0][0] and tape.replayed > 50
    larger = pad_left([*random_rows([5, 9, 7, 4]), *random_rows([8] * 8, seed=1)])
    alone = outputs(generate(model, larger, config={"runner": "eager"}, max_new_tokens=30))
    caches.clear()
    assert outputs(generate(model, larger, strategy, {"runner": "graph"}, **more, max_new_tokens=30)) == alone
    assert caches and tape.recorded > taken[1][0]
    release(model)


def test_drafts_are_those_of_a_ragged_cache(tiny: LlamaForCausalLM, drafters, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter may be wrong without changing a token: its acceptance tells whether it reads what it should."""
    names = "self", "model", "eagle3", "tts model rollout"
    options = dict(max_new_tokens=40, config={"max_batch_size": 5, "runner": "eager"})
    expected = generate(tiny, PROMPTS, drafter=drafters(*names), control=random_plans(4, 5), **options)
    install_pool(monkeypatch)
    found = generate(tiny, PROMPTS, drafter=drafters(*names), control=random_plans(4, 5), **options)
    assert outputs(found) == outputs(expected)
    assert found.statistics.per_drafter == expected.statistics.per_drafter
    assert found.statistics.per_drafter["self"].accepted > 0


def test_what_a_broken_drafter_writes_reaches_nobody(tape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its NaN goes to the columns of its drafts, which are verified, and with free rows to the waste."""
    model = tiny_llama()
    options: dict[str, Any] = dict(config={"runner": "graph", "max_batch_size": 5}, **ENDS)
    expected = outputs(generate(model, PROMPTS, **options))
    install_pool(monkeypatch)
    release(model)
    drafter = SelfDrafter(model, kernel="reference")
    for layer in drafter.quantized.layers.values():
        layer.packed.scales.fill_(torch.nan)
    with pytest.warns(UserWarning, match="returned NaN logits"):
        found = generate(model, PROMPTS, drafter=drafter, **options)
    assert outputs(found) == expected
    release(model)


def test_a_copy_that_runs_ahead_reads_through_the_table(tiny: LlamaForCausalLM, monkeypatch) -> None:
    install_pool(monkeypatch)
    exact = NetworkDrafter(make_shadow(tiny), shares_target_cache=True)
    drafter = DecoupledDrafter(DraftThread(exact))
    found = generate(tiny, PROMPTS, drafter=drafter, config={"max_batch_size": 3}, **ENDS)
    assert drafter.drafted > 0 == drafter.dropped
    assert found.statistics.total.accepted == found.statistics.total.drafted
    assert outputs(found) == outputs(generate(tiny, PROMPTS, **ENDS))


@pytest.mark.parametrize(("strategy", "head_share"), [("none", 0.0), ("self", 0.37), ("model", 0.37)])
def test_rows_that_move_between_ranks(
    strategy: str, head_share: float, tiny: LlamaForCausalLM, tiny_assistant: LlamaForCausalLM, monkeypatch
) -> None:
    """A rank that has nothing left takes rows of the other one, with the tail of their K/V."""
    install_pool(monkeypatch)
    ranks.test_moved_rows_go_on_where_they_were(tiny, tiny_assistant, "", strategy, head_share, monkeypatch)


def test_a_copy_that_runs_ahead_reads_moved_rows(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    install_pool(monkeypatch)
    ranks.test_a_copy_that_drafts_ahead_reads_the_columns_of_moved_rows(tiny, monkeypatch)


@pytest.mark.parametrize(
    "name", ["qwen2 with window", "mistral with window", "gemma2", "gpt_oss", "llama4_text", "gpt_neo", "bart"]
)
def test_windows_chunks_and_sinks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = install_pool(monkeypatch)
    families.test_drafting_equals_none_and_the_plain_forward(name, pad_left(random_rows([3, 11, 7, 1])))
    assert caches


def test_rows_in_step_have_pages_for_all(tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot leave: a kept pool that is too small gives way to a larger one."""
    from transformers import LogitsProcessor, LogitsProcessorList

    class Unmarked(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    caches = install_pool(monkeypatch, most=60)
    found = generate(tiny, PROMPTS, logits_processor=LogitsProcessorList([Unmarked()]))
    assert caches[0].pages.count > 60 and outputs(found) == outputs(generate(tiny, PROMPTS))


# ---- how many rows --------------------------------------------------------------------------------------------------


def test_without_a_number_rows_are_as_many_as_a_pool_holds_at_a_quarter_of_their_limit(
    tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = install_pool(monkeypatch, columns=4)
    column, row = 2 * 2 * 2 * 16 * 8, 3 * 6 * 64 * 4  # bytes, as in test_row_memory.py
    columns = 9 + 120 + 5
    row += columns * column // 2  # pages are gathered, one layer at a time
    fixed = 16 * 8 * (9 + 120) * 64 * 8  # 8 prompts of 9 tokens and 120 new ones
    capacities = []

    def watched(capacity: int, *options: Any, **more: Any) -> Rows:
        capacities.append(capacity)
        return Rows(capacity, *options, **more)

    plain = outputs(generate(tiny, PROMPTS, **ENDS))
    monkeypatch.setattr(one_call, "Rows", watched)
    caches.clear()
    two = fixed * 2 // 8 + 2 * row + 50 * 4 * column
    for config, free in (({}, fixed + 3 * (columns // 4 * column + row)), ({"max_batch_size": 2}, two)):
        monkeypatch.setattr(row_memory, "free_for_cache", lambda *_, free=free: free)
        found = generate(tiny, PROMPTS, config={"draft_length": 5, "runner": "eager"} | config, **ENDS)
        assert outputs(found) == plain
    assert capacities == [3, 2], "who names a number gets it"
    assert [cache.pages.count for cache in caches] == [34, 50], "one row at its limit fits in any pool"


def test_what_a_row_needs_beside_pages(tiny: LlamaForCausalLM, drafters) -> None:
    eagle, model = drafters("eagle3", "model")
    needs = RowNeeds.of(tiny, [eagle, model], verified=6, prefilled=10, columns=100, in_pool=True)
    target = 2 * 2 * 2 * 16 * 8
    assert needs.column == target + eagle.column_bytes + model.column_bytes
    assert needs.row == 3 * 6 * 64 * 4 + 100 * target / 2
    assert RowNeeds(column=2, row=30, fixed=7).pages_that_fit(3, 7 + 3 * 30 + 64 * 2 * 5 + 127) == 5


def memory_of(lengths: list[int], pages: int, drafted: int = 3) -> PagedRowMemory:
    rows = Rows(8, 1000, CPU)
    rows.admit([Request(index, torch.ones(1).long(), 500, 0) for index in range(len(lengths))])
    rows.commit(np.array(lengths), None)
    cache = PagedCache(1, 8, 1000, pages)
    cache.reserve(lengths)
    return PagedRowMemory(rows, cache, drafted)


def test_rows_are_admitted_while_pages_last() -> None:
    prompt = torch.arange(200)
    waiting = [Request(index, prompt, 500, 0) for index in range(4)]
    # Rows of 101 and 21 columns have 2 pages and 1; with 100 and 64 more, and 3 drafts, they have 4 and 2. A new one
    # has 5 pages for 200 + 64 + 3 columns, of which the next ones share 3.
    for free, count in ((3 + 5 + 2 + 2, 3), (3 + 5 + 2 + 1, 2), (3 + 4, 0)):
        own = memory_of([101, 21], pages=3 + free)
        assert own.fitting(waiting[:3]) == count and own.is_full == (count == 0)
    again = [Request(index, prompt, 500, 0, SavedRow(torch.arange(10), None, 0, {})) for index in range(2)]
    assert memory_of([101, 21], pages=3 + 3 + 5 + 5).fitting(again) == 2
    assert memory_of([101, 21], pages=3 + 3 + 5 + 4).fitting(again) == 1, "both prompts are computed again"
    assert memory_of([], pages=3).fitting(waiting) == 1, "else nobody would ever decode"


def test_the_shortest_rows_leave_a_pool() -> None:
    lengths = [126, 62, 190]  # with 3 drafts each needs a page
    assert memory_of(lengths, pages=6 + 3).leaving(0) == []
    assert memory_of(lengths, pages=6 + 2).leaving(0) == [1]
    own = memory_of(lengths, pages=6)
    assert own.leaving(0) == [0, 1] and own.is_full, "the second gives back one page, and two are needed"
    assert memory_of([125, 61, 189], pages=6).leaving(0) == []


def test_shared_pages_are_free_when_the_last_row_leaves() -> None:
    rows, cache = Rows(8, 1000, CPU), PagedCache(1, 8, 1000, pages=6)
    rows.admit([Request(index, torch.arange(129), 500, 0) for index in range(3)])
    cache.reserve([128])
    cache.copy_rows([0, 0], [1, 2], [128, 128])  # two pages, of all
    cache.reserve([129, 129, 129])
    rows.commit(np.array([190, 190, 190]), None)
    assert cache.pages.free == 1
    assert PagedRowMemory(rows, cache, 3).leaving(0) == [0], "its page and the free one serve two"


# ---- what a forward reads -------------------------------------------------------------------------------------------


def test_one_copy_tells_the_device_what_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(PagedCache(1, 6, 192, pages=12))
    tables, sent, make = cache.tables, [], torch.tensor
    monkeypatch.setattr(pages.torch, "tensor", lambda *given: sent.append(make(*given)) or sent[-1])
    cache.reserve([70, 130, 64], first_row=1)
    assert sent == [], "they have their pages"
    cache.reserve([129, 131, 65], first_row=1)
    assert [each.shape for each in sent] == [(2, 4)] and cache.tables is tables, "two changes, in two tables"


def test_a_forward_reads_pages_where_they_lie() -> None:
    network = make_shadow(tiny_llama())
    cache = PagedCache.with_pages(network, 4, 192, 12)
    EagerRunner(network, cache).prefill(torch.ones(2, 3).long(), torch.arange(3).expand(2, 3), 3, first_row=1)
    assert cache.layers[0].keys.shape == (14, 2, 64, 16) and cache.tables is not None
    table = cache.table_to_read(2)
    assert torch.equal(table, cache.tables[0, 1:3, :2]), "as many pages as the columns have, and an even number"
    cache.point_at(torch.zeros(2, 1).long(), 192, 1)
    assert torch.equal(cache.table_to_read(2), cache.tables[0, 1:3]) and cache.tables.shape == (2, 4, 4)
    states = torch.zeros(2, 2, 1, 16, dtype=torch.float64)
    keys, values = cache.update(states, states, 0)
    assert keys is cache.layers[0].keys and values is cache.layers[0].values
    cache.point_at(torch.zeros(2, 1).long(), 70, 0)
    assert cache.update(states, states, 0)[0].shape == (2, 2, 70, 16)
