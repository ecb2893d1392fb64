"""TRL's trainers with speculative rollouts, and `speculate` for any other loop."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Moved(ModuleType):
    """A module of an earlier release, by whose name `training_args.bin` of its checkpoints finds a config."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("Spec"):
            raise AttributeError(name)
        return getattr(import_module("spec_trl.trainers.trainers"), name)


for _name in ("grpo_config", "grpo_trainer", "rloo_trainer", "distillation_trainer", "gmpo_trainer"):
    sys.modules[f"{__name__}.spec_{_name}"] = _Moved(f"{__name__}.spec_{_name}")
