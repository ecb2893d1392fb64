"""A decoder layer in one call: what it computes, and when it leaves the layer to its modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from spec_trl.generation.engine import cpu_layers
from spec_trl.generation.engine.cache import RaggedCache
from spec_trl.generation.engine.chains import ChainLayout
from spec_trl.generation.engine.runner import CompiledRunner
from spec_trl.generation.engine.shadow import make_shadow
from spec_trl.native_code import compiler
from spec_trl.quantization import quantize_projections
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.test_fused_layers import CONFIGS, compare, model_of, run


pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
LAYERS, FORWARDS = 2, 4  # of `run`


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each layer's forward was one call."""
    found: list[bool] = []
    call = cpu_layers.OneCall.__call__

    def noted(*given: Any) -> Any:
        output = call(*given)
        found.append(output is not None)
        return output

    monkeypatch.setattr(cpu_layers.OneCall, "__call__", noted)
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_layer_is_that_of_the_family(served: list[bool], family: str, threads: int) -> None:
    before = torch.get_num_threads()
    network = make_shadow(model_of(family, torch.float32))
    expected = run(network)
    assert not served, "an eager forward runs the modules as they are"
    torch.set_num_threads(threads)
    try:
        compare(run(network, kind=CompiledRunner), expected)
    finally:
        torch.set_num_threads(before)
    assert served == [True] * LAYERS * FORWARDS


def test_chains_are_served(served: list[bool]) -> None:
    """Two chains of two tokens after five: the second one's logits are those that it has alone."""
    network = make_shadow(model_of("llama", torch.float32))
    found = []
    for slots, shifts in ((range(5), [0, 0, 0, 2, 2]), ([0, 3, 4], [0, 0, 0])):
        runner = CompiledRunner(network, RaggedCache.for_network(network, 1, 16))
        tokens, own = torch.arange(3, 12)[None], torch.tensor(slots)
        runner.forward(tokens[:, :5], torch.arange(5)[None], 5)
        places = torch.arange(4, 4 + len(own))[None]
        layout = ChainLayout(tokens[:, 4:][:, own], places, places - torch.tensor(shifts), own[None, None])
        found.append(runner.forward_chains(layout, 9)[:, -2:])
    torch.testing.assert_close(found[0], found[1])
    assert all(served)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_copy_is_served(served: list[bool], family: str) -> None:
    """Its packed weights, joined where they are siblings, and biases; what it computes by its modules is the same."""
    model = model_of(family, torch.float32)
    model.config.intermediate_size = 128
    model = type(model)(model.config).eval()
    network = make_shadow(model)
    copy = quantize_projections(network, "rtn-w4-g64", kernel="native")
    whole = run(network, kind=CompiledRunner)
    assert served == [True] * LAYERS * FORWARDS
    copy.assert_all_called()
    for layer in network.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, given, output: output)
    served.clear()
    compare(run(network, kind=CompiledRunner), whole)
    assert served == [False] * LAYERS * FORWARDS


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a weight that moves": lambda layer: setattr(layer.mlp.up_proj.weight, "data", 2 * layer.mlp.up_proj.weight.data),
    "a weight written in place": lambda layer: layer.self_attn.o_proj.weight.data.mul_(2),
    "a norm that moves": lambda layer: setattr(layer.input_layernorm.weight, "data", 2 * layer.input_layernorm.weight),
    "rows that do not follow each other": lambda layer: setattr(
        layer.mlp.gate_proj.weight, "data", layer.mlp.gate_proj.weight.data.T.contiguous().T
    ),
    "rows of a square weight become columns": lambda layer: setattr(
        layer.self_attn.q_proj.weight, "data", layer.self_attn.q_proj.weight.data.T
    ),
    "a hook": lambda layer: layer.self_attn.v_proj.register_forward_hook(lambda module, given, output: 2 * output),
    "a hook on a norm": lambda layer: layer.post_attention_layernorm.register_forward_pre_hook(
        lambda module, given: (2 * given[0],)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_forwards(served: list[bool], change: str) -> None:
    network = make_shadow(model_of("bitnet" if "square" in change else "llama", torch.float32))
    before = run(network, kind=CompiledRunner)
    with torch.no_grad():
        CHANGES[change](network.model.layers[1])
    expected = run(network)
    served.clear()
    compare(run(network, kind=CompiledRunner), expected)
    if "rows that" not in change:
        assert not torch.allclose(before, expected)
    by_modules = "hook" in change or "rows" in change
    assert served == [True, not by_modules] * FORWARDS


def test_many_tokens_are_left_to_the_modules(served: list[bool]) -> None:
    network = make_shadow(model_of("llama", torch.float32))
    runner = CompiledRunner(network, RaggedCache.for_network(network, rows=1, columns=64))
    for count in (16, 17):
        served.clear()
        runner.forward(torch.ones(1, count, dtype=torch.long), torch.arange(count)[None], count)
        assert served == [count == 16] * LAYERS


def test_drafts_change_no_token(served: list[bool]) -> None:
    """Steps of one token, verifications of several, and batches of different size give the same tokens in float32."""
    model = model_of("llama", torch.float32)
    prompts = pad_left(random_rows([4, 9, 6]))
    plain = generate(model, prompts, max_new_tokens=40)
    drafted = generate(model, prompts, "self", max_new_tokens=40)
    assert outputs(drafted) == outputs(plain) and drafted.statistics.total.drafted and any(served)
