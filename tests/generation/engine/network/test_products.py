"""Copies of float32 weights under autocast, which lie still, with a tape in the place of CUDA graphs."""

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import spec_trl
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import load_assistant
from spec_trl.generation.engine.drafter import DraftSession
from spec_trl.generation.engine.kv.row_memory import RowNeeds
from spec_trl.generation.engine.network.products import Copies, Product, bytes_of_copies, copied_bytes, make_copies
from spec_trl.generation.engine.network.shadow import make_shadow, share_weights
from spec_trl.native import cpu_products
from tests.generation.calls import generate, outputs, pad_left, random_rows


PROMPTS = pad_left(random_rows([5, 9, 1, 12, 7, 7, 3]))
SIZES = dict(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.1,
    eos_token_id=None,
)  # fmt: skip
OTHERS = "qwen2", "gemma2"
OF_GPT2 = dict(vocab_size=64, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.1)


def autocast(dtype: torch.dtype | None = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=dtype is not None)


def model_of(family: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = OF_GPT2 if family == "gpt2" else SIZES
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | options), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "bias" in name:
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model.eval()


def with_adapters(**options: Any) -> PreTrainedModel:
    config = LoraConfig(**dict(r=4, init_lora_weights=False, target_modules="all-linear") | options)
    model: PreTrainedModel = get_peft_model(one_layer(), config).base_model.model
    return model


def one_layer(family: str = "llama", **options: Any) -> PreTrainedModel:
    """A tape is slow."""
    return model_of(family, num_hidden_layers=1, **options)


def eager(model: nn.Module, strategy: str = "none", config: dict[str, Any] | None = None, **options: Any) -> Any:
    return graph(model, strategy, (config or {}) | {"runner": "eager"}, **options)


def graph(model: nn.Module, strategy: str = "none", config: dict[str, Any] | None = None, **options: Any) -> Any:
    chosen = {"runner": "graph"} | (config or {})
    return generate(model, PROMPTS, strategy, chosen, **{"max_new_tokens": 20} | options)


# ---- what they compute ----------------------------------------------------------------------------------------------


@pytest.mark.instructions
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda: model_of("llama", tie_word_embeddings=True), torch.bfloat16),
        (lambda: model_of("qwen2"), torch.float16),
        (lambda: model_of("gpt2"), torch.bfloat16),
        (lambda: model_of("gpt2"), torch.float16),
        (lambda: model_of("gemma2"), torch.bfloat16),
        (lambda: with_adapters(), torch.float16),
        (lambda: with_adapters(use_dora=True), torch.bfloat16),
        (lambda: with_adapters(modules_to_save=["lm_head"]), torch.bfloat16),
        (
            lambda: with_adapters(
                target_modules=["k_proj", "v_proj"], target_parameters=["q_proj.weight", "lm_head.weight"]
            ),
            torch.bfloat16,
        ),
    ],
    ids=["tied", "biases", "Conv1D", "Conv1D in float16", "gemma2", "LoRA", "DoRA", "trained head", "LoRA on weights"],
)
@torch.no_grad()
def test_they_are_what_autocast_casts_bit_for_bit(
    make: Callable[[], PreTrainedModel], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "library", lambda *_: None)  # the products are those of the model, on a CPU too
    model, tokens = make(), torch.arange(14).view(2, 7) + 3
    shadow = make_shadow(model)
    expected = shadow(tokens, use_cache=False).logits  # in float32 oneDNN multiplies, for the model another library
    torch.testing.assert_close(expected, model(tokens, use_cache=False).logits)
    with autocast(dtype):
        cast = model(tokens, use_cache=False).logits
        needed = bytes_of_copies(model, dtype)
        make_copies(shadow)
        assert torch.equal(shadow(tokens, use_cache=False).logits, cast)
        layers = [module for module in shadow.modules() if isinstance(module, Product)]
        assert len(layers) >= (9 if model.config.model_type == "gpt2" else 15) and copied_bytes(shadow) == needed
        for layer in layers:
            for tensor in layer.copies or ():
                assert tensor is None or tensor.zero_().dtype == dtype
        assert not torch.equal(shadow(tokens, use_cache=False).logits, cast), "it reads them"
    assert torch.equal(shadow(tokens, use_cache=False).logits, expected), "but not without autocast"
    assert copied_bytes(shadow) == needed == sum(p.numel() for p in copied(model)) * 2


def copied(model: PreTrainedModel) -> list[Tensor]:
    """Weights and biases of linear layers."""
    layers = [m for m in model.modules() if type(m) is nn.Linear or type(m).__name__ == "Conv1D"]
    return list({id(p): p for layer in layers for p in layer.parameters(recurse=False)}.values())


