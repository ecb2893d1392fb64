"""Quantization schemes by name: how many bits, and how many weights share a scale."""

from dataclasses import dataclass


GROUP_SIZES = (128, 64, 32)  # every 4-bit kernel takes these three


@dataclass(frozen=True)
class Scheme:
    """What a scheme name means.

    Attributes:
        name: as users write it.
        bits: bits per weight, 4 or 8.
        group: the largest number of weights of a row that may share a scale; None = the whole row.
        activation_aware: scale the input channels by the size of the activations (AWQ, ER §C.4).
        normal_float: the 16 codes stand for NF4's values and not for equal steps.
    """

    name: str
    bits: int
    group: int | None
    activation_aware: bool = False
    normal_float: bool = False

    def group_for(self, in_features: int) -> int | None:
        """Weights per scale in a row of `in_features` (ER §3.1): the largest that divides it, None if none does."""
        if self.group is None:
            return in_features
        return next((g for g in GROUP_SIZES if g <= self.group and in_features % g == 0), None)


SCHEMES = (
    *(Scheme(f"rtn-w4-g{group}", 4, group) for group in GROUP_SIZES),
    Scheme("rtn-w8", 8, None),
    *(Scheme(f"awq-w4-g{group}", 4, group, activation_aware=True) for group in GROUP_SIZES),
    Scheme("nf4", 4, 64, normal_float=True),
)


def find_scheme(name: str) -> Scheme:
    """The scheme called `name`; raises ValueError where there is none."""
    schemes = {scheme.name: scheme for scheme in SCHEMES}
    if name not in schemes:
        raise ValueError(f"scheme={name!r} is not a quantization scheme; use one of {list(schemes)}")
    return schemes[name]
