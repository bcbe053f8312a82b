"""Sections that every worker role shares: model, training, data, sampling, placement."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.schema.acts_if import BACKEND, ROLE, TRAINED, TRAINS, acting, needs, unless
from roll.configs.schema.fields import number, one_or_many, parsed
from roll.configs.schema.placement_plan import parse_device_mapping
from roll.configs.schema.strategy_config import DTYPE_NAMES, AutoDtype, StrategyArgs
from roll.configs.schema.training_args import TrainingArgs

HUGGING_FACE = needs(BACKEND, "fsdp2", "deepspeed")
ADAPTERS_DROP = unless(
    BACKEND, "megatron", words="without `megatron_*`",
    why="its ranks and recomputed layers would drop different inputs",
    fix="remove it, or strategy_name=fsdp2_train or deepspeed_train",
)  # fmt: skip
OF_PROCESSES = {
    "acts_if": (needs("^executor", "ray", why="this process has already read its environment",
                      fix="set them in the shell, or executor=ray"),),
    "idle": (),
}  # fmt: skip
"""Metadata of environment variables: `inline` starts no processes."""


ADAPTERS_TRAIN = needs(TRAINED, words="for roles that train", why={
    "actor_infer": "the engine gets the trainer's merged weights, or its adapters (lora_sync)",
    "reward_model": "it doesn't train; merge the adapters into its model first",
    "reference": "it doesn't train; without a reference section, actor_train with its adapters off is the reference",
})  # fmt: skip
WITH_ADAPTERS = needs(
    "uses_lora", words="with `lora_rank` or `adapter_name_or_path`", fix="{section}.lora_rank=16, or remove it",
    why="lora_rank is 0 and adapter_name_or_path is null",
)  # fmt: skip
WITHOUT_ADAPTERS = unless(
    "uses_lora", words="without adapters", why="they freeze the whole base model",
    fix="choose the layers that train with {section}.lora_target",
)  # fmt: skip

ALL_LINEAR = "all-linear"
"""Entry of `lora_target` that means every linear layer but the head."""


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    """Which model a role loads, and how."""

    model_name_or_path: str | None = None
    """Hugging Face folder or hub id. null: `reward_pretrain` for the critic if that is set, else `pretrain`,
    else the model of `actor_train`."""
    tokenizer_name_or_path: str | None = acting(
        None,
        unless(ROLE, "actor_infer", "reference", "critic", words="but for `actor_infer`, `reference` and `critic`",
               why="it reads the tokens of actor_train", fix="actor_train.model_args.tokenizer_name_or_path"),
    )  # fmt: skip
    """Folder or hub id of the tokenizer; its tokens must be the model's. null: that of the model; for roles that read
    the policy's tokens that of `actor_train`."""
    external_lib: tuple[str, ...] = one_or_many()
    """Packages or files (`package.module`, `path/to/file.py`) that register models or tokenizers with transformers:
    this role's processes import them before they load any, as they do those of the pipeline's `external_lib`. Processes
    that `vllm` and `sglang` start themselves don't; these engines have plugins."""
    use_shm: bool = False
    """Read the weights from a copy of the model's folder in shared memory (/dev/shm), which the first process of each
    machine makes: where the disk is slow and several ranks or roles load the same model. The copy goes once all roles
    stand. Needs a folder, not a hub id."""
    dtype: AutoDtype = acting("fp32", also=DTYPE_NAMES)
    """Type of the forward pass, and of the weights of roles that don't train; trained weights are kept in fp32. `auto`:
    bf16 where every machine of the run has accelerators or processors that compute in it, else fp32. It is settled once
    for all roles when the run starts; a resumed run takes what its checkpoint says."""
    attn_implementation: Literal["auto", "eager", "sdpa", "fa2"] = acting(
        "auto",
        unless(BACKEND, "megatron", "vllm", "sglang", words="without `megatron_*`, `vllm` and `sglang`", why={
            "megatron": "its attention is chosen by strategy_config.transformer_impl",
            "vllm": "the kernels are vLLM's own, see strategy_config.attention_backend",
            "sglang": "the kernels are SGLang's own, see strategy_config.attention_backend",
        }),
        accelerator={"fa2": "flash_attn"},
        also={"flash_attention_2": "fa2", "flash_attn": "fa2", "disabled": "eager"},
    )  # fmt: skip
    """Attention kernel. `auto`: what transformers picks; `fa2` needs the flash-attn package and an accelerator."""
    disable_gradient_checkpointing: bool = acting(
        False, unless(BACKEND, "vllm", "sglang", words="without `vllm` and `sglang`", why="it has no backward pass")
    )
    """false: a training role recomputes activations in the backward pass (less memory, about a third more
    time). Roles that never run a backward pass have nothing to switch off."""
    recompute_granularity: Literal["full", "selective"] = acting(
        "full",
        needs(BACKEND, "fsdp2", why={
            "deepspeed": "ZeRO 3 gathers weights inside layers, which torch's selective checkpointing can't follow",
            "megatron": "it has strategy_config.recompute_granularity",
        }),
        TRAINS,
        unless("disable_gradient_checkpointing", why="nothing is recomputed then"),
        unless("torch_compile", why="the compiler chooses what a layer keeps"),
        unless("activation_offload", why="it moves the inputs of layers, and what is kept beside them would stay"),
    )  # fmt: skip
    """What gradient checkpointing recomputes: `full` is whole layers, `selective` all but matrix products and attention
    (not `eager`), whose outputs are kept: nothing expensive is computed twice, in about half of the memory of no
    checkpointing, by the plan. Numbers are the same. Megatron has a key of this name in its strategy_config."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Overrides of the model's own `config.json`, e.g. `{rope_theta: 1000000}`; an unknown name is refused
    when the model is loaded."""
    freeze_module_prefix: tuple[str, ...] = one_or_many(commas=True, acts_if=(TRAINS, WITHOUT_ADAPTERS))
    """Parameters whose name starts with one of these are not trained. Empty: none."""
    freeze_vision_tower: bool = acting(False, HUGGING_FACE, TRAINS, WITHOUT_ADAPTERS)
    """Keep the part of the model that reads pictures as it is, but for its projector: only for models that are given
    pictures (docs/images.md)."""
    freeze_projector: bool = acting(False, HUGGING_FACE, TRAINS, WITHOUT_ADAPTERS)
    """Keep the layers between that part and the language model as they are, likewise."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the model's folder to run."""
    activation_offload: bool = acting(False, HUGGING_FACE, TRAINS)
    """Keep what the forward pass saves for the backward pass in host memory; with gradient checkpointing these are the
    inputs of the layers. Changes memory and time only; without an accelerator it only costs time."""
    torch_compile: bool = acting(False, HUGGING_FACE)
    """Compile the decoder layers with torch.compile, once for all lengths. The first
    passes wait for the compiler; numbers differ by rounding."""
    use_liger: bool = acting(
        False, HUGGING_FACE, unless("torch_compile", why="the compiler makes fused norms and MLPs of its own"),
        accelerator={True: "liger_kernel"},
    )  # fmt: skip
    """Compute norms and gated MLPs (of mixtures of experts only the norms) with the Triton kernels of liger-kernel. For
    the model families that docs/backends.md lists. Needs an accelerator."""
    use_fused_kernels: bool = acting(
        False, HUGGING_FACE, unless(ROLE, "critic", "reward_model", words="for roles that compute log-probs"),
        accelerator={True: "liger_kernel"},
    )  # fmt: skip
    """Compute log-probs from hidden states with liger-kernel's fused kernel. Passes that also want entropies, and
    models with soft-capped logits, use the chunks of logits as ever. Needs an accelerator."""
    ulysses_size: int = number(1, ge=1, acts_if=(
        unless(ROLE, "reward_model", words="but for `reward_model`", why="it reads whole texts"),
        unless(BACKEND, "megatron", "hf_infer", "vllm", "sglang", words="with `fsdp2_*` and `deepspeed_*`",
               why={"megatron": "it splits sequences by its own context_parallel_size"}),
    ))  # fmt: skip
    """Ranks that share every sequence (Ulysses sequence parallelism): attention exchanges heads for tokens between
    them. Divides the attention heads."""
    ring_attention_size: int = number(1, ge=1, acts_if=(
        unless(ROLE, "reward_model", words="but for `reward_model`", why="it reads whole texts"),
        unless(BACKEND, "megatron", "hf_infer", "vllm", "sglang", words="with `fsdp2_*` and `deepspeed_*`",
               why={"megatron": "it splits sequences by its own context_parallel_size"}),
    ))  # fmt: skip
    """Ranks that share every sequence (ring attention, arXiv:2310.01889): keys and values travel from rank to rank. Any
    number of heads will do. With `ulysses_size`, their product shares a sequence. Rules out `use_prefix_sharing`."""
    lora_rank: int = number(0, ge=0, acts_if=(ADAPTERS_TRAIN,))
    """Rank of low-rank adapters (LoRA, arXiv:2106.09685), which then are all that is trained (with a critic's value
    head); the base weights are frozen and kept in `dtype`. Engines get the merged weights, or the
    adapters (`lora_sync`). Needs peft. 0: train the weights themselves, unless
    `adapter_name_or_path` brings adapters."""
    lora_alpha: float | None = number(None, gt=0, acts_if=(ADAPTERS_TRAIN, WITH_ADAPTERS))
    """The adapters' product is scaled with `lora_alpha / lora_rank`. null: 16, or what `adapter_name_or_path` says."""
    lora_target: tuple[str, ...] = one_or_many(commas=True, acts_if=(ADAPTERS_TRAIN, WITH_ADAPTERS))
    """Names of the linear layers that get adapters, e.g. `[q_proj, v_proj]`; `all-linear`: every linear layer but the
    head, which leaves fused experts (one 3-D parameter) alone. Empty: `all-linear`, or what `adapter_name_or_path`
    says."""
    lora_dropout: float = number(0.0, ge=0, lt=1, acts_if=(ADAPTERS_TRAIN, WITH_ADAPTERS, ADAPTERS_DROP))
    """Dropout before the adapters in the update, never in other passes. It makes old and new log-probs differ by
    chance; 0 is safe."""
    adapter_name_or_path: str | None = acting(None, ADAPTERS_TRAIN)
    """Folder of adapters in peft's format to start from; their own rank, alpha and targets count, and keys that say
    something else are refused. null: new ones, which change nothing until they are trained."""

    @property
    def uses_lora(self) -> bool:
        """Return whether adapters are trained instead of the weights."""
        return self.lora_rank > 0 or self.adapter_name_or_path is not None

    @property
    def freezes_pictures(self) -> bool:
        """Return whether a part of what reads pictures isn't trained."""
        return self.freeze_vision_tower or self.freeze_projector

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share every sequence."""
        return self.ulysses_size * self.ring_attention_size


TEMPLATES = ("native", "plain", "question_answer", "step_by_step")
"""Named values of `template`."""


@dataclass(frozen=True, kw_only=True)
class ProceduralTask:
    """Verifiable tasks generated by reasoning-gym instead of read from a file."""

    tag: str
    """Tag of its rows; `rewards.<domain>.tag_included` maps it to a domain."""
    dataset: str
    """Name of a reasoning-gym dataset, e.g. `chain_sum`."""
    size: int = number(1000, ge=1)
    """Number of rows."""
    seed: int | None = number(None, ge=0)
    """Key of the rows and of the solved examples; training and validation rows differ all the same. null: the run's
    `seed`. A number keeps the data while the run's seed varies."""
    config: dict[str, Any] = field(default_factory=dict)
    """Options of that dataset, e.g. `{min_digits: 1, max_digits: 1}`; an unknown one is refused."""
    few_shot: int = number(0, ge=0)
    """Solved examples put before each question, the same in every prompt. 0: none."""
    example_template: str = "{question}\n{answer}\n\n"
    """One solved example: `{question}`, `{answer}` and plain fields of the task's metadata are filled in."""
    question_template: str = "{question}\n"
    """The question to answer, likewise, without its answer."""


