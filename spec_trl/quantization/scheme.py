"""Quantization schemes by name: how many bits, and how many weights share a scale."""

from dataclasses import dataclass


GROUP_SIZES = (128, 64, 32)  # every 4-bit kernel takes these three


@dataclass(frozen=True)
class Scheme:
    """What a scheme name means.

    Attributes:
        name: the name as users write it.
        bits: bits per weight, 4 or 8.
        group: the largest number of weights of a row that may share a scale; None = the whole row.
        activation_aware: input channels are scaled by what the activations are like (AWQ, ER §C.4).
    """

    name: str
    bits: int
    group: int | None
    activation_aware: bool = False

    def group_for(self, in_features: int) -> int | None:
        """Weights per scale in a row of `in_features` (ER §3.1): the largest that divides it, None if none does."""
        if self.group is None:
            return in_features
        return next((g for g in GROUP_SIZES if g <= self.group and in_features % g == 0), None)


SCHEMES = (
    Scheme("rtn-w4-g128", bits=4, group=128),
    Scheme("rtn-w4-g64", bits=4, group=64),
    Scheme("rtn-w4-g32", bits=4, group=32),
    Scheme("rtn-w8", bits=8, group=None),
    Scheme("awq-w4-g128", bits=4, group=128, activation_aware=True),
    Scheme("awq-w4-g64", bits=4, group=64, activation_aware=True),
    Scheme("awq-w4-g32", bits=4, group=32, activation_aware=True),
)


def find_scheme(name: str) -> Scheme:
    """The scheme called `name`.

    Raises:
        ValueError: no scheme has this name.
    """
    for scheme in SCHEMES:
        if scheme.name == name:
            return scheme
    raise ValueError(f"scheme={name!r} is not a quantization scheme; use one of {[s.name for s in SCHEMES]}")
