"""The probe: how the products of a model and of its copy grow with the tokens of a forward."""

import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from spec_trl import SpeculativeConfig
from spec_trl.generation import probe as probing
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.engine.cuda.graph_capture import Outputs, Recording
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.planner.clock import ForwardSeconds
from spec_trl.generation.probe import TOKENS, probe
from spec_trl.native import cpu_products
from spec_trl.native.native_code import compiler
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from tests.conftest import tiny_llama
from tests.tiny_families import make


CONFIG = SpeculativeConfig()
Product = tuple[int, int, int]
"""Tokens, output and input features."""


class Device:
    """Stands for a GPU that captures. A product takes a time by its weights and tokens, and the very first one five
    seconds more: it compiles."""

    def __init__(self) -> None:
        self.now, self.recorded, self.replayed = 5.0, 0, 0
        self.products: list[Product] = []  # since a forward was recorded

    @staticmethod
    def takes(tokens: int, rows: int, columns: int) -> float:
        return 1e-6 * rows * columns + 1e-3 * tokens

    def multiply(self, tokens: int, rows: int, columns: int) -> None:
        self.now += self.takes(tokens, rows, columns) + (5.0 if self.now == 0.0 else 0.0)
        self.products.append((tokens, rows, columns))

    def record(self, work: Callable[[], Outputs]) -> Recording:
        self.recorded += 1
        self.products.clear()
        before = self.now
        logits, features = work()
        took = self.now - before

        def replay() -> None:
            self.replayed += 1
            self.now += took

        return Recording(replay, logits, features)

    def seconds(self, replay: Callable[[], None], replays: int) -> float:
        before = self.now
        for _ in range(replays):
            replay()
        return (self.now - before) / replays


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Each look at the host's clock finds it a minute later."""
    device, multiply = Device(), F.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        device.multiply(x[..., 0].numel(), *weight.shape)
        return multiply(x, weight, bias)

    minutes = itertools.count(0.0, 60.0)
    monkeypatch.setattr(F, "linear", linear)
    monkeypatch.setattr(cpu_products, "library", lambda *_: None)
    monkeypatch.setattr(cpu_products, "HAS_ONEDNN", False)
    monkeypatch.setattr(runner_choice, "recorder_for", lambda _: device)
    monkeypatch.setattr(time, "perf_counter", lambda: next(minutes))
    return device


@pytest.mark.skipif(compiler() is None, reason="on a CPU fused layers are compiled")
def test_captured_forwards_are_timed_as_they_will_run(device: Device) -> None:
    """By the device's time alone, without the first call. What is joined is one product: q, k, v, and gate, up."""
    device.now = 0.0  # nothing is compiled
    model, layers = tiny_llama(vocab_size=80).float(), 2
    with torch.inference_mode():  # in which fused layers run on a CPU as on a GPU
        rounds = probe(model, [SelfDrafter(model, kernel="reference", lm_head="dense", packs_later=True)], CONFIG)
    assert device.recorded == 2 * len(TOKENS) and device.replayed == probing.REPLAYS * device.recorded
    assert device.products == [*[(64, 128, 64), (64, 64, 64)] * 2 * layers, (64, 80, 64)]  # the copy's, of 64 rows
    dense = [*[(64, 64), (32, 64), (32, 64), (64, 64), (64, 64), (64, 64), (64, 64)] * layers, (80, 64)]
    joined = [(128, 64), (64, 64)] * 2 * layers
    for tokens in TOKENS:
        rows = max(tokens, 2)  # without C++, a dense layer multiplies one row as two
        target = sum(device.takes(rows, *each) for each in dense)
        draft = sum(device.takes(tokens, *each) for each in joined) + device.takes(rows, *dense[-1])
        assert rounds({}, 0, tokens, 9.0) == pytest.approx(target)
        assert rounds({"self": 1}, 0, tokens, 9.0) == pytest.approx(target + draft)


def test_where_nothing_is_captured_the_host_counts(device: Device) -> None:
    """A forward that waits for the device, as routed experts do, will run eagerly; so do all under "eager"."""
    model = tiny_llama()
    assert probe(model, [], SpeculativeConfig(runner="eager"))({}, 0, 1, 9.0) >= 60.0 and device.recorded == 0

    def record(work: object) -> None:
        raise RuntimeError("aten::nonzero waits for the device")

    device.record = record
    assert probe(model, [SelfDrafter(model, kernel="reference")], CONFIG)({"self": 1}, 1, 1, 9.0) >= 120.0


def seconds_by_layer(work: Any, device: torch.device) -> float:
    """A layer takes a second and a sixteenth for each token; the forward of a whole network a hundred."""
    return 1.0 + len(work.args[0]) / 16 if isinstance(work.func, nn.Module) else 100.0