_TRAINING_ROWS = needs(ROLE, "actor_train", why="validation plays every row once, in the order of its files")


@dataclass(frozen=True, kw_only=True)
class CurriculumArgs:
    """Which rows of a domain come when. Shares of domains stay as they are."""

    by: Literal["column", "success"] | None = None
    """`column`: easy rows first, by a number in each row. `success`: rows that the model always or never solves are
    passed over more often. null: a new random order in every epoch."""
    column: str | None = acting(None, needs("by", "column"))
    """Column with the difficulty, a number; a dot leads into nested columns."""
    window: float = number(0.1, ge=0, le=1, acts_if=(needs("by", "column"),))
    """Share of the rows by which a row may come earlier or later than its difficulty says. 0: strictly ascending (equal
    ones in random order), 1: hardly sorted."""
    success_threshold: float = number(0.5, acts_if=(needs("by", "success"),))
    """A response with a reward above this has solved its row."""
    min_share: float = number(0.1, gt=0, le=1, acts_if=(needs("by", "success"),))
    """How often a row still comes that is always or never solved: 0.1 is every tenth epoch. Between, a row with success
    rate p comes in a share 4 p (1 - p) of the epochs; rows that were never played come."""


@dataclass(frozen=True, kw_only=True)
class DataArgs:
    """Where prompts come from. Files and procedural tasks may be mixed."""

    template: str = "native"
    """How a prompt becomes text: `native` (the tokenizer's own chat template), `plain` (as it stands),
    `question_answer`, `step_by_step`, a text with `{prompt}`, or Jinja over `messages`. `global_template` and
    `tag_to_template` take precedence."""
    file_name: tuple[str, ...] = one_or_many()
    """json, jsonl, csv, tsv, parquet file, a glob, a folder of such files, a Hugging Face dataset folder or hub id; one
    or many. Relative to the working directory."""
    prompt: str | None = None
    """Column with the prompt as text, or as verl's list of messages. null: the column `prompt` or `messages`, whichever
    there is."""
    messages: str | None = None
    """Column with the prompt as chat messages (a list, or its JSON text). Not together with `prompt`."""
    ground_truth: str | None = None
    """Column with what the reward compares against; a dot leads into nested columns. null: `ground_truth`, else
    `answer`, else `response`, else verl's `reward_model.ground_truth`, as there are."""
    tag: str | None = None
    """Column that says which kind of task a row is. null: `tag` if there is one, else verl's `data_source` unless there
    is a `default_tag` or only one domain."""
    default_tag: str | None = None
    """Tag of files without a tag column. null: with one domain its first tag, else the file's name."""
    id: str | None = None
    """Column with a row's name. null: `id` if there is one, else rows are numbered."""
    images: str | None = None
    """Column with the pictures of a row, for models that read them, or the column of messages that have them in their
    parts (docs/images.md). null: none, and rows with pictures are refused."""
    dataset: str | None = None
    """Class of your own that gives rows, `path/to/file.py:MyData` or `package.module:MyData`, next to or instead of
    files; docs/data.md."""
    dataset_args: dict[str, Any] = field(default_factory=dict, metadata={"acts_if": (needs("dataset"),), "idle": ()})
    """Arguments of that class."""
    streaming: bool = acting(False, _TRAINING_ROWS)
    """Leave the rows on disk and keep only where each begins, for files larger than the memory. Order and tokens are
    the same. Formats other than jsonl are unpacked into a temporary file in `output_dir` first."""
    deduplicate: bool = False
    """Keep only the first of rows with exactly the same prompt. How many were left out is counted and logged."""
    max_bad_rows: float = number(0.0, ge=0)
    """How many rows may be unusable: a count, or below 1 a share of all rows. They are left out and listed with file,
    line and reason in `bad_rows.jsonl` in the folder of the logs; one more ends the run. 0: the first one does."""
    curriculum: CurriculumArgs = field(
        default_factory=CurriculumArgs, metadata={"acts_if": (_TRAINING_ROWS,), "idle": ()}
    )
    """Order of the rows within an epoch."""
    domain_interleave_probs: dict[str, float] = field(default_factory=dict)
    """Share of each domain in a batch, met exactly by quotas, not by chance. The domains of `rewards`, summing to 1;
    with `validation`, a domain that is left out is for validation alone. Empty: equal shares."""
    procedural: tuple[ProceduralTask, ...] = ()
    """Tasks generated on the fly, next to or instead of files."""
    shuffle: bool = True
    """New order in every epoch, from the run's seed. Validation has `validation.shuffle`."""
    filter_overlong_prompts: bool = False
    """Tokenise all rows before the start and drop those longer than `prompt_length` (counted and logged).
    `truncation` says what happens to a long prompt that is met later."""
    preprocessing_num_workers: int = number(1, ge=1)
    """Threads that tokenise the prompts."""

    @property
    def has_rows(self) -> bool:
        """Return whether any source is named."""
        return bool(self.file_name or self.procedural or self.dataset)

    @property
    def columns(self) -> dict[str, str]:
        """Columns that every row must have, by the keys that name them."""
        named = {"prompt": self.prompt, "messages": self.messages, "ground_truth": self.ground_truth}
        return {key: column for key, column in named.items() if column is not None}