@pytest.mark.parametrize("strategy", ["none", "self"])
@pytest.mark.parametrize("family", ["llama", "qwen3", *(pytest.param(f, marks=pytest.mark.slow) for f in OTHERS)])
def test_as_many_replays_as_a_bfloat16_policy_has(family: str, strategy: str, tape) -> None:
    """And the tokens of eager forwards, with and without drafts."""
    found = []
    for model, dtype in ((one_layer(family), torch.bfloat16), (one_layer(family).bfloat16(), None)):
        with autocast(dtype):
            before = tape.recorded, tape.replayed
            result = graph(model, strategy, {"draft_length": 2})
            found.append((tape.recorded - before[0], tape.replayed - before[1], result.statistics.graphs))
            assert outputs(result) == outputs(eager(model))
        assert (result.statistics.total.accepted > 20) == (strategy == "self")
        assert result.statistics.copied_bytes == (0 if dtype is None else 2 * sum(p.numel() for p in copied(model)))
        assert result.statistics.drafter_failure is None
    assert found[0][1] > 5 and found[0][0] == found[1][0]
    rounds_differ = 2 if strategy == "self" else 0  # other logits, and so other drafts that are accepted
    assert abs(found[0][1] - found[1][1]) <= rounds_differ, found


@pytest.mark.slow
def test_compiled_layers_read_them_too(tape) -> None:
    model = one_layer("qwen2")
    with autocast():
        expected = outputs(eager(model))
        for strategy in ("none", "self"):
            assert outputs(graph(model, strategy, {"runner": "compiled"})) == expected
    assert tape.replayed > 20


# ---- weights that change --------------------------------------------------------------------------------------------


@torch.no_grad()
def _in_place(model: Any) -> None:
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)


