"""Defines a model's constants for predicted times (ER App. E.3), and the key of measured times."""

from dataclasses import astuple, dataclass, fields

from ...user_cache import file_name
from ...value_checks import require_field


@dataclass(frozen=True)
class ModelConstants:
    """Bytes and FLOP of a forward of a target and of its drafter, from the model's shape (ER App. E.3). Raises
    ValueError if a number is out of range or a part exceeds its whole."""

    name: str  # only shown in tables and plots
    weight_bytes: float  # W_T: of the target's weights; tied embeddings count once
    draft_weight_bytes: float  # W_D: of the drafter's weights; 0 for a drafter without any
    dense_flops: float  # C_dense, per token, without attention, with the lm_head; of experts the active ones count
    attention_flops: float  # C_attn, per token and cached token
    kv_bytes: float  # κ_theoretical, per cached token over all layers
    expert_bytes: float = 0.0  # the part of W_T in routed experts
    draft_expert_bytes: float = 0.0  # the part of W_D in routed experts
    experts: int = 0  # routed experts of a layer
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            require_field(self, field.name, above=0.0 if field.name in ("weight_bytes", "dense_flops") else None)
        for part, whole in (
            ("expert_bytes", "weight_bytes"),
            ("draft_expert_bytes", "draft_weight_bytes"),
            ("experts_per_token", "experts"),
        ):
            if vars(self)[part] > vars(self)[whole]:
                raise ValueError(f"{part}={vars(self)[part]} exceeds {whole}={vars(self)[whole]}; it is a part of it.")

    def target_weight_traffic(self, tokens: int) -> float:
        """Bytes of target weights that a forward over `tokens` tokens reads."""
        return self.weight_bytes - self.expert_bytes * self._untouched(tokens)

    def draft_weight_traffic(self, tokens: int) -> float:
        return self.draft_weight_bytes - self.draft_expert_bytes * self._untouched(tokens)

    def _untouched(self, tokens: int) -> float:
        """Share of routed experts that none of `tokens` tokens uses, under uniform routing."""
        return (1.0 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0


@dataclass(frozen=True)
class ProfileKey:
    """Key of what a profile is valid for, without the model's name: two models of one shape share a profile."""

    hardware: str  # device name; on a CPU with the number of threads
    shape: str  # fingerprint of the target's and the drafter's shape
    dtype: str  # of the target's weights
    quantization: str  # the drafter's
    kernel: str  # the drafter's
    runner: str = "eager"  # or how forwards are captured: one of the ways of `SpeculativeConfig.runner`

    @property
    def file_name(self) -> str:
        text = "_".join(astuple(self))
        return file_name(text, text)
