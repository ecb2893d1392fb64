"""What sets a kind of model apart: the memory that its layers need, and what may be done with its rows."""

from transformers import PreTrainedConfig, PreTrainedModel

from ..kv.base import KVCache
from ..kv.cache import RaggedCache
from ..kv.states import States, state_bytes
from .attention import STATE_LAYERS


class Family:
    """A kind of model, told by its config.

    Attributes:
        name: its `model_type`.
        keeps_states: whether layers keep states of convolutions or scans beside K/V.
        drafts_ahead: whether drafts may go beyond those that the target verifies. States cannot go back.
        takes_chains: whether a row may have several chains of drafts in a forward. A scan takes one.
        shares_prompts: whether a row may copy the prompt of a row in flight, whose states have gone on.
        is_compiled: whether torch.compile may trace its layers. It does not trace mixers.
        takes_pages: whether K/V may lie in the pages of a pool. Beside states it is small.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.name: str = config.model_type
        types = getattr(config.get_text_config(decoder=True), "layer_types", None)
        self.keeps_states = not STATE_LAYERS.isdisjoint(types or ())
        self.drafts_ahead = self.takes_chains = self.shares_prompts = not self.keeps_states
        self.is_compiled = self.takes_pages = not self.keeps_states

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Family":
        """Returns the family of `model`."""
        return cls(model.config)

    def cache(self, network: PreTrainedModel, rows: int, columns: int) -> KVCache:
        """Makes a cache for `network`, of this family, outside of a pool."""
        return (States if self.keeps_states else RaggedCache).for_network(network, rows, columns)

    def row_bytes(self, network: PreTrainedModel) -> int:
        """Bytes of a row of `network`, of this family, beside K/V."""
        return state_bytes(network) if self.keeps_states else 0

    def with_states(self, what: str) -> str:
        """Words for `what`, of this family, if its layers keep states, for :func:`~.refusals.check`; else ""."""
        return f"{what} of type '{self.name}', which keeps states," if self.keeps_states else ""
