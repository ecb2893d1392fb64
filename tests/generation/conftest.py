"""Drafters of every kind for the tiny target, and a tape in the place of CUDA graphs."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.mtp.mtp_drafter import MtpDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.engine import rollout
from spec_trl.generation.engine.cuda.graph_drafts import CapturedLoop
from spec_trl.generation.engine.drafter import Drafter, NetworkDraft
from spec_trl.generation.engine.sampling.accept import Proposal
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from tests.conftest import tiny_llama
from tests.generation.drafters.dflash import reference as dflash
from tests.generation.drafters.eagle3 import reference as eagle3
from tests.generation.drafters.mtp.heads import write_alone
from tests.generation.engine.tape import Tape, install_tape


Make = Callable[..., list[Drafter]]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of random drafters for the tiny target, by kind."""
    return write_checkpoints(tmp_path_factory.mktemp("drafters"))


def write_checkpoints(folder: Path, **sizes: int) -> dict[str, str]:
    """The same in `folder`, for a tiny target of other `sizes`."""
    eagle3.make_folder(folder / "eagle3", eagle3.safeai(vocab_size=64, draft_vocab_size=64, **sizes))
    eagle3.make_folder(folder / "pruned", eagle3.safeai(**sizes))  # eagle3 with a part of the vocabulary
    dflash.make_checkpoint(folder / "dflash", dflash.zlab(vocab_size=64, **sizes), 2 * sizes.get("hidden_size", 64))
    write_alone(folder / "mtp", tiny_llama(**sizes))
    return {kind: str(folder / kind) for kind in ("eagle3", "pruned", "dflash", "mtp")}


@pytest.fixture(scope="session")
def drafters(tiny, tiny_assistant, checkpoints) -> Make:
    """Makes drafters by name; all of `KINDS` by default. "tts" learns, with the drafter named after it and how."""
    return maker(tiny, tiny_assistant, checkpoints)


def maker(target: PreTrainedModel, assistant: PreTrainedModel, checkpoints: Mapping[str, str]) -> Make:
    """The same for `target`."""

    def one(name: str) -> Drafter:
        if name == "self":
            return SelfDrafter(target, kernel="reference")
        if name == "model":
            return SmallModelDrafter(assistant, target)
        if name == "ngram":
            return NgramDrafter(2)
        if name == "history":
            return HistoryDrafter(10_000)
        if name in checkpoints:
            learned: dict[str, Any] = {"dflash": DFlashDrafter, "mtp": MtpDrafter}
            return learned.get(name, Eagle3Drafter)(checkpoints[name], target)
        _, kind, scope, *together = name.split()
        students: dict[str, Callable[[], Drafter]] = {
            "self": lambda: SelfDrafter(target, "rtn-w4-g32", "reference", "packed"),
            "model": lambda: SmallModelDrafter(copy.deepcopy(assistant), target),
        }
        student = students.get(kind, lambda: one(kind))()
        how = TTSOptions(learning_rate=1e-3, scope=scope, stride=1, asynchronous=bool(together))
        return DistilledDrafter(student, how)

    return lambda *names: [one(name) for name in names or KINDS]


KINDS = ("self", "dflash", "ngram", "model", "history", "eagle3", "mtp", "tts model rollout")


class Clock:
    """A second passes between any two looks of the rollout at it; a lookup takes `draft_seconds` more."""

    def __init__(self) -> None:
        self.now = self.draft_seconds = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In the place of the machine's."""
    clock = Clock()
    monkeypatch.setattr(rollout, "time", clock)
    for kind in (NgramDrafter, HistoryDrafter):
        propose = kind.propose

        def slow(drafter: Any, *arguments: Any, propose: Any = propose) -> Any:
            clock.now += clock.draft_seconds
            return propose(drafter, *arguments)

        monkeypatch.setattr(kind, "propose", slow)
    return clock


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    return install_tape(monkeypatch)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and drafts of each replay of a draft."""
    found: list[tuple[int, int]] = []
    replay = CapturedLoop.replay

    def watched(self: CapturedLoop, draft: NetworkDraft) -> Proposal:
        found.append((len(draft.tokens), draft.draft_length))
        return replay(self, draft)

    monkeypatch.setattr(CapturedLoop, "replay", watched)
    return found
