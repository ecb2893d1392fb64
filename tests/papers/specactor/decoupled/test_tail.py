"""The policy's copy, decoupled: it reads the target's columns of committed text, and writes to a tail of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_trl.generation.drafters.autoregressive import NetworkDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.generation.engine.kv import memory
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.engine.statistics import DraftCounts
from spec_trl.generation.planner.control import Chain
from spec_trl.papers.specactor.decoupled.decoupled_drafter import DecoupledDrafter
from spec_trl.papers.specactor.decoupled.pipe import DraftPipe, DraftThread
from spec_trl.papers.specactor.decoupled.worker import Kind
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.test_families import build
from tests.generation.races import EOS, PROMPTS, Knowing, Plans
from tests.papers.specactor.decoupled.scripted import InTurn
from tests.papers.specactor.decoupled.test_decoupled_drafter import Assigned


class Before(InTurn):
    """Drafts before the target verifies; `InTurn` does afterwards, when drafts of that round lie in its columns."""

    def send(self, kind: Kind, values: Tensor) -> None:
        super().send(kind, values)
        if kind == Kind.DRAFT:
            self.answer = super().receive()

    def receive(self) -> Tensor:
        return self.answer


class Recorded(SelfDrafter):
    """Writes down what it drafts, by request and length of the text."""

    def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
        rows, proposal = self.session.rows, super().propose(draft_length, noise)
        drafts = zip(rows.indices, rows.lengths.tolist(), proposal.tokens.tolist(), strict=True)
        self.drafts |= {(request, length): tokens for request, length, tokens in drafts}
        return proposal

    drafts: dict[tuple[int, int], list[int]]


def recorded(model: Any) -> Recorded:
    drafter = Recorded(model, kernel="reference")
    drafter.drafts = {}
    return drafter


def exact_copy(model: Any) -> NetworkDrafter:
    """Without quantization: every draft is right, unless K/V is not where it belongs."""
    return NetworkDrafter(make_shadow(model), shares_target_cache=True)


def check(
    model: Any, drafter: DecoupledDrafter, new_tokens: int, prompts: Any = PROMPTS, **options: Any
) -> DraftCounts:
    """No token changes, and every draft of the exact copy that `drafter` runs is right; returns the counts."""
    found = generate(model, prompts, drafter=drafter, max_new_tokens=new_tokens, **options)
    for name in ("config", "control"):
        options.pop(name, None)
    assert outputs(found) == outputs(generate(model, prompts, max_new_tokens=new_tokens, **options))
    assert drafter.drafted > 0 == drafter.dropped
    return found.statistics.total


# ---- drafts --------------------------------------------------------------------------------------------------------


CASES: dict[str, dict[str, Any]] = {
    "one window": {},
    "greedy": dict(do_sample=False),
    "refilled": dict(config={"max_batch_size": 3}, **EOS),
    "one row": dict(config={"max_batch_size": 1}, **EOS),
    "γ = 1": dict(config={"draft_length": 1}, **EOS),
    "the longest γ": dict(config={"draft_length": 64}),
    "texts of one token": dict(prompts=pad_left(random_rows([1, 1, 1])), config={"max_batch_size": 2}),
}


@pytest.mark.parametrize("pipe", [InTurn, Before])
@pytest.mark.parametrize("case", CASES)
def test_an_exact_copy_drafts_what_the_target_says(case: str, pipe: Callable[[Drafter], DraftPipe], tiny) -> None:
    total = check(tiny, DecoupledDrafter(pipe(exact_copy(tiny))), 70, **CASES[case])
    assert total.accepted == total.drafted


@pytest.mark.parametrize("modes", ["decoupled", "coupled", "changing"])
def test_windows_that_change(modes: str, tiny) -> None:
    """Rounds of other γ, without drafts, with chains of some rows; requests with windows and modes of their own."""
    rounds = [[Chain(0, 2)], [Chain(0, 9)], [], [Chain(0, 1)], [Chain(0, 5, (0, 2, 5))], [Chain(0, 9)], [Chain(0, 3)]]
    drafter = DecoupledDrafter(DraftThread(exact_copy(tiny)), Assigned(modes))
    check(tiny, drafter, 90, control=Plans(1, rounds), config={"max_batch_size": 4})


def test_rows_whose_tail_is_full(tiny) -> None:
    """Rows without a chain of their own wait with 2w - 1 drafts, and are fed as many tokens as the others draft."""
    control = Plans(1, [[Chain(0, 5, (0, 2))]] * 8 + [[Chain(0, 5)]] * 2)
    check(tiny, DecoupledDrafter(DraftThread(exact_copy(tiny))), 60, control=control)


def test_races(tiny) -> None:
    """Chains of a race lie in the target's columns behind the committed ones while the copy drafts."""
    texts = outputs(generate(tiny, PROMPTS, max_new_tokens=60))
    drafter = DecoupledDrafter(DraftThread(exact_copy(tiny)))
    control = Plans(2, [[Chain(0, 3), Chain(1, 5)], [Chain(1, 2)], [Chain(0, 6)]])
    found = generate(tiny, PROMPTS, drafter=[drafter, Knowing(texts, 1)], control=control, max_new_tokens=60)
    assert outputs(found) == texts
    assert drafter.drafted > 0 == drafter.dropped


