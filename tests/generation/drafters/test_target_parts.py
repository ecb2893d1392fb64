"""Learned drafters on targets whose embedding and head are wrapped: they borrow what the target computes with."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from spec_trl.drafter_training.sequence_loss import sequence_loss
from spec_trl.generation.drafters.target_parts import plain_embedding
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.drafters.watching import KINDS, make_checkpoint, view_of, watch


PROMPTS = pad_left(random_rows([5, 9, 2]))
TOKENS = random_rows([8])[0][None]  # [1, T]
WORDS, TABLES = list(range(3, 40)), ["embed_tokens", "lm_head"]


def peft(model: nn.Module, **options: Any) -> Any:
    """The model under adapters that matter, and dropout, which must not."""
    given = dict(r=4, lora_alpha=16, target_modules=["q_proj"], lora_dropout=0.5) | options
    wrapped = get_peft_model(model, LoraConfig(**given))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return wrapped.double().eval()


WRAPPED: dict[str, Callable[[], Any]] = {
    "trained tokens": lambda: peft(tiny_llama(), trainable_token_indices=WORDS),
    "trained tokens, tied": lambda: peft(tiny_llama(tie_word_embeddings=True), trainable_token_indices=WORDS),
    "trained copies": lambda: peft(tiny_llama(), modules_to_save=TABLES),
    "LoRA": lambda: peft(tiny_llama(), target_modules=TABLES),
    "DoRA": lambda: peft(tiny_llama(), target_modules=TABLES, use_dora=True),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_and_losses_are_those_on_the_merged_target(kind: str, wrap: Callable[[], Any], tmp_path: Path) -> None:
    wrapped, checkpoint = wrap(), make_checkpoint(tmp_path, kind)
    merged = copy.deepcopy(wrapped).merge_and_unload()
    found, losses = [], []
    for target in (wrapped.get_base_model(), merged):
        drafter = KINDS[kind](checkpoint, target)
        seen = watch(drafter)
        result = generate(target, PROMPTS, drafter=drafter, max_new_tokens=12, config={"draft_length": 3})
        assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 20
        assert outputs(result) == outputs(generate(target, PROMPTS, max_new_tokens=12))
        found.append((seen, outputs(result)))
        view = view_of(target, drafter, TOKENS)
        target.train()  # with live dropout
        state = torch.get_rng_state()
        generator = torch.Generator().manual_seed(0)
        losses.append(sequence_loss(drafter, target, view, generator=generator).cross_entropy.item())
        assert torch.equal(torch.get_rng_state(), state)
    (seen, tokens), (expected, same) = found
    assert tokens == same and losses[0] == pytest.approx(losses[1], abs=1e-9)
    for (row, drafts, logits), (row_, drafts_, logits_) in zip(seen, expected, strict=True):
        assert (row, drafts) == (row_, drafts_)
        torch.testing.assert_close(logits, logits_, rtol=0, atol=1e-9)
    with wrapped.disable_adapter():
        bare = plain_embedding(wrapped.get_base_model())
    table = torch.arange(64)
    assert (bare(table) - plain_embedding(merged)(table)).std() > 0.05  # the wrapper matters


def test_rows_are_without_what_a_family_does_to_them_and_the_target_keeps_it() -> None:
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    target = Gemma3ForCausalLM(config).double().eval()
    tokens, words = torch.arange(64), target.get_input_embeddings()
    expected = words(tokens)  # [64, H]
    assert plain_embedding(target)(tokens).equal(words.weight)
    wrapped = peft(target, target_modules=["embed_tokens"])
    merged = copy.deepcopy(wrapped).merge_and_unload().get_input_embeddings()
    torch.testing.assert_close(plain_embedding(wrapped.get_base_model())(tokens), merged.weight, rtol=0, atol=1e-9)
    assert words(tokens).equal(expected) and not expected.equal(words.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_tables(kind: str, tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    target = tiny_llama().float()
    words = bnb.nn.Embedding8bit(64, 64, dtype=torch.float32)
    words.load_state_dict(target.model.embed_tokens.state_dict())
    head = bnb.nn.Linear4bit(64, 64, False, compute_dtype=torch.float32, quant_type="nf4")
    head.load_state_dict(target.lm_head.state_dict())
    target.model.embed_tokens, target.lm_head = words.to("cpu"), head.to("cpu")
    drafter = KINDS[kind](make_checkpoint(tmp_path, kind), target.eval())
    result = generate(target, PROMPTS, drafter=drafter, max_new_tokens=12, config={"draft_length": 3})
    assert result.statistics.drafter_failure is None and result.statistics.total.drafted > 20
    assert outputs(result) == outputs(generate(target, PROMPTS, max_new_tokens=12))
    assert sequence_loss(drafter, target, view_of(target, drafter, TOKENS)).cross_entropy.isfinite()


def test_a_compiled_embedding_is_read_and_not_run(tmp_path: Path) -> None:
    target = tiny_llama()
    drafter = KINDS["eagle3"](make_checkpoint(tmp_path, "eagle3"), target)
    expected = generate(target, PROMPTS, drafter=drafter)
    target.model.embed_tokens = torch.compile(target.model.embed_tokens)
    found = generate(target, PROMPTS, drafter=drafter)
    assert found.statistics.total == expected.statistics.total and found.statistics.total.drafted > 20
    assert outputs(found) == outputs(expected)
