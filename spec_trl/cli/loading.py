"""Loads what a command line names."""

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..value_checks import require_folder_or_id


def find_device(name: str | None) -> torch.device:
    """The device called `name`; None: CUDA where there is one, else the CPU.

    Raises:
        ValueError: there is none of this name here.
    """
    try:
        return torch.empty(0, device=name or ("cuda" if torch.cuda.is_available() else "cpu")).device
    except (AssertionError, RuntimeError) as error:  # a build without CUDA asserts
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error


def load_config(name: str) -> PreTrainedConfig:
    """The config of the causal LM of a folder or hub id.

    Raises:
        ValueError: there is none, or it is of another kind of model.
    """
    require_folder_or_id("MODEL", name)
    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"MODEL {name} has no config that transformers can read: {reason}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"MODEL {name} is of type {config.model_type!r}, which transformers has no causal LM for.")
    return config


def load_model(name: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """The causal LM of a folder or hub id, for inference; `dtype` as transformers takes it, "auto" included.

    Raises:
        ValueError: its weights are missing or damaged.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # each format has errors of its own
        raise ValueError(f"MODEL {name} cannot be loaded: {type(error).__name__}: {error}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub id; None where it has none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
