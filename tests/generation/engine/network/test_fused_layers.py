"""Fused decoder layers against the families' own code: in Triton, interpreted or on a device, and in C++."""

from collections import Counter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BitNetConfig,
    Exaone4Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from benchmarks.gpu.kernels_per_layer import in_a_forward, per_layer
from spec_trl.generation.engine.cuda import graph_runner
from spec_trl.generation.engine.cuda.graph_runner import compiled_twin
from spec_trl.generation.engine.forwards.cpu_runner import CompiledRunner
from spec_trl.generation.engine.forwards.runner import EagerRunner
from spec_trl.generation.engine.kv.cache import RaggedCache
from spec_trl.generation.engine.network import cpu_layers, fused_layers, one_call
from spec_trl.generation.engine.network.products import make_copies
from spec_trl.generation.engine.network.shadow import keep_states, make_shadow
from spec_trl.native import cpu_products
from spec_trl.native.native_code import compiler
from spec_trl.papers.specactor.decoupled.tail import TailCache
from spec_trl.quantization import quantize_projections
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.tiny_families import PER_LAYER, tiny_settings
from tests.tiny_vision import VISION


pytest.importorskip("triton", reason="Triton is not installed")

SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=24, max_position_embeddings=256, initializer_range=0.1,
)  # fmt: skip
CONFIGS = {
    "bitnet": BitNetConfig(**SIZES | {"head_dim": 16}, hidden_act="silu"),
    "llama": LlamaConfig(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=4),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
}


def slow(parameter: object) -> object:
    return pytest.param(*parameter if isinstance(parameter, tuple) else [parameter], marks=pytest.mark.slow)


def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).to(dtype).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.no_grad()
def run(network: PreTrainedModel, cache: RaggedCache | None = None, kind: type = EagerRunner) -> torch.Tensor:
    """Logits `[2, n, V]` of four forwards: prompts, and rounds of several tokens and of one, each row where it is."""
    runner = kind(network, cache or RaggedCache.for_network(network, rows=3, columns=64))
    tokens = torch.arange(14).view(2, 7) + 3
    starts = torch.tensor([[0], [5]])  # the second row has more text: its first tokens are those of its prompt
    runner.prefill(tokens[1:, :5], torch.arange(5)[None], 5, first_row=1)
    logits = []
    for begin, end in ((0, 3), (2, 4), (4, 5)):
        positions = starts + torch.arange(begin, end)
        logits.append(runner.forward(tokens[:, begin:end], positions, 5 + end))
    return torch.cat(logits, dim=1)


def names_of(network: nn.Module) -> set[str]:
    return {type(module).__name__ for module in network.modules()}


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """The modules norm in float32 whatever their dtype; the interpreter truncates to bfloat16."""
    error = (ours.double() - theirs.double()).norm(dim=-1) / theirs.double().norm(dim=-1)  # [B, q]
    assert error.max() < {torch.bfloat16: 0.05, torch.float16: 4e-3}.get(theirs.dtype, 5e-6)


@pytest.mark.parametrize("dtype", [*map(slow, (torch.float64, torch.bfloat16)), torch.float32], ids=str)
@pytest.mark.parametrize("family", CONFIGS)
def test_a_forward_is_that_of_the_family(fused, family: str, dtype: torch.dtype) -> None:
    model = model_of(family, dtype)
    network = fused(model)
    name = type(model).__name__.removesuffix("ForCausalLM")
    assert {f"Fused{name}{part}" for part in ("RMSNorm", "MLP", "Attention", "DecoderLayer")} < names_of(network)
    compare(run(network), run(make_shadow(model)))


# Other families with known code: the parts that are fused (norms, MLPs, attention, decoder layers), and how many
# operations a layer takes; None: experts come to it.
OTHERS: dict[str, tuple[str, int | None]] = {
    "gemma3_text": ("NMAD", 14), "qwen3_5_text": ("NMAD", 15), "qwen3_vl": ("NMAD", 14), "olmo2": ("NMAD", 15),
    "gpt_oss": ("NAD", None), "glm4_moe": ("NMAD", None), "phi3": ("NMAD", 11), "gemma2": ("NMAD", 14),
    "gemma3": ("NMAD", 14), "qwen2_5_vl": ("NMAD", 14), "smolvlm": ("NMAD", 14), "smollm3": ("NMAD", 14),
    "qwen3_vl_moe": ("NAD", None), "qwen3_next": ("NMAD", None), "mixtral": ("NAD", None), "granite": ("NMA", 17),
    "seed_oss": ("NAD", 15),
}  # fmt: skip
PARTS = dict(N="RMSNorm", M="MLP", A="Attention", D="DecoderLayer")
OWN: dict[str, dict[str, Any]] = {"glm4_moe": {"use_qk_norm": True}, "smollm3": {"no_rope_layers": [1, 0]}}