@dataclass(frozen=True, kw_only=True)
class GeneratingArgs:
    """How responses are sampled."""

    max_new_tokens: int | None = number(None, ge=1)
    """Tokens per response. null: `response_length`, which it may not exceed."""
    do_sample: bool = True
    """false: greedy, whatever `temperature` says. Not in training."""
    temperature: float = number(1.0, ge=0, le=100)
    """The trainer divides its logits by the same number. Above 0 in training."""
    top_p: float = number(1.0, gt=0, le=1)
    """Smallest set of tokens with this probability. 1: off. The trainer's log-probs don't know this
    truncation: below 1 in training needs `train_infer_correction`, whose ratio contains it."""
    top_k: int = number(-1, ge=-1)
    """Number of likeliest tokens. -1 or 0: off. In training as for `top_p`."""
    repetition_penalty: float = number(1.0, gt=0)
    """Divides the logits of tokens seen before. 1: off. In training as for `top_p`."""
    stop_strings: tuple[str, ...] = one_or_many()
    """A response ends when its text contains one of these."""
    include_stop_str_in_output: bool = True
    """Keep the stop string in the text that the reward sees; the tokens are trained on either way."""
    ignore_eos: bool = False
    """Sample on after the end-of-sequence token, up to the limit."""
    num_return_sequences: int | None = number(None, ge=1, le=65_536)
    """Validation: responses per prompt (default 1). Training uses `num_return_sequences_in_group`; if given
    there, equal to that."""
    fire_temperature: float | None = number(None, gt=0, le=100, acts_if=(
        needs(ROLE, "actor_infer", why="validation samples as the policy does"),
        unless("^pipeline", "agentic", words="but for `pipeline: agentic`", why="it is about the first word of an "
               "answer, not the first of many actions"),
    ))  # fmt: skip
    """Temperature of a response's first token (FIRE, arXiv:2410.21236: 30), for groups whose responses differ from the
    start. That token isn't trained on: it wasn't the policy's choice. null: as all others."""
    fire_top_k: int = number(16, ge=1, acts_if=(needs("fire_temperature"),))
    """It is one of so many likeliest tokens."""
    num_beams: Literal[1] = 1
    """Only 1: beam search isn't sampling from the policy."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Placement, model and backend of one role."""

    world_size: int | None = number(None, ge=1, le=8192)
    """Number of ranks. null: slots in `device_mapping` / `num_gpus_per_worker`, or 1; if given, equal to that."""
    device_mapping: tuple[int, ...] | None = parsed(
        None, parse_device_mapping, "slots such as [0, 1], '0-7,12', 'list(range(0, 8))' or 'range(0, 8)'"
    )
    """Global device slots, numbered over all nodes; a CPU worker each where there is no accelerator. Several
    roles may name the same slots. null: slots 0, 1, ... up to the world size."""
    num_gpus_per_worker: int = number(1, ge=1, le=64)
    """Slots per rank."""
    system_envs: dict[str, str] = field(default_factory=dict, metadata=OF_PROCESSES)
    """Environment variables of this role's processes, over the pipeline's own `system_envs`."""
    model_args: ModelArgs = field(default_factory=ModelArgs)
    """Model of this role."""
    strategy_args: StrategyArgs
    """Backend of this role."""

    @property
    def ranks(self) -> int:
        """World size, whichever way it was given."""
        if self.world_size is not None:
            return self.world_size
        return len(self.device_mapping) // self.num_gpus_per_worker if self.device_mapping else 1

    @property
    def data_parallel(self) -> int:
        """Ranks that work on different rows: all, divided by those that share one copy of the model or sequence."""
        return self.ranks // self.model_parallel_size

    @property
    def parallel_sizes(self) -> dict[str, int]:
        """Ways in which ranks work on the same rows together, with the ranks of each; the backend's are first."""
        args = self.model_args
        shared = {"ulysses": args.ulysses_size, "ring": args.ring_attention_size}
        backend = self.strategy_args.strategy_config.parallel_sizes
        return {**backend, **{name: size for name, size in shared.items() if size > 1}}

    @property
    def model_parallel_size(self) -> int:
        """Ranks that work on the same rows together."""
        return math.prod(self.parallel_sizes.values())

    @property
    def slots(self) -> tuple[int, ...]:
        """Global slots in rank order, `num_gpus_per_worker` for each rank."""
        return self.device_mapping or tuple(range(self.ranks * self.num_gpus_per_worker))


