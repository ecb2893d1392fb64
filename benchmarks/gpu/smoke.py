"""Every path of the engine on tiny models, in seconds each: tokens against those of an eager forward,
log-probabilities against transformers' own forward. Models and checkpoints are those of the tests.
"""

import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from transformers import PreTrainedModel

import spec_trl
from spec_trl import SpeculativeOutput
from tests import tiny_families, tiny_vision
from tests.conftest import tiny_llama
from tests.generation.calls import generate, outputs, pad_left, random_rows
from tests.generation.conftest import write_checkpoints
from tests.generation.drafters.mtp.heads import write_heads

from .stage import Stage


GIVEN_UP = (
    "could not be captured", "the attention kernel failed", "kernels do not run on", "is left out of the choice",
    "too little memory is free",
)  # fmt: skip
"""Of warnings, all with the same tokens: what was to run on the GPU did not."""
LENGTHS = (5, 90, 1, 320, 70, 7, 33)
WIDE: dict[str, Any] = dict(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=1024,
)  # fmt: skip
MOST_OTHER_ROWS = 1  # in float32: a near-tie may be decided otherwise
FLOAT32_OFF, BFLOAT16_OFF = 0.01, 0.05  # nats: the largest and the mean difference of log-probabilities
PROCESSED = {"top_p", "top_k", "repetition_penalty"}  # log-probabilities are not those of the logits
Make = Callable[[], PreTrainedModel]


def smoke(stage: Stage) -> None:
    """All cases."""
    device, f32, bf16 = stage.device, torch.float32, torch.bfloat16
    kernel = {"draft_kernel": "triton" if device.type == "cuda" else "reference"}
    exact = {"exact": True} if device.type == "cuda" else {}
    check = partial(check_case, stage)

    def llama(dtype: torch.dtype = f32, **sizes: Any) -> PreTrainedModel:
        return tiny_llama(**(WIDE | sizes)).to(device, dtype)

    def family(name: str) -> PreTrainedModel:
        return tiny_families.make(name).to(device, f32)

    def lora() -> PreTrainedModel:
        return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).eval()

    check("none, float32", llama, "none")
    check("none, bfloat16", partial(llama, bf16), "none")
    check("self, float32", llama, "self")
    packed = {"efficient_rollout": {"lm_head": "packed"}}
    check("self, bfloat16, packed head", partial(llama, bf16), "self", kernel | packed)
    check("auto, bfloat16", partial(llama, bf16), "auto", {"draft_kernel": "auto"}, calls=2, drafts=False)
    for strategy in ("none", "self", "ngram"):
        check(f"exact, {strategy}", partial(llama, bf16), strategy, exact | kernel, bits="exact", do_sample=False)
    for strategy in ("none", "ngram"):  # a mixture
        mixture = partial(family, "gpt_oss")
        check(f"exact gpt_oss, {strategy}", mixture, strategy, exact, bits="gpt_oss", do_sample=False)
    check("top-p, top-k", llama, "self", top_p=0.9, top_k=20)
    check("float32 under autocast", llama, "self", kernel, autocast=True)
    check("LoRA", lora, "self")
    for strategy in ("none", "self"):
        check(f"hybrid qwen3_5_text, {strategy}", partial(family, "qwen3_5_text"), strategy)
    with tempfile.TemporaryDirectory() as scratch:
        folders = stage.attempt("checkpoints", partial(write_checkpoints, Path(scratch))) or {}
        for kind in ("mtp", "eagle3", "dflash"):
            if kind in folders:
                check(kind, lambda: tiny_llama().to(device, f32), kind, assistant_model=folders[kind])
        own = Path(scratch) / "own"
        check("mtp, hybrid", lambda: write_heads(own, "qwen3_5_text")[0].to(device, f32), "mtp")
    stage.measure("images", partial(_images, stage), needs=5.0)
    check("refill", llama, "self", {"max_batch_size": 3}, eos_token_id=[5, 6])
    check("greedy, repetition penalty", llama, "self", do_sample=False, repetition_penalty=1.1)
    check("ngram", llama, "ngram", do_sample=False)
    check("history", llama, "history", calls=2)
    check("rejection", partial(llama, bf16), "self", kernel | {"verification": "rejection"})
    for kind in ("qwen3", "gemma3_text", "qwen3_moe", "gpt_oss"):
        check(f"family {kind}", partial(family, kind), "self")


