"""Ranks that share a pool decode what one rank decodes, whoever decodes what; ranks are threads here."""

import pytest
from transformers import LlamaForCausalLM

from spec_trl.distributed import pool as pool_module
from spec_trl.distributed.pool import SharedPool
from spec_trl.scheduling.migration import MoveCosts
from spec_trl.scheduling.shared_order import longest_first
from tests.distributed.thread_ranks import links, run_ranks
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.eagle3 import reference as eagle3


ENDS = {"eos_token_id": [5, 6], "max_new_tokens": 100}  # lengths with a long tail, about 32 on average


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random drafter that reads the target's hidden states."""
    folder = tmp_path_factory.mktemp("eagle3")
    eagle3.make_folder(folder, eagle3.safeai(vocab_size=64, draft_vocab_size=64))
    return str(folder)


def prompts(count: int, copies: int = 2) -> dict:
    rows = random_rows([4 + 3 * (index % 4) for index in range(count // copies)])
    return pad_left([row for row in rows for _ in range(copies)])


def decode(model: LlamaForCausalLM, ranks: int, rows: int, given: dict, order: list[int], strategy: str, **config):
    """Completions as the ranks have them together, and each rank's pool and statistics."""
    ends, pools = links(ranks), {}

    def job(rank: int):
        def make(requests):
            pools[rank] = SharedPool(requests, order, rows, ends[rank], None)
            return pools[rank]

        return generate(model, given, strategy, {"max_batch_size": rows} | config, make_queue=make, **ENDS)

    found = run_ranks(ranks, job)
    texts = [[tokens for tokens in each if tokens] for each in zip(*map(outputs, found), strict=True)]
    assert all(len(each) == 1 for each in texts), "a request was decoded twice, or not at all"
    return [each[0] for each in texts], [pools[rank] for rank in range(ranks)], found


@pytest.mark.parametrize("strategy", ["none", "self", "ngram", "history"])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 3), (4, 2), (3, 16)])
def test_ranks_decode_what_one_decodes(tiny: LlamaForCausalLM, ranks: int, rows: int, strategy: str) -> None:
    given = prompts(16)
    alone = outputs(generate(tiny, given, **ENDS))
    texts, pools, found = decode(tiny, ranks, rows, given, list(range(16)), strategy)
    assert texts == alone
    assert sum(len(each.statistics.ended_in) for each in found) == 16
    assert sum(each.statistics.tokens for each in found) == sum(map(len, alone))
    assert all(pool.waiting == 0 for pool in pools)


@pytest.mark.parametrize("head_share", [0.0, 0.37, 1.0])
@pytest.mark.parametrize("strategy", ["none", "self", "model", "eagle3", "history"])
def test_moved_rows_go_on_where_they_were(
    tiny: LlamaForCausalLM, tiny_assistant, eagle, strategy: str, head_share: float, monkeypatch
) -> None:
    """A rank that has nothing left gets half of the rows of the one that has most, as often as it asks."""
    monkeypatch.setattr(pool_module, "rows_to_give", lambda lengths, *_: len(lengths) // 2)
    monkeypatch.setattr(MoveCosts, "head_share", property(lambda _: head_share))
    given = prompts(8)
    reference = generate(tiny, given, **ENDS)
    alone = outputs(reference)
    by_length = longest_first([""] * 8, [len(text) for text in alone])
    unfair = [by_length[place] for place in (0, 4, 5, 1, 2, 6, 7, 3)]  # the first rank is dealt the four longest
    assistants = {"model": tiny_assistant, "eagle3": eagle}
    more = {"assistant_model": assistants[strategy]} if strategy in assistants else {}
    ends, pools = links(2), {}

    def job(rank: int):
        def make(requests):
            pools[rank] = SharedPool(requests, unfair, 4, ends[rank], None)
            return pools[rank]

        return generate(tiny, given, strategy, {"max_batch_size": 4}, make_queue=make, **ENDS, **more)

    found = run_ranks(2, job)
    assert [one or other for one, other in zip(*map(outputs, found), strict=True)] == alone
    assert pools[0].taken_over + pools[1].taken_over > 0
    for row, text in enumerate(alone):  # logprobs of both parts
        mine = found[0] if found[0].lengths[row] else found[1]
        given_by = mine.logprobs[row, : len(text)]
        assert given_by.allclose(reference.logprobs[row, : len(text)], atol=1e-6)
