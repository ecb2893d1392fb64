"""What a round asks of the host: one wait for the device, and few tensor operations outside the networks."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import LlamaForCausalLM

from spec_trl.generation.engine import processors
from spec_trl.generation.engine.cuda_graphs import Outputs, Recording
from spec_trl.generation.engine.noise import RoundNoise
from spec_trl.generation.engine.noise_ahead import NoiseAhead
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.scheduling.planner import Planner
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
@pytest.mark.parametrize("strategy", ["none", "self", "history", "ngram", "model", "eagle3"])
def test_a_round_reads_once_whoever_retires(
    tiny: LlamaForCausalLM, tiny_assistant, checkpoints, rounds, strategy: str, rows: int
) -> None:
    assistant = {"model": tiny_assistant, "eagle3": checkpoints["eagle3"]}.get(strategy)
    options = dict(eos_token_id=[5, 6], max_new_tokens=60, assistant_model=assistant)
    found = generate(tiny, PROMPTS, strategy, {"max_batch_size": rows}, **options)
    assert len(set(found.lengths.tolist())) > 2 and (found.statistics.total.drafted > 0) == (strategy != "none")
    assert rounds == [["cpu"]] * found.statistics.rounds


@pytest.mark.parametrize("strategy", ["auto", "best_of_n"])
def test_a_round_reads_once_while_lookups_are_overheard(
    tiny: LlamaForCausalLM, rounds, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    told: list[int] = []
    overheard = Planner.overheard

    def noted(self: Planner, which: int, *verdicts: Any) -> None:
        told.append(which)
        overheard(self, which, *verdicts)

    monkeypatch.setattr(Planner, "overheard", noted)
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


@pytest.mark.parametrize(("strategy", "most"), [("none", 14), ("self", 23)])
def test_operations_outside_the_networks(tape, monkeypatch: pytest.MonkeyPatch, strategy: str, most: int) -> None:
    """As on CUDA: a replayed forward is two copies into its buffers, a draft loop three, and one kernel draws."""
    pytest.importorskip("triton")
    monkeypatch.setattr(processors, "run_on", lambda device: True)
    plain = lambda self, count: RoundNoise(self._rows.noise_keys(count), self._vocabulary)  # noqa: E731
    monkeypatch.setattr(NoiseAhead, "of_round", plain)  # which looks ahead on a CPU alone
    record, decode_round = tape.record, Rollout.decode_round
    rounds: list[tuple[list[int], list[str]]] = []

    def recorded(forward: Callable[[], Outputs]) -> Recording:
        recording = record(forward)

        def replay() -> None:
            with _disable_current_modes():
                recording.replay()

        return recording._replace(replay=replay)

    def counted(self: Rollout, plan: Any) -> None:
        before = self._target.preparations, len(self.in_flight)
        with Operations() as operations:
            decode_round(self, plan)
        if before == (self._target.preparations, len(self.in_flight)):  # nothing was captured, no row retired
            rounds.append(([chain.draft_length for chain in plan], operations.found))

    monkeypatch.setattr(tape, "record", recorded)
    monkeypatch.setattr(Rollout, "decode_round", counted)
    config = {"runner": "graph", "draft_length": 5, "draft_kernel": "reference"}
    prompts = pad_left(random_rows([4] * 16))
    generate(tiny_llama(num_hidden_layers=1).float(), prompts, strategy, config, max_new_tokens=60)
    drafted = [5] if strategy == "self" else []
    settled = [found for lengths, found in rounds if lengths == drafted]
    assert len(settled) > 3 and len(settled[0]) <= most, settled[0]
    assert {len(found) for found in settled} == {len(settled[0])}
