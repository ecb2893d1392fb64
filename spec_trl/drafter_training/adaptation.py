"""Trains a learned drafter along with the policy (ER App. F.5, the learned-auxiliary row of its Table 2).

The forward of the policy's loss provides the hidden states, and after every micro-batch the drafter takes one
optimizer step on them: no second forward of the policy, no data stored from step to step.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from ..generation.drafters.dflash.dflash_drafter import DFlashDrafter
from ..generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from ..generation.drafters.mtp.mtp_drafter import MtpDrafter
from ..generation.engine.network.shadow import decoder_layers, keep_states
from ..generation.engine.sampling.noise import stream_keys
from ..generation.planner.acceptance import MAX_DRAFT_LENGTH
from ..json_files import replacing
from ..value_checks import DeclaredOptions, option
from .sequence_loss import TargetView, sequence_loss


Adaptable = Eagle3Drafter | DFlashDrafter
ADAPTABLE = (Eagle3Drafter.strategy, DFlashDrafter.strategy, MtpDrafter.strategy)
DRAFTER_FOLDER = "drafter"
"""Folder of the adapted drafter in a checkpoint or a saved model; `assistant_model` can name it."""
STATE_FILE = "drafter_adaptation.pt"
_REHEARSED = 8  # tokens


@dataclass(frozen=True)
class AdaptationOptions(DeclaredOptions):
    """How a drafter learns along with the policy."""

    group = "drafter_adaptation"

    learning_rate: float = option(1e-6, "Of the drafter's own AdamW, constant.", positive=True)
    hidden_weight: float = option(1.0, "Weight of the regression of its hidden states onto the policy's.")
    token_weight: float = option(0.1, "Weight of its soft cross-entropy against the policy's distributions.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hidden_weight and not self.token_weight:
            raise ValueError(
                "drafter_adaptation.hidden_weight=0 and drafter_adaptation.token_weight=0 leave the drafter nothing "
                "to learn. Raise one of them, or set drafter_adaptation=False."
            )


class DrafterAdaptation:
    """Trains a drafter inline, with a separate optimizer.

    The loss is `hidden_weight` · hidden regression + `token_weight` · soft cross-entropy, over completion tokens
    (:func:`~.sequence_loss`). Adaptation changes no bit of the policy's training. The gradient is the mean over the
    ranks with something to learn from. A failure on one rank never ends the training: all ranks stop adapting with a
    warning, and the drafter's weights stay.

    Args:
        drafter: learns in place. In a dtype narrower than float32 its weights are copies of float32 ones, which the
            optimizer moves: a bfloat16 weight would lose a step of 1e-6 in rounding.
        policy: the live policy, without peft's outer wrapper.
        how: learning rate, and weights of the loss; a weight of 0 leaves its term out.
        seed: of DFlash's anchors.
        draft_length: the longest in rollouts; an MTP head is unrolled no further.

    Raises:
        ValueError: this drafter cannot learn from this policy.
    """

    def __init__(
        self,
        drafter: Adaptable,
        policy: PreTrainedModel,
        accelerator: Accelerator,
        how: AdaptationOptions,
        seed: int,
        draft_length: int = MAX_DRAFT_LENGTH,
    ) -> None:
        self.drafter = drafter
        self._policy, self._accelerator, self._seed = policy, accelerator, seed
        # An MTP head's output and the state that it stands for differ by a norm.
        self._hidden_weight = 0.0 if isinstance(drafter, MtpDrafter) else how.hidden_weight
        self._token_weight = how.token_weight
        self._depth = min(draft_length, 3) if isinstance(drafter, MtpDrafter) else 7
        self._parameters = [parameter.requires_grad_() for parameter in drafter.trained(drafter.network)]
        wide = torch.promote_types(drafter.network.dtype, torch.float32)
        # In float32 or wider the parameters themselves.
        self._masters: list[Tensor] = [parameter.detach().to(wide) for parameter in self._parameters]
        # Decay would pull an already trained drafter towards nothing; ER names none.
        self._optimizer = torch.optim.AdamW(self._masters, lr=how.learning_rate, weight_decay=0.0)
        self._micro_batches = 0
        self._seen: tuple[Mapping[str, Any], dict[int, Tensor]] | None = None  # inputs, hidden states by index
        self._problem: str | None = None  # of this rank, unknown to other ranks so far
        self.is_stopped = False
        self._sums = dict.fromkeys(("loss", "agreement", "learned", "seconds"), 0.0)
        self._rehearse()

    @contextmanager
    def watch(self, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Stores the hidden states of the forward inside the block, which must be the policy's on `inputs`. Leave the
        block before the backward pass, in which gradient checkpointing runs the forward again, and before rollouts.

        Args:
            inputs: TRL's: left-padded `prompt_ids` and `prompt_mask` `[B, P]`, right-padded `completion_ids` and
                `completion_mask` `[B, C]`.
        """
        if self.is_stopped:
            yield
            return
        states: dict[int, Tensor] = {}
        newest = len(decoder_layers(self._policy))
        handles = keep_states(self._policy, {*self.drafter.feature_layers, newest}, states)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._seen = inputs, {index: state.detach() for index, state in states.items()}

    def update(self) -> None:
        """Takes one step on the states stored since the last step. Every rank must call it once per micro-batch."""
        seen, self._seen = self._seen, None
        if self.is_stopped:
            return
        started = self._device_time()  # the policy's backward pass is not the drafter's time
        self._micro_batches += 1
        problem = self._problem
        gradients: list[Tensor] = []
        failed, learned, loss, agreement = 1.0, 0.0, 0.0, 0.0
        if problem is None:
            try:
                learned, loss, agreement, gradients = self.learn_from(seen)
                failed = 0.0
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        status = torch.tensor([failed, learned, loss, agreement], device=self._accelerator.device)  # [4]
        failed, learned, loss, agreement = self._accelerator.reduce(status, "sum").tolist()
        if failed:
            self.is_stopped = True
            self._optimizer.state.clear()
            warnings.warn(
                f"the {self.drafter.strategy} drafter is adapted no further (micro-batch {self._micro_batches}): "
                f"{problem or 'it failed on another rank'}. It drafts on with the weights it has. Completions and the "
                "policy are not affected.",
                stacklevel=2,
            )
            return
        if learned:
            gradients = [self._accelerator.reduce(gradient, "sum").div_(learned) for gradient in gradients]
            try:
                self.step(gradients)
            except Exception as error:  # of this rank; other ranks learn of it at the next micro-batch
                self._problem = f"{type(error).__name__}: {error}"
        for name, value in zip(self._sums, (loss, agreement, learned, self._device_time() - started), strict=True):
            self._sums[name] += value

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call: "loss" and "agreement", means over micro-batches and ranks, and
        "update_seconds", the sum over micro-batches on this rank."""
        sums, self._sums = self._sums, dict.fromkeys(self._sums, 0.0)
        if not sums["seconds"]:
            return {}
        means = {name: sums[name] / sums["learned"] for name in ("loss", "agreement")} if sums["learned"] else {}
        return means | {"update_seconds": sums["seconds"]}

    def learn_from(
        self, seen: tuple[Mapping[str, Any], dict[int, Tensor]] | None
    ) -> tuple[float, float, float, list[Tensor]]:
        """1 if there was something to learn from, else 0; the loss; the agreement; gradients of the masters."""
        if seen is None:
            raise RuntimeError("the policy's loss was not computed")
        view = target_view(*seen, self.drafter.feature_layers)
        del seen
        if not bool((view.is_real.sum(dim=1) > view.first).any()):  # every completion is masked
            return 0.0, 0.0, 0.0, [torch.zeros_like(master) for master in self._masters]
        # The seed depends on the saved count of micro-batches, and on the rank.
        rank, ranks = self._accelerator.process_index, self._accelerator.num_processes
        key = stream_keys(self._seed, torch.tensor([self._micro_batches * ranks + rank]))
        generator = torch.Generator().manual_seed(int(key) & 0xFFFFFFFF)  # the CPU's generator takes 32 bits
        with torch.enable_grad():
            loss, agreement = self._loss(view, generator)
            # Not backward(): no other .grad may change.
            computed = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
        gradients = [gradient.to(master.dtype) for gradient, master in zip(computed, self._masters, strict=True)]
        finite = torch.stack([loss.isfinite(), *(gradient.isfinite().all() for gradient in gradients)])  # [1 + n]
        if not bool(finite.all()):
            raise FloatingPointError("its loss or a gradient of it is not finite")
        return 1.0, float(loss.detach()), float(agreement), gradients

    def _loss(self, view: TargetView, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        with_regression = self._hidden_weight > 0
        losses = sequence_loss(
            self.drafter, self._policy, view, generator, depth=self._depth, with_regression=with_regression
        )
        loss = self._token_weight * losses.cross_entropy
        if with_regression:
            loss = loss + self._hidden_weight * losses.regression
        return loss, losses.agreement

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> None:
        """Takes one optimizer step on the masters by their `gradients`, and copies them into the drafter."""
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._copy_masters()

    @torch.no_grad()
    def _copy_masters(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.copy_(master)

    def _rehearse(self) -> None:
        """Computes the loss once, to raise its errors now and not after the first rollout."""
        width = self._policy.config.get_text_config(decoder=True).hidden_size
        like = {"dtype": self._policy.dtype, "device": self._policy.device}
        tokens = torch.zeros(1, _REHEARSED, dtype=torch.int64, device=self._policy.device)  # [1, T]
        view = TargetView(
            tokens,
            torch.ones_like(tokens, dtype=torch.bool),
            torch.zeros(1, _REHEARSED, len(self.drafter.feature_layers) * width, **like),
            torch.zeros(1, _REHEARSED, width, **like),
            torch.ones_like(tokens[:, 0]),
        )
        try:
            with torch.no_grad():
                self._loss(view, torch.Generator().manual_seed(0))
        except ValueError as error:
            raise ValueError(
                f"drafter_adaptation=True with this drafter and policy: {error} Set drafter_adaptation=False to keep "
                'the drafter as it is, or {"hidden_weight": 0} where hidden states cannot be compared.'
            ) from error
        except Exception as error:  # all ranks learn of it at the first micro-batch
            self._problem = f"{type(error).__name__}: {error}"

    def _device_time(self) -> float:
        if self._accelerator.device.type == "cuda":
            torch.cuda.synchronize(self._accelerator.device)
        return time.perf_counter()

    def save_drafter(self, folder: str | Path) -> None:
        """Writes the drafter to `folder/drafter` in its own format, whose dtypes may round its weights."""
        self.drafter.save(Path(folder) / DRAFTER_FOLDER)

    def save_state(self, folder: str | Path) -> None:
        """Writes the state of :meth:`load_state`, for a bitwise continuation: exact weights, optimizer and count."""
        state = {
            "strategy": self.drafter.strategy,
            "micro_batches": self._micro_batches,
            "masters": self._masters,
            "optimizer": self._optimizer.state_dict(),
        }
        with replacing(Path(folder) / STATE_FILE) as file:
            torch.save(state, file)

    def load_state(self, folder: str | Path) -> None:
        """Restores a trainer's checkpoint; without a state of such a drafter, warns and trains from the start."""
        path = Path(folder) / STATE_FILE
        state = torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None
        expected = [self.drafter.strategy, *(master.shape for master in self._masters)]
        if state is None or [state["strategy"], *(master.shape for master in state["masters"])] != expected:
            warnings.warn(
                f"{folder} holds no {STATE_FILE} of such a drafter: the {self.drafter.strategy} drafter starts from "
                "assistant_model again. Completions are not affected.",
                stacklevel=2,
            )
            return
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._copy_masters()
        groups = self._optimizer.state_dict()["param_groups"]  # the learning rate is this run's
        self._optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        self._micro_batches = state["micro_batches"]


