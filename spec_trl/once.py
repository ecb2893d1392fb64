"""Warns or measures once per process."""

seen: set[str] = set()
"""The subjects so far."""


def first_time(subject: str) -> bool:
    """Whether `subject` is new in this process."""
    is_new = subject not in seen
    seen.add(subject)
    return is_new
