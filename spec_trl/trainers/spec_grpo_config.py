"""GRPOConfig with one more group of fields: how rollouts are drafted and verified."""

from dataclasses import dataclass, field

from trl import GRPOConfig

from ..generation.configuration import MAX_DRAFT_LENGTH, SpeculativeConfig, check_strategy, require_int


@dataclass
class SpecGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`SpecGRPOTrainer`]. It adds one group of fields to [`~trl.GRPOConfig`].

    Parameters:
        > Parameters that control speculative rollouts

        assistant_strategy (`str`, *optional*, defaults to `"self"`):
            How rollouts are drafted: `"self"` (the policy's own quantized copy, refreshed when the weights have
            changed), `"model"` (a smaller causal LM, see `assistant_model`), `"ngram"` (prompt lookup) or `"none"`
            (autoregressive decoding by the same engine). Rollouts are the same tokens under each of them.
        assistant_model (`str`, *optional*):
            Path or hub id of the drafter of `assistant_strategy="model"`.
        initial_draft_length (`int`, *optional*, defaults to `5`):
            Draft tokens per verification (γ₀), 1 to 64.
        verification (`str`, *optional*, defaults to `"exact"`):
            `"exact"`: rollouts are token-identical to those without speculation. `"rejection"`: identical in
            distribution only, with a slightly higher block efficiency.
        draft_quantization (`str`, *optional*, defaults to `"rtn-w4-g128"`):
            Quantization of the self-drafter: `"rtn-w4-g128"`, `"rtn-w4-g64"`, `"rtn-w4-g32"` or `"rtn-w8"`.
        draft_kernel (`str`, *optional*, defaults to `"auto"`):
            Kernel of the self-drafter's quantized layers; `"auto"` takes the fastest one that serves a layer.
        draft_lm_head (`str`, *optional*, defaults to `"auto"`):
            `"dense"`: the self-drafter uses the policy's output head. `"packed"`: quantized as well. `"auto"`: packed
            where it is a large share of a draft step.
        rollout_batch_size (`int`, *optional*):
            Rows that are decoded together on each device; the others of the generation batch follow as rows finish.
            `None`: all at once.
    """

    assistant_strategy: str = field(
        default="self", metadata={"help": "How rollouts are drafted: 'self', 'model', 'ngram' or 'none'."}
    )
    assistant_model: str | None = field(
        default=None, metadata={"help": "Path or hub id of the drafter of assistant_strategy='model'."}
    )
    initial_draft_length: int = field(default=5, metadata={"help": "Draft tokens per verification, 1 to 64."})
    verification: str = field(
        default="exact", metadata={"help": "'exact' (token-identical) or 'rejection' (identical in distribution)."}
    )
    draft_quantization: str = field(
        default="rtn-w4-g128", metadata={"help": "Quantization of the self-drafter, e.g. 'rtn-w4-g128' or 'rtn-w8'."}
    )
    draft_kernel: str = field(default="auto", metadata={"help": "Kernel of the self-drafter's quantized layers."})
    draft_lm_head: str = field(
        default="auto", metadata={"help": "Output head of the self-drafter: 'auto', 'dense' or 'packed'."}
    )
    rollout_batch_size: int | None = field(
        default=None, metadata={"help": "Rows decoded together on each device; None: all at once."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for other in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(self, other):
                raise ValueError(
                    f"{other}=True contradicts assistant_strategy={self.assistant_strategy!r}: SpecGRPOTrainer "
                    f"generates rollouts itself. Set {other}=False, or use trl.GRPOTrainer."
                )
        if not self.ds3_gather_for_generation:
            raise ValueError(
                "ds3_gather_for_generation=False contradicts SpecGRPOTrainer: ranks run different numbers of "
                "forwards, so the weights must be gathered for the whole rollout. Set ds3_gather_for_generation=True."
            )
        check_strategy(self.assistant_strategy)
        if (self.assistant_model is None) == (self.assistant_strategy == "model"):
            raise ValueError(
                f"assistant_strategy={self.assistant_strategy!r} with assistant_model={self.assistant_model!r}: "
                'assistant_model belongs to assistant_strategy="model", and that strategy needs it.'
            )
        if self.assistant_strategy == "ngram" and self.verification == "rejection":
            raise ValueError(
                'verification="rejection" needs draft probabilities, which assistant_strategy="ngram" has none of. '
                'Use verification="exact".'
            )
        # SpeculativeConfig checks the rest; these two have other names there, which its errors would give.
        require_int("initial_draft_length", self.initial_draft_length, 1, MAX_DRAFT_LENGTH)
        if self.rollout_batch_size is not None:
            require_int("rollout_batch_size", self.rollout_batch_size, 1, None)
        self.speculative_config()

    def speculative_config(self) -> SpeculativeConfig:
        """The same options as `generate` takes them."""
        return SpeculativeConfig(
            draft_length=self.initial_draft_length,
            verification=self.verification,  # type: ignore[arg-type]
            seed=self.seed,
            max_batch_size=self.rollout_batch_size,
            draft_quantization=self.draft_quantization,
            draft_kernel=self.draft_kernel,
            draft_lm_head=self.draft_lm_head,  # type: ignore[arg-type]
        )
