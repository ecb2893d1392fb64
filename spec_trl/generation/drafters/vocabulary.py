"""Whether vocabularies of two sizes belong to one tokenizer."""

_PADDED_TO = (64, 128, 256, 512)
"""Multiples to which vocabularies are padded. Not 1024, by which Mistral's 32,768 would pass for Llama's 32,000."""


def is_padded(size: int, other: int) -> bool:
    """Whether two sizes are equal, or one is the other one padded for the hardware: Qwen2.5 has 151,936 rows up to 3 B
    and 152,064 beyond."""
    low, high = sorted((size, other))
    return low == high or any(-(-low // multiple) * multiple == high for multiple in _PADDED_TO)


def check_sizes(argument: str, size: int, wanted: int) -> None:
    """Raises ValueError, naming the drafter's `argument`, unless a vocabulary of `size` tokens and the target's
    `wanted` tokens can belong to one tokenizer."""
    if not is_padded(size, wanted):
        raise ValueError(
            f"{argument} has a vocabulary of {size} tokens and the target one of {wanted}; a drafter must use the "
            "target's tokenizer, and padding to a multiple of 64, 128, 256 or 512 does not explain the difference. "
            'Choose a drafter of the same family, or assistant_strategy="self".'
        )
