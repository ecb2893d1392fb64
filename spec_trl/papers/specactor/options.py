"""Declares the options of SpecActor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...generation.registry import assistant_of, drafter_names, needing_assistant
from ...value_checks import DeclaredOptions, option, require_folder_or_id


@dataclass(frozen=True)
class SpecActorOptions(DeclaredOptions):
    """Decoupled execution (SpecActor §4.1) and races of drafters, the strategy `"best_of_n"` (§4.2)."""

    group = "specactor"

    decoupled_execution: Literal["never", "always", "auto"] = option(
        "never",
        'Draft while the target verifies, on CPU cores that torch leaves: "always", with "self", "model" or "ngram"; '
        '"auto", where a profile predicts a gain.',
    )
    drafters: Sequence[str] = option(("self", "history", "ngram"), 'Drafters of "best_of_n".')
    assistants: Mapping[str, Any] | None = option(
        None, "Assistants by drafter: a path, hub id or module. assistant_model serves a single one."
    )
    budget: int | None = option(
        None, "Most tokens of one verification of a race, all rows together. None: as many as pay.", low=1
    )
    race: bool = option(True, "Several drafters may race for a row. False: one drafts.")
    draft_ranks: int = option(0, "In trainers, number of the last ranks that only draft, for the first ones.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafters is type(self).drafters and self.assistants is None:
            return
        names, known = self.drafters, drafter_names()
        if not isinstance(names, tuple) or not names or set(names) - {*known} or len(set(names)) < len(names):
            raise ValueError(f"specactor.drafters={names!r} must be one or more different ones of {list(known)}.")
        if self.assistants is None:
            return
        takers = [name for name in names if assistant_of(name) != "none"]
        if not isinstance(self.assistants, Mapping) or not self.assistants or set(self.assistants) - {*takers}:
            raise ValueError(
                f"specactor.assistants={self.assistants!r} must be a dict with some of {takers}, the members of "
                f"specactor.drafters={list(names)} that take an assistant."
            )
        for name, assistant in self.assistants.items():
            require_folder_or_id(f"specactor.assistants[{name!r}]", assistant)

    @property
    def ahead(self) -> str:
        """Where drafts are made while the target verifies."""
        return f"{self.decoupled_execution} {self.draft_ranks}"

    def chains(self, are_asked: bool) -> tuple[bool, int | None]:
        """Whether a row may have chains of several drafters, if these `are_asked` for, and the budget."""
        return are_asked and self.race, self.budget

    def assistants_with(self, assistant: object, tts_drafter: str) -> dict[str, Any]:
        """The assistant of each of `drafters` that has one. `assistant`, i.e. `assistant_model`, is for the drafter
        without its own; `tts_drafter` is the one that learns under "tts".

        Raises:
            ValueError: a drafter lacks its assistant, or not exactly one lacks the given one.
        """
        assistants = dict(self.assistants or {})
        needs = {*needing_assistant()} | ({"tts"} if tts_drafter in needing_assistant() else set())
        lacking = [name for name in self.drafters if name in needs and name not in assistants]
        if assistant is not None and len(lacking) == 1:
            assistants[lacking.pop()] = assistant
        elif assistant is not None or lacking:
            shown = type(assistant).__name__ if not isinstance(assistant, str | None) else repr(assistant)
            raise ValueError(
                f"assistant_model={shown} with specactor.drafters={list(self.drafters)}, of which {lacking} lack an "
                "assistant: assistant_model serves exactly one of them. Name them in specactor.assistants, "
                "e.g. {'eagle3': 'path/or/hub-id'}."
            )
        return assistants
