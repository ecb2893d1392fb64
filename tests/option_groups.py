"""Options of tests, in groups as a SpeculativeConfig has them."""

from typing import Any


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    """One dict of all `parts`, the later ones first; groups of options, which are dicts, are merged too."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            groups = isinstance(value, dict) and isinstance(found.get(name), dict)
            found[name] = found[name] | value if groups else value
    return found
