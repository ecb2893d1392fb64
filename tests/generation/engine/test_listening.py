"""Hidden states that the target tells its drafters."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.cache import RaggedCache
from spec_trl.generation.engine.captured import GraphRunner
from spec_trl.generation.engine.cuda_graphs import GraphBudget
from spec_trl.generation.engine.runner import EagerRunner
from spec_trl.generation.engine.shadow import make_shadow
from tests.generation.engine.tape import Tape


LAYERS = [2, 0, 1, 2]  # in an order of their own, one twice; 2 is the number of layers: after the final norm


class Store:
    """Keeps what it hears where it belongs: `[rows, columns, width]`."""

    def __init__(self) -> None:
        self.features = torch.full((4, 64, 4 * 64), float("nan"), dtype=torch.float64)
        self.calls = 0

    def hear(self, features: Tensor, positions: Tensor, first_row: int) -> None:
        rows = torch.arange(first_row, first_row + len(positions))[:, None]
        self.features[rows, positions] = features
        self.calls += 1


@pytest.mark.parametrize("kind", ["eager", "graph"])
@torch.no_grad()
def test_states_are_those_of_transformers(kind: str, tiny: LlamaForCausalLM) -> None:
    network = make_shadow(tiny)
    cache, tape = RaggedCache.for_network(network, rows=4, columns=64), Tape()
    runner = (
        EagerRunner(network, cache) if kind == "eager" else GraphRunner(network, cache, GraphBudget(tape, 1e9), kind)
    )
    tokens = torch.randint(3, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    states = tiny(tokens, output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer] for layer in LAYERS], dim=-1)
    positions = torch.arange(40).expand(3, -1)
    store = Store()
    runner.listen(LAYERS, store.hear)
    other: list[Tensor] = []

    def hear(features: Tensor, positions: Tensor, first_row: int) -> None:
        other.append(features[..., 0].clone())

    runner.listen([1, 0], hear)  # a second one, of other layers
    runner.prefill(tokens[1:, :10], positions[1:, :10], 10, first_row=1)
    runner.prefill(tokens[:1, :10], positions[:1, :10], 10)
    for column in range(10, 40, 2):
        runner.forward(tokens[:, column : column + 2], positions[:, column : column + 2], column + 2)
    torch.testing.assert_close(store.features[:3, :40], expected)
    assert len(other) == 17
    torch.testing.assert_close(other[-1], states[1][:, 38:, 0])
    for _ in range(2):  # who does not listen may stop
        runner.stop_listening(hear)
    assert store.calls == 17 and (tape.replayed > 10) == (kind != "eager")
    runner.stop_listening(store.hear)
    runner.forward(tokens[:, 38:], positions[:, 38:], 40)
    runner.listen(LAYERS, store.hear)
    runner.forward(tokens[:, 38:], positions[:, 38:], 40)
    assert store.calls == 18 and tape.recorded <= 1


def test_layers_past_the_targets_depth(tiny: LlamaForCausalLM) -> None:
    network = make_shadow(tiny)
    runner = EagerRunner(network, RaggedCache.for_network(network, 1, 8))
    with pytest.raises(
        ValueError, match=r"layers=\[1, 3\]: hidden states \[3\] are asked for, and .* those of 0 to 2"
    ):
        runner.listen([1, 3], lambda *_: None)
