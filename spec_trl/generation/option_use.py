"""Which strategies read an option: one that is set for another would be ignored without a word."""

from dataclasses import MISSING, fields
from typing import Any


_READ_BY = {"tts_": "tts", "best_of_n_": "best_of_n", "ngram_size": "ngram", "history_max_tokens": "history"}
"""Strategy or drafter by the beginning of an option's name. Options of all drafters, and of the quantized copy that
most strategies may draft with, are not here: strategies are compared under one config."""


def check_use(strategy: str, config: Any) -> None:
    """Raises ValueError where `config`, a SpeculativeConfig or a dataclass with options of the same names, sets one
    to another value than its default that `strategy` does not read. `"none"` may have any: it is what others are
    compared with."""
    reading = {"auto": {"history"}, "best_of_n": {"best_of_n", *config.best_of_n_drafters}}.get(strategy, {strategy})
    for each in fields(config) if strategy != "none" else ():
        reader = next((reader for begin, reader in _READ_BY.items() if each.name.startswith(begin)), None)
        default = each.default if each.default_factory is MISSING else each.default_factory()
        value = getattr(config, each.name)
        is_default = value == default or isinstance(value, list) and tuple(value) == default  # JSON has no tuples
        if reader is not None and reader not in reading and not is_default:
            raise ValueError(
                f"{each.name}={value!r} has no use with assistant_strategy={strategy!r}, which does not draft by "
                f"{reader!r}. Drop it, or set assistant_strategy={reader!r}."
            )
