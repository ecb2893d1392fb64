"""Classes of transformers are recognised by their code, until somebody replaces it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.utils.deprecation import deprecate_kwarg

from spec_trl.generation.engine.network import fused_layers
from spec_trl.generation.engine.network.known_code import code_of_reference
from spec_trl.generation.engine.network.shadow import make_shadow
from spec_trl.native.native_code import compiler
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.engine.network.test_fused_layers import compare, model_of, names_of, other_model, run


def test_transformers_has_all_references() -> None:
    """A class that it renamed, or wrote anew, would no longer be fused: counts of other families would not tell."""
    assert all(map(code_of_reference, fused_layers._REFERENCES)) and code_of_reference("llama.LlamaNorm") == ""


def test_a_method_that_was_replaced_stays(fused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma3RMSNorm, "_norm", lambda self, x: 2 * x)
    assert "Gemma3RMSNorm" in names_of(fused(other_model("gemma3_text", 1, torch.float32)))


@pytest.fixture
def doubled(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has a function or the forward of a class of Llama's source return twice what it returned."""

    def patch(name: str) -> None:
        owner, attribute = modeling_llama, name
        if hasattr(getattr(modeling_llama, name), "forward"):
            owner, attribute = getattr(modeling_llama, name), "forward"
        before = getattr(owner, attribute)

        @functools.wraps(before)
        def twice(*given: Any, **named: Any) -> Any:
            result = before(*given, **named)
            return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

        monkeypatch.setattr(owner, attribute, twice)

    return patch


PATCHED = {
    "LlamaRMSNorm": "RMSNorm", "LlamaMLP": "MLP", "LlamaAttention": "Attention", "LlamaDecoderLayer": "DecoderLayer",
    "apply_rotary_pos_emb": "Attention", "rotate_half": "Attention",
}  # fmt: skip


def test_a_forward_that_takes_an_old_name_too_is_the_familys_own(fused, monkeypatch: pytest.MonkeyPatch) -> None:
    """So transformers 5.24 decorates all that take a cache."""
    takes_old = deprecate_kwarg("old", "99", new_name="past_key_values")
    for kind in (LlamaAttention, LlamaDecoderLayer):
        monkeypatch.setattr(kind, "forward", takes_old(kind.forward))
    network = fused(model_of("llama", torch.float32))
    assert {"FusedLlamaAttention", "FusedLlamaDecoderLayer"} < names_of(network)


@pytest.mark.parametrize("patched", PATCHED)
def test_a_class_whose_forward_was_replaced_keeps_that(
    fused, doubled: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, patched: str
) -> None:
    """Its subclasses too, and what its forward calls; also where the class was fused before."""
    model = model_of("llama")
    before = run(fused(model))
    doubled(patched)
    network = fused(model)
    ours = {f"FusedLlama{part}" for part in ("RMSNorm", "MLP", "Attention", "DecoderLayer")}
    assert names_of(network) & ours == ours - {f"FusedLlama{PATCHED[patched]}"}
    with monkeypatch.context() as patch:
        patch.setattr(fused_layers, "compiler", lambda: None)
        for module in model.model.layers[1].modules():
            if type(module).__name__ == patched:
                module.__class__ = type(patched, (type(module),), {})
        plain = make_shadow(model)
    compare(run(network), run(plain))
    compare(run(fused(model)), run(plain))
    assert (run(plain) - before).abs().max() > 0.01


def test_a_class_is_patched_between_two_calls(doubled: Callable[[str], None]) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    model, prompts = model_of("llama", torch.float32), pad_left(random_rows([5, 3]))
    before = [outputs(generate(model, prompts)) for _ in range(2)][1]
    doubled("LlamaMLP")
    expected = outputs(generate(model_of("llama", torch.float32), prompts, config={"runner": "eager"}))
    assert outputs(generate(model, prompts)) == expected != before