def _step(model: Any) -> None:
    """Which version counters do not see either."""
    versions = [parameter._version for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    with torch.enable_grad():
        model(PROMPTS["input_ids"], labels=PROMPTS["input_ids"]).loss.backward()
    optimizer.step()
    model.zero_grad()
    assert versions == [parameter._version for parameter in model.parameters()]


def _through_data(model: Any) -> None:
    """Which version counters do not see."""
    for parameter in model.parameters():
        before = parameter._version
        parameter.data.copy_(parameter.data + 0.05 * torch.randn_like(parameter))
        assert parameter._version == before


def _other_memory(model: Any) -> None:
    """As what is gathered from several ranks has it."""
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.05 * torch.randn_like(parameter)


def _other_parameters(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.weight = nn.Parameter(layer.weight.detach() + 0.05 * torch.randn_like(layer.weight))


def _merge(model: Any) -> None:
    for layer in model.modules():
        if hasattr(layer, "merge"):
            layer.merge()


def _train_adapters(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(-1)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "in place": (one_layer, _in_place),
    "optimizer": (lambda: one_layer("qwen2"), _step),
    "data": (lambda: one_layer(tie_word_embeddings=True), _through_data),
    "addresses": (one_layer, _other_memory),
    "parameters": (one_layer, _other_parameters),
    "state dict": (
        lambda: one_layer("qwen2"),
        lambda model: model.load_state_dict({k: v.flip(0).contiguous() for k, v in model.state_dict().items()}),
    ),
    "adapters": (with_adapters, _train_adapters),
    "merged": (with_adapters, _merge),
}
UNSEEN = _step, _through_data, _train_adapters
"""By version counters, by which the quantized copy tells: there it drafts with old weights."""


@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["kept", "freed"])
@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_no_generation_reads_old_ones(make: Any, change: Callable[[Any], Any], keeps: bool, tape) -> None:
    """Nor does the quantized copy where it reads dense weights: it would accept less. All within one autocast, which
    keeps the casts that it makes."""
    model, config = make(), {"keep_graphs": keeps, "draft_length": 2}
    with autocast():
        before = outputs(graph(model, config=config))
        first = graph(model, "self", config)
        assert outputs(first) == before
        change(model)
        fresh, replayed = copy.deepcopy(model), tape.replayed
        result = graph(model, "self", config)
        assert tape.replayed > replayed + 5
    with autocast():
        expected, drafted = eager(fresh), eager(fresh, "self", config).statistics.total
    assert outputs(result) == outputs(expected) and (outputs(expected) != before or change is _merge)
    assert change in UNSEEN or result.statistics.total == drafted
    assert drafted.accepted > 20


def _prune(layer: nn.Module) -> Tensor:
    prune.l1_unstructured(layer, "weight", 0.3)
    weight: Tensor = layer.weight_orig
    return weight


def _parametrize(layer: nn.Module) -> Tensor:
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    weight: Tensor = layer.parametrizations.weight.original
    return weight


@pytest.mark.parametrize("compute", [_prune, _parametrize])
def test_weights_that_each_forward_computes_have_none(compute: Callable[[nn.Module], Tensor], tape) -> None:
    model = one_layer()
    weights = [compute(getattr(model.model.layers[0].mlp, name)) for name in ("gate_proj", "down_proj")]
    with autocast():
        before = outputs(graph(model))
    with torch.no_grad():
        for weight in weights:
            weight.copy_(weight.flip(0))
    replayed = tape.replayed
    with autocast():
        assert outputs(graph(model)) == outputs(eager(model)) != before and tape.replayed > replayed


# ---- lifetime and memory --------------------------------------------------------------------------------------------


def alive() -> int:
    """Number of copies there are, without a collection of garbage."""
    return sum(type(each) is Copies for each in gc.get_objects())


def test_they_live_as_long_as_what_was_captured(tape) -> None:
    """Those of an eager runner end with the call, garbage or not; a drafter and what learns from it keep none."""
    model = one_layer()
    drafter = SelfDrafter(model)
    gc.collect()
    started = alive()
    with autocast():
        assert copied_bytes(drafter.network) == 0 and eager(model, drafter=drafter).statistics.copied_bytes > 0
        assert alive() == started and copied_bytes(drafter.network) == 0
        graph(model, drafter=drafter)
        assert alive() == started + 8 and copied_bytes(drafter.network) == 0
        recorded = tape.recorded
        graph(model, drafter=drafter)
        assert (alive(), tape.recorded) == (started + 8, recorded), "the same, at the same addresses"
        graph(model, drafter=drafter, config={"keep_graphs": False})
        assert alive() == started
        graph(model, drafter=drafter)
    spec_trl.release(model)
    assert alive() == started


def test_the_quantized_copy_reads_the_targets_own(tape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head, and the projections that it runs where rows are many, at the same addresses in the next call."""
    begin, found = SelfDrafter.begin, []

    def watched(drafter: SelfDrafter, session: DraftSession) -> None:
        begin(drafter, session)
        assert session.target is not None
        network, target = drafter.network, session.target.network
        assert network.lm_head.copies is target.lm_head.copies is not None
        assert network.model.layers[0].mlp.up_proj.dense.copies is target.model.layers[0].mlp.up_proj.copies
        found.append((copied_bytes(network), copied_bytes(target), target.lm_head.copies.weight.data_ptr()))

    monkeypatch.setattr(SelfDrafter, "begin", watched)
    model = one_layer()
    with autocast():
        for _ in range(2):
            graph(model, "self", {"efficient_rollout": {"lm_head": "dense"}})
    (ours, theirs, _), second = found
    assert found[0] == second and ours == theirs == 2 * sum(weight.numel() for weight in copied(model))


def test_a_call_that_fails_frees_them(tape) -> None:
    gc.collect()  # those of earlier tests
    model, started = one_layer(), alive()

    def fail(*_: Any) -> Tensor:
        raise RuntimeError("of the caller")

    with autocast(), pytest.raises(RuntimeError, match="of the caller"):
        graph(model, logits_processor=[fail])
    gc.collect()
    assert alive() == started


def test_what_learns_has_none() -> None:
    shadow = make_shadow(one_layer())
    with autocast():
        make_copies(shadow)
        assert copied_bytes(shadow) > 0 == copied_bytes(share_weights(shadow))
        assert copied_bytes(make_shadow(shadow)) == copied_bytes(shadow), "a compiled twin reads the same ones"


def test_room_for_rows_counts_them(tape) -> None:
    model = one_layer()
    wide = RowNeeds.of(model, [], verified=6, prefilled=10)
    with autocast():
        mixed = RowNeeds.of(model, [], verified=6, prefilled=10)
        copies = 2 * sum(weight.numel() for weight in copied(model))
        assert mixed.fixed - copies == wide.fixed / 2 and mixed.column == wide.column / 2
        assert graph(model).statistics.copied_bytes == copies


# ---- what has none --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "seen", set())


def test_stacked_experts_are_said_to_be_cast(no_warnings_yet: None) -> None:
    """Once; tokens are right all the same."""
    model = model_of("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, num_hidden_layers=1)
    with autocast():
        expected = model.generate(**PROMPTS, max_new_tokens=8, do_sample=False)
        with pytest.warns(UserWarning, match=r'of Qwen3MoeForCausalLM are not bfloat16.*"dtype": "bfloat16"') as seen:
            for _ in range(2):
                found = eager(model, max_new_tokens=8, do_sample=False, return_dict_in_generate=False)
    assert len([one for one in seen if "are not bfloat16" in str(one.message)]) == 1 and torch.equal(found, expected)


def test_of_other_models_nothing_is_said(no_warnings_yet: None, recwarn: pytest.WarningsRecorder) -> None:
    with autocast():
        for model in (one_layer(tie_word_embeddings=True, vocab_size=2048), one_layer().bfloat16()):
            result = eager(model, max_new_tokens=2)
            assert (result.statistics.copied_bytes > 0) == (model.dtype == torch.float32)
    assert not eager(one_layer(), max_new_tokens=2).statistics.copied_bytes
    assert not [each for each in recwarn if "most weights" in str(each.message)]


def test_an_assistant_by_name_is_loaded_as_the_target_computes(tmp_path: Path) -> None:
    target = one_layer()
    target.save_pretrained(tmp_path)
    for dtype in (torch.bfloat16, None):
        with autocast(dtype):
            assert load_assistant(str(tmp_path), target).dtype == (dtype or torch.float32)
