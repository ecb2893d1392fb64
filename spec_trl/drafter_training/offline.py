"""Training a drafter offline, on what its target itself would say: sample, cut into windows, distil.

    prompts ─► sample_sequences ─► Samples ─► cut ─► Windows ─► train(target, trainee, windows, options, folder)

The target's hidden states are computed window by window, each from position 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import PreTrainedModel

from ..generation.configuration import SpeculativeConfig
from ..generation.drafters.dflash.drafter import DFlashDrafter
from ..generation.drafters.eagle3.drafter import Eagle3Drafter
from ..generation.engine.shadow import observe
from ..generation.generate import speculative_decoding
from ..json_files import replacing
from .sequence_loss import SequenceLoss, TargetView, causal_lm_loss, sequence_loss


STATE_FILE, SAMPLES_FILE = "training_state.pt", "training_samples.safetensors"
_SAMPLED_AT_ONCE = 64  # rows in flight
_PER_CALL = 256  # rows between two updates of the progress bar
_MAX_NORM = 1.0  # of the gradient
_EPOCHS = 1 << 31  # seeds of the order of the windows begin here, those of the steps at 0


@dataclass(frozen=True)
class TrainingOptions:
    """How a drafter is trained.

    Args:
        steps: number of optimizer steps.
        learning_rate: of AdamW at its highest, after a linear warm-up; a cosine takes it to 0.
        batch_size: number of windows per step.
        warmup: share of the steps that warm up.
        depth: number of steps that EAGLE-3 is unrolled.
        anchors: number of DFlash's per window; None: enough to draft each token about twice.
        save_every: number of steps between two saved states.
        seed: of the order of the windows and of the anchors.

    Raises:
        ValueError: one of them is out of range.
    """

    steps: int
    learning_rate: float
    batch_size: int = 16
    warmup: float = 0.05
    depth: int = 7
    anchors: int | None = None
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "depth", "save_every", "anchors"):
            count = vars(self)[name]
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}; it must be at least 1.")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate={self.learning_rate}; it must be above 0.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup}; it is a share of the steps, from 0 to below 1.")


# ---- samples -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Sequences that a target sampled.

    Args:
        tokens: `[N, length]` int64, right-padded with 0.
        lengths: `[N]` int64, EOS included.
        prompts: `[N]` int64, length of each prompt.
    """

    tokens: Tensor
    lengths: Tensor
    prompts: Tensor

    def save(self, folder: Path) -> None:
        """Writes them to `folder`, whole or not at all."""
        with replacing(folder / SAMPLES_FILE) as file:
            save_file(asdict(self), file)

    @classmethod
    def load(cls, folder: Path) -> "Samples":
        """Reads what `save` wrote; raises ValueError where there is nothing."""
        return cls(**load_file(_to_resume(folder, SAMPLES_FILE)))


