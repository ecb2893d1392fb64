"""Computes a loss's log-probabilities over the tokens that the sampler's top-k, top-p and min-p kept (its support).

Over the whole vocabulary they are of another distribution than the sampler's (TRL, issue 6789). The sampler stores the
support of each token as bits, which stay beside the token through the splits of a batch, so that current, old and
reference policies are all normalised over it.
"""

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..generation.engine.requirements import policy_in
from ..generation.engine.sampling.noise import widen
from ..generation.engine.sampling.support import unpack


SUPPORT = "sampled_support"
"""Our name of the supports among the inputs of a loss: `[B, n, ceil(vocabulary / 8)]` uint8, on the host."""
_ALL = 0xFF  # of tokens that tools wrote, and of padding, which do not count
Supports = Mapping[int, Sequence[tuple[int, Tensor]]]
"""By row of a rollout, its turns: place of the first token in the row's text, and supports `[n, bytes]` uint8."""


class SampledSupport:
    """Replaces TRL's `_get_per_token_logps_and_entropies` of a training at `temperature`.

    Attributes:
        rows: supports of the rows that are scored next, as :data:`SUPPORT`.
    """

    def __init__(self, accelerator: Accelerator, temperature: float) -> None:
        self._accelerator, self._temperature = accelerator, temperature
        self.rows = torch.empty(0, dtype=torch.uint8)

    def take(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], turns: Supports) -> None:
        """Lays out the supports of a rollout's `turns` over its `completions`; both are token ids by row."""
        width = max(part.shape[1] for of_row in turns.values() for _, part in of_row)
        self.rows = torch.full((len(completions), max(map(len, completions)), width), _ALL, dtype=torch.uint8)
        for row, prompt, completion, (_, of_row) in zip(
            self.rows, prompts, completions, sorted(turns.items()), strict=True
        ):
            for first, part in of_row:
                first -= len(prompt)
                count = min(len(completion) - first, len(part))  # TRL cuts the last turn of a tool loop
                row[first : first + count] = part[: max(count, 0)]

    def __call__(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities in nats, and entropies if requested, both over the supports, `[B, n]` each, of the last
        n = `logits_to_keep` columns of `input_ids` `[B, T]`; and the routers' loss if requested."""
        accepted = signature(policy_in(self._accelerator.unwrap_model(model)).forward).parameters
        options: dict[str, Any] = {"logits_to_keep": logits_to_keep + 1} if "logits_to_keep" in accepted else {}
        options |= {"output_router_logits": True} if compute_aux_loss else {}
        parts, size = list[tuple[Tensor, Tensor]](), batch_size or len(input_ids)
        losses, supports = list[Tensor](), self.of_columns(logits_to_keep).split(size)
        for ids, mask, packed in zip(input_ids.split(size), attention_mask.split(size), supports, strict=True):
            with self._accelerator.autocast():
                output = model(input_ids=ids, attention_mask=mask, use_cache=False, **options)
            logits = output.logits[:, -logits_to_keep - 1 : -1]  # [B, n, V]
            parts.append(self.score(logits, ids, mask, packed))
            losses += [output.aux_loss] if compute_aux_loss else []
        logprobs, entropies = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
        return logprobs, entropies if compute_entropy else None, torch.stack(losses).mean() if losses else None

    def of_columns(self, width: int) -> Tensor:
        """`rows` with `width` columns."""
        return F.pad(self.rows, (0, 0, 0, width - self.rows.shape[1]), value=_ALL)

    def score(self, logits: Tensor, ids: Tensor, mask: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, `[B, n]` each, of the last n tokens of `ids` `[B, T]`, 0 where `mask` `[B,
        T]` is; from logits `[B, n, V]` and supports `[B, n, bytes]`."""
        width = logits.shape[1]
        # The float32 of one row at a time: the backward pass computes it again.
        rows = [
            checkpoint(self._of_row, *row, use_reentrant=False)
            for row in zip(logits, ids[:, -width:], packed.to(logits.device), strict=True)
        ]
        logprobs, entropies = (torch.stack(of_rows) for of_rows in zip(*rows, strict=True))
        padding = mask[:, -width:] == 0  # [B, n]
        return logprobs.masked_fill(padding, 0), entropies.masked_fill(padding, 0)

    def _of_row(self, logits: Tensor, tokens: Tensor, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies, `[n]` each, of a row's `tokens` `[n]`, from logits `[n, V]` and supports
        `[n, bytes]`."""
        kept = unpack(packed, logits.shape[1])  # [n, V]
        logprobs = (widen(logits) / self._temperature).masked_fill(~kept, -torch.inf).log_softmax(-1)  # [n, V]
        entropies = -(logprobs.exp() * logprobs.masked_fill(~kept, 0)).sum(-1)
        return logprobs.gather(-1, tokens[:, None])[:, 0], entropies