def test_products_of_each_kind_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a forward of the target and of its copy: what it takes beyond its products is added to all."""
    model = tiny_llama()
    timed = []

    def seconds(work: Any, device: torch.device) -> float:
        timed.append((type(work.func).__name__, len(work.args[0])))
        return seconds_by_layer(work, device)

    monkeypatch.setattr(probing, "seconds_of", seconds)
    rounds = probe(model, [SelfDrafter(model, kernel="reference"), NgramDrafter(3)], CONFIG)
    layers = 7 * model.config.num_hidden_layers + 1  # with the head
    rest = 100.0 - layers * (1 + 1 / 16)
    assert rounds({}, 0, 1, 100.0) == pytest.approx(100.0)
    assert rounds({}, 0, 16, 100.0) == pytest.approx(2.0 * layers + rest)
    assert rounds({"ngram": 5}, 3, 4, 100.0) == pytest.approx(2.0 * layers + rest)
    assert rounds({"self": 2}, 2, 1, 100.0) == pytest.approx(rounds({}, 0, 3, 100.0) + 200.0)
    kinds = {name for name, _ in timed}
    assert len(kinds) == 3 and len(timed) < 2 * layers * len(TOKENS)
    assert [tokens for name, tokens in timed if name == "method"] == [1, 1]


def test_real_layers_can_be_probed() -> None:
    model = tiny_llama()
    rounds = probe(model, [SelfDrafter(model, kernel="reference")], CONFIG)
    assert rounds({}, 0, 1, 10.0) > 0 and rounds({"self": 1}, 1, 1, 10.0) > 0


def test_layers_in_dtypes_of_their_own_and_transposed_ones() -> None:
    """Adapters stay in float32 over a policy in bfloat16; GPT-2 holds its weights the other way around."""
    adapted = get_peft_model(tiny_llama().bfloat16(), LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
    assert {weight.dtype for weight in adapted.parameters()} == {torch.bfloat16, torch.float32}
    gpt2 = make("gpt2")
    for model in (adapted, gpt2):
        rounds = probe(model, [SelfDrafter(model, kernel="reference")], CONFIG)
        assert rounds({}, 0, 1, 10.0) > 0 and rounds({"self": 1}, 1, 1, 10.0) > rounds({}, 0, 2, 10.0)
    layers = [layer for layer in gpt2.modules() if isinstance(layer, nn.Linear | Conv1D)]
    ticks = iter(range(10**6))  # each call takes a second
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: float(next(ticks)))
        rounds = probe(gpt2, [], CONFIG)
        assert rounds({}, 0, 64, 10.0) == rounds({}, 0, 1, 10.0) == len(layers)  # of which a whole forward takes one


def test_a_copy_that_learns_drafts_like_one_that_does_not() -> None:
    model = tiny_llama()
    drafter = DistilledDrafter(SelfDrafter(model, kernel="reference"), TTSOptions())
    rounds = probe(model, [drafter], CONFIG)
    assert rounds({"tts": 3}, 3, 1, 10.0) > rounds({}, 0, 4, 10.0)


def test_a_head_is_not_timed_but_takes_as_long_for_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model, timed = tiny_llama(vocab_size=640), set()

    def seconds(work: Any, device: torch.device) -> float:
        if not isinstance(work.func, nn.Linear):
            return 0.0  # noise: a whole forward cannot take less than its products
        timed.add(tuple(work.func.weight.shape))
        return float(work.func.weight.numel())

    monkeypatch.setattr(probing, "seconds_of", seconds)
    rounds = probe(model, [], CONFIG)
    layers = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert rounds({}, 0, 1, 10.0) == sum(weight.numel() for weight in layers)
    assert model.lm_head.weight.shape == (640, 64) not in timed and len(timed) == 2


def test_slow_layers_are_called_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    clock = iter(range(10**6))  # each reading is a second later
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    model = tiny_llama()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *_: calls.append(1))
    rounds = probe(model, [], CONFIG)
    kinds = {(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)}
    layers = 7 * model.config.num_hidden_layers + 1
    # The last times follow from those before; and the whole forward is called twice.
    assert len(calls) == 2 * len(kinds) * (len(TOKENS) - 1) + 2 * layers
    assert rounds({}, 0, 1, 10.0) == layers


def test_forwards_beyond_those_timed_go_on_straight() -> None:
    seconds = ForwardSeconds((1, 4), (1.0, 4.0))
    assert [seconds(tokens) for tokens in (1, 2, 4, 10)] == pytest.approx([1.0, 2.0, 4.0, 10.0])
    assert ForwardSeconds((1, 4), (2.0, 1.0))(8) == 1.0  # noise does not make it cheaper without end


def test_a_first_call_that_compiles_is_not_what_a_layer_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, takes = [0.0], iter([5.0, *[0.001] * 99])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Compiles(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now[0] += next(takes)
            return x

    work = partial(Compiles(), torch.zeros(1))
    assert probing.seconds_of(work, torch.device("cpu")) == pytest.approx(0.001)
