"""The clock of a training step."""

import pytest
import torch

from spec_trl.trainers.step_clock import StepClock


class Device:
    """A GPU that has a second of work left for each piece that was not waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.left = 0.0, 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def work(self) -> None:
        self.left += 1.0

    def wait(self, device: torch.device) -> None:
        assert device == torch.device("cuda:1")
        self.now, self.left = self.now + self.left, 0.0


def test_phases_have_the_work_that_they_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = Device(monkeypatch), {}
    clock = StepClock(torch.device("cuda:1"), lambda step, seconds, phases: found.update(phases, step=seconds))
    device.work()  # of the step before
    clock.on_step_begin(None, None, None)
    with clock.phase("prepare"):
        with clock.phase("rollout"):
            device.work()
        with clock.phase("logprobs"):
            device.work()
        device.work()
    device.work()
    clock.on_step_end(None, type("State", (), {"global_step": 1}), None)
    expected = {"step": 4.0, "rollout": 1.0, "reward": 0.0, "logprobs": 1.0, "adaptation": 0.0, "update": 1.0}
    assert found == expected | {"other": 1.0}
