"""Lends the engine of a trainer to a `rollout_func`, so that the loop of an agent drafts too."""

from collections.abc import Sequence
from typing import Any

from ..generation.engine.requirements import policy_in
from .speculative_rollouts import SpeculativeRollouts
from .trainer_checks import check_drawn, check_generation


def rollout_backend(trainer: Any) -> "RolloutBackend":
    """The engine of `trainer`, one of ours, for its `rollout_func`, which TRL calls with the trainer:

        def rollout(prompts, trainer):
            backend = spec_trl.rollout_backend(trainer)
            return backend.generate(backend.tokenize(prompts))

    Raises:
        ValueError: `trainer` is none of ours, samples in vLLM, or cannot sample its policy.
    """
    if not isinstance(trainer, SpeculativeRollouts):
        raise ValueError(
            f"trainer is a {type(trainer).__name__}; give a SpecGRPOTrainer, or call spec_trl.speculate(trainer) once "
            "and trainer.model.generate in the rollout_func."
        )
    if getattr(trainer.args, "use_vllm", False):
        raise ValueError("use_vllm=True: vLLM samples; call trainer.vllm_generation.generate, or set use_vllm=False.")
    return RolloutBackend(trainer)


class RolloutBackend:
    """Samples for a `rollout_func`; made by :func:`rollout_backend`. Any number of calls are one rollout."""

    def __init__(self, trainer: SpeculativeRollouts) -> None:
        self._trainer = trainer
        if trainer.rollout_backend is None:
            policy, settings = policy_in(trainer.model), trainer.generation_config
            check_generation(policy, settings, trainer._tokenizer, "leave out the backend")
            trainer.rollout_backend = self

    def tokenize(self, prompts: list[Any]) -> list[list[int]]:
        """Token ids of texts or conversations, as the trainer makes them."""
        ids: list[list[int]] = self._trainer._tokenize_prompts(prompts)[0]
        return ids

    def generate(self, prompt_ids: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
        """Samples a completion of each prompt under the trainer's config.

        Args:
            prompt_ids: token ids of the prompts. Those of a later turn contain the turns before.

        Returns:
            What TRL expects of a `rollout_func`: `prompt_ids`, `completion_ids` (token ids, EOS included) and their
            `logprobs`, in nats.
        """
        trainer, ids = self._trainer, [[*prompt] for prompt in prompt_ids]
        check_drawn(policy_in(trainer.model), trainer.generation_config, ids, trainer._tokenizer)
        sampled = trainer.sample(ids)
        return {
            "prompt_ids": ids,
            "completion_ids": [one.tokens for one in sampled],
            "logprobs": [one.logprobs for one in sampled],
        }
