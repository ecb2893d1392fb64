"""The list of `python -m tests.mutations` follows the code."""

from tests.mutations import ROOT, places


def test_each_place_to_break_is_in_the_code_once() -> None:
    listed = places()
    stale = [each for each in listed if (ROOT / "spec_trl" / each.file).read_text().count(each.old) != 1]
    assert len(listed) > 250 and not stale