def check_case(
    stage: Stage, name: str, make: Make, strategy: str, config: dict[str, Any] | None = None, *, calls: int = 1,
    drafts: bool | None = None, autocast: bool = False, bits: str = "", **options: Any,
) -> None:  # fmt: skip
    """Measures one case: the last of `calls`, which must have drafted unless `drafts` is False. Cases with the same
    `bits` must have the same log-probabilities, bit for bit."""
    must_draft = strategy != "none" if drafts is None else drafts

    def work() -> dict[str, Any]:
        started, model = time.perf_counter(), make()
        rows = random_rows(LENGTHS)
        prompts = {key: tensor.to(stage.device) for key, tensor in pad_left(rows).items()}
        new = 16 if stage.is_smoke else 96
        plain = {key: value for key, value in options.items() if key != "assistant_model"}
        mixed = partial(torch.autocast, stage.device.type, torch.bfloat16) if autocast else nullcontext
        with mixed(), warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            eager = generate(model, prompts, "none", {"runner": "eager"}, max_new_tokens=new, **plain)
            for _ in range(calls):
                result = generate(model, prompts, strategy, config, max_new_tokens=new, **options)
        said = {str(each.message)[:300] for each in heard}
        found = facts(result, [text for text in said if any(words in text for words in GIVEN_UP)])
        same = sum(a == b for a, b in zip(outputs(result), outputs(eager), strict=True))
        narrow = autocast or model.dtype == torch.bfloat16
        found |= {"same_rows": [same, len(rows)], "seconds": time.perf_counter() - started}
        found["ok"] &= narrow or same >= len(rows) - MOST_OTHER_ROWS
        found["ok"] &= found["drafted"] > 0 or not must_draft
        if not PROCESSED & options.keys():
            largest, mean = off(model, [row.to(stage.device) for row in rows], result, mixed)
            found |= {"largest_off": largest, "mean_off": mean}
            found["ok"] &= mean < BFLOAT16_OFF if narrow else largest < FLOAT32_OFF
        if bits:
            assert result.logprobs is not None
            logprobs = result.logprobs.cpu()
            found["same_bits"] = torch.equal(stage.shared.setdefault(bits, logprobs), logprobs)
            found["ok"] &= found["same_bits"]
        spec_trl.release(model)
        return found

    stage.measure(name, work, needs=5.0)


def facts(result: SpeculativeOutput, warned: list[str]) -> dict[str, Any]:
    """What was drafted and captured."""
    found = result.statistics
    assert found is not None
    return {
        "ok": found.drafter_failure is None and not warned, "warned": warned, "failure": found.drafter_failure,
        "drafted": found.total.drafted, "acceptance": found.acceptance_rate, "graphs": found.graphs,
    }  # fmt: skip


@torch.no_grad()
def off(
    model: PreTrainedModel, rows: list[torch.Tensor], result: SpeculativeOutput,
    mixed: Callable[[], AbstractContextManager[Any]],
) -> tuple[float, float]:  # fmt: skip
    """The largest and the mean difference of log-probabilities to those of transformers' own forward of each text."""
    assert result.logprobs is not None
    differences = []
    for row, tokens, logprobs in zip(rows, outputs(result), result.logprobs, strict=True):
        text = torch.cat([row, torch.tensor(tokens, device=row.device)])  # [prompt + new]
        with mixed():
            logits = model(text[None], use_cache=False).logits[0, len(row) - 1 : -1].float()  # [new, V]
        taken = logits.log_softmax(-1).gather(1, text[len(row) :, None])[:, 0]  # [new]
        differences.append((taken - logprobs[: len(tokens)]).abs())
    whole = torch.cat(differences)
    return whole.max().item(), whole.mean().item()


def _images(stage: Stage) -> dict[str, Any]:
    """Prompts with images: tokens of `generate` itself."""
    model = tiny_vision.make("qwen2_5_vl").to(stage.device, torch.float32)
    processor = tiny_vision.processor("qwen2_5_vl")
    chats = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a b c"}]}]] * 2
    texts = [processor.apply_chat_template(chat, tokenize=False) for chat in chats]
    pictures = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]
    inputs = processor(text=texts, images=pictures, return_tensors="pt", padding=True).to(stage.device)
    new = 16 if stage.is_smoke else 96
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=new)
    result = generate(model, dict(inputs), "self", do_sample=False, max_new_tokens=new)
    found = facts(result, [])
    same = bool(torch.equal(result.sequences, expected))
    return found | {"ok": found["ok"] and same and found["drafted"] > 0, "same": same}
