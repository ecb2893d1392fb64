"""When vocabularies of two sizes belong to one tokenizer."""

_PADDED_TO = (64, 128, 256, 512)
"""Multiples that vocabularies are padded to. 1024 is none: it would take Mistral's 32,768 for Llama's 32,000."""


def is_padded(size: int, other: int) -> bool:
    """Whether two sizes are equal, or one is the other padded for the hardware: Qwen2.5 has 151,936 rows up to 3 B
    and 152,064 beyond."""
    low, high = sorted((size, other))
    return low == high or any(-(-low // multiple) * multiple == high for multiple in _PADDED_TO)
