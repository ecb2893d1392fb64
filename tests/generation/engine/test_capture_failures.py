"""Captured forwards at their bounds: too little memory, forwards that cannot be captured or compiled, bad input."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spec_trl import SpeculativeConfig
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine import captured, runner
from spec_trl.generation.engine.cuda_graphs import Outputs, Recording
from tests.conftest import tiny_llama
from tests.generation.calls import outputs
from tests.generation.engine.test_captured import eager, graph


EOS = dict(eos_token_id=[1, 2, 3, 4])


@pytest.fixture
def fresh() -> nn.Module:
    """A target of the test's own, of one layer: a tape is slow."""
    return tiny_llama(num_hidden_layers=1)


def test_above_the_memory_bound_larger_ones_serve(fresh, tape) -> None:
    """Rows finish, and the smaller batch runs padded to the bucket of 8 that was captured."""
    bound = {"max_graph_memory": 0.5 / 2**10}  # half a MiB: reached by the first capture
    with pytest.warns(UserWarning, match=r"reaches max_graph_memory=0.000488281.*Raise max_graph_memory") as seen:
        result = graph(fresh, config=bound, **EOS)
    assert len(seen) == 1
    assert outputs(result) == outputs(eager(fresh, **EOS))
    assert tape.recorded == 1 and result.statistics.graphs == 1
    assert tape.replayed > result.statistics.target_forwards // 2


