"""A stand-in for CUDA graphs on a CPU: what ran once is replayed on the same memory, without Python of the model."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from spec_trl.generation import session
from spec_trl.generation.engine.cuda.graph_capture import Outputs, Recording
from spec_trl.generation.engine.forwards import runner_choice
from spec_trl.generation.engine.network import cpu_states
from spec_trl.native import cpu_products, cpu_sampling
from tests.generation.calls import outputs


_WAITS_FOR_DEVICE = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else compiled code would fall back to what was compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _WAITS_FOR_DEVICE:
            raise RuntimeError(f"{func} waits for the device, which a capture cannot")
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, result))
        return result


class Tape:
    """Records every tensor operation with the tensors it read and wrote; a replay runs them again, and puts what an
    operation returns where it lay before. Numbers that Python computed while recording stay as they were."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, forward: Callable[[], Outputs], apart: bool = False) -> Recording:
        with _Recorder() as recorder:
            logits, features = forward()
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, result in recorder.calls:
                # As a captured graph would see them: the same memory, whatever its tensors' versions.
                again = func(*tree_map_only(Tensor, Tensor.detach, args), **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return Recording(replay, logits, features)

    def seconds(self, replay: Callable[[], None], replays: int = 1) -> float:
        return 1.0

    def bytes(self) -> int:
        return self.recorded << 20


def install_tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    """A tape for all forwards that are captured from now on. What torch.compile traces runs as it was traced: the
    compiler itself is not ours to test, and takes half a minute."""
    tape, compile_ = Tape(), torch.compile
    # Models outlive a test: forwards that an earlier one captured would be replayed from its tape.
    monkeypatch.setattr(session, "_sessions", WeakKeyDictionary())
    for functions in (cpu_products, cpu_sampling):
        monkeypatch.setattr(functions, "library", lambda *_: None)  # a tape hears torch alone
    monkeypatch.setattr(cpu_states, "serves", lambda state: False)
    monkeypatch.setattr(runner_choice, "recorder_for", lambda device: tape)
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile_(f, backend="aot_eager", **options))
    return tape


def check_drafts(graph: Any, eager: Any) -> None:
    """The same tokens, and the same drafts: a wrong draft changes no token, but how many are accepted."""
    assert outputs(graph) == outputs(eager) and graph.statistics.drafter_failure is None
    assert graph.statistics.total == eager.statistics.total and graph.statistics.total.accepted > 0
    assert graph.statistics.draft_forwards == eager.statistics.draft_forwards


def no_memory(*_: Any) -> Recording:
    """In the place of a capture."""
    raise torch.OutOfMemoryError("not now")


class Taken(TorchDispatchMode):
    """Collects the memory that operations take for their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given, new = (
            {
                each.untyped_storage().data_ptr(): each.untyped_storage()
                for each in tree_leaves(of)
                if torch.is_tensor(each)
            }
            for of in ((args, kwargs), result)
        )
        self.found += [storage for place, storage in new.items() if place not in given]
        return result


def spoil_pool(monkeypatch: pytest.MonkeyPatch, tape: Tape) -> list[list[torch.UntypedStorage]]:
    """Has each replay overwrite what other captures took first, as they may on CUDA, where all share a pool, or those
    recorded apart; returns the memory that each takes. A commit of states reads what its forward wrote there."""
    record, taken, pools = tape.record, [], {False: [], True: []}

    def watch(work: Callable[[], Outputs], apart: bool = False) -> Recording:
        def watched() -> Outputs:
            with Taken() as memory:
                outputs = work()
            taken.append(memory.found)
            pools[apart].append(memory.found)
            return outputs

        recording = record(watched)
        pool, commits = pools[apart], "_record_commit" in getattr(work, "__qualname__", "")
        own = pool[-2:] if commits else pool[-1:]

        def replay() -> None:
            for other in pool:
                for storage in other if not any(other is each for each in own) else []:
                    storage.fill_(255)  # NaN, or token -1
            recording.replay()

        return recording._replace(replay=replay)

    monkeypatch.setattr(tape, "record", watch)
    return taken
