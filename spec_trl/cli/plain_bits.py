"""Log-probabilities that transformers' own forward gives to known texts, and the first module whose bits depend on how
many tokens it computes at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.engine.network.family_hooks import CACHE_NAMES, cache_argument, takes_positions
from .loading import pad_left


@torch.no_grad()
def forced_logprobs(
    model: PreTrainedModel, prompts: Sequence[list[int]], texts: Sequence[list[int]], count: int
) -> Tensor:
    """Log-probabilities in nats `[B, new]`, float32 or float64, of `texts`, of equal lengths, after `prompts`: read as
    `generate` reads them, left-padded and over its cache, `count` new tokens at once."""
    inputs, new = pad_left(list(prompts), model.device), torch.tensor(texts, device=model.device)  # [B, new]
    logits, cache = _forward(model, inputs["input_ids"], inputs["attention_mask"], None)  # [B, width, V]
    found, mask = [logits[:, -1:]], inputs["attention_mask"]
    for part in new[:, :-1].split(count, dim=1):
        mask = torch.cat([mask, torch.ones_like(part)], dim=1)
        logits, cache = _forward(model, part, mask, cache)
        found.append(logits)
    logits = torch.cat(found, dim=1)  # [B, new, V]
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return scores.gather(2, new[:, :, None])[:, :, 0].cpu()


def _forward(model: PreTrainedModel, tokens: Tensor, mask: Tensor, cache: Any) -> tuple[Tensor, Any]:
    """Logits of `tokens` `[B, q]`, the last ones that `mask` `[B, columns]` shows, and the cache."""
    options = {"attention_mask": mask, cache_argument(model): cache, "use_cache": True}
    if takes_positions(model):
        options["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    out = model(tokens, **options)
    return out.logits, next(out[name] for name in CACHE_NAMES if out.get(name) is not None)


@torch.no_grad()
def first_that_differs(model: PreTrainedModel, prompt: list[int], text: list[int]) -> str:
    """Names the first module whose output for the first token of `text` has other bits where all of `text` is computed
    at once; "" if none has."""
    found: list[dict[str, Tensor]] = []
    for count in (1, len(text)):
        outputs: dict[str, Tensor] = {}

        def keep(name: str, output: Any, outputs: dict[str, Tensor] = outputs, count: int = count) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.dim() == 3 and first.shape[1] == count:
                outputs[name] = first[:, 0].clone()

        ids = torch.tensor([prompt + text[:count]], device=model.device)
        _, cache = _forward(model, ids[:, :-count], torch.ones_like(ids[:, :-count]), None)
        handles = [
            module.register_forward_hook(lambda _, given, output, name=name: keep(name, output))
            for name, module in model.named_modules()
            if name
        ]
        try:
            _forward(model, ids[:, -count:], torch.ones_like(ids), cache)
        finally:
            for handle in handles:
                handle.remove()
        found.append(outputs)
    alone, together = found
    return next((name for name, own in alone.items() if not torch.equal(own, together.get(name, own))), "")
