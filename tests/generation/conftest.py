"""Drafters of every kind for the tiny target, and a tape in the place of CUDA graphs."""

import copy
from collections.abc import Callable

import pytest
import torch

from spec_trl.generation.configuration import Distillation
from spec_trl.generation.drafters.dflash.drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.drafter import Eagle3Drafter
from spec_trl.generation.drafters.history import HistoryDrafter
from spec_trl.generation.drafters.ngram import NgramDrafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.tts.drafter import DistilledDrafter
from spec_trl.generation.engine import captured, compiled
from spec_trl.generation.engine.drafter import Drafter
from tests.generation.drafters.dflash import test_drafter
from tests.generation.drafters.eagle3 import reference
from tests.generation.engine.tape import Tape


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafters")
    reference.make_folder(folder / "eagle3", reference.safeai(vocab_size=64, draft_vocab_size=64))
    test_drafter.make_checkpoint(folder / "dflash", test_drafter.zlab(vocab_size=64))
    return {kind: str(folder / kind) for kind in ("eagle3", "dflash")}


@pytest.fixture
def drafters(tiny, tiny_assistant, checkpoints) -> Callable[..., list[Drafter]]:
    """Makes drafters by name; all there are, in an order of their own."""

    def make(*names: str) -> list[Drafter]:
        how = Distillation(1e-3, scope="rollout")
        known: dict[str, Callable[[], Drafter]] = {
            "self": lambda: SelfDrafter(tiny, kernel="reference"),
            "dflash": lambda: DFlashDrafter(checkpoints["dflash"], tiny),
            "ngram": lambda: NgramDrafter(2),
            "model": lambda: SmallModelDrafter(tiny_assistant, tiny),
            "history": lambda: HistoryDrafter(10_000),
            "eagle3": lambda: Eagle3Drafter(checkpoints["eagle3"], tiny),
            "tts": lambda: DistilledDrafter(SmallModelDrafter(copy.deepcopy(tiny_assistant), tiny), how),
        }
        return [known[name]() for name in names or known]

    return make


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    monkeypatch.setattr(captured, "recorder_for", lambda device: tape)
    # The backend is not ours to test, and the C++ one takes half a minute: what matters is what torch.compile traces.
    compile_ = torch.compile
    monkeypatch.setattr(compiled.torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    return tape
