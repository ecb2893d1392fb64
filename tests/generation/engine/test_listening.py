"""Hidden states that the target tells its drafters."""

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from spec_trl.generation.engine.cuda.graph_capture import GraphBudget
from spec_trl.generation.engine.cuda.graph_runner import GraphRunner
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.network.shadow import make_shadow
from tests.generation.engine.tape import Tape


LAYERS = [2, 0, 1, 2]  # in an order of their own, one twice; 2 is the number of layers: after the final norm


@pytest.mark.parametrize("kind", ["eager", "graph"])
@torch.no_grad()
def test_states_are_those_of_transformers(kind: str, tiny: LlamaForCausalLM) -> None:
    network = make_shadow(tiny)
    cache, tape = RaggedCache.for_network(network, rows=4, columns=64), Tape()
    runner = EagerRunner(network, cache)
    if kind == "graph":
        runner = GraphRunner(network, cache, GraphBudget(tape, 1e9), kind)
    tokens = torch.randint(3, 64, (3, 40), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40).expand(3, -1)
    states = tiny(tokens, output_hidden_states=True).hidden_states
    heard = torch.full((4, 64, 4 * 64), torch.nan, dtype=torch.float64)  # [rows, columns, width]
    calls: list[Tensor] = []
    others: list[Tensor] = []

    def store(features: Tensor, positions: Tensor, first_row: int) -> None:
        heard[torch.arange(first_row, first_row + len(positions))[:, None], positions] = features
        calls.append(positions)

    def hear(features: Tensor, positions: Tensor, first_row: int) -> None:
        others.append(features[..., 0].clone())

    runner.listen(LAYERS, store)
    runner.listen([1, 0], hear)  # a second one, of other layers
    runner.prefill(tokens[1:, :10], positions[1:, :10], 10, first_row=1)
    runner.prefill(tokens[:1, :10], positions[:1, :10], 10)
    for column in range(10, 40, 2):
        runner.forward(tokens[:, column : column + 2], positions[:, column : column + 2], column + 2)
    torch.testing.assert_close(heard[:3, :40], torch.cat([states[layer] for layer in LAYERS], dim=-1))
    torch.testing.assert_close(others[-1], states[1][:, 38:, 0])
    for _ in range(2):  # who does not listen may stop
        runner.stop_listening(hear)
    assert len(calls) == len(others) == 17 and (tape.replayed > 10) == (kind != "eager")
    runner.stop_listening(store)
    runner.forward(tokens[:, 38:], positions[:, 38:], 40)
    runner.listen(LAYERS, store)
    runner.forward(tokens[:, 38:], positions[:, 38:], 40)
    assert len(calls) == 18 and tape.recorded <= 1


def test_layers_past_the_targets_depth(tiny: LlamaForCausalLM) -> None:
    network = make_shadow(tiny)
    runner = EagerRunner(network, RaggedCache.for_network(network, 1, 8))
    message = r"layers=\[1, 3\]: hidden states \[3\] are asked for, and .* those of 0 to 2"
    with pytest.raises(ValueError, match=message):
        runner.listen([1, 3], lambda *_: None)