@torch.no_grad()
def sample_sequences(
    target: PreTrainedModel, prompts: Sequence[Tensor], count: int, length: int, seed: int = 0, progress: bool = False
) -> Samples:
    """Samples from the target with this engine, without a drafter, at temperature 1.

    Args:
        target: a causal language model, with an EOS token or without.
        prompts: `[n_i]` int64 each, taken in turn.
        count: N, number of sequences.
        length: largest number of tokens of a sequence, its prompt included.
        seed: of the noise. The same seed and prompts give the same sequences.
        progress: whether to show a bar.

    Raises:
        ValueError: a prompt is empty or leaves no room, or a number is out of range.
    """
    limit = target.config.get_text_config(decoder=True).max_position_embeddings
    if count < 1 or not 2 <= length <= limit:
        raise ValueError(f"count={count}, length={length}; give at least 1 sequence of 2 to {limit} tokens.")
    bad = [len(prompt) for prompt in prompts if not 1 <= len(prompt) < length]
    if bad or not prompts:
        raise ValueError(
            f"{len(prompts)} prompts, of which {len(bad)} are empty or as long as a whole sequence (length={length}, "
            f"prompts of {sorted(set(bad))[:5]} tokens); cut them, or sample longer sequences."
        )
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    sizes = torch.tensor([len(prompt) for prompt in chosen])  # [N]
    tokens = torch.zeros(count, length, dtype=torch.int64)  # [N, length]
    lengths = sizes.clone()  # [N]
    bar = tqdm(total=count, desc="sampling", unit=" sequences", disable=not progress)
    order = sizes.sort(stable=True).indices.tolist()
    while order:
        # Prompts of about one length go together: then all rows can grow to about the same length.
        shortest = int(sizes[order[0]])
        batch = [i for i in order[:_PER_CALL] if int(sizes[i]) <= shortest + (length - shortest) // 8]
        order = order[len(batch) :]
        width = int(sizes[batch[-1]])
        ids = torch.stack([nn.functional.pad(chosen[i], (width - len(chosen[i]), 0)) for i in batch])  # [B, width]
        mask = torch.arange(width) >= width - sizes[batch, None]  # [B, width]
        output: Any = target.generate(
            input_ids=ids.to(target.device), attention_mask=mask.long().to(target.device),
            custom_generate=speculative_decoding, assistant_strategy="none", do_sample=True, temperature=1.0, top_k=0,
            top_p=1.0, pad_token_id=0, max_new_tokens=length - width, return_dict_in_generate=True, request_ids=batch,
            speculative_config=SpeculativeConfig(seed=seed, max_batch_size=_SAMPLED_AT_ONCE),
        )  # fmt: skip
        lengths[batch] += output.lengths.cpu()
        for i, row in zip(batch, output.sequences.cpu(), strict=True):
            whole = row[width - int(sizes[i]) :]  # [up to length]
            tokens[i, : len(whole)] = whole
        bar.update(len(batch))
    bar.close()
    real = torch.arange(length) < lengths[:, None]  # [N, length]
    return Samples(tokens * real, lengths, sizes)


@dataclass(frozen=True)
class Windows:
    """Pieces of samples, on which a drafter is trained one by one.

    Args:
        tokens: `[M, W]` int64, right-padded with 0.
        lengths: `[M]` int64.
        first: `[M]` int64, index in the window of the first sampled token that has a token before it.
    """

    tokens: Tensor
    lengths: Tensor
    first: Tensor


def cut(samples: Samples, window: int | None = None) -> Windows:
    """Cuts samples into windows of `window` tokens, the last of a sample shorter; None: whole samples. Windows without
    a sampled token after another are left out.

    Raises:
        ValueError: `window` is below 2, or no window is left.
    """
    if window is not None and window < 2:
        raise ValueError(f"window={window}; it must be at least 2 tokens.")
    width = min(window or samples.tokens.shape[1], samples.tokens.shape[1])
    starts = range(0, samples.tokens.shape[1], width)
    tokens = torch.cat(
        [nn.functional.pad(part, (0, width - part.shape[1])) for part in samples.tokens.split(width, 1)]
    )
    lengths = torch.cat([(samples.lengths - start).clamp(0, width) for start in starts])  # [pieces * N]
    first = torch.cat([(samples.prompts - start).clamp(min=1) for start in starts])  # [pieces * N]
    kept = (lengths > first).nonzero().flatten()
    if not len(kept):
        raise ValueError(f"no window of {width} tokens holds a sampled token after another; sample longer sequences.")
    return Windows(tokens[kept], lengths[kept], first[kept])


# ---- what is trained -----------------------------------------------------------------------------------------------


@dataclass
class Trainee:
    """Something that can be trained to draft: the parameters that learn, the indices of the hidden states that it
    reads, its loss, and what writes a checkpoint for `generate(assistant_model=...)`."""

    parameters: list[nn.Parameter]
    layers: tuple[int, ...]
    loss: Callable[[PreTrainedModel, TargetView, TrainingOptions, torch.Generator], SequenceLoss]
    save: Callable[[Path], None]


def learned_trainee(drafter: Eagle3Drafter | DFlashDrafter) -> Trainee:
    """An EAGLE-3 or DFlash drafter, which should run in float32, whatever its target runs in."""

    def loss(
        target: PreTrainedModel, view: TargetView, options: TrainingOptions, generator: torch.Generator
    ) -> SequenceLoss:
        return sequence_loss(drafter, target, view, generator, depth=options.depth, anchors=options.anchors)

    return Trainee(drafter.trained(drafter.network), drafter.feature_layers, loss, drafter.save)


def model_trainee(model: PreTrainedModel) -> Trainee:
    """A small causal language model with the target's vocabulary."""

    def save(folder: Path) -> None:
        fresh = folder / ".new"
        model.save_pretrained(fresh)
        for file in fresh.iterdir():
            file.replace(folder / file.name)
        fresh.rmdir()

    return Trainee(list(model.parameters()), (), lambda target, view, *_: causal_lm_loss(model, target, view), save)


# ---- training ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """How training went: cross-entropy in nats and agreement in 0..1 of each step, `[steps]` float."""

    cross_entropy: Tensor
    agreement: Tensor


def train(
    target: PreTrainedModel,
    trainee: Trainee,
    windows: Windows,
    options: TrainingOptions,
    folder: Path,
    *,
    resume: bool = False,
    progress: bool = False,
) -> Progress:
    """Trains a drafter and saves it with its training state, every `options.save_every` steps and at the end.

    Training that was broken off and resumed on the same machine ends in the same bits as training without a break.

    Args:
        target: in eval mode; it is not changed.
        trainee: trained in place.
        windows: to train on, in a new random order in each pass.
        options: steps, rates and sizes.
        folder: for checkpoint and state.
        resume: whether to go on from the state in `folder`.
        progress: whether to show a bar.

    Raises:
        ValueError: there is no state to resume or it was made with other options, the target is in train mode.
        FloatingPointError: the loss is not finite; the last saved state stays as it is.
    """
    if target.training:
        raise ValueError("the target is in train mode, where it may drop out units; call target.eval() first.")
    parameters = [parameter.requires_grad_() for parameter in trainee.parameters]
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = LambdaLR(optimizer, lambda step: _share_of_rate(step, options))
    record = torch.zeros(options.steps, 2)  # [steps, (cross-entropy, agreement)]
    done = 0
    if resume:
        state = _read_state(folder, options)
        with torch.no_grad():
            for parameter, saved in zip(parameters, state["parameters"], strict=True):
                parameter.copy_(saved)
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        record, done = state["record"], state["done"]

    def save() -> None:
        trainee.save(folder)
        state = {
            "options": asdict(options), "done": done, "record": record, "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(), "parameters": [parameter.detach().cpu() for parameter in parameters],
        }  # fmt: skip
        with replacing(folder / STATE_FILE) as file:
            torch.save(state, file)

    if not resume:
        save()  # training that is broken off before the first save can be resumed too
    bar = tqdm(total=options.steps, initial=done, desc="training", unit=" steps", disable=not progress)
    while done < options.steps:
        view, generator = _batch(target, trainee, windows, options, done)
        loss = trainee.loss(target, view, options, generator)
        record[done, 0], record[done, 1] = loss.cross_entropy.detach(), loss.agreement
        if not bool(record[done, 0].isfinite()):
            raise FloatingPointError(
                f"the loss is {float(record[done, 0])} at step {done + 1} of {options.steps}: lower learning_rate="
                f"{options.learning_rate}. The state of the last save is untouched."
            )
        optimizer.zero_grad(set_to_none=True)
        loss.cross_entropy.backward()
        nn.utils.clip_grad_norm_(parameters, _MAX_NORM)
        optimizer.step()
        schedule.step()
        done += 1
        bar.update()
        recent = record[max(done - 20, 0) : done].mean(dim=0).tolist()
        bar.set_postfix(loss=f"{recent[0]:.3f}", agreement=f"{recent[1]:.3f}", refresh=False)
        if done % options.save_every == 0 or done == options.steps:
            save()
    bar.close()
    for parameter in parameters:
        parameter.grad = None
        parameter.requires_grad_(False)
    return Progress(record[:, 0], record[:, 1])


def _batch(
    target: PreTrainedModel, trainee: Trainee, windows: Windows, options: TrainingOptions, step: int
) -> tuple[TargetView, torch.Generator]:
    """What the target shows of the windows of `step`, and the step's own random numbers."""
    count = len(windows.tokens)
    places = range(step * options.batch_size, (step + 1) * options.batch_size)
    seed = options.seed << 32
    orders = {
        epoch: torch.randperm(count, generator=torch.Generator().manual_seed(seed + _EPOCHS + epoch))
        for epoch in {place // count for place in places}
    }
    chosen = torch.stack([orders[place // count][place % count] for place in places])  # [B]
    lengths = windows.lengths[chosen]  # [B]
    width = int(lengths.max())
    tokens = windows.tokens[chosen, :width].to(target.device)  # [B, T]
    is_real = (torch.arange(width) < lengths[:, None]).to(target.device)  # [B, T]
    features, hidden = observe(target, tokens, trainee.layers)
    view = TargetView(tokens, is_real, features, hidden, windows.first[chosen].to(target.device))
    return view, torch.Generator().manual_seed(seed + step)


def _share_of_rate(step: int, options: TrainingOptions) -> float:
    warm = int(options.warmup * options.steps)
    if step < warm:
        return (step + 1) / (warm + 1)
    return 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (step - warm) / (options.steps - warm))).item())


def _to_resume(folder: Path, file: str) -> Path:
    if not (folder / file).is_file():
        raise ValueError(f"{str(folder)!r} has no {file}: there is no training to resume in it.")
    return folder / file


def _read_state(folder: Path, options: TrainingOptions) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(_to_resume(folder, STATE_FILE), map_location="cpu", weights_only=True)
    now = asdict(options)
    changed = {name: (state["options"][name], now[name]) for name in now if state["options"][name] != now[name]}
    changed.pop("save_every", None)
    if changed:
        raise ValueError(f"{str(folder)!r} was trained with other options, {changed} (then, now); give the same ones.")
    return state
