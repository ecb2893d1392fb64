"""Writes the tables of options into the pages next to this file: ``python -m docs.write_options``.

A table stands between the marks ``<!-- options: SpecGRPOConfig -->`` and ``<!-- end of options -->``. Names after the
class, such as ``<!-- options: SpecGRPOConfig tts_* -->``, choose some of its options. The table of refusals stands
between ``<!-- refusals -->`` and ``<!-- end of refusals -->``. A test compares.
"""

import re
from dataclasses import MISSING, Field, fields
from fnmatch import fnmatch
from pathlib import Path

from spec_trl import SpeculativeConfig
from spec_trl.generation.refusals import REFUSALS
from spec_trl.trainers.rollout_options import RolloutOptions


CONFIGS: dict[str, type] = {"SpecGRPOConfig": RolloutOptions, "SpeculativeConfig": SpeculativeConfig}
TABLE = re.compile(r"<!-- options: (\w+)([^>]*?) -->\n(.*?)<!-- end of options -->", re.DOTALL)


def with_tables(text: str) -> str:
    """The page `text` with its tables of options as the fields say them, and of refusals as the package has them."""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in REFUSALS)
    table = f"<!-- refusals -->\n| this | does not go with | because | instead |\n|---|---|---|---|\n{rows}<!-- end of"
    text = re.sub("<!-- refusals -->\n.*?<!-- end of(?= refusals)", lambda _: table, text, flags=re.DOTALL)
    return TABLE.sub(lambda found: write_table(found[1], found[2].split()), text)


def write_table(name: str, patterns: list[str]) -> str:
    """The table of the class `name`, of those options that match one of `patterns`, or of all, with its marks."""
    chosen = [
        each for each in fields(CONFIGS[name]) if any(fnmatch(each.name, pattern) for pattern in patterns or ["*"])
    ]
    rows = [f"| `{each.name}` | `{default_of(each)!r}` | {each.metadata['help']} |" for each in chosen]
    mark = " ".join([f"<!-- options: {name}", *patterns, "-->"])
    return "\n".join([mark, "| option | default | what it does |", "|---|---|---|", *rows, "<!-- end of options -->"])


def default_of(option: Field) -> object:
    return option.default if option.default_factory is MISSING else option.default_factory()


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
