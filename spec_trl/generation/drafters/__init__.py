"""Holds the drafters of the package. Importing their modules registers them."""

from . import history, ngram, self_copy, small_model
from .dflash import dflash_drafter
from .eagle3 import eagle3_drafter
from .mtp import mtp_drafter


__all__ = ["dflash_drafter", "eagle3_drafter", "history", "mtp_drafter", "ngram", "self_copy", "small_model"]
