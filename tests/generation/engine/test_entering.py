"""First tokens come from the prompts' forwards: N tokens cost N forwards. That they are the right ones, and what
statistics say of them, `test_token_identity.py` tells."""

from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxTimeCriteria
from transformers.modeling_outputs import CausalLMOutputWithPast

from spec_trl.generation.engine.cache import RaggedCache
from spec_trl.generation.engine.processors import PrefixView
from spec_trl.generation.engine.rows import Request, Rows
from spec_trl.generation.engine.runner import EagerRunner
from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.generation.engine.stopping import Stopping
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows, reference_outputs


CPU = torch.device("cpu")
PROMPTS = pad_left(random_rows([5, 9, 1, 12]))


@pytest.fixture
def seen() -> tuple[LlamaForCausalLM, list[tuple[int, ...]]]:
    """A model, and the shapes of what its head is given."""
    model, shapes = tiny_llama(), list[tuple[int, ...]]()
    model.lm_head.register_forward_hook(lambda _, inputs, __: shapes.append(tuple(inputs[0].shape[:2])))
    return model, shapes


@pytest.mark.parametrize("count", [1, 4, 10])
def test_tokens_cost_as_many_forwards(count: int, seen) -> None:
    model, shapes = seen
    expected = reference_outputs(model, PROMPTS, max_new_tokens=count)
    shapes.clear()
    result = generate(model, PROMPTS, do_sample=False, max_new_tokens=count)
    assert outputs(result) == expected
    assert shapes == [(4, 1)] * count, "the head runs on one position of each prompt"
    assert result.statistics.target_forwards == count == result.statistics.rounds + 1


def test_copies_draw_from_one_row_of_logits(seen) -> None:
    model, shapes = seen
    result = generate(model, PROMPTS, num_return_sequences=5, max_new_tokens=1)
    assert shapes == [(4, 1)]
    found = outputs(result)
    assert all(len(set(map(tuple, found[start : start + 5]))) > 1 for start in range(0, 20, 5)), "each with its noise"
    assert found == outputs(
        generate(model, PROMPTS, config={"max_batch_size": 1}, num_return_sequences=5, max_new_tokens=1)
    )


@pytest.mark.parametrize("strategy", ["none", "self", "history"])
def test_one_token_frees_its_row(strategy: str, tiny: LlamaForCausalLM) -> None:
    result = generate(tiny, PROMPTS, strategy, {"max_batch_size": 2}, max_new_tokens=1)
    statistics = result.statistics
    assert outputs(result) == [tokens[:1] for tokens in outputs(generate(tiny, PROMPTS))]
    assert (statistics.target_forwards, statistics.rounds, statistics.ended_in) == (2, 0, [0] * 4)
    assert [done for _, done in statistics.completion_curve] == [2, 4] and statistics.tail(0.5).rounds == 0
    assert [[change[1:] for change in row.changes] for row in statistics.timeline] == [[(0, [])]] * 4
    assert statistics.plain_seconds == statistics.seconds and "0% of 0 rounds" in str(statistics)
    assert statistics.phase_seconds["accept"] > 0, "drafters are told of first tokens"


def test_eos_as_the_first_token_frees_its_row(tiny: LlamaForCausalLM) -> None:
    """The second of two rows ends at once; the third request takes its place after the next round."""
    prompts = {name: tensor[:3] for name, tensor in PROMPTS.items()}
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
    tokens, counts, room = np.array([[0], [5]]), np.array([0, 1]), np.array([8, 8])
    keep, ends = Stopping(over, PrefixView(rows, torch.ones(2, 1).long())).first_stop(tokens, counts, room)
    assert keep.tolist() == [0, 1] and ends.tolist() == [False, True]


@torch.no_grad()
@pytest.mark.parametrize("limits", [(2048, 8192), (4, 8192), (3, 20)])
def test_texts_and_heads_are_read_together(
    limits: tuple[int, int], tiny: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that another rank has begun has fewer columns to read than a shorter prompt, or none."""
    for name, limit in zip(("_QUERIES_PER_FORWARD", "TOKENS_PER_FORWARD"), limits, strict=True):
        monkeypatch.setattr(f"spec_trl.generation.engine.runner.{name}", limit)
    runner = EagerRunner(network := make_shadow(tiny), RaggedCache.for_network(network, rows=6, columns=32))
    rows, (short, long, other, copied) = Rows(6, 32, CPU), random_rows([6, 9, 8, 9])
    requests = [Request(0, short, 30, 0), Request(1, long, 30, 1), Request(2, long, 30, 2)]
    requests += [Request(3 + index, other, 30, 3, copied[:3], head=head) for index, head in enumerate((3, 0))]
    admission = rows.admit(requests)
    count, logits = runner.read_prompts(rows, admission)
    assert count == 6 + 9 + 3 + 0 and admission.begun == {0: 0, 1: 1, 4: 1} and admission.cached == [6, 9, 10, 10, 9]
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
    expected, shapes = outputs(generate(tiny, PROMPTS)), list[tuple[int, ...]]()
    model = kind(tiny.config).double().eval()
    model.load_state_dict(tiny.state_dict())
    monkeypatch.setattr("spec_trl.generation.engine.runner._LOGITS_PER_FORWARD", 10 * 64)
    prefill = EagerRunner.prefill

    def noting(self: EagerRunner, tokens: Tensor, *given: Any) -> Tensor | None:
        shapes.append(tuple(tokens.shape))
        return prefill(self, tokens, *given)

    monkeypatch.setattr(EagerRunner, "prefill", noting)
    result = generate(model, PROMPTS, strategy, {"runner": "eager"})
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
