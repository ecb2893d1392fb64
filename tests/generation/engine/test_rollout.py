"""Rollouts: what a row samples depends on its seed and request; requests enter rows; what `test_token_identity.py`
cannot show."""

import gc
import weakref
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.rollout import RequestQueue
from spec_trl.generation.engine.rows import PrefixView, Request, Rows
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.engine.sampling.stopping import Stopping
from spec_trl.generation.engine.saved_row import TARGET, SavedRow
from spec_trl.generation.planner import control
from spec_trl.generation.planner.control import AdmissionDelay
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftThread
from tests.conftest import tiny_llama
from tests.generation.calls import Prompts, generate, outputs, pad_left, random_rows, reference_outputs
from tests.generation.races import PROMPTS, ROWS


class Failing(SelfDrafter):
    """Raises in its second window."""

    windows = 0

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        self.windows += 1
        if self.windows == 2:
            raise KeyError
        return super().propose(draft_length, noise)


THREE = pad_left([ROWS[3]] * 3)


def test_seeds_and_requests_matter(tiny) -> None:
    def call(seed: int | None = 0, prompts: Prompts = THREE, **options: Any) -> list[list[int]]:
        return outputs(generate(tiny, prompts, config={"seed": seed}, **options))

    first = call()
    assert first[0] != first[1] != first[2] != first[0] and call(1) != first
    assert call(request_ids=[0, 0, 5])[0:2] == [first[0], first[0]]
    assert call(request_ids=[-1, 2**62, 7]) != first
    under_padding = pad_left([ROWS[3]] * 3, 20, pad=63)
    assert call(prompts=under_padding) == first
    torch.manual_seed(3)
    unseeded = call(None), call(None)
    torch.manual_seed(3)
    assert call(None) == unseeded[0] != unseeded[1]


@pytest.mark.parametrize("drafter", [None, SelfDrafter, Failing])
@pytest.mark.parametrize("link", [None, DraftThread])
@pytest.mark.filterwarnings("ignore:the drafter")
def test_memory_is_free_when_a_generation_is_over(drafter: Any, link: Any, tiny, monkeypatch) -> None:
    """Not when the garbage collector finds it: on a GPU the training step needs it first."""
    made, make = [], RaggedCache.__init__

    def watched(self: RaggedCache, *arguments: Any) -> None:
        make(self, *arguments)
        made.append(weakref.ref(self))

    monkeypatch.setattr(RaggedCache, "__init__", watched)
    given = [] if drafter is None else [drafter(tiny, kernel="reference")]
    gc.disable()
    try:
        generate(tiny, PROMPTS, drafter=given if link is None else [DecoupledDrafter(link(each)) for each in given])
        assert made and not any(cache() for cache in made)
    finally:
        gc.enable()


def test_copies_of_a_prompt_are_prefilled_once(tiny, monkeypatch) -> None:
    fed, prefill = [], EagerRunner.prefill

    def count(self: EagerRunner, tokens: torch.Tensor, *args, **kwargs) -> None:
        fed.append(tokens.shape[0])
        prefill(self, tokens, *args, **kwargs)

    monkeypatch.setattr(EagerRunner, "prefill", count)
    generate(tiny, pad_left([ROWS[2], ROWS[3]] * 4), max_new_tokens=2)
    assert sum(fed) == 2


# ---- first tokens come from the prompts' forwards: N tokens cost N forwards --------------------------------------


CPU = torch.device("cpu")
TEXTS = pad_left(random_rows([5, 9, 1, 12]))


@pytest.fixture
def seen() -> tuple[LlamaForCausalLM, list[tuple[int, ...]]]:
    """A model, and the shapes of what its head is given."""
    model, shapes = tiny_llama(), list[tuple[int, ...]]()
    model.lm_head.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape[:2])))
    return model, shapes


@pytest.mark.parametrize("count", [1, 4, 10])
def test_tokens_cost_as_many_forwards(count: int, seen) -> None:
    model, shapes = seen
    expected = reference_outputs(model, TEXTS, max_new_tokens=count)
    shapes.clear()
    result = generate(model, TEXTS, do_sample=False, max_new_tokens=count)
    assert outputs(result) == expected
    assert shapes == [(4, 1)] * count, "the head runs on one position of each prompt"
    assert result.statistics.target_forwards == count == result.statistics.rounds + 1


def test_copies_draw_from_one_row_of_logits(seen) -> None:
    model, shapes = seen
    result = generate(model, TEXTS, num_return_sequences=5, max_new_tokens=1)
    assert shapes == [(4, 1)]
    found = outputs(result)
    assert all(len(set(map(tuple, found[start : start + 5]))) > 1 for start in range(0, 20, 5)), "each with its noise"
    assert found == outputs(
        generate(model, TEXTS, config={"max_batch_size": 1}, num_return_sequences=5, max_new_tokens=1)
    )


