"""Decoder layers through torch.compile."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedModel, Qwen2Config

from spec_trl.generation.engine.cuda import graph_runner
from spec_trl.generation.engine.cuda.graph_runner import compiled_twin
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.papers.test_time_speculation.trained_weights import RowAdapters
from spec_trl.quantization import quantize_projections
from tests.conftest import tiny_llama


SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
)  # fmt: skip


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounterWithBackend:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compile_ = torch.compile
    monkeypatch.setattr(graph_runner.torch, "compile", lambda f, **options: compile_(f, backend=counter, **options))
    return counter


def forward_twice(network: PreTrainedModel, compiled: bool = False) -> torch.Tensor:
    """Logits `[3, 1 + 4, V]` of a forward of one token and one of four more."""
    cache = RaggedCache.for_network(network, rows=4, columns=64)
    tokens = torch.arange(15).view(3, 5)
    positions = torch.arange(5).expand(3, -1).contiguous()
    with torch.no_grad():
        EagerRunner(network, cache).forward(tokens[:, :1], positions[:, :1], 1)
        runner = EagerRunner(compiled_twin(network, cache) if compiled else network, cache)
        first = runner.forward(tokens[:, :1], positions[:, :1], 1)
        return torch.cat([first, runner.forward(tokens[:, 1:], positions[:, 1:], 5)], dim=1)


def test_hooks_of_the_head_stay_and_those_of_transformers_go(counter) -> None:
    """A forward that shows hidden states leaves hooks on every layer, which torch.compile cannot trace."""
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda module, args, output: output * 3)
    model(torch.arange(4)[None], output_hidden_states=True, output_attentions=True)
    network = make_shadow(model)
    assert torch.equal(forward_twice(network, compiled=True), forward_twice(network))


CONFIGS = {
    "alike": Qwen2Config(**SIZES),
    # They differ by the mask alone, which the decoder chooses.
    "windowed and full": Gemma3TextConfig(
        **SIZES, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
}


@pytest.mark.parametrize(
    ("layers", "how"),
    [
        ("alike", "plain"), ("windowed and full", "plain"), ("alike", "learns"),
        pytest.param("alike", "quantized", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_one_compilation_serves_all_layers(counter, layers: str, how: str) -> None:
    network = make_shadow(AutoModelForCausalLM.from_config(CONFIGS[layers]).double().eval())
    if how == "quantized":
        quantize_projections(network, kernel="reference")
    elif how == "learns":
        linear = {name: each for name, each in network.named_modules() if isinstance(each, nn.Linear)}
        found = {name: each for name, each in linear.items() if "layers" in name}
        adapters = RowAdapters(found, rows=1, rank=2)
        for up in adapters.tensors:
            up.normal_()
        adapters.attach(found, lambda: 0)
    torch.testing.assert_close(forward_twice(network, compiled=True), forward_twice(network))
    assert counter.frame_count == 2  # one token per row, and four


def test_twin_shares_the_weights_and_leaves_the_network_alone(counter) -> None:
    network = make_shadow(tiny_llama())
    cache = RaggedCache.for_network(network, 1, 8)
    twin = compiled_twin(network, cache)
    assert [p.data_ptr() for p in twin.parameters()] == [p.data_ptr() for p in network.parameters()]
    assert all("forward" not in vars(layer) for layer in network.model.layers)
    network.model.layers = nn.Sequential(*network.model.layers)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no single list of decoder layers"):
        compiled_twin(network, cache)