@pytest.mark.parametrize("family", ["mistral with window", "gemma2", "gpt_oss", "llama4_text", "deepseek_v3", "gpt2"])
def test_layers_that_see_a_part_and_code_of_their_own(family: str) -> None:
    model = build(family)
    check(model, DecoupledDrafter(DraftThread(exact_copy(model))), 40)


def test_a_packed_copy_drafts_as_it_does_coupled(tiny) -> None:
    """The same tokens after the same text, where no drafts wait when it is asked for more."""
    windows: dict[tuple[int, int], list[int]] = {}

    class Watched(InTurn):
        def receive(self) -> Tensor:
            answer, batch = super().receive(), len(self.asked)
            for row, count in enumerate(answer[:batch].tolist()):
                if count:
                    text = self.mirror.indices[row], int(self.mirror.lengths[row]) - count
                    windows[text] = answer[batch:].view(batch, -1)[row, :count].tolist()
            return answer

    coupled = recorded(tiny)
    ahead = DecoupledDrafter(Watched(SelfDrafter(tiny, kernel="reference")), Assigned("coupled"))
    for drafter in (coupled, ahead):
        generate(tiny, PROMPTS, drafter=drafter, max_new_tokens=60, config={"draft_length": 4})
    same = coupled.drafts.keys() & windows.keys()
    assert len(same) > 20
    for text in same:
        assert all(one == other for one, other in zip(coupled.drafts[text], windows[text], strict=False))


def test_what_follows_its_own_drafts_is_accepted_as_well(tiny) -> None:
    """A cache of the copy's own K/V alone, which gets further and further from the target's, costs 0.07."""
    drafter = SelfDrafter(tiny, kernel="reference")
    shares = []
    for each in (drafter, DecoupledDrafter(DraftThread(drafter))):
        found = generate(tiny, PROMPTS, drafter=each, max_new_tokens=150, config={"draft_length": 5}).statistics.total
        shares.append(found.accepted / found.drafted)
    assert shares[1] > shares[0] - 0.03


def test_drafts_do_not_depend_on_timing(tiny) -> None:
    """Drafted before the target verifies, meanwhile, and afterwards."""
    found = []
    for link in (Before, DraftThread, InTurn):
        drafter = recorded(tiny)
        config = {"draft_length": 6, "max_batch_size": 3}
        result = generate(tiny, PROMPTS, drafter=DecoupledDrafter(link(drafter)), config=config, **EOS)
        found.append((drafter.drafts, result.statistics.per_request))
    assert found[0] == found[1] == found[2] and len(found[0][0]) > 20


# ---- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_length", [3, 9])
def test_a_tail_has_two_windows(draft_length: int, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "takes_memory_late", lambda device: False)  # pages are larger than these tails
    config = {"draft_length": draft_length, "max_batch_size": 4}
    coupled = generate(tiny, PROMPTS, drafter=SelfDrafter(tiny, kernel="reference"), config=config).statistics
    ahead = DecoupledDrafter(DraftThread(SelfDrafter(tiny, kernel="reference")))
    decoupled = generate(tiny, PROMPTS, drafter=ahead, config=config).statistics
    column = 2 * 2 * 2 * 16 * 8  # bytes: layers, K and V, heads, their size, float64
    assert decoupled.cache_bytes - coupled.cache_bytes == 4 * 2 * (draft_length + 1) * column


def test_the_target_keeps_its_columns(tiny) -> None:
    """A drafter writes nothing where the target reads, whatever its rows look like."""

    class Wild(NetworkDrafter):
        def propose(self, draft_length: int, noise: RoundNoise | None) -> Proposal:
            rows, target = self.session.rows, watched.session.target
            kept = [layer.keys.clone() for layer in target.cache.layers if layer.is_initialized]
            for columns in (torch.zeros_like(rows.lengths), rows.lengths - 1, rows.lengths + 30):
                tokens = torch.full_like(columns, 5)[:, None]  # [B, 1]
                self._runner.forward(tokens, columns[:, None], rows.longest)
            assert all(torch.equal(one, layer.keys) for one, layer in zip(kept, target.cache.layers, strict=False))
            return super().propose(draft_length, noise)

    watched = DecoupledDrafter(Before(Wild(make_shadow(tiny), shares_target_cache=True)))
    found = generate(tiny, PROMPTS, drafter=watched)
    assert outputs(found) == outputs(generate(tiny, PROMPTS)) and found.statistics.drafter_failure is None