@pytest.mark.parametrize("strategy", ["none", "self", "history"])
def test_one_token_frees_its_row(strategy: str, tiny: LlamaForCausalLM) -> None:
    result = generate(tiny, TEXTS, strategy, {"max_batch_size": 2}, max_new_tokens=1)
    statistics = result.statistics
    assert outputs(result) == [tokens[:1] for tokens in outputs(generate(tiny, TEXTS))]
    assert (statistics.target_forwards, statistics.rounds, statistics.ended_in) == (2, 0, [0] * 4)
    assert [done for _, done in statistics.completion_curve] == [2, 4] and statistics.tail(0.5).rounds == 0
    assert [[change[1:] for change in row.changes] for row in statistics.timeline] == [[(0, [])]] * 4
    assert statistics.plain_seconds == statistics.seconds and "0% of 0 rounds" in str(statistics)
    assert statistics.phase_seconds["accept"] > 0, "drafters are told of first tokens"


def test_eos_as_the_first_token_frees_its_row(tiny: LlamaForCausalLM) -> None:
    """The second of two rows ends at once; the third request takes its place after the next round."""
    prompts = {name: tensor[:3] for name, tensor in TEXTS.items()}
    plain = outputs(generate(tiny, prompts))
    eos = plain[1][0]
    expected = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in plain]
    result = generate(tiny, prompts, config={"max_batch_size": 2}, eos_token_id=eos)
    assert outputs(result) == expected and len(expected[0]) > 3 < len(expected[2])
    assert result.statistics.ended_in == [len(expected[0]) - 1, 0, len(expected[2])]
    assert result.statistics.points[0].batch == 1, "of the first round"


def test_time_that_is_over_ends_rows_that_get_a_token() -> None:
    rows = Rows(2, 9, CPU)
    rows.admit([Request(index, torch.tensor([3]), 9, index) for index in range(2)])
    over = StoppingCriteriaList([MaxTimeCriteria(1.0, initial_timestamp=0.0)])
    tokens, counts, remaining = np.array([[0], [5]]), np.array([0, 1]), np.array([8, 8])
    keep, ends = Stopping(over, PrefixView(rows, torch.ones(2, 1).long())).first_stop(tokens, counts, remaining)
    assert keep.tolist() == [0, 1] and ends.tolist() == [False, True]


