"""What a round asks of the host: one wait for the device, and few tensor operations outside the networks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.cuda import graph_runner
from spec_trl.generation.engine.cuda.graph_capture import Outputs, Recording
from spec_trl.generation.engine.kv.pages import PagedCache
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.generation.engine.rows import NoiseAhead, Request, Rows
from spec_trl.generation.engine.sampling import processors
from spec_trl.generation.engine.sampling.noise import RoundNoise
from spec_trl.generation.planner.planner import Planner
from tests.conftest import tiny_llama
from tests.generation.calls import generate, pad_left, random_rows


READS = ("tolist", "item", "cpu", "__int__", "__bool__", "__float__", "__index__", "nonzero", "unique")
PROMPTS = pad_left(random_rows([4, 6, 5, 7, 4, 9]))


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The reads of each round."""
    reads: list[str] = []
    rounds: list[list[str]] = []
    decode_round = Rollout.decode_round

    def watched(self: Rollout, plan: Any) -> None:
        reads.clear()
        decode_round(self, plan)
        rounds.append(list(reads))

    def note(name: str) -> None:
        read = getattr(Tensor, name)

        def noted(self: Tensor, *given: Any, **more: Any) -> Any:
            reads.append(name)
            return read(self, *given, **more)

        monkeypatch.setattr(Tensor, name, noted)

    monkeypatch.setattr(Rollout, "decode_round", watched)
    for name in READS:
        note(name)
    return rounds


@pytest.mark.parametrize("rows", [6, 2])  # all in flight; or rows that retire give way to others
@pytest.mark.parametrize("strategy", ["none", "self", "history", "ngram", "model", "eagle3", "dflash", "mtp"])
def test_a_round_reads_once_whoever_retires(
    tiny: LlamaForCausalLM, tiny_assistant, checkpoints, rounds, strategy: str, rows: int
) -> None:
    assistant = {"model": tiny_assistant, **checkpoints}.get(strategy)
    options = dict(eos_token_id=[5, 6], max_new_tokens=60, assistant_model=assistant)
    found = generate(tiny, PROMPTS, strategy, {"max_batch_size": rows}, **options)
    assert len(set(found.lengths.tolist())) > 2 and (found.statistics.total.drafted > 0) == (strategy != "none")
    assert rounds == [["cpu"]] * found.statistics.rounds


@pytest.mark.parametrize("strategy", ["auto", "best_of_n"])
def test_a_round_reads_once_while_lookups_are_overheard(
    tiny: LlamaForCausalLM, rounds, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    told: list[int] = []
    overheard = Planner.record_unverified

    def noted(self: Planner, drafter: int, *verdicts: Any) -> None:
        told.append(drafter)
        overheard(self, drafter, *verdicts)

    monkeypatch.setattr(Planner, "record_unverified", noted)
    found = generate(tiny, PROMPTS, strategy, max_new_tokens=60)
    assert told and found.statistics.drafter_failure is None
    assert rounds == [["cpu"]] * found.statistics.rounds


class Operations(TorchDispatchMode):
    """Counts operations that compute or copy; views and memory without contents launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


INSTRUCT = dict(repetition_penalty=1.05, temperature=0.7, top_k=20, top_p=0.8)  # Qwen2.5-7B-Instruct's own settings


@pytest.mark.parametrize(
    ("strategy", "most", "settings"),
    [
        ("none", 14, {}), ("self", 23, {}), ("eagle3", 26, {}), ("dflash", 26, {}), ("self", 54, INSTRUCT),
    ],
)  # fmt: skip
def test_operations_outside_the_networks(
    tape, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch, strategy: str, most: int, settings: Any
) -> None:
    """As on CUDA: a replayed forward is two copies into its buffers, a draft loop three, and one kernel draws. With a
    model's own settings a draft is still one replay, and the host sends no more than the new lengths."""
    pytest.importorskip("triton")
    if settings:  # top-p is slow in the interpreter
        monkeypatch.setattr(graph_runner, "CAPTURE_AFTER", 1)
        monkeypatch.setattr(graph_runner, "WARM_UPS", 0)
    monkeypatch.setattr(processors, "run_on", lambda device: True)
    plain = lambda self, count: RoundNoise(self._rows.noise_keys(count), self._vocabulary)  # noqa: E731
    monkeypatch.setattr(NoiseAhead, "of_round", plain)  # which looks ahead on a CPU alone
    record, decode_round = tape.record, Rollout.decode_round
    rounds: list[tuple[list[int], list[str]]] = []

    def recorded(forward: Callable[[], Outputs], apart: bool = False) -> Recording:
        recording = record(forward, apart)

        def replay() -> None:
            with _disable_current_modes():
                recording.replay()

        return recording._replace(replay=replay)

    def counted(self: Rollout, plan: Any) -> None:
        before = self.target.preparations, self.rows.active
        with Operations() as operations:
            decode_round(self, plan)
        if before == (self.target.preparations, self.rows.active):  # nothing was captured, no row retired
            rounds.append(([chain.draft_length for chain in plan], operations.found))

    monkeypatch.setattr(tape, "record", recorded)
    monkeypatch.setattr(Rollout, "decode_round", counted)
    config = {"runner": "graph", "draft_length": 5, "draft_kernel": "reference"}
    model = tiny_llama().float()
    options = dict(max_new_tokens=40 if strategy == "self" else 20, assistant_model=checkpoints.get(strategy))
    options |= settings | ({"max_new_tokens": 18} if settings else {})
    rows = 1 if settings else 2
    generate(model, pad_left(random_rows([4] * rows)), strategy, config, **options)
    drafted = [] if strategy == "none" else [5]
    settled = [found for lengths, found in rounds if lengths == drafted]
    assert len(settled) > (1 if settings else 3) and len(settled[0]) <= most, " ".join(settled[0])
    # After a row has retired, its place in the buffers is sent to column 0, once.
    assert len({len(found) - found.count("aten.fill_.Tensor") for found in settled}) == 1


def test_an_admission_sends_numbers_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `torch.tensor` on a device waits for it: one for all rows, one for all layers' pages, one for the table."""
    sent: list[object] = []
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *given, **more: (sent.append(given), make(*given, **more))[1])
    found = []
    for count, layers in ((1, 1), (6, 3)):
        rows = Rows(8, 100, torch.device("cpu"))
        sent.clear()
        rows.admit([Request(index, torch.ones(5).long(), 50, index) for index in range(count)])
        found.append(len(sent))
        assert rows.lengths.tolist() == [5] * count and rows.requests.tolist() == list(range(count))
        cache = PagedCache.with_pages(tiny_llama(num_hidden_layers=layers), 8, 200, None)
        cache.reserve([70])
        cache.point_at(torch.arange(70)[None], 70, 0)
        states = torch.randn(1, 2, 70, 16)  # [1, kv, n, d]
        for layer in cache.layers:
            layer.update(states, states)
        sent.clear()
        cache.copy_rows([0], [1], [70])
        found.append(len(sent))
        cache.point_at(torch.tensor([[70]]), 71, 1)
        for layer in cache.layers:
            assert all(torch.equal(read[0], states[0]) for read in layer.read(1, 1, 70))
    assert found == [1, 2, 1, 2]
