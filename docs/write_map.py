"""Writes the map of the package into engine.md, from the docstrings of its folders and modules: ``python -m
docs.write_map``. A test compares."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path


PAGE = Path(__file__).with_name("engine.md")
PACKAGE = Path(__file__).parents[1] / "spec_trl"
MAP = re.compile(r"<!-- map -->\n.*?<!-- end of map -->", re.DOTALL)
END_OF_SENTENCE = re.compile(r"(?<!al)(?<!App)(?<!Eq)(?<!Fig)(?<!Tab)\.(?=\s|$)")


def sentence_of(path: Path) -> str:
    """The first sentence of the docstring of the module at `path`, without its full stop; "" if it has none."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return END_OF_SENTENCE.split(text, maxsplit=1)[0].replace("``", "`").replace("|", "\\|")


def rows_of(folder: Path) -> Iterator[str]:
    """Rows of a table: the folder, its modules, and its folders in turn."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    yield f"| **`{folder.relative_to(PACKAGE.parent)}/`** | **{sentence_of(folder / '__init__.py')}** |"
    yield from (f"| `{path.name}` | {sentence_of(path)} |" for path in modules)
    for below in sorted(path.parent for path in folder.glob("*/__init__.py")):
        yield from rows_of(below)


def with_map(text: str) -> str:
    """The page `text` with the map that the package's docstrings make."""
    head, end = ["<!-- map -->", "| file | what it does |", "|---|---|"], "<!-- end of map -->"
    return MAP.sub(lambda _: "\n".join([*head, *rows_of(PACKAGE), end]), text)


if __name__ == "__main__":
    PAGE.write_text(with_map(PAGE.read_text()))
