"""What measured times are valid for, and the name of the file that keeps them."""

import dataclasses
from dataclasses import dataclass

from ..user_cache import file_name


@dataclass(frozen=True)
class ProfileKey:
    """What a profile is valid for. A model's name is no part of it: two models of one shape share a profile."""

    hardware: str  # device name; on a CPU with the number of threads
    shape: str  # fingerprint of the target's and the drafter's shape
    dtype: str  # of the target's weights
    quantization: str  # the drafter's
    kernel: str  # the drafter's
    runner: str = "eager"  # or how forwards are captured: one of the ways of `SpeculativeConfig.runner`

    @property
    def file_name(self) -> str:
        """A readable file name that no other key has."""
        text = "_".join(dataclasses.astuple(self))
        return file_name(text, text)
