"""Translates a trainer's options into vLLM's speculative decoding: how vLLM drafts, and what follows the policy."""

from dataclasses import dataclass, field
from typing import Any

from ..generation.options import SpeculativeConfig


BACKEND = "spec_trl"
"""Name of our weight transfer engine in vLLM."""
TRANSPORTS = {"nccl": "nccl", "file": BACKEND}
"""vLLM's name by ours, of how weights get to a server."""
STRATEGIES = ("none", "self", "model", "eagle3", "mtp", "history", "ngram", "auto")
ONLINE_QUANTIZATION = "fp8_per_channel"
"""Of the policy's copy on a GPU: vLLM makes it of the weights that it is given, at each push."""
SHORTEST_MATCH = 2  # tokens of a suffix that "ngram" looks up; one token matches too much


ON_THE_HOST = "history", "ngram"
"""Strategies whose drafts are looked up on the host, between steps."""


@dataclass(frozen=True)
class Drafting:
    """How vLLM drafts.

    Attributes:
        strategy: `assistant_strategy`, with "auto" resolved.
        speculative: vLLM's `speculative_config`; None: it does not draft.
        lengths: γ that the scheduler may choose, beside 0; a single one is fixed.
        is_copy: whether the drafter has the policy's weights, and gets them at each push.
        options: of our parts in vLLM's processes.
    """

    strategy: str
    speculative: dict[str, Any] | None
    lengths: tuple[int, ...] = ()
    is_copy: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def engine_arguments(self, device: str, backend: str = BACKEND) -> dict[str, Any]:
        """Arguments of vLLM's `LLM` on "cuda" or "cpu", whose weights come through `backend`."""
        arguments: dict[str, Any] = {"weight_transfer_config": {"backend": backend}}
        if self.speculative is None:
            return arguments
        arguments |= {"speculative_config": self.speculative, "additional_config": {"spec_trl": self.options}}
        if len(self.lengths) > 1:  # GPUs schedule a step while one runs
            overlaps = "Async" * (device == "cuda" and self.strategy not in ON_THE_HOST)
            arguments["scheduler_cls"] = f"{__package__}.scheduler.{overlaps}LengthScheduler"
        return arguments


def drafting_of(
    strategy: str, config: SpeculativeConfig, assistant: object, model: str, has_head: bool, device: str
) -> Drafting:
    """How vLLM drafts for `model` (folder or hub id) on a "cuda" or "cpu" under a trainer's `config`; `has_head`:
    whether its checkpoint has an MTP head.

    Raises:
        ValueError: vLLM cannot do what an option asks; names the option, its value and a remedy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"assistant_strategy={strategy!r} does not go with use_vllm=True: use one of {STRATEGIES}.")
    if config.sd_toggle == "roofline":
        raise ValueError('sd_toggle="roofline" does not go with use_vllm=True: use "measured" or "always".')
    if not isinstance(assistant, str | None):
        kind = type(assistant).__name__
        raise ValueError(f"assistant_model is a {kind}; under use_vllm=True give a folder or hub id for vLLM.")
    if strategy == "auto":
        strategy = "mtp" if has_head else "self"
    if strategy == "none" or config.sd_toggle == "never":
        return Drafting(strategy, None)
    lengths = (config.first_draft_length,) if config.sd_toggle == "always" else config.choice_of_draft_lengths()
    network: dict[str, Any] = {"draft_sample_method": "probabilistic"}  # vLLM's default proposes the likeliest token
    drafter = network | {"method": "draft_model"}
    quantization = {"quantization": ONLINE_QUANTIZATION} if device == "cuda" else {}
    how: dict[str, Any] = {
        "self": drafter | {"model": model} | quantization,
        "model": drafter | {"model": assistant},
        "eagle3": network | {"method": "eagle3", "model": assistant},
        "mtp": network | {"method": "mtp"} | ({} if assistant is None else {"model": assistant}),
        "history": {"method": "custom_class", "model": f"{__package__}.history.HistoryProposer"},
        "ngram": {
            "method": "ngram", "prompt_lookup_max": max(config.ngram_size, SHORTEST_MATCH),
            "prompt_lookup_min": min(config.ngram_size, SHORTEST_MATCH),
        },
    }[strategy]  # fmt: skip
    options = {"strategy": strategy, "draft_lengths": lengths, "history_max_tokens": config.history_max_tokens}
    return Drafting(strategy, how | {"num_speculative_tokens": lengths[-1]}, lengths, strategy == "self", options)
