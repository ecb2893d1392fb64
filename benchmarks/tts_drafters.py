"""The drafters of the TTS benchmark: found in a folder, or trained there at first use, and how they learn."""

import hashlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

from examples import train_drafter
from spec_trl.generation.drafters.dflash.dflash_drafter import DFlashDrafter
from spec_trl.generation.drafters.eagle3.eagle3_drafter import Eagle3Drafter
from spec_trl.generation.drafters.self_copy import SelfDrafter
from spec_trl.generation.drafters.small_model import SmallModelDrafter
from spec_trl.generation.drafters.trainable_drafter import TrainableDrafter
from spec_trl.generation.engine.drafter import Drafter
from spec_trl.papers.test_time_speculation.distilled_drafter import DistilledDrafter
from spec_trl.papers.test_time_speculation.options import TTSOptions
from spec_trl.papers.test_time_speculation.trained_weights import CORRECTION_RATE


KINDS = ("eagle3", "dflash", "model", "self")
TITLES = {"eagle3": "EAGLE-3", "dflash": "DFlash", "model": "small LM", "self": "adapter on the self-drafter"}
DRAFT_LENGTH = 7  # γ where no block decides; TTS App. B drafts 8 deep
WINDOW = 64  # tokens that a drafter saw at most while it was trained
HELD_OUT = 200  # prompts that no drafter is trained on, the last ones
RECIPE_FILE = "recipe.json"
# More than the example's minutes: what a drafter knows of its first 64 tokens is what it can lose after them.
TRAINING = {
    "eagle3": ["--steps", "5000", "--batch-size", "8", "--learning-rate", "4e-3", "--depth", "6"],
    "dflash": ["--steps", "9000", "--batch-size", "8", "--learning-rate", "5e-3", "--anchors", "16", "--layers", "2"],
    "model": ["--steps", "5000", "--batch-size", "16"],
}
SAMPLES = 16000
_WEIGHT_RATES = {
    "eagle3": Eagle3Drafter.weight_rate, "dflash": DFlashDrafter.weight_rate, "model": SmallModelDrafter.weight_rate,
}  # fmt: skip
NONE, FROZEN, TTS = "none", "frozen", "TTS"


@dataclass(frozen=True)
class Kind:
    """One drafter of the benchmark."""

    name: str  # one of `KINDS`
    folder: Path | None  # its checkpoint; None for "self"
    draft_length: int  # γ
    learning_rate: float  # η of all weights; of "self", of its corrections
    quantization: str  # scheme of "self"

    def how(self, **changes: Any) -> TTSOptions:
        """The paper's way to learn, but for `changes`."""
        return replace(TTSOptions(learning_rate=self.learning_rate, stride=1), **changes)

    def student(self, target: PreTrainedModel) -> TrainableDrafter:
        """A drafter whose weights are nobody else's."""
        if self.folder is None:
            return SelfDrafter(target, self.quantization)
        if self.name == "model":
            small = AutoModelForCausalLM.from_pretrained(self.folder, dtype=target.dtype).to(target.device).eval()
            return SmallModelDrafter(small, target)
        kind = Eagle3Drafter if self.name == "eagle3" else DFlashDrafter
        return kind(str(self.folder), target)

    def drafter(self, target: PreTrainedModel, how: TTSOptions | None) -> Drafter:
        """It drafts, and learns as `how` says; None: frozen."""
        return self.student(target) if how is None else DistilledDrafter(self.student(target), how)

    def facts(self) -> dict[str, object]:
        """What a result must state about it. The digest is of the weights."""
        facts: dict[str, object] = {"draft_length": self.draft_length, "learning_rate": self.learning_rate}
        if self.folder is None:
            return facts | {"quantization": self.quantization}
        recipe = self.folder / RECIPE_FILE
        digest = hashlib.sha256((self.folder / "model.safetensors").read_bytes()).hexdigest()[:16]
        trained = json.loads(recipe.read_text()) if recipe.exists() else "trained elsewhere"
        return facts | {"digest": digest, "training": trained}


def make_kind(
    name: str, folder: Path, target: str, stories: Path, block_size: int, rate: float | None, quantization: str
) -> Kind:
    """The drafter `name`, trained now where `folder`, which holds eagle3, dflash<block size> and small_lm, has none.
    Of `stories`, a JSON list of strings, the last `HELD_OUT` are not trained on; `rate` is η, None: spec_trl's own."""
    if name == "self":
        return Kind(name, None, DRAFT_LENGTH, rate or CORRECTION_RATE, quantization)
    draft_length = block_size - 1 if name == "dflash" else DRAFT_LENGTH
    place = folder / {"eagle3": "eagle3", "dflash": f"dflash{block_size}", "model": "small_lm"}[name]
    _train_once(name, place, target, stories, block_size)
    width = json.loads((place / "config.json").read_text())["hidden_size"]
    return Kind(name, place, draft_length, rate or _WEIGHT_RATES[name] / width, quantization)


def _train_once(name: str, place: Path, target: str, stories: Path, block_size: int) -> None:
    recipe = place / RECIPE_FILE
    begun = json.loads(recipe.read_text()) if recipe.exists() else None
    if begun is None and (place / "config.json").exists():
        return  # trained elsewhere
    if begun is not None and begun["seconds"] is not None:
        return
    options = ["--drafter", name, "--window", str(WINDOW), "--held-out", str(HELD_OUT), "--measure-tokens", "0"]
    options += ["--sample-tokens", str(WINDOW), "--samples", str(SAMPLES), *TRAINING[name]]
    if name == "dflash":
        options += ["--block-size", str(block_size)]
    place.mkdir(parents=True, exist_ok=True)
    resumed = (place / train_drafter.STATE_FILE).exists()
    recipe.write_text(json.dumps({"options": options, "seconds": None, "resumed": resumed}))
    print(f"training the drafter {place.name}, once", flush=True)
    started = time.perf_counter()
    resume = ["--resume"] if resumed else []
    train_drafter.main(["--target", target, "--prompts", str(stories), "--output", str(place), *options, *resume])
    seconds = round(time.perf_counter() - started, 1)
    recipe.write_text(json.dumps({"options": options, "seconds": seconds, "resumed": resumed}))
