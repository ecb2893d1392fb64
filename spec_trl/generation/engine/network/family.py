"""What sets a kind of model apart: the memory that its layers need, and what may be done with its rows."""

from transformers import PreTrainedConfig, PreTrainedModel

from ..kv.cache import RaggedCache
from ..kv.states import States, state_bytes
from .attention import STATE_LAYERS


PIXELS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), ("pixel_values", "image_grid_thw")),
    "gemma3": ("pixel_values",),
    **dict.fromkeys(("smolvlm", "idefics3"), ("pixel_values", "pixel_attention_mask")),
}
"""Inputs that hold the images of a batch, by model type."""
TOKEN_TYPES = "mm_token_type_ids", "token_type_ids"
"""Inputs with one number per token: 0 is text, 1 an image."""

class Family:
    """A kind of model, told by its config.

    Attributes:
        name: its `model_type`.
        keeps_states: whether layers keep states of convolutions or scans beside K/V.
        stateful: the words of a refusal if they do; else "".
        cache: class of caches outside of a pool.
        drafts_ahead: whether drafts may go beyond those that the target verifies. States cannot go back.
        takes_chains: whether a row may have several chains of drafts in a forward. A scan takes one.
        shares_prompts: whether a row may copy the prompt of a row in flight, whose states have gone on.
        is_compiled: whether torch.compile may trace its layers. It does not trace mixers.
        takes_pages: whether K/V may lie in the pages of a pool. Beside states it is small.
        media: inputs that hold the images of a batch (`media.py`); (): images are not served.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.name: str = config.model_type
        types = getattr(config.get_text_config(decoder=True), "layer_types", None)
        self.keeps_states = not STATE_LAYERS.isdisjoint(types or ())
        self.stateful = f"of type '{self.name}', which keeps states," if self.keeps_states else ""
        self.cache = States if self.keeps_states else RaggedCache
        self.drafts_ahead = self.takes_chains = self.shares_prompts = not self.keeps_states
        self.is_compiled = self.takes_pages = not self.keeps_states
        self.media = PIXELS.get(self.name, ())

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Family":
        """Returns the family of `model`."""
        return cls(model.config)

    def row_bytes(self, network: PreTrainedModel) -> int:
        """Bytes of a row of `network`, of this family, beside K/V."""
        return state_bytes(network) if self.keeps_states else 0

    def check_media(self, remedy: str) -> None:
        """Raises ValueError, with the `remedy`, unless images of this family are served."""
        if not self.media:
            served = ", ".join(PIXELS)
            raise ValueError(f"images of model type '{self.name}' are not served; those of {served} are. {remedy}")


def has_token_types(model: PreTrainedModel) -> bool:
    """Whether `model` may be given :data:`TOKEN_TYPES`."""
    return "image" in model.input_modalities