@dataclass(frozen=True, kw_only=True)
class ForwardConfig(WorkerConfig):
    """A role that runs forward passes over finished responses."""

    infer_batch_size: int = number(8, ge=1)
    """Responses per forward pass on one rank. Changes memory and speed only."""
    use_dynamic_batching_in_infer: bool = False
    """Fill forward passes up to a token budget instead of a number of responses."""
    max_tokens_per_microbatch_in_infer: int | None = number(
        None, ge=1, acts_if=(needs("use_dynamic_batching_in_infer"),)
    )
    """That budget, padding included; at least the longest sequence. Required by the switch."""
    sequence_length_round_in_infer: int = number(1, ge=1)
    """The padded width of a forward pass, or the length of its packed line, is rounded up to a multiple of this many
    tokens: fewer different sizes for compilers and kernels, the same numbers. 1: as long as it is."""
    use_sequence_packing: bool = False
    """Lay the responses of a pass end to end instead of padding them to the longest. Attention never crosses from one
    to the next; numbers stay the same, no time is spent on padding. Models that mix tokens by other means than
    attention, or with options of it that aren't supported, are refused when they are loaded."""
    use_prefix_sharing: bool | None = acting(
        None, unless(ROLE, "reward_model", words="but for `reward_model`", why="it reads whole texts"), idle=(False,)
    )
    """Compute tokens that rows have in common at their beginnings once for all of them, forward and backward: the
    prompt of a group's responses, the earlier turns of an agent's rows. Rows are compared by their token ids; numbers
    stay those of rows by themselves. Such rows then come into one pass, and as many of them as compute no more tokens
    than the pass's limit allows for rows that share nothing. null: where the model can and at least 15 %
    of the tokens is shared; on accelerators only with `use_sequence_packing`. true: refused where it can't act."""


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(ForwardConfig):
    """The frozen reference policy of the KL terms."""

    strategy_args: StrategyArgs = field(default_factory=lambda: StrategyArgs(strategy_name="fsdp2_infer"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ForwardConfig):
    """A role that trains."""

    training_args: TrainingArgs = field(default_factory=TrainingArgs)
    """Optimizer, schedule, batch."""
    use_dynamic_batching_in_train: bool = False
    """Fill forward/backward passes up to a token budget instead of `per_device_train_batch_size` responses;
    the mini-batch stays the same."""
    max_tokens_per_microbatch_in_train: int | None = number(
        None, ge=1, acts_if=(needs("use_dynamic_batching_in_train"),)
    )
    """That budget, padding included; at least the longest sequence. Required by the switch."""
    sequence_length_round_in_train: int = number(1, ge=1)
    """As `sequence_length_round_in_infer`, for forward/backward passes."""
    strategy_args: StrategyArgs = field(default_factory=lambda: StrategyArgs(strategy_name="fsdp2_train"))


@dataclass(frozen=True, kw_only=True)
class ActorTrainConfig(TrainConfig):
    """The policy that learns."""

    data_args: DataArgs = field(default_factory=DataArgs)
    """Training prompts."""


@dataclass(frozen=True, kw_only=True)
class ActorInferConfig(WorkerConfig):
    """The policy's copy that generates."""

    generating_args: GeneratingArgs = field(default_factory=GeneratingArgs)
    """Sampling in training; validation has its own."""
    strategy_args: StrategyArgs = field(default_factory=lambda: StrategyArgs(strategy_name="hf_infer"))
