"""Loads what a command line names."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def find_device(name: str | None) -> torch.device:
    """The device called `name`; None: CUDA where there is one, else the CPU.

    Raises:
        ValueError: there is none of this name here.
    """
    try:
        return torch.empty(0, device=name or ("cuda" if torch.cuda.is_available() else "cpu")).device
    except (AssertionError, RuntimeError) as error:  # a build without CUDA asserts
        raise ValueError(f"--device {name} cannot be used here: {str(error).splitlines()[0]}") from error


def load_model(name: str, dtype: str, device: torch.device) -> PreTrainedModel:
    """The causal LM of a folder or hub id, for inference; `dtype` as transformers takes it, "auto" included."""
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()


def load_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or hub id; None where it has none."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return None