def target_view(inputs: Mapping[str, Any], states: Mapping[int, Tensor], layers: tuple[int, ...]) -> TargetView:
    """A batch of TRL's (:meth:`DrafterAdaptation.watch`) as whole sequences padded right. All tokens of a completion
    count, also a tool's.

    Args:
        inputs: prompts padded left and completions right.
        states: hidden states `[B, P + C, H]` by index; the largest index is the input of the output embedding.
        layers: indices that the drafter reads.
    """
    tokens = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)  # [B, P + C]
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1).bool()  # [B, P + C]
    lengths = mask.sum(dim=1)  # [B]
    # Real tokens first, in their order.
    order = torch.argsort(~mask, dim=1, stable=True)[:, : int(lengths.max())]  # [B, T]
    is_real = torch.arange(order.shape[1], device=order.device) < lengths[:, None]  # [B, T]
    rows = torch.arange(len(order), device=order.device)[:, None]  # [B, 1]

    def straight(state: Tensor) -> Tensor:
        # Attention over padding only may have left NaN there.
        return state[rows, order].masked_fill_(~is_real[..., None], 0)  # [B, T, H]

    features = torch.cat([straight(states[index]) for index in layers], dim=-1)  # [B, T, layers * H]
    first = inputs["prompt_mask"].sum(dim=1)  # [B]
    return TargetView(tokens[rows, order], is_real, features, straight(states[max(states)]), first)
