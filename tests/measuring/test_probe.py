"""The probe: how the products of a model and of its copy grow with the tokens of a forward."""

import time

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from benchmarks.tiny_families import make
from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.measuring import probe as probing
from spec_trl.measuring.probe import TOKENS, probe
from spec_trl.scheduling.round_costs import ForwardSeconds
from tests.conftest import tiny_llama


def test_products_of_each_kind_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    timed = []

    def seconds(layer: object, x: torch.Tensor) -> float:
        timed.append((type(layer).__name__, len(x)))
        return 1.0 + len(x) / 16

    monkeypatch.setattr(probing, "seconds_of", seconds)
    rounds = probe(model, [SelfDrafter(model, kernel="reference"), NgramDrafter(3)])
    layers = 7 * model.config.num_hidden_layers + 1  # with the head
    assert rounds({}, 0, 16, 100.0) == pytest.approx(2.0 * layers)
    assert rounds({"ngram": 5}, 3, 4, 100.0) == pytest.approx(2.0 * layers)
    assert rounds({"self": 2}, 2, 1, 100.0) > rounds({}, 0, 3, 100.0) + 2 * 1.0
    kinds = {name for name, _ in timed}
    assert len(kinds) == 2 and len(timed) < 2 * layers * len(TOKENS)


def test_real_layers_can_be_probed() -> None:
    model = tiny_llama()
    rounds = probe(model, [SelfDrafter(model, kernel="reference")])
    assert rounds({}, 0, 1, 10.0) > 0 and rounds({"self": 1}, 1, 1, 10.0) > 0


def test_layers_in_dtypes_of_their_own_and_transposed_ones() -> None:
    """Adapters stay in float32 over a policy in bfloat16; GPT-2 holds its weights the other way around."""
    adapted = get_peft_model(tiny_llama().bfloat16(), LoraConfig(r=2, target_modules=["q_proj"])).get_base_model()
    assert {weight.dtype for weight in adapted.parameters()} == {torch.bfloat16, torch.float32}
    gpt2 = make("gpt2")
    for model in (adapted, gpt2):
        rounds = probe(model, [SelfDrafter(model, kernel="reference")])
        assert rounds({}, 0, 1, 10.0) > 0 and rounds({"self": 1}, 1, 1, 10.0) > rounds({}, 0, 2, 10.0)
    layers = [layer for layer in gpt2.modules() if isinstance(layer, nn.Linear | Conv1D)]
    ticks = iter(range(10**6))  # each call takes a second
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: float(next(ticks)))
        assert probe(gpt2, [])({}, 0, 1, 10.0) == len(layers)


def test_a_copy_that_learns_drafts_like_one_that_does_not() -> None:
    model = tiny_llama()
    drafter = DistilledDrafter(SelfDrafter(model, kernel="reference"), Distillation())
    rounds = probe(model, [drafter])
    assert rounds({"tts": 3}, 3, 1, 10.0) > rounds({}, 0, 4, 10.0)


def test_a_head_is_not_timed_but_takes_as_long_for_each_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    model, timed = tiny_llama(vocab_size=640), set()

    def seconds(layer: nn.Linear, x: torch.Tensor) -> float:
        timed.add(tuple(layer.weight.shape))
        return float(layer.weight.numel())

    monkeypatch.setattr(probing, "seconds_of", seconds)
    rounds = probe(model, [])
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
    rounds = probe(model, [])
    kinds = {(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)}
    assert len(calls) == 2 * len(kinds) * (len(TOKENS) - 1)  # the last times follow from those before
    assert rounds({}, 0, 1, 10.0) == 7 * model.config.num_hidden_layers + 1


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

    assert probing.seconds_of(Compiles(), torch.zeros(1)) == pytest.approx(0.001)
