"""What SpecGRPOTrainer takes for granted of the classes it extends, whose private methods change without notice."""

from inspect import Parameter, signature

import transformers
import trl
from trl.models import unwrap_model_for_generation


KNOWN = "trl 1.16 and transformers 5.17 to 5.24"
_REMEDY = "Install trl>=1.16,<1.17, or a spec_trl that knows the installed version."
OVERRIDDEN = (
    "_calculate_rewards", "_generate", "_generate_single_turn", "_get_per_token_logps_and_entropies",
    "_inner_training_loop",
    "_get_train_sampler", "_load_optimizer_and_scheduler", "_prepare_inputs", "_save_rng_state", "_tool_call_loop",
    "compute_loss", "save_model", "train", "training_step",
)  # fmt: skip
"""Methods that the trainer puts its own in place of, and calls."""
_CALLED = ("_tokenize_prompts",)
READ = (
    "_dist", "_metrics", "_tokenizer", "accelerator", "aux_loss_enabled", "eval_dataset", "generation_config",
    "generation_kwargs", "model", "model_wrapped", "rollout_func", "state", "tools", "train_dataset",
)  # fmt: skip
"""Attributes that the trainer reads."""
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def check_methods(ours: type, theirs: type) -> None:
    """Raises ImportError unless each method of `ours` that overrides one of `theirs` takes what callers give it: the
    same parameters in the same order. What goes into `*args` of ours may change."""
    for name in (*OVERRIDDEN, *_CALLED):
        if not hasattr(theirs, name):
            raise _unknown(f"{theirs.__name__} has no {name}")
        if name in _CALLED:
            continue
        mine, given = signature(getattr(ours, name)), signature(getattr(theirs, name))
        passes_on = any(each.kind is Parameter.VAR_POSITIONAL for each in mine.parameters.values())
        wanted = [each.name for each in mine.parameters.values() if each.kind in _POSITIONAL]
        found = list(given.parameters)[: len(wanted) if passes_on else None]
        if found != wanted:
            known, new = (", ".join(each.parameters) for each in (mine, given))
            raise _unknown(f"{theirs.__name__}.{name} takes ({new}), where ({known}) is known")
    keywords = {"gather_deepspeed3_params", "generation_kwargs", "gradient_checkpointing_kwargs"}
    if unknown := sorted(keywords - {*signature(unwrap_model_for_generation).parameters}):
        raise _unknown(f"trl.models.unwrap_model_for_generation takes no {', '.join(unknown)}")


def check_attributes(trainer: object) -> None:
    """Raises ImportError where the base classes have not set what `trainer` reads."""
    if missing := [name for name in READ if not hasattr(trainer, name)]:
        raise _unknown(f"a GRPOTrainer has no {', '.join(missing)}")


def _unknown(difference: str) -> ImportError:
    return ImportError(
        f"SpecGRPOTrainer knows {KNOWN}; trl {trl.__version__} and transformers {transformers.__version__} are "
        f"installed, and differ: {difference}. {_REMEDY}"
    )
