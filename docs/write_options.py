"""Writes the tables of options into the pages next to this file: ``python -m docs.write_options``.

A table stands between the marks ``<!-- options: SpecGRPOConfig -->`` and ``<!-- end of options -->``; after the class
the mark may name a group, as in ``<!-- options: SpeculativeConfig tts -->``. The table of refusals stands between
``<!-- refusals -->`` and ``<!-- end of refusals -->``. A test compares.
"""

import re
from pathlib import Path

from spec_trl import SpeculativeConfig
from spec_trl.generation.refusals import REFUSALS
from spec_trl.trainers.rollout_options import RolloutOptions
from spec_trl.value_checks import declared_in


CONFIGS: dict[str, type] = {"SpecGRPOConfig": RolloutOptions, "SpeculativeConfig": SpeculativeConfig}
TABLE = re.compile(r"<!-- options: (\w+) ?(\w*) -->\n(.*?)<!-- end of options -->", re.DOTALL)


def with_tables(text: str) -> str:
    """The page `text` with its tables of options as the fields say them, and of refusals as the package has them."""
    rows = "".join(f"| {' | '.join(row)} |\n" for row in REFUSALS)
    table = f"<!-- refusals -->\n| this | does not go with | because | instead |\n|---|---|---|---|\n{rows}<!-- end of"
    text = re.sub("<!-- refusals -->\n.*?<!-- end of(?= refusals)", lambda _: table, text, flags=re.DOTALL)
    return TABLE.sub(lambda found: write_table(found[1], found[2]), text)


def write_table(name: str, group: str) -> str:
    """The table of the class `name`, of its options in `group` or of those in none, with its marks."""
    rows = [
        f"| `{place}` | `{declared.default!r}` | {declared.metadata['help']} |"
        for place, declared in declared_in(CONFIGS[name])
        if place.rpartition(".")[0] == group
    ]
    mark = f"<!-- options: {name}{' ' * bool(group)}{group} -->"
    return "\n".join([mark, "| option | default | what it does |", "|---|---|---|", *rows, "<!-- end of options -->"])


if __name__ == "__main__":
    for page in Path(__file__).parent.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
