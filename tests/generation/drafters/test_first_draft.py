"""Kernels of the quantized copy are measured when it first drafts, on a pretended GPU with invented times."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, partialmethod
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import spec_trl
from spec_trl.generation import measuring
from spec_trl.generation.engine.rollout import Rollout
from spec_trl.generation.planner.clock import ForwardSeconds, ProbedRounds
from spec_trl.generation.planner.planner import Planner
from spec_trl.generation.session import Session
from spec_trl.quantization import kernels, quantized_copy
from spec_trl.quantization.kernels import LayerSpec, PackedWeight, kernel_times
from spec_trl.quantization.kernels.kernel_times import ROWS, KernelTable
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.tape import Tape
from tests.quantization.conftest import on_gpu


HOST = torch.device("cpu")
PROMPTS = pad_left(random_rows([4, 6, 5, 7]))
SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1)  # shapes that all differ


class Times:
    """Invented times; `events` has what is timed, and "tokens" after each admission, which draws first tokens. The
    down projection stays dense, and the attention's output takes another kernel than the one that stands in."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.last_row = 1e9  # from which on each kernel is slow

    def measure(self, layer: LayerSpec, given: Sequence[type[PackedWeight]], timer: object) -> KernelTable:
        def seconds(name: str, rows: int, calls: Sequence[Callable[[], Tensor]]) -> float:
            self.events.append((layer.shape, rows))
            if name == "dense" or layer.in_features == SIZES["intermediate_size"] or rows > self.last_row:
                return 1.0 if name == "dense" else 9.0
            return 0.2 if (name == "other") == (layer.shape == "64x64") else 0.4

        return real_measure(replace(layer, device=HOST), given, seconds)


real_measure = kernel_times.measure


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Times:
    times = Times()
    inspected, admit = quantized_copy.inspect_projection, Rollout.admit

    def inspect(module: torch.nn.Module) -> Any:
        return replace(inspected(module), device=torch.device("cuda"))

    def noted(self: Rollout) -> bool:
        has_rows = admit(self)
        times.events.append("tokens")
        return has_rows

    target = ForwardSeconds((1, 64), (1.0, 1.0))
    monkeypatch.setenv("SPEC_TRL_CACHE", str(tmp_path))
    monkeypatch.setattr(quantized_copy, "inspect_projection", inspect)
    monkeypatch.setattr(kernels, "FAST_KERNELS", (on_gpu("other"), on_gpu("triton")))
    monkeypatch.setattr(Rollout, "admit", noted)
    # Drafts of the copy are predicted to pay: the planner tries them when the budget covers that.
    monkeypatch.setattr(measuring, "probe", lambda *_: ProbedRounds(target, {"self": target.scaled(0.05)}))
    monkeypatch.setattr(Planner, "__init__", partialmethod(Planner.__init__, now=lambda: 0.0))  # it plans each round
    for name, value in dict(
        tables={}, failed_kernels=set(), hardware_name=lambda device: "GPU", measure=times.measure
    ).items():
        monkeypatch.setattr(kernel_times, name, value)
    return times


def run(model: LlamaForCausalLM, strategy: str, **config: Any) -> Any:
    config = {"draft_kernel": "auto", "draft_quantization": "rtn-w4-g32", "draft_length": 3, "exact": False} | config
    return generate(model, PROMPTS, strategy, config, max_new_tokens=20)


def timed(times: Times) -> list[tuple[str, int]]:
    return [event for event in times.events if event != "tokens"]


@pytest.mark.parametrize(
    ("strategy", "toggle", "runner"), [("auto", "measured", "eager"), ("self", "always", "graph")]
)
def test_kernels_are_measured_when_a_draft_first_pays(
    tape: Tape, times: Times, monkeypatch: pytest.MonkeyPatch, strategy: str, toggle: str, runner: str
) -> None:
    """Not before the first token, few shapes, and said once; drafts of the chosen kernels are captured, also in later
    calls, and no token changes. Later processes read the times before they choose."""
    model = tiny_llama(**SIZES)
    expected = outputs(run(model, "none", runner=runner))
    times.events.clear()
    with pytest.warns(UserWarning, match="are measured on .* now, before its first draft: .* shapes") as said:
        found = run(model, strategy, sd_toggle=toggle, runner=runner)
    assert len([each for each in said if "are measured" in str(each.message)]) == 1
    assert times.events[0] == "tokens" and len({rows for _, rows in timed(times)}) == len(ROWS)
    assert 0 < len(set(timed(times))) <= 15
    layers = Session.of(model).drafters["self"].quantized.layers
    chosen = {name.rpartition(".")[2]: layer.packed.name for name, layer in layers.items() if "layers" in name}
    joined = dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "triton")
    assert chosen == joined | {"o_proj": "other"}  # the down projection is as it was
    assert found.statistics.per_drafter["self"].drafted > 0
    times.events.clear()
    for prepare in (lambda: None, partial(spec_trl.release, model)):  # the same copy again; a new one, with the file
        assert outputs(found) == expected and found.statistics.drafter_failure is None
        drafts = found.statistics.per_drafter["self"]
        assert toggle == "measured" or drafts.acceptance_rate > 0.2
        assert runner == "eager" or found.statistics.graphs > 1
        prepare()
        monkeypatch.setattr(kernel_times, "tables", {})
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*measured on")
            found = run(model, strategy, sd_toggle=toggle, runner=runner)
    assert outputs(found) == expected and not timed(times)


@pytest.mark.parametrize(("strategy", "toggle"), [("self", "measured"), ("self", "always")])
def test_a_copy_that_serves_fewer_rows_than_expected_drafts_once(times: Times, strategy: str, toggle: str) -> None:
    """The control learns what was measured, and keeps it for the next call."""
    model, times.last_row = tiny_llama(**SIZES), 1
    expected = outputs(run(model, "none", runner="eager"))
    with pytest.warns(UserWarning, match="are measured"):
        found = run(model, strategy, sd_toggle=toggle, runner="eager")
    assert outputs(found) == expected and found.statistics.drafted_rounds == 1
    session = Session.of(model)
    (drafter,), controls = session.drafters.values(), [entry.control for entry in session.controls.values()]
    assert [control.candidates[0].max_rows for control in controls if control.candidates] == [drafter.max_rows]
    again = run(model, strategy, sd_toggle=toggle, runner="eager").statistics
    assert again.drafted_rounds == 0 and "more rows (4) than" in again.reason
    assert controls == [entry.control for entry in session.controls.values()]
