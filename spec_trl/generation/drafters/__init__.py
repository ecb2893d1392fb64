"""The drafters of the package. Importing their modules registers them."""

from . import history, ngram, self_copy, small_model
from .dflash import drafter as dflash_drafter
from .eagle3 import drafter as eagle3_drafter
from .mtp import drafter as mtp_drafter
from .tts import drafter as tts_drafter


__all__ = [
    "dflash_drafter", "eagle3_drafter", "history", "mtp_drafter", "ngram", "self_copy", "small_model", "tts_drafter",
]  # fmt: skip
