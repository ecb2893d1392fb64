"""Trainings that take turns in one process: a step of each while the others wait.

A busy minute of the machine then hits all of them, and speeds can be compared step by step. Each training runs in a
thread of its own, of which one at a time does anything.
"""

import random
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback


class Turns(TrainerCallback):
    """What the trainers that `add` was called with share.

    Attributes:
        order: names, in the order of turns.
        seconds: of the turns of each name. A turn is a step; the first one begins the training too.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.seconds: dict[str, list[float]] = {}
        self._trainers: dict[str, Trainer] = {}
        self._random_states: dict[str, tuple[Any, ...]] = {}
        self._change = threading.Condition()
        self._waiting: deque[str] = deque()  # the first one's turn it is
        self._is_over = False  # one has failed, or the caller was interrupted
        self._failure: BaseException | None = None  # the first one
        self._mine = threading.local()  # name, and when its turn began

    def add(self, name: str, trainer: Trainer) -> None:
        """Lets `trainer` take part, with random generators as they are now, after it was made."""
        trainer.add_callback(self)
        self._trainers[name], self.seconds[name] = trainer, []
        self._random_states[name] = _random_state()

    def train(self) -> None:
        """Trains all of them. If one fails, or the caller is interrupted, the others stop before their next step."""
        self._waiting.extend(self._trainers)
        with ThreadPoolExecutor(len(self._trainers)) as pool:
            try:
                wait([pool.submit(self._run, name) for name in self._trainers])
            finally:
                self._is_over = True
        if self._failure is not None:
            raise self._failure

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Passes the turn on and waits for the next one; the first step belongs to the turn that began it all."""
        if self._mine.steps:
            self._pass_on()
            self._wait()
        self._mine.steps += 1

    def _run(self, name: str) -> None:
        self._mine.name, self._mine.steps, self._mine.started = name, 0, time.perf_counter()
        try:
            self._wait()
            self._trainers[name].train()
        except BaseException as error:
            self._failure, self._is_over = self._failure or error, True
        finally:
            self._pass_on(is_last=True)

    def _wait(self) -> None:
        name = self._mine.name
        with self._change:
            self._change.wait_for(lambda: self._is_over or self._waiting[0] == name)
            if self._is_over:
                raise RuntimeError("another training has ended early")
            self.order.append(name)
        _set_random_state(self._random_states[name])
        self._mine.started = time.perf_counter()

    def _pass_on(self, is_last: bool = False) -> None:
        name = self._mine.name
        self.seconds[name].append(time.perf_counter() - self._mine.started)
        self._random_states[name] = _random_state()
        with self._change:
            self._waiting.remove(name)
            if not is_last:
                self._waiting.append(name)
            self._change.notify_all()


def _random_state() -> tuple[Any, ...]:
    """Of the generators that all trainings of a process share."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_state(state: tuple[Any, ...]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