@torch.no_grad()
@pytest.mark.parametrize("limits", [(2048, 8192), (4, 8192), (3, 20)])
def test_texts_and_heads_are_read_together(
    limits: tuple[int, int], tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that another rank has begun has fewer columns to read than a shorter prompt, or none."""
    for name, limit in zip(("QUERIES_PER_FORWARD", "TOKENS_PER_FORWARD"), limits, strict=True):
        monkeypatch.setattr(f"spec_trl.generation.engine.forwards.runner.{name}", limit)
    runner = EagerRunner(network := make_shadow(tiny), RaggedCache.for_network(network, rows=6, columns=32))
    rows, (short, long, other, copied) = Rows(6, 32, CPU), random_rows([6, 9, 8, 9])
    requests = [Request(0, short, 30, 0), Request(1, long, 30, 1), Request(2, long, 30, 2)]
    for index, head in enumerate((3, 0)):  # the other columns are saved, here as nothing
        requests.append(Request(3 + index, other, 30, 3, SavedRow(copied[:3], None, head, {TARGET: (10, dict)})))
    admission = rows.admit(requests)
    count, logits = runner.read_prompts(rows, admission)
    assert admission.first_token_rows == {0: 0, 1: 1, 4: 1} and admission.cached == [6, 9, 10, 10, 9]
    assert count == 6 + 9 + 3 + 0
    assert logits is not None and logits.shape == (2, 1, 64)
    for row, text in enumerate((short, long)):
        torch.testing.assert_close(logits[row, 0], tiny(text[None]).logits[0, -1], rtol=0, atol=1e-9)
    alone = EagerRunner(network, RaggedCache.for_network(network, rows=1, columns=32))
    for row, text in ((0, short), (1, long), (2, other[:3]), (4, long)):
        alone.prefill(text[None], torch.arange(len(text))[None], len(text))
        for layer, expected in alone.cache.export_row(0, 0, len(text)).items():
            found = runner.cache.export_row(row, 0, len(text))[layer]
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


class Headless(LlamaForCausalLM):
    """Does not name its head."""

    def get_output_embeddings(self) -> None:
        return None


class Multiplying(LlamaForCausalLM):
    """Names a head, and does not call it."""

    def forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        hidden = self.model(*args, **kwargs).last_hidden_state  # [B, q, hidden]
        return CausalLMOutputWithPast(logits=hidden @ self.lm_head.weight.T)


@pytest.mark.parametrize("kind", [Headless, Multiplying])
@pytest.mark.parametrize("strategy", ["none", "self"])
def test_a_head_that_no_hook_narrows(
    kind: type[LlamaForCausalLM], strategy: str, tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not named may compute logits of all positions, in forwards of few tokens."""
    expected, shapes = outputs(generate(tiny, TEXTS)), list[tuple[int, ...]]()
    model = kind(tiny.config).double().eval()
    model.load_state_dict(tiny.state_dict())
    monkeypatch.setattr("spec_trl.generation.engine.forwards.runner._LOGITS_PER_FORWARD", 10 * 64)
    prefill = EagerRunner.prefill

    def noting(self: EagerRunner, tokens: Tensor, *given: Any) -> Tensor | None:
        shapes.append(tuple(tokens.shape))
        return prefill(self, tokens, *given)

    monkeypatch.setattr(EagerRunner, "prefill", noting)
    result = generate(model, TEXTS, strategy, {"runner": "eager"})
    assert outputs(result) == expected
    assert (result.statistics.total.drafted > 0) == (strategy == "self")
    assert shapes == ([(2, 5), (1, 9), (1, 10), (1, 2)] if kind is Headless else [(4, 12)])


@torch.no_grad()
def test_who_borrows_the_head_meanwhile_gets_all_of_it(tiny: LlamaForCausalLM) -> None:
    network, borrowed = make_shadow(tiny), list[Tensor]()

    def borrow(*_: object) -> None:
        thread = Thread(target=lambda: borrowed.append(network.lm_head(torch.ones(2, 3, 64).double())))
        thread.start()
        thread.join()

    network.model.layers[1].register_forward_hook(borrow)
    runner = EagerRunner(network, RaggedCache.for_network(network, rows=2, columns=32))
    logits = runner.prefill(torch.ones(2, 5).long(), torch.arange(5).expand(2, 5), 5, places=[(1, 3)])
    assert logits is not None and logits.shape == (1, 1, 64) and [own.shape for own in borrowed] == [(2, 3, 64)]


# ---- when free rows take waiting requests --------------------------------------------------------------------------


ENDS = dict(eos_token_id=[5, 6, 7], max_new_tokens=24)


def test_rows_wait_until_they_have_cost_a_quarter_of_a_round() -> None:
    """Of 16 rows 4: one row for 3 rounds, or 1 and then 2 rows for one each."""
    patience = AdmissionDelay(16)
    assert [patience.waits(1, "abc", "x") for _ in range(8)] == 2 * [True, True, True, False]
    assert [patience.waits(free, "abc", "x") for free in (1, 2, 1)] == [True, True, False]
    assert not patience.waits(4, "abc", "x")
    assert patience.rounds(1, "abc", "x") == 3
    assert not AdmissionDelay(4).waits(1, "abc", "x"), "few rows never wait"


def test_nothing_is_waited_for_where_it_saves_nothing_or_never_comes() -> None:
    patience = AdmissionDelay(100)
    assert patience.waits(1, ["a"], "b") and patience.waits(1, ["a"], None)
    assert not patience.waits(1, ["a", "b"], "b"), "its prompt is in flight"
    assert patience.waits(1, ["a"], "b")
    assert not patience.waits(1, [], "b"), "no row is in flight"


@pytest.mark.parametrize("strategy", ["none", "ngram"])
def test_several_prompts_are_read_at_once_and_no_token_changes(
    strategy: str, fresh: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, admitted = pad_left(random_rows([4 + i % 3 for i in range(40)])), []
    take = RequestQueue.take

    def counted(queue: RequestQueue, free: int, active: int) -> list[Request]:
        admitted.append(take(queue, free, active))
        return admitted[-1]

    monkeypatch.setattr(RequestQueue, "take", counted)
    found, times = [], []
    for patience in (control.MAX_EMPTY_ROUNDS, 0.0):
        monkeypatch.setattr(control, "MAX_EMPTY_ROUNDS", patience)
        admitted.clear()
        found.append(outputs(generate(fresh, prompts, strategy, {"max_batch_size": 16}, **ENDS)))
        times.append(sum(map(bool, admitted)))
    assert found[0] == found[1]
    assert times[0] < 0.8 * times[1]
