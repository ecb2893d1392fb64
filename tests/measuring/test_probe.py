"""The probe: how the products of a model and of its copy grow with the tokens of a forward."""

import time

import pytest
from torch import nn

from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.measuring import probe as probing
from spec_trl.measuring.probe import TOKENS, probe
from spec_trl.scheduling.round_costs import ForwardSeconds
from tests.conftest import tiny_llama


def test_products_of_each_kind_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    timed = []

    def seconds(layer: object, tokens: int, *_: object) -> float:
        timed.append((type(layer).__name__, tokens))
        return 1.0 + tokens / 16

    monkeypatch.setattr(probing, "_seconds", seconds)
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


def test_slow_layers_are_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    clock = iter(range(10**6))  # each reading is a second later
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    model = tiny_llama()
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *_: calls.append(1))
    rounds = probe(model, [])
    kinds = {(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)}
    assert len(calls) == len(kinds) * len(TOKENS)
    assert rounds({}, 0, 1, 10.0) == 7 * model.config.num_hidden_layers + 1


def test_forwards_beyond_those_timed_go_on_straight() -> None:
    seconds = ForwardSeconds((1, 4), (1.0, 4.0))
    assert [seconds(tokens) for tokens in (1, 2, 4, 10)] == pytest.approx([1.0, 2.0, 4.0, 10.0])
    assert ForwardSeconds((1, 4), (2.0, 1.0))(8) == 1.0  # noise does not make it cheaper without end
