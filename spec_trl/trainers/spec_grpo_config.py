"""GRPOConfig with one more group of fields: how rollouts are drafted and verified."""

from dataclasses import dataclass, field
from typing import Any

from trl import GRPOConfig

from ..drafter_training.adaptation import ADAPTABLE
from ..generation.configuration import (
    NEED_ASSISTANT,
    TAKE_ASSISTANT,
    SpeculativeConfig,
    check_strategy,
    check_verification,
    require_folder_or_id,
    require_int,
    require_number,
)
from ..scheduling.draft_length import DraftLengthController


@dataclass
class SpecGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`SpecGRPOTrainer`]. It adds one group of fields to [`~trl.GRPOConfig`].

    Parameters:
        > Parameters that control speculative rollouts

        assistant_strategy (`str`, *optional*, defaults to `"self"`):
            How rollouts are drafted: `"self"` (the policy's own quantized copy, refreshed when the weights have
            changed), `"model"` (a smaller causal LM, see `assistant_model`), `"ngram"` (prompt lookup), `"history"`
            (lookup in earlier rollouts of the same prompt and in the other completions of its group), `"eagle3"` or
            `"dflash"` (a learned drafter's checkpoint, see `assistant_model`, which follows the policy as it learns,
            see `drafter_adaptation`), `"tts"` (a drafter that learns from the rounds it drafts, see `tts_drafter`),
            `"auto"` (whichever of the copy, the history and an assistant is fastest, by their past acceptance, a
            profile and measured rounds, autoregressive decoding included), `"best_of_n"` (so chosen among
            `best_of_n_drafters`, and in the tail several of them for the same rows) or `"none"` (autoregressive
            decoding by the same engine). Rollouts are the same tokens under each of them.
        assistant_model (`str`, *optional*):
            Path or hub id of the drafter of `assistant_strategy="model"`, `"eagle3"` or `"dflash"`, or of `"tts"`
            with such a `tts_drafter`; `"auto"` then considers it, a causal LM, as well. Under `"best_of_n"` that of
            the one member that needs one.
        draft_lengths (`list[int]`, *optional*, defaults to `[5, 7, 9, 11]`):
            Draft tokens per verification that the controller moves among (Γ), ascending, 1 to 64. One entry keeps it
            fixed. Once `"auto"` and `"best_of_n"` have a draft ladder they have no controller, nor use for the four
            fields after this one: in each rollout every drafter gets the length that promises most.
        initial_draft_length (`int`, *optional*):
            The one to start with (γ₀); `None`: the first of `draft_lengths`.
        draft_length_up (`float`, *optional*, defaults to `0.94`):
            The draft length γ rises when the block efficiency stays at 1 + γ `draft_length_up` or more.
        draft_length_down (`float`, *optional*, defaults to `0.85`):
            It falls when the block efficiency stays at 1 + γ `draft_length_down` or less.
        draft_length_patience (`int`, *optional*, defaults to `2`):
            For so many training rollouts in a row.
        sd_toggle (`str`, *optional*, defaults to `"measured"`):
            `"measured"`: try the drafter for a few rounds, and speculate where they were faster than autoregressive
            ones. A roofline profile or draft ladder that an earlier calibration left is used, and none is made.
            `"roofline"`: calibrate the machine before the first rollout (minutes, once) and speculate where the
            roofline predicts a speedup and measured rounds bear it out, as in EfficientRollout. `"always"`: in every
            round that the drafter's kernels can serve. `"never"`: decode autoregressively. Under `"auto"` and
            `"best_of_n"` `"roofline"` and `"always"` first profile the draft ladder (half a minute, once); under
            `"measured"` the rounds of the first rollouts fill it.
        sd_margin (`float`, *optional*, defaults to `0.05`):
            Predicted speedup beyond 1 from which on to speculate (ε).
        roofline_profile (`str`, *optional*):
            Path of the profile. Where the file is missing, `sd_toggle="roofline"` calibrates the machine at the first
            rollout and saves the profile there; `"measured"` refuses it. `None`: the one in the user's cache for this
            hardware, model shape, dtype and kernel. A copy goes to `output_dir/roofline_profile.json`.
        roofline_mismatch (`str`, *optional*, defaults to `"recalibrate"`):
            What to do with a `roofline_profile` of other hardware, shape, dtype or kernel: `"recalibrate"`, with a
            warning, into the user's cache, or `"error"`.
        history_max_tokens (`int`, *optional*, defaults to `16_000_000`):
            `"history"`: tokens of earlier rollouts that each device remembers; the oldest prompts are forgotten first.
        verification (`str`, *optional*, defaults to `"exact"`):
            `"exact"`: rollouts are token-identical to those without speculation. `"rejection"`: identical in
            distribution only, with a slightly higher block efficiency.
        draft_quantization (`str`, *optional*, defaults to `"rtn-w4-g128"`):
            Quantization of the self-drafter: `"rtn-w4-g128"`, `"rtn-w4-g64"`, `"rtn-w4-g32"` or `"rtn-w8"`; or
            `"awq-w4-g128"` and its smaller groups, which scale input channels by what the training forwards of the
            step before showed of them.
        draft_kernel (`str`, *optional*, defaults to `"auto"`):
            Kernel of the self-drafter's quantized layers; `"auto"` takes the fastest one that serves a layer.
        draft_lm_head (`str`, *optional*, defaults to `"auto"`):
            `"dense"`: the self-drafter uses the policy's output head. `"packed"`: quantized as well. `"auto"`: packed
            where it is a large share of a draft step.
        rollout_batch_size (`int`, *optional*):
            Rows that are decoded together on each device; the others of the generation batch follow as rows finish.
            `None`: all at once.
        runner (`str`, *optional*, defaults to `"auto"`):
            How the forwards of rollouts run: `"eager"`, captured as CUDA graphs (`"graph"`), these with compiled
            decoder layers (`"compiled"`), or `"auto"`: captured on CUDA, compiled where that measures faster.
        max_graph_memory (`float`, *optional*, defaults to `4.0`):
            GiB that captured forwards may take; further shapes run padded to a captured one, or eagerly.
        keep_graphs (`bool`, *optional*, defaults to `False`):
            Keep captured forwards and the rollout's whole K/V cache while training. `False` gives their memory to the
            training step and captures again in each rollout, which takes seconds for a model of some billions.

        > Parameters that control the adaptation of a learned drafter (`"eagle3"`, `"dflash"`)

        drafter_adaptation (`bool`, *optional*, defaults to `True`):
            Train the drafter along with the policy, on the hidden states of the loss's own forward, by an optimizer
            of its own. A drafter that stays as it was loaded falls behind a policy that learns. Costs the drafter's
            forward and backward pass in each micro-batch, and changes neither completions nor the policy.
        drafter_learning_rate (`float`, *optional*, defaults to `1e-6`):
            Of the drafter's AdamW, constant.
        drafter_hidden_weight (`float`, *optional*, defaults to `1.0`):
            Weight of the regression of the drafter's hidden states onto the policy's; 0 leaves it out.
        drafter_token_weight (`float`, *optional*, defaults to `0.1`):
            Weight of the soft cross-entropy against the policy's distributions.

        > Parameters that control Test-Time Speculation (`"tts"`)

        tts_drafter (`str`, *optional*, defaults to `"self"`):
            What learns from the rounds it drafts: `"eagle3"`, `"dflash"` or `"model"`, the checkpoint in
            `assistant_model`; or low-rank corrections of the policy's quantized copy, `"self"`.
        tts_learning_rate (`float`, *optional*):
            Of its Adam; `None`: by what learns, as `SpeculativeConfig` says.
        tts_scope (`str`, *optional*, defaults to `"run"`):
            How long it is kept what the drafter learned: for the `"run"`, since training comes back to the same task
            in every rollout, saved in checkpoints; for one `"rollout"`; or for one `"request"`, as in the paper, where
            the requests of a batch learn low-rank corrections, each for itself.
        tts_steps (`int`, *optional*, defaults to `1`):
            Optimizer steps per update (K).
        tts_stride (`str`, *optional*, defaults to `"1"`):
            An update every so many rounds (S), an integer; or `"adaptive"`: more often while the block efficiency
            falls, less often while it is level.
        tts_anchor_weight (`float`, *optional*, defaults to `0.0`):
            Weight of the loss term that keeps the drafter near the anchor (λ).
        tts_anchor (`str`, *optional*, defaults to `"current"`):
            `"current"`: the drafter before the update, which matters for `tts_steps` > 1 only. `"initial"`: the one
            that was loaded.
        tts_asynchronous (`bool`, *optional*, defaults to `False`):
            Update beside the next S - 1 rounds instead of between two rounds.
        tts_rank (`int`, *optional*, defaults to `8`):
            Rank of low-rank corrections.

        > Parameters that control Best-of-N speculation (`"best_of_n"`)

        best_of_n_drafters (`list[str]`, *optional*, defaults to `["self", "history", "ngram"]`):
            The strategies that may draft, without repetition, of `"self"`, `"history"`, `"ngram"`, `"model"`,
            `"eagle3"`, `"dflash"` and `"tts"`. Each drafts with the one of `draft_lengths` that promises most.
        best_of_n_assistants (`dict[str, str]`, *optional*):
            Path or hub id of the assistant of each member that needs one; on the command line as JSON. A single one
            may be given as `assistant_model` instead.
        best_of_n_budget (`int`, *optional*):
            Tokens that one verification of a race may have, all rows together. `None`: those that the roofline says
            are free; without a profile, as many as the rollout's first speculative round verified.
        best_of_n_tolerance (`float`, *optional*, defaults to `0.05`):
            Share by which the roofline may predict a longer verification for tokens that count as free.
        best_of_n_race (`bool`, *optional*, defaults to `True`):
            Whether rows race; `False`: one drafter per row.
    """

    _VALID_DICT_FIELDS = [*GRPOConfig._VALID_DICT_FIELDS, "best_of_n_assistants"]

    assistant_strategy: str = field(
        default="self",
        metadata={
            "help": "'self', 'model', 'ngram', 'history', 'eagle3', 'dflash', 'tts', 'auto', 'best_of_n' or 'none'."
        },
    )
    assistant_model: str | None = field(
        default=None, metadata={"help": "Path or hub id of the drafter of 'model', 'eagle3', 'dflash' or 'tts'."}
    )
    draft_lengths: list[int] = field(
        default_factory=lambda: [5, 7, 9, 11], metadata={"help": "Draft tokens per verification to move among."}
    )
    initial_draft_length: int | None = field(
        default=None, metadata={"help": "The one to start with; None: the first of draft_lengths."}
    )
    draft_length_up: float = field(default=0.94, metadata={"help": "Accepted share from which on it rises."})
    draft_length_down: float = field(default=0.85, metadata={"help": "Accepted share from which on it falls."})
    draft_length_patience: int = field(default=2, metadata={"help": "Rollouts in a row before it moves."})
    sd_toggle: str = field(
        default="measured", metadata={"help": "When to speculate: 'measured', 'roofline', 'always' or 'never'."}
    )
    sd_margin: float = field(default=0.05, metadata={"help": "Predicted speedup beyond 1 that turns speculation on."})
    roofline_profile: str | None = field(
        default=None, metadata={"help": "Path of the roofline profile; 'roofline' calibrates and saves a missing one."}
    )
    roofline_mismatch: str = field(
        default="recalibrate", metadata={"help": "A profile of something else: 'recalibrate' or 'error'."}
    )
    history_max_tokens: int = field(
        default=SpeculativeConfig.history_max_tokens,
        metadata={"help": "Tokens of earlier rollouts that 'history' remembers on each device."},
    )
    verification: str = field(
        default="exact", metadata={"help": "'exact' (token-identical) or 'rejection' (identical in distribution)."}
    )
    draft_quantization: str = field(
        default="rtn-w4-g128", metadata={"help": "Quantization of the self-drafter, e.g. 'rtn-w4-g128' or 'rtn-w8'."}
    )
    draft_kernel: str = field(default="auto", metadata={"help": "Kernel of the self-drafter's quantized layers."})
    draft_lm_head: str = field(
        default="auto", metadata={"help": "Output head of the self-drafter: 'auto', 'dense' or 'packed'."}
    )
    rollout_batch_size: int | None = field(
        default=None, metadata={"help": "Rows decoded together on each device; None: all at once."}
    )

    runner: str = field(
        default="auto", metadata={"help": "Forwards of rollouts: 'eager', 'graph', 'compiled' or 'auto'."}
    )
    max_graph_memory: float = field(default=4.0, metadata={"help": "GiB that captured forwards may take."})
    keep_graphs: bool = field(
        default=False, metadata={"help": "Keep captured forwards and the K/V cache between rollouts."}
    )

    drafter_adaptation: bool = field(
        default=True, metadata={"help": "Train the drafter of 'eagle3' or 'dflash' along with the policy."}
    )
    drafter_learning_rate: float = field(default=1e-6, metadata={"help": "Of the drafter's own AdamW."})
    drafter_hidden_weight: float = field(
        default=1.0, metadata={"help": "Weight of the drafter's hidden regression; 0 leaves it out."}
    )
    drafter_token_weight: float = field(default=0.1, metadata={"help": "Weight of the drafter's soft cross-entropy."})

    tts_drafter: str = field(
        default="self", metadata={"help": "What learns under 'tts': 'self', 'model', 'eagle3' or 'dflash'."}
    )
    tts_learning_rate: float | None = field(default=None, metadata={"help": "Of its Adam; None: by what learns."})
    tts_scope: str = field(default="run", metadata={"help": "It learns for one 'request', 'rollout' or the 'run'."})
    tts_steps: int = field(default=1, metadata={"help": "Optimizer steps per update (K)."})
    tts_stride: str = field(default="1", metadata={"help": "An update every so many rounds (S), or 'adaptive'."})
    tts_anchor_weight: float = field(
        default=0.0, metadata={"help": "Weight of the term that keeps the drafter near the anchor."}
    )
    tts_anchor: str = field(
        default="current", metadata={"help": "'current': the drafter before the update; 'initial': as it was loaded."}
    )
    tts_asynchronous: bool = field(default=False, metadata={"help": "Update beside the next S - 1 rounds."})
    tts_rank: int = field(default=8, metadata={"help": "Rank of low-rank corrections."})

    best_of_n_drafters: list[str] = field(
        default_factory=lambda: list(SpeculativeConfig.best_of_n_drafters),
        metadata={"help": "The strategies among which 'best_of_n' chooses."},
    )
    best_of_n_assistants: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Paths or hub ids of the members' assistants, by member."}
    )
    best_of_n_budget: int | None = field(
        default=None, metadata={"help": "Tokens that a race may verify; None: what is free by the roofline."}
    )
    best_of_n_tolerance: float = field(
        default=0.05, metadata={"help": "How much longer a verification of free tokens may be, as a share."}
    )
    best_of_n_race: bool = field(default=True, metadata={"help": "Whether rows race."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for other in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(self, other):
                raise ValueError(
                    f"{other}=True contradicts assistant_strategy={self.assistant_strategy!r}: SpecGRPOTrainer "
                    f"generates rollouts itself. Set {other}=False, or use trl.GRPOTrainer."
                )
        if not self.ds3_gather_for_generation:
            raise ValueError(
                "ds3_gather_for_generation=False contradicts SpecGRPOTrainer: ranks run different numbers of "
                "forwards, so the weights must be gathered for the whole rollout. Set ds3_gather_for_generation=True."
            )
        check_strategy(self.assistant_strategy)
        drafter, setting = self.assistant_strategy, f"assistant_strategy={self.assistant_strategy!r}"
        if drafter == "tts":
            drafter, setting = self.tts_drafter, f"{setting}, tts_drafter={self.tts_drafter!r}"
        needs, takes = drafter in NEED_ASSISTANT, drafter in TAKE_ASSISTANT
        if (self.assistant_model is None and needs) or (self.assistant_model is not None and not takes):
            raise ValueError(
                f"{setting} with assistant_model={self.assistant_model!r}: assistant_model belongs to one of "
                f"{list(NEED_ASSISTANT)}, which need it under 'tts' as well, or to 'auto' or 'best_of_n'."
            )
        require_folder_or_id("assistant_model", self.assistant_model)
        if self.assistant_strategy in ("ngram", "history", "auto") and self.verification == "rejection":
            raise ValueError(
                'verification="rejection" needs draft probabilities, which '
                f"assistant_strategy={self.assistant_strategy!r} has none of. "
                'Use verification="exact".'
            )
        if self.roofline_profile is not None and self.assistant_strategy == "none":
            raise ValueError(
                f"roofline_profile={self.roofline_profile!r} has no use with assistant_strategy='none'; drop one of "
                "them."
            )
        require_number("drafter_learning_rate", self.drafter_learning_rate, positive=True)
        require_number("drafter_hidden_weight", self.drafter_hidden_weight, positive=False)
        require_number("drafter_token_weight", self.drafter_token_weight, positive=False)
        if not self.drafter_hidden_weight and not self.drafter_token_weight:
            raise ValueError(
                "drafter_hidden_weight=0 and drafter_token_weight=0 leave the drafter nothing to learn. Raise one of "
                "them, or set drafter_adaptation=False."
            )
        check_verification(self.assistant_strategy, self.verification)
        if self.assistant_strategy == "best_of_n":
            self.speculative_config().assistants_of_best_of_n(self.assistant_model)
            if self.drafter_adaptation and len(learned := [n for n in self.best_of_n_drafters if n in ADAPTABLE]) > 1:
                raise ValueError(
                    f"best_of_n_drafters={self.best_of_n_drafters} has {learned}, and drafter_adaptation=True trains "
                    "one drafter. Name one of them, or set drafter_adaptation=False."
                )
        self.draft_length_controller()
        # SpeculativeConfig checks the rest; this one has another name there, which its error would give.
        if self.rollout_batch_size is not None:
            require_int("rollout_batch_size", self.rollout_batch_size, 1, None)
        self.speculative_config()

    def speculative_config(self) -> SpeculativeConfig:
        """The same options as `generate` takes them."""
        stride: int | str = int(self.tts_stride) if str(self.tts_stride).isdecimal() else self.tts_stride
        return SpeculativeConfig(
            draft_length=self.draft_length_controller().draft_length,
            verification=self.verification,  # type: ignore[arg-type]
            seed=self.seed,
            sd_toggle=self.sd_toggle,  # type: ignore[arg-type]
            sd_margin=self.sd_margin,
            roofline_profile=self.roofline_profile,
            roofline_mismatch=self.roofline_mismatch,  # type: ignore[arg-type]
            history_max_tokens=self.history_max_tokens,
            max_batch_size=self.rollout_batch_size,
            runner=self.runner,  # type: ignore[arg-type]
            max_graph_memory=self.max_graph_memory,
            keep_graphs=self.keep_graphs,
            draft_quantization=self.draft_quantization,
            draft_kernel=self.draft_kernel,
            draft_lm_head=self.draft_lm_head,  # type: ignore[arg-type]
            tts_drafter=self.tts_drafter,  # type: ignore[arg-type]
            tts_learning_rate=self.tts_learning_rate,
            tts_scope=self.tts_scope,  # type: ignore[arg-type]
            tts_steps=self.tts_steps,
            tts_stride=stride,  # type: ignore[arg-type]
            tts_anchor_weight=self.tts_anchor_weight,
            tts_anchor=self.tts_anchor,  # type: ignore[arg-type]
            tts_asynchronous=self.tts_asynchronous,
            tts_rank=self.tts_rank,
            best_of_n_drafters=self.best_of_n_drafters,
            best_of_n_assistants=self.best_of_n_assistants,  # type: ignore[arg-type]
            best_of_n_budget=self.best_of_n_budget,
            best_of_n_tolerance=self.best_of_n_tolerance,
            best_of_n_race=self.best_of_n_race and self.assistant_strategy == "best_of_n",
        )

    def draft_length_controller(self) -> DraftLengthController:
        """A controller of the draft length at its start."""
        return DraftLengthController(
            self.draft_lengths,
            self.initial_draft_length,
            self.draft_length_up,
            self.draft_length_down,
            self.draft_length_patience,
        )
