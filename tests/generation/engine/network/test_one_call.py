"""Decoder layers in C++, each or all in one call, against the families' own code."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm, apply_rotary_pos_emb

from spec_trl.generation.engine.forwards.cpu_runner import CompiledRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.network import cpu_layers
from spec_trl.generation.engine.network.one_call import OneCall
from spec_trl.generation.engine.network.products import make_copies
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.native import native_code
from spec_trl.quantization import quantize_projections
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.network.test_fused_layers import CONFIGS, compare, model_of, other_model, run


pytestmark = pytest.mark.skipif(native_code.compiler() is None, reason="no C++ compiler")
LAYERS, FORWARDS = 2, 4  # of `run`
WHOLE, EACH, NONE = [LAYERS], [1] * LAYERS, [0] * LAYERS
"""What :func:`served` finds in a forward: one call, one for each layer, and none."""
FAMILIES = [*CONFIGS, "smollm3", "phi3", "phi3, rotated in part", "olmo2", "gemma", "gemma2", "gemma3_text"]


def model_in(family: str, dtype: torch.dtype) -> Any:
    if family in CONFIGS:
        return model_of(family, dtype)
    model: Any = other_model(family.split(",")[0], LAYERS, dtype)
    if "part" in family:
        model.config.rope_parameters["partial_rotary_factor"] = 0.5
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if family == "gemma3_text":
        model.config.layer_types = ["sliding_attention", "full_attention"]
        states, model = model.state_dict(), type(model)(model.config).to(dtype).eval()
        model.load_state_dict(states)
    if family == "smollm3":
        model.model.layers[1].self_attn.use_rope = 0
    return model


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Layers that each call computed; 0: it left them to the modules."""
    found: list[int] = []
    call = OneCall.__call__

    def noted(layers: Any, *given: Any) -> Any:
        output = call(layers, *given)
        found.append(0 if output is None else len(layers.indices))
        return output

    monkeypatch.setattr(OneCall, "__call__", noted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_family(served: list[int], family: str, threads: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    network = make_shadow(model_in(family, dtype))
    expected = run(network)
    assert not served, "an eager forward runs the modules as they are"
    torch.set_num_threads(threads)
    try:
        whole = run(network, kind=CompiledRunner)
    finally:
        torch.set_num_threads(before)
    compare(whole, expected)
    assert served == WHOLE * FORWARDS
    layers = network.model.layers
    for watched, found in (([layers[0]], EACH), ([layer.self_attn.o_proj for layer in layers], NONE)):
        for module in watched:
            module.register_forward_hook(lambda module, given, output: None)
        served.clear()
        assert torch.equal(run(network, kind=CompiledRunner), whole), "what hooks watch, in C++ too"
        assert served == found * FORWARDS


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_under_autocast_are_those_of_the_family(served: list[int], family: str, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        network = make_shadow(model_in(family, dtype))
        make_copies(network)
        expected = run(network)
        found = run(network, kind=CompiledRunner)
    assert found.dtype == expected.dtype == torch.bfloat16
    compare(found, expected)
    if family in ("bitnet", "olmo2") and dtype == torch.float32:
        assert not any(served)
    else:
        assert served == WHOLE * FORWARDS


@pytest.mark.parametrize(
    "kind", [(LlamaRMSNorm, None), (Gemma3RMSNorm, 1.0), (Olmo2RMSNorm, 0.0)], ids=["llama", "gemma", "olmo2"]
)
@pytest.mark.parametrize("size", [64, 100])
def test_bfloat16_rounds_where_the_family_does(size: int, kind: tuple[Any, float | None]) -> None:
    """A difference of a last bit of float32 rarely changes a bit of bfloat16."""
    norm, how = kind[0](size, 0.1).bfloat16(), (None, kind[1])
    norm.weight.data = torch.randn(size).bfloat16()
    x, other = torch.randn(2, 50, size).bfloat16()
    total, normed = cpu_layers.add_rms_norm(x, other, norm.weight, 0.1, *how)
    both = cpu_layers.add_rms_norm(x, other, norm.weight, 0.1, *how, norm.weight, 0.1)
    pairs = [(total, x + other), (normed, norm(x + other)), (both[0], norm(x) + other), (both[1], norm(both[0]))]
    pairs += [(cpu_layers.norm_add(x, other, norm.weight, 0.1, kind[1]), other + norm(x))]
    pairs += [(cpu_layers.silu_multiply(x, other), F.silu(x) * other)]
    gate = 4 * x.clamp(min=-0.5)  # of less, torch loses digits in 1 + tanh
    pairs += [(cpu_layers.gelu_multiply(gate, other), F.gelu(gate, approximate="tanh") * other)]
    for ours, theirs in pairs:
        assert (ours != theirs).double().mean() < 2e-3


@pytest.mark.parametrize("angles", [torch.float32, torch.bfloat16], ids=str)
def test_bfloat16_rounds_rotated_heads_where_the_family_does(angles: torch.dtype) -> None:
    heads, (cosine, sine) = torch.randn(50, 1, 3, 40).bfloat16(), torch.randn(2, 50, 1, 40).to(angles)
    cache, places = torch.zeros(2, 50, 3, 1, 40).bfloat16(), (torch.arange(50)[:, None], torch.zeros(50, 1).long())
    rotated = cpu_layers.rotate_and_write(
        heads, heads, heads, cosine, sine, *cache, *places, None, None, 0.0, None, half=20
    )
    theirs, _ = apply_rotary_pos_emb(heads, heads, cosine, sine, unsqueeze_dim=2)
    assert torch.equal(cache[0], rotated) and torch.equal(cache[1], heads.transpose(1, 2))
    assert (rotated != theirs.transpose(1, 2)).double().mean() < 2e-3


def test_chains_are_served(served: list[int]) -> None:
    """Two chains of two tokens after five: the second one's logits are those that it has alone."""
    network = make_shadow(model_of("llama", torch.float32))
    found = []
    for slots, shifts in ((range(5), [0, 0, 0, 2, 2]), ([0, 3, 4], [0, 0, 0])):
        runner = CompiledRunner(network, RaggedCache.for_network(network, 1, 16))
        tokens, own = torch.arange(3, 12)[None], torch.tensor(slots)
        runner.forward(tokens[:, :5], torch.arange(5)[None], 5)
        places = torch.arange(4, 4 + len(own))[None]
        found.append(runner.forward_at(tokens[:, 4:][:, own], places - torch.tensor(shifts), 9, places)[0][:, -2:])
    torch.testing.assert_close(found[0], found[1])
    assert all(served)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_copy_is_served(served: list[int], family: str) -> None:
    """Its packed weights, joined where they are siblings, and biases; what it computes by its modules is the same."""
    model = model_of(family, torch.float32)
    model.config.intermediate_size = 128
    model = type(model)(model.config).eval()
    network = make_shadow(model)
    copy = quantize_projections(network, "rtn-w4-g64", kernel="native")
    whole = run(network, kind=CompiledRunner)
    assert served == WHOLE * FORWARDS
    copy.assert_all_called()
    for layer in network.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, given, output: output)
    served.clear()
    compare(run(network, kind=CompiledRunner), whole)
    assert served == NONE * FORWARDS


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
def test_changes_between_forwards(served: list[int], change: str) -> None:
    network = make_shadow(model_of("bitnet" if "square" in change else "llama", torch.float32))
    before = run(network, kind=CompiledRunner)
    with torch.no_grad():
        CHANGES[change](network.model.layers[1])
    expected = run(network)
    served.clear()
    compare(run(network, kind=CompiledRunner), expected)
    if "rows that" not in change:
        assert not torch.allclose(before, expected)
    expected_of_a_forward = [1, 0] if "hook" in change else [0, 1, 0] if "rows" in change else WHOLE
    assert served == expected_of_a_forward * FORWARDS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 600), (3, 100), (2, 300)], ids=str)
