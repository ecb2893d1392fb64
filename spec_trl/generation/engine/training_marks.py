"""What training leaves on the modules of a policy, and generation takes no notice of."""

from typing import Any

from torch import nn

from .patched_forwards import patched_forward


HOOK_DICTS = frozenset(name for name in vars(nn.Module()) if name.endswith("_hooks"))
# Of gradient checkpointing, which a network in eval mode does not do: each time it is switched on they are new. And
# what accelerate wraps autocast around.
_MARKS = ("_gradient_checkpointing_func", "_require_grads_hook", "_require_grads_hooks", "_original_forward")
# Hooks of these stay behind. A forward with `output_hidden_states` leaves the first one's, which torch.compile cannot
# trace. FSDP2's would gather and free weights in each forward. ZeRO-3's on the root, which TRL does not take off for
# generation, compares notes with the other ranks, and ranks run different numbers of forwards.
_LEFT_BEHIND = ("transformers.utils.output_capturing", "torch.distributed.fsdp", "deepspeed")


def lasting_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of `module` that mean something to generation; its dicts of hooks are copied."""
    state = {name: value for name, value in vars(module).items() if name not in _MARKS}
    if patched_forward(module) is None:  # accelerate sets the class's own forward
        state.pop("forward", None)
    for name in HOOK_DICTS & state.keys():
        state[name] = state[name].copy()
        for key, hook in vars(module)[name].items():
            if _stays_behind(hook):
                del state[name][key]
    return state


def _stays_behind(hook: Any) -> bool:
    """Whether a hook means nothing to generation. TRL puts one more on the embedding after each rollout, so that
    checkpointed activations get gradients."""
    is_for_gradients = getattr(hook, "__name__", "").startswith("make_inputs_require_grad")
    return is_for_gradients or str(hook.__module__).startswith(_LEFT_BEHIND)
