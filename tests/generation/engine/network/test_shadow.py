"""The shadow: own modules over the same Parameters, in eval mode, free of what training left on the policy."""

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import MethodType

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from spec_trl.generation.engine.kv import memory
from spec_trl.generation.engine.network.shadow import make_shadow, share_weights
from spec_trl.generation.engine.network.snapshot import structure
from spec_trl.generation.engine.network.swap import explain
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.tiny_families import make


PROMPTS = pad_left(random_rows([4, 6]))


def test_own_modules_same_parameters(fresh: LlamaForCausalLM) -> None:
    fresh.train()
    shadow = make_shadow(fresh)
    assert type(shadow) is type(fresh)
    own, theirs = dict(fresh.named_modules()), dict(shadow.named_modules())
    assert own.keys() == theirs.keys() and not {id(m) for m in own.values()} & {id(m) for m in theirs.values()}
    assert {id(p) for p in fresh.parameters()} == {id(p) for p in shadow.parameters()}
    assert all(module.training for module in own.values()) and not any(module.training for module in theirs.values())
    assert shadow.config is not fresh.config
    assert {id(module.config) for module in theirs.values() if "config" in vars(module)} == {id(shadow.config)}


def test_weights_are_live_and_edits_stay_in_the_shadow(fresh: LlamaForCausalLM) -> None:
    shadow = make_shadow(fresh)
    shadow.model.layers[0].mlp = nn.Identity()
    shadow.register_forward_hook(lambda *_: pytest.fail("a hook of the shadow ran"))
    assert not isinstance(fresh.model.layers[0].mlp, nn.Identity)
    fresh(torch.arange(3)[None])
    with torch.no_grad():
        fresh.lm_head.weight.mul_(2)
    assert torch.equal(shadow.lm_head.weight, fresh.lm_head.weight)
    fresh.lm_head.weight = nn.Parameter(torch.zeros_like(fresh.lm_head.weight))  # another Parameter altogether
    assert shadow.lm_head.weight is fresh.lm_head.weight
    fresh.to(torch.float32)
    assert shadow.model.norm.weight.dtype == torch.float32


def test_explain_says_what_is_replaced_and_why_not(fresh: LlamaForCausalLM) -> None:
    fresh.model.layers[0].mlp.forward = lambda x: x
    kinds = {type(module) for module in fresh.modules()}
    lines = explain(fresh.float()).splitlines()
    assert {type(module) for module in fresh.modules()} == kinds
    assert any(re.match(r"Linear \(15\) -> ProductOfLinear: products sum in one order", line) for line in lines)
    assert "Embedding (1) stays: no row of the table is about it" in lines
    assert "LlamaMLP (1) stays: its forward was replaced" in lines
    for other in (torch.nn.Linear(2, 2), "a/b"):
        with pytest.raises(ValueError, match="is no model of transformers"):
            explain(other)


def test_tied_and_repeated_modules_stay_one() -> None:
    model = tiny_llama(tie_word_embeddings=True)
    model.model.layers.append(model.model.layers[0])
    shadow = make_shadow(model)
    assert shadow.model.layers[2] is shadow.model.layers[0]
    assert shadow.lm_head.weight is shadow.model.embed_tokens.weight


def test_what_training_leaves_on_a_policy_is_no_change_of_it(fresh: LlamaForCausalLM, tmp_path: Path) -> None:
    """Or its copy would be made anew: hooks of output_hidden_states and of checkpointed activations, and what saving
    writes into a config."""
    fresh(torch.tensor([[3, 4]]))
    before = structure(fresh)
    fresh(torch.tensor([[3, 4]]), output_hidden_states=True)
    fresh.train()
    fresh.enable_input_require_grads()  # as TRL after each rollout, under gradient checkpointing
    fresh.save_pretrained(tmp_path)
    assert structure(fresh) == before
    fresh.model.register_forward_pre_hook(lambda *_: None)
    assert structure(fresh) != before


def test_hooks_of_a_shadow_leave_no_trace_on_the_policy(fresh: LlamaForCausalLM) -> None:
    before = structure(fresh), [dict(layer._forward_pre_hooks_with_kwargs) for layer in fresh.model.layers]
    for layer in make_shadow(fresh).model.layers:
        layer.register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    assert before == (structure(fresh), [dict(layer._forward_pre_hooks_with_kwargs) for layer in fresh.model.layers])


def test_methods_bound_below_the_root_are_bound_to_the_clone(fresh: LlamaForCausalLM) -> None:
    fresh.lm_head.forward = MethodType(lambda self, x: seen.append(self), fresh.lm_head)
    seen: list[nn.Module] = []
    shadow = make_shadow(fresh)
    shadow.lm_head(torch.zeros(1, 64).double())
    assert seen == [shadow.lm_head]