def quick(*names: str) -> list[Any]:
    return [name if name in names else slow(name) for name in OTHERS]


def other_model(family: str, layers: int, dtype: torch.dtype) -> PreTrainedModel:
    """All of its layers are of the last of its kinds, the one that attends."""
    settings = tiny_settings(kind := CONFIG_MAPPING[family]) | OWN.get(family, {})
    text = settings.get("text_config", settings)
    text |= {name: [text[name][0 if "rope" in name else -1]] * layers for name in PER_LAYER if name in text}
    text["num_hidden_layers"] = layers
    if family in VISION:
        settings["vision_config"] |= VISION[family]
    config = kind(**settings)
    config.get_text_config()._experts_implementation = "eager"
    auto = AutoModelForImageTextToText if family in VISION else AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(0, 0.1) if parameter.dim() > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("dtype", [slow(torch.float64), torch.float32], ids=str)
@pytest.mark.parametrize("family", quick("gemma3_text", "qwen3_5_text", "gpt_oss"))
def test_a_forward_is_that_of_any_family_with_known_code(fused, family: str, dtype: torch.dtype) -> None:
    model = other_model(family, 1, dtype)
    network, plain = fused(model), make_shadow(model)
    names = {name for name in names_of(network) if name.startswith("Fused")}
    assert {part for part, suffix in PARTS.items() for name in names if name.endswith(suffix)} == {*OTHERS[family][0]}
    compare(run(network), run(plain))
    if dtype == torch.float32 and OTHERS[family][1] is not None:  # roundings send tokens to other experts
        with torch.autocast("cpu", torch.float16):
            make_copies(network)
            compare(run(network), run(plain))


@pytest.mark.parametrize("dtype", [slow(torch.bfloat16), torch.float16], ids=str)
@pytest.mark.parametrize("family", [*map(slow, ("bitnet", "mistral", "qwen2")), "llama", "qwen3"])
def test_a_float32_forward_under_autocast_is_that_of_the_family(fused, family: str, dtype: torch.dtype) -> None:
    """Norms, angles and residual stream in float32 beside narrow products; a projection that is watched is given what
    the family's own code gives it."""
    model = model_of(family, torch.float32)
    network, plain = fused(model), make_shadow(model)
    cache = RaggedCache.for_network(network, rows=3, columns=64)
    with torch.autocast("cpu", dtype):
        make_copies(network)
        expected = run(plain)
        compare(run(network, cache), expected)
        assert {states.dtype for layer in cache.layers for states in (layer.keys, layer.values)} == {dtype}
        given: set[torch.dtype] = set()
        projection = network.model.layers[0].self_attn.q_proj
        projection.register_forward_pre_hook(lambda _, inputs: given.add(inputs[0].dtype))
        compare(run(network), expected)
    assert given == {torch.float32}


@pytest.fixture
def in_cpp(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the compiled functions that ran, where layers are not one call (test_one_call.py)."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(one_call.OneCall, "__call__", lambda *given: None)
    ran: list[str] = []

    def note(name: str) -> None:
        function = getattr(cpu_layers, name)
        monkeypatch.setattr(cpu_layers, name, lambda *given: (ran.append(name), function(*given))[1])

    for name in ("rms_norm", "add_rms_norm", "norm_add", "silu_multiply", "gelu_multiply", "rotate_and_write"):
        note(name)
    return ran


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("family", CONFIGS)
def test_in_cpp_a_forward_is_that_of_the_family(
    in_cpp: list[str], monkeypatch: pytest.MonkeyPatch, family: str, threads: int
) -> None:
    monkeypatch.setattr(cpu_layers, "_threads", lambda out: threads)
    exact = make_shadow(model_of(family, torch.float64))
    run(exact, kind=CompiledRunner)
    assert not in_cpp, "float64 is for exactness"
    network = make_shadow(model_of(family, torch.float32))
    expected = run(network)
    assert not in_cpp, "an eager forward runs the modules as they are"
    compare(run(network, kind=CompiledRunner), expected)
    norms = 2 * 4 * (3 if family == "bitnet" else 1) + 4  # layers x forwards, and the last one
    assert Counter(in_cpp) == dict(rms_norm=norms, add_rms_norm=8, silu_multiply=8, rotate_and_write=8)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("granite", dict(rms_norm=5 * 4, silu_multiply=8, rotate_and_write=8)),
        ("mixtral", dict(rms_norm=3 * 4, add_rms_norm=8, rotate_and_write=8)),
        ("gemma", dict(rms_norm=3 * 4, add_rms_norm=8, gelu_multiply=8, rotate_and_write=8)),
        ("gemma3_text", dict(rms_norm=3 * 4, add_rms_norm=8, norm_add=8, gelu_multiply=8, rotate_and_write=8)),
        ("olmo2", dict(rms_norm=5 * 4, norm_add=16, silu_multiply=8, rotate_and_write=8)),
        ("phi3", dict(rms_norm=3 * 4, add_rms_norm=8, silu_multiply=8, rotate_and_write=8)),
    ],
)
def test_in_cpp_what_has_llamas_code_in_other_families(
    in_cpp: list[str], family: str, expected: dict[str, int]
) -> None:
    network = make_shadow(other_model(family, 2, torch.float32))
    theirs = run(network)
    assert not in_cpp, "the eager forward runs as it is"
    compare(run(network, kind=CompiledRunner), theirs)
    assert Counter(in_cpp) == expected