def test_many_tokens_have_the_bits_of_few(served: list[int], shape: tuple[int, int], dtype: torch.dtype) -> None:
    """They are computed in parts of rows, or of a row."""
    rows, count = shape
    model = model_of("llama", dtype)
    model.config.max_position_embeddings = 600
    network = make_shadow(type(model)(model.config).to(dtype).eval())
    tokens, positions = torch.randint(3, 64, shape), torch.arange(count).expand(shape)
    runner = CompiledRunner(network, RaggedCache.for_network(network, rows, 600))
    together = runner.forward(tokens, positions, count)
    for row in range(rows):
        alone = CompiledRunner(network, RaggedCache.for_network(network, 1, 600))
        fed = [slice(start, start + 70) for start in range(0, count, 70)]
        parts = [alone.forward(tokens[row, None, part], positions[row, None, part], count) for part in fed]
        assert torch.equal(together[row, None], torch.cat(parts, dim=1))
    assert set(served) == {LAYERS}


@pytest.mark.parametrize("kind", ["dense", "codes of 4 bits", "codes of 8 bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_teams_of_any_size_have_the_bits_of_one_thread(served: list[int], dtype: torch.dtype, kind: str) -> None:
    """Also of more threads than the CPU has: some wait for those that do not run."""
    config = model_of("llama", dtype).config
    config.hidden_size, config.intermediate_size, config.head_dim = 512, 1536, 128  # work for six threads at a token
    network, before = make_shadow(LlamaForCausalLM(config).to(dtype).eval()), torch.get_num_threads()
    if kind != "dense":
        quantize_projections(network, "rtn-w4-g64" if "4" in kind else "rtn-w8", kernel="native")
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(run(network, kind=CompiledRunner))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], each) for each in found) and served == WHOLE * FORWARDS * 3


