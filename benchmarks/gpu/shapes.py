"""Models to measure on a GPU: the shapes of real models, with weights made on the device in seconds."""

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from benchmarks.models import build


DEFAULT = "qwen2.5-7b"
TINY = "tiny"
"""For trying the benchmarks out without a GPU."""

_QWEN3: dict[str, Any] = dict(
    model_type="qwen3", head_dim=128, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=151936, max_position_embeddings=40960, rms_norm_eps=1e-6, rope_theta=1e6,
)  # fmt: skip
_QWEN25: dict[str, Any] = dict(
    model_type="qwen2", vocab_size=152064, max_position_embeddings=32768, rms_norm_eps=1e-6, rope_theta=1e6,
    tie_word_embeddings=False,
)  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": _QWEN25 | dict(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28, num_key_value_heads=4,
    ),
    "qwen2.5-0.5b": _QWEN25 | dict(
        hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": _QWEN25 | dict(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
        vocab_size=151936, tie_word_embeddings=True,
    ),
    "qwen3-8b": _QWEN3 | dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    TINY: _QWEN25 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, max_position_embeddings=2048,
    ),
}  # fmt: skip
"""Of the models' published config.json what their shapes need."""


def config_of(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of `name`, without end of sequence: all rows then generate equally many tokens."""
    settings = copy.deepcopy(CONFIGS[name]) | changes
    return AutoConfig.for_model(
        settings.pop("model_type"), **settings, bos_token_id=None, eos_token_id=None, pad_token_id=0
    )


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """A model with normal weights of standard deviation 0.02: speed does not depend on what they are."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def grid_model(
    config: PreTrainedConfig, noise: float, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """A model whose projections and head lie on a 4-bit grid, plus Gaussian noise of `noise` grid steps.

    Round-to-nearest finds the grid again, so the noise is all that its 4-bit copy gets wrong: it sets τ.
    """
    return build(config, noise, seed, dtype, str(device)).requires_grad_(False)