def test_a_model_that_waits_for_the_device_runs_eagerly(fresh, tape) -> None:
    class Waiting(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * float(x.abs().max() >= 0)

    fresh.model.layers[0].mlp = nn.Sequential(fresh.model.layers[0].mlp, Waiting())
    expected = outputs(eager(fresh))
    with pytest.warns(UserWarning, match="could not be captured.*waits for the device") as seen:
        result = graph(fresh)
    assert len(seen) == 1 and outputs(result) == expected and tape.replayed == 0


@pytest.mark.parametrize("does_nothing", [False, True])
def test_a_capture_that_computes_something_else_is_not_used(fresh, tape, monkeypatch, does_nothing: bool) -> None:
    """A capture on another device than the model's records nothing; its buffers hold the right answer all the same."""
    record = tape.record

    def broken(forward: Callable[[], Outputs]) -> Recording:
        recording = record(forward)

        def replay() -> None:
            recording.replay()
            recording.logits.mul_(1.5)

        return recording._replace(replay=(lambda: None) if does_nothing else replay)

    monkeypatch.setattr(tape, "record", broken)
    with pytest.warns(UserWarning, match="its logits differ from an eager forward's"):
        result = graph(fresh)
    assert outputs(result) == outputs(eager(fresh))


def test_an_attention_kernel_that_fails_gives_way_to_masks(tape, monkeypatch) -> None:
    """At once, before anything is captured, and what is captured then attends under masks too."""
    kernels = pytest.importorskip("spec_trl.generation.engine.kernels.ragged_attention", exc_type=ImportError)
    model = tiny_llama().float()
    expected = outputs(eager(model))
    monkeypatch.setattr(runner, "reads_spans", lambda network: True)
    monkeypatch.setattr(kernels, "ragged_decode_attention", no_compiler)
    with pytest.warns(UserWarning, match="attention kernel failed.*under masks.*no compiler here") as seen:
        result = graph(model)
    assert len(seen) == 1 and outputs(result) == expected and tape.replayed > 15


def no_compiler(*_: Any) -> None:
    raise RuntimeError("no compiler here")


def test_one_shape_that_fails_spoils_no_other(fresh, tape, monkeypatch) -> None:
    graph(fresh, "self")
    record, replayed = tape.record, tape.replayed

    def no_memory(forward: Callable[[], Outputs]) -> Recording:
        raise torch.OutOfMemoryError("not now")

    monkeypatch.setattr(tape, "record", no_memory)
    with pytest.warns(UserWarning, match=r"could not be captured and runs eagerly for \d+ rows x 4 tokens") as seen:
        result = graph(fresh, "self", {"draft_length": 3})
    assert outputs(result) == outputs(eager(fresh)) and tape.replayed > replayed
    assert len(seen) == len({str(warning.message) for warning in seen})  # once for each shape
    monkeypatch.setattr(tape, "record", record)
    assert outputs(graph(fresh)) == outputs(eager(fresh))


@pytest.mark.parametrize(
    ("mode", "said"), [("compiled", "goes on without being compiled"), ("auto", "could not be compiled")]
)
def test_what_does_not_compile_is_captured_as_it_is(fresh, tape, monkeypatch, mode: str, said: str) -> None:
    monkeypatch.setattr(captured, "COMPILE_AFTER", 10)
    monkeypatch.setattr(captured, "compiled_twin", no_compiler)
    with pytest.warns(UserWarning, match=f"{said}.*no compiler here") as seen:
        result = graph(fresh, config={"runner": mode})
    assert len(seen) == 1 and outputs(result) == outputs(eager(fresh))
    assert tape.replayed > 15


@pytest.mark.parametrize("compiled_is_faster", [True, False])
def test_auto_keeps_what_measures_faster(fresh, tape, monkeypatch, compiled_is_faster: bool) -> None:
    monkeypatch.setattr(captured, "COMPILE_AFTER", 10)
    times = iter([1.0, 2.0] if compiled_is_faster else [2.0, 1.0])  # the compiled one is timed first
    monkeypatch.setattr(tape, "seconds", lambda replay: next(times))
    record = tape.record
    replays: list[int] = []

    def watch(forward: Callable[[], Outputs]) -> Recording:
        recording, own = record(forward), len(replays)
        replays.append(0)

        def replay() -> None:
            replays[own] += 1
            recording.replay()

        return recording._replace(replay=replay)

    monkeypatch.setattr(tape, "record", watch)
    assert outputs(graph(fresh, config={"runner": "auto"})) == outputs(eager(fresh))
    assert len(replays) == 2
    chosen, other = (1, 0) if compiled_is_faster else (0, 1)
    assert replays[chosen] > 12 and replays[other] <= 13


def test_a_compiled_trial_writes_what_the_call_writes(fresh, tape, monkeypatch) -> None:
    """Rows have moved since the shape ran last, and a self-drafter's old K/V could land on the target's columns."""
    monkeypatch.setattr(captured, "COMPILE_AFTER", 4)
    result, expected = graph(fresh, "self", {"runner": "auto", "draft_length": 3}, **EOS), eager(fresh, **EOS)
    assert outputs(result) == outputs(expected) and result.statistics.drafter_failure is None
    torch.testing.assert_close(result.logprobs, expected.logprobs, rtol=0, atol=1e-6)


def test_wide_weights_under_autocast_run_eagerly(tape) -> None:
    """A graph would cast every weight again in each replay; autocast keeps the casts of a rollout."""
    model = tiny_llama().float()
    with torch.autocast("cpu", torch.bfloat16):
        graph(model)
    assert tape.recorded == 0
    graph(model)
    assert tape.recorded == 1


def test_a_drafter_that_returns_nan_is_dropped(fresh, tape) -> None:
    drafter = SelfDrafter(fresh, kernel="reference")
    drafter.network.lm_head = nn.Linear(64, 64, dtype=torch.float64)
    nn.init.constant_(drafter.network.lm_head.weight, float("nan"))
    drafter.quantized.layers.clear()  # that they run is not what is tested
    with pytest.warns(UserWarning, match="the draft network returned NaN logits"):
        result = graph(fresh, drafter=drafter)
    assert outputs(result) == outputs(eager(fresh))
    assert result.statistics.drafter_failure is not None and result.statistics.total.accepted == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"runner": "fast"}, "runner='fast' is unknown; choose one of"),
        ({"max_graph_memory": 0}, "max_graph_memory=0 is out of range.*positive number of GiB"),
        ({"max_graph_memory": "4GB"}, "max_graph_memory='4GB' is out of range"),
    ],
)
def test_bad_values(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**config)


@pytest.mark.parametrize("mode", ["graph", "compiled"])
def test_captured_forwards_need_cuda(tiny, mode: str) -> None:
    with pytest.raises(ValueError, match=f'runner="{mode}" captures CUDA graphs, and the model is on cpu'):
        graph(tiny, config={"runner": mode})
