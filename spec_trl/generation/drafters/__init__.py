"""The drafters of the package. Importing their modules registers them."""

from ..registry import DRAFTERS
from . import history, ngram, self_copy, small_model
from .dflash import dflash_drafter
from .eagle3 import eagle3_drafter
from .mtp import mtp_drafter


DRAFTERS.setdefault("tts", "papers.test_time_speculation.distilled_drafter")  # loaded when it is asked for

__all__ = ["dflash_drafter", "eagle3_drafter", "history", "mtp_drafter", "ngram", "self_copy", "small_model"]