def test_many_tokens_of_a_copy_are_left_to_the_modules(served: list[int]) -> None:
    model = model_of("llama", torch.float32)
    model.config.intermediate_size = 128
    network = make_shadow(type(model)(model.config).eval())
    quantize_projections(network, "rtn-w4-g64", kernel="native")
    runner = CompiledRunner(network, RaggedCache.for_network(network, rows=1, columns=64))
    for count in (32, 33):
        served.clear()
        runner.forward(torch.ones(1, count, dtype=torch.long), torch.arange(count)[None], count)
        assert served == (WHOLE if count == 32 else NONE)


def test_drafts_change_no_token(served: list[int]) -> None:
    """Steps of one token, verifications of several, and batches of different size give the same tokens in float32."""
    model = model_of("llama", torch.float32)
    prompts = pad_left(random_rows([4, 9, 6]))
    plain = generate(model, prompts, max_new_tokens=40)
    drafted = generate(model, prompts, "self", max_new_tokens=40)
    assert outputs(drafted) == outputs(plain) and drafted.statistics.total.drafted and any(served)


def test_under_autocast_training_goes_on_after_it(served: list[int]) -> None:
    model, prompts = model_of("llama", torch.float32), pad_left(random_rows([4, 9, 6]))
    with torch.autocast("cpu", torch.bfloat16):
        generate(model, prompts, "none", {"exact": False})
        assert served and all(served)
        model(prompts["input_ids"]).logits.float().sum().backward()


def test_layer_types_beyond_the_last_layer_are_not_read(served: list[int]) -> None:
    model = model_of("qwen2", torch.float32)
    model.config.num_hidden_layers = 1
    network = make_shadow(model)
    compare(run(network, kind=CompiledRunner), run(network))
    assert served == [1] * FORWARDS


def test_where_modules_must_run_they_run_once(served: list[int]) -> None:
    network = make_shadow(model_of("llama", torch.float32))
    network.model.layers[0].register_forward_hook(lambda module, given, output: None)
    embedded: list[int] = []
    network.model.embed_tokens.register_forward_hook(lambda module, given, output: embedded.append(1))
    run(network, kind=CompiledRunner)
    assert len(embedded) == FORWARDS and served == EACH * FORWARDS


def test_a_call_that_is_interrupted_describes_its_layers_anew(
    served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = make_shadow(model_of("llama", torch.float32))
    expected = run(network)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("spec_trl.generation.engine.network.one_call.attention_function", interrupt)
        run(network, kind=CompiledRunner)
    compare(run(network, kind=CompiledRunner), expected)
    assert served == WHOLE * FORWARDS