def test_autocast_runs(fresh: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TRL's bf16=True has it: float32 weights under autocast."""
    monkeypatch.setattr(memory, "takes_memory_late", lambda device: False)  # pages are larger than these rows
    model = fresh.float()
    with torch.autocast("cpu", torch.bfloat16):
        result = generate(model, PROMPTS, "self", temperature=0.3)
    assert result.lengths.tolist() == [24, 24] and result.statistics.acceptance_rate > 0.4
    assert result.statistics.cache_bytes < 0.6 * generate(model, PROMPTS, temperature=0.3).statistics.cache_bytes


compiled = partial(torch.compile, backend="eager")


def _compile_in_a_closure(model: LlamaForCausalLM) -> None:
    inside = compiled(model.model.layers[0].mlp.forward)
    model.model.layers[0].mlp.forward = lambda x: inside(x)


def _compile_a_patch(model: LlamaForCausalLM) -> None:
    inside = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = compiled(lambda x: inside(x))


def _compile_under_accelerate(model: LlamaForCausalLM) -> None:
    add_hook_to_module(model, ModelHook())
    model.forward = compiled(model.forward)


COMPILE: dict[str, Callable[[LlamaForCausalLM], object]] = {
    "layers": lambda model: setattr(model.model, "layers", nn.ModuleList(map(compiled, model.model.layers))),
    "in place": lambda model: model.compile(backend="eager"),
    "the forward": lambda model: setattr(model, "forward", compiled(model.forward)),
    "a layer's forward": lambda model: setattr(model.lm_head, "forward", compiled(model.lm_head.forward)),
    "bound": lambda model: setattr(model, "forward", partial(compiled(model.forward), return_dict=True)),
    "in a closure": _compile_in_a_closure,
    "a patch": _compile_a_patch,
    "under accelerate": _compile_under_accelerate,
    "traced": lambda model: setattr(model.model.layers[0], "mlp", torch.fx.symbolic_trace(model.model.layers[0].mlp)),
}


@pytest.mark.parametrize("what", [*COMPILE, "a class's forward", "assistant"])
def test_what_is_compiled_generates_and_drafts_uncompiled(
    what: str, fresh: LlamaForCausalLM, tiny_assistant, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.utils.counters.clear()
    fresh = fresh.float()
    expected = outputs(generate(fresh, PROMPTS))
    options = dict(assistant_model=compiled(deepcopy(tiny_assistant).float())) if what == "assistant" else {}
    if what in COMPILE:
        COMPILE[what](fresh)
    elif what == "a class's forward":
        monkeypatch.setattr(LlamaDecoderLayer, "forward", compiled(LlamaDecoderLayer.forward))
    result = generate(fresh, PROMPTS, "model" if what == "assistant" else "self", **options)
    assert outputs(result) == expected and result.statistics.total.accepted > 0 and result.statistics.exact is True
    assert torch._dynamo.utils.counters["frames"]["total"] == 0


def test_a_compiler_does_not_trace_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled behind a class's forward, which nobody unwraps, calls the C++ as it is."""
    model, graphs = make("llama").float(), []
    expected = outputs(generate(model, PROMPTS))
    kind = type(model.model.layers[0].mlp)
    inside = torch.compile(kind.forward, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    monkeypatch.setattr(kind, "forward", lambda mlp, x: inside(mlp, x))
    result = generate(model, PROMPTS, "ngram", {"draft_length": 2})
    assert outputs(result) == expected and result.statistics.total.drafted > 0
    traced = "".join(node.stack_trace or "" for graph in graphs for node in graph.graph.nodes)
    assert "in by_registers" in traced and "in multiply" not in traced


def test_a_module_of_torch_jit_is_refused(fresh: LlamaForCausalLM) -> None:
    mlp = fresh.model.layers[0].mlp
    fresh.model.layers[0].mlp = torch.jit.trace(mlp, torch.zeros(1, 3, 64).double())
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp', a module of torch.jit: put back the module that it"):
        generate(fresh, PROMPTS)


@pytest.mark.parametrize("family", ["bart", "gpt_neo"])
def test_forwards_that_take_no_positions_or_one_mask_for_all_layers(family: str) -> None:
    model = make(family)
    shadow = make_shadow(model)
    tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        for network in (shadow, share_weights(shadow), make_shadow(shadow)):
            torch.testing.assert_close(network(tokens, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(model(tokens, use_cache=False).logits, expected), "the policy itself is left as it was"