def test_in_cpp_with_packed_weights_adapters_and_hooks(in_cpp: list[str]) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    network = make_shadow(get_peft_model(model_of("qwen3", torch.float32), config).base_model.model)
    compare(run(network, kind=CompiledRunner), run(network))
    assert Counter(in_cpp) == dict(rms_norm=12, add_rms_norm=8, silu_multiply=8, rotate_and_write=8), "as without"
    quantize_projections(network, kernel="reference")
    compare(run(network, kind=CompiledRunner), run(network))
    in_cpp.clear()
    network.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, given, out: 2 * out)
    compare(run(network, kind=CompiledRunner), run(network))
    assert Counter(in_cpp)["add_rms_norm"] == 4, "one layer's is watched"


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what stands in for kernels on a CPU")
@pytest.mark.parametrize(
    ("family", "quantized", "expected"),
    [("qwen2", False, 14), ("qwen2", True, 12), slow(("llama", True, 11)), slow(("qwen3", False, 14))],
)
@pytest.mark.parametrize("mixed", [False, True], ids=["one dtype", "float32 under autocast"])
def test_at_most_fourteen_kernels_in_a_layer(
    family: str, quantized: bool, expected: int, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm, three projections, rotation, two of attention, projection, add and norm, two projections, silu,
    projection, add; of packed projections that share an input one, with one more for biases."""
    monkeypatch.setattr(cpu_products, "library", lambda *_: None)  # what counts hears torch alone
    found = per_layer(family, quantized, mixed=mixed)
    assert found.total() == expected <= 14 and found["ragged_decode_attention"] == 2, found


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what stands in for kernels on a CPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float32)], ids=["one dtype", "float32 under autocast"])
@pytest.mark.parametrize("family", quick("gemma3_text", "qwen3_5_text", "qwen3_vl"))
def test_at_most_eighteen_kernels_in_a_layer(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "library", lambda *_: None)
    few, many = (in_a_forward(other_model(family, layers, dtype)) for layers in (1, 2))
    found, expected = many - few, OTHERS[family][1]
    attends = dict(rotate_and_write=1, ragged_decode_attention=2)
    assert {name: found[name] for name in attends} == attends, found
    if expected is not None and family not in ("granite", "olmo2", "seed_oss", "phi3"):  # casts come to these
        assert found.total() == expected <= 18, found
    elif expected is not None:
        assert dtype == torch.float32 or found.total() == expected, found


@pytest.mark.slow
def test_one_compilation_serves_all_layers(fused) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    network = fused(model_of("qwen3"))
    cache = RaggedCache.for_network(network, rows=3, columns=64)
    expected = run(network, cache)
    with pytest.MonkeyPatch.context() as patch:
        compile_ = torch.compile
        patch.setattr(graph_runner.torch, "compile", lambda f, **options: compile_(f, backend=counter, **options))
        twin = compiled_twin(network, cache)
    assert names_of(twin) == names_of(network)
    compare(run(twin, cache), expected)
    assert counter.frame_count <= 4  # as many as shapes, whatever the number of layers


def test_hooks_see_what_they_saw(fused) -> None:
    """On modules that a kernel would pass over, whether they came with the model or later; and hidden states."""
    model = model_of("qwen3")
    plain, network = make_shadow(model), fused(model)
    seen: dict[str, list[torch.Tensor]] = {}

    def watch(shadow: PreTrainedModel, whose: str) -> None:
        layer = shadow.model.layers[1]
        for module in (layer.post_attention_layernorm, layer.self_attn.k_norm, layer.mlp.act_fn):
            module.register_forward_hook(lambda _module, _args, output: seen[whose].append(output) or output * 1.5)
        keep_states(shadow, [0, 1, 2], states := {})
        seen[whose] = []
        seen[whose + " logits"] = [run(shadow)]
        seen[whose] += states.values()

    watch(plain, "plain")
    watch(network, "fused")
    assert len(seen["plain"]) == len(seen["fused"]) == 3 * 4 + 3
    for ours, theirs in zip(seen["fused"] + seen["fused logits"], seen["plain"] + seen["plain logits"], strict=True):
        compare(ours, theirs)


def test_with_gradient_or_other_caches_the_own_code_runs(fused) -> None:
    model = model_of("llama")
    network, tokens = fused(model), torch.arange(5)[None]
    gradients = []
    for shadow in (make_shadow(model), network):
        shadow(tokens).logits.sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        model.zero_grad()
    assert all(map(torch.equal, *gradients))
    with torch.no_grad():
        compare(network(tokens, use_cache=False).logits, model(tokens).logits)
        compare(network(tokens, use_cache=True).logits, model(tokens).logits)
        cache = RaggedCache.for_network(network, rows=1, columns=64)
        runner = EagerRunner(network, cache)
        runner.prefill(tokens[:, :3], torch.arange(3)[None], 3)
        tail = EagerRunner(network, TailCache(cache, torch.tensor([4]), size=4))
        compare(tail.forward(tokens[:, 3:], torch.tensor([[3, 4]]), 5), model(tokens).logits[:, 3:])


def test_what_is_not_known_keeps_its_own_code(fused, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(fused_layers, "compiler", lambda: None)  # on a CPU
        assert not any(name.startswith("Fused") for name in names_of(make_shadow(model_of("llama"))))
    with_own_attention = AutoModelForCausalLM.from_config(Exaone4Config(**SIZES))  # rotates in some layers alone
    assert "Exaone4Attention" in names_of(fused(with_own_attention))
    model = model_of("llama")
    first, second = model.model.layers
    first.mlp.act_fn = nn.ReLU()
    first.post_attention_layernorm.forward = lambda hidden_states: hidden_states
    second.mlp.__class__ = own = type("LlamaMLP", (LlamaMLP,), {})  # as code of a hub's model has them
    network = fused(model)
    layers = network.model.layers
    assert [type(layer.mlp) for layer in layers] == [LlamaMLP, own]
    assert type(layers[0].post_attention_layernorm) is LlamaRMSNorm
    compare(run(network), run(make_shadow(model)))


def test_where_triton_cannot_launch_the_own_code_runs(fused, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("no compiler here")

    fused_layers.launches.cache_clear()
    monkeypatch.setattr("spec_trl.generation.engine.cuda.kernels.fused_layer.rms_norm", no_compiler)
    with pytest.warns(UserWarning, match="keep transformers' own code.*no compiler here") as seen:
        network = fused(model_of("llama"))
    fused_layers.launches.cache_clear()
    assert len(seen) == 1 and not any(name.startswith("Fused") for name in names_of(network))


def test_a_shadow_of_a_shadow_is_the_same(fused) -> None:
    network = fused(model_of("mistral"))
    assert names_of(make_shadow(network)) == names_of(network)


@pytest.mark.parametrize("family", ["llama", slow("qwen3")])
def test_tokens_are_those_of_the_families_code(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_of = fused_layers.layer_of
    model = tiny_llama(num_hidden_layers=1) if family == "llama" else model_of(family)
    prompts = pad_left(random_rows([5, 3]))
    expected = outputs(generate(model, prompts, max_new_tokens=6))
    monkeypatch.setattr(fused_layers, "run_on", lambda device: True)
    used = []
    monkeypatch.setattr(fused_layers, "layer_of", lambda *given: used.append(layer_of(*given)) or used[-1])
    for strategy in ("none", "self"):
        result = generate(model, prompts, strategy, {"draft_length": 3}, max_new_tokens=6)
        assert outputs(result) == expected and result.statistics.drafter_failure is None
    assert used and None not in used and result.statistics.total.accepted > 0
