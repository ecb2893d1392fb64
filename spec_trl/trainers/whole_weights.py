"""The policy's whole weights on every rank, for the length of a rollout.

Ranks run different numbers of forwards in a rollout, so that no forward may wait for another rank. TRL gathers what
DeepSpeed ZeRO-3 has sharded; under FSDP2 it leaves gathering to the hooks of each forward, so it is done here.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ..generation.engine.requirements import policy_in


def check_fsdp(version: int | None) -> None:
    """Raises ValueError for a `version` of FSDP whose weights cannot be gathered; None: no FSDP."""
    if version == 1:
        raise ValueError(
            "fsdp_version=1 is not served: it keeps a layer's weights in one flat tensor, and the drafter is made of "
            'each weight by itself. Set fsdp_version: 2 in the file for accelerate (fsdp_config={"version": 2} in '
            "SpecGRPOConfig)."
        )


@contextmanager
def whole_weights(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Gives the policy in `model` with plain Parameters, under FSDP2 in the `param_dtype` of its mixed precision. All
    ranks must enter and leave."""
    policy, sharded = policy_in(model), [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        yield policy
        return
    try:
        for module in sharded:
            module.unshard()
        policy._is_fsdp_managed_module = False  # transformers asks it whether a forward has to wait for other ranks
        yield policy
    finally:
        policy._is_fsdp_managed_module = True
        for module in sharded:
            module.reshard()
