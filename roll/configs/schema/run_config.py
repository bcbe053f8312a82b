"""What every run has: names and folders, machines, schedule, checkpoints, tracking."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from roll.configs.catalog.tracker_table import TRACKERS
from roll.configs.schema.acts_if import acting, needs, unless
from roll.configs.schema.batch_plan import BatchPlan
from roll.configs.schema.checkpoint_config import CheckpointConfig, is_address
from roll.configs.schema.fields import args_by_name, number, one_or_many
from roll.configs.schema.placement_plan import PlacementPlan
from roll.configs.schema.profiler_config import ProfilerConfig, TracingConfig
from roll.configs.schema.worker_config import OF_PROCESSES, TrainConfig, WorkerConfig

VALIDATES = needs(
    "validates", words="with `validation` (in `pipeline: agentic` with `val_env_manager`)",
    fix="add that section (where rows are finished, validation_share does as well), or remove it",
)  # fmt: skip


_NO_ROLE = re.compile(
    r"(int|float|str|bool|None|[| ]|Literal\[[^\]]*\]|"
    r"(Checkpoint|Profiler|Tracing|Gateway|ToolUse|\w*Validation)Config)+"
)
"""The type of a key that can't be the section of a role."""


@dataclass(frozen=True, kw_only=True)
class RayInit:
    """Options of the Ray that a run on one machine starts, as those of `ray.init`."""

    num_cpus: int | None = number(None, ge=1)
    """CPUs that this Ray counts on; a device slot takes 1/100 of one. null: those that this process may use. Set it
    where a container has fewer than its machine."""
    object_store_memory: int | None = number(None, ge=80 * 2**20)
    """Bytes of shared memory through which batches travel. null: what Ray takes, 30 % of the memory at most."""

    @property
    def options(self) -> dict[str, int]:
        """Return those that were given."""
        values = {"num_cpus": self.num_cpus, "object_store_memory": self.object_store_memory}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Keys of every run: names and folders, machines, schedule, checkpoints, tracking. What is trained a subclass says.
    Inert and frozen; derived values are properties."""

    validation_key: ClassVar[str] = "validation"
    """The section that says what is held out."""

    pipeline: str
    """Which pipeline the file is for."""
    exp_name: str = "rlvr"
    """Name of the run in its closing summary and its checkpoints."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables that the policy's chat template reads, e.g. `{enable_thinking: false}` (Qwen3) or `{reasoning_effort:
    low}` (gpt-oss), in training, validation and fine-tuning alike. One that the template doesn't read is refused."""
    seed: int = number(42, ge=0)
    """Key of every random draw. Same seed, same run."""
    output_dir: str = "output"
    """Folder of everything a run writes, besides `logging_dir`. Created if absent. Relative to the working
    directory. With `num_nodes` > 1 all machines must share it; see docs/cluster.md."""
    logging_dir: str | None = None
    """Folder of logs and trackers. null: `<output_dir>/logs`."""
    executor: Literal["ray", "inline"] = "ray"
    """`ray`: a process per rank, on one or more machines. `inline`: everything in this process, one rank per
    role; starts at once and breakpoints work."""
    rpc_timeout: float = number(3600.0, gt=0)
    """Seconds a call to a worker (with `executor: ray`) may take, or responses may wait for their rewards, before
    an error that names who was waited for. The start of a role has an hour, or this if it is longer."""
    ray_init: RayInit = field(
        default_factory=RayInit,
        metadata={"acts_if": (
            needs("executor", "ray", why="no Ray is started"),
            unless("joins_ray", words="with one machine",
                   why="the Ray that the run joins was started by `ray start`, which takes these options"),
        ), "idle": ()},
    )  # fmt: skip
    """Options of the Ray that the run starts."""
    system_envs: dict[str, str] = field(default_factory=dict, metadata=OF_PROCESSES)
    """Environment variables of every worker process (quote numbers). Values arrive as they are written, dollar signs
    included."""
    track_with: tuple[str, ...] = one_or_many(("stdout", "jsonl"), args="tracker_kwargs")
    """Where metrics go, one or several: `tensorboard`, `stdout` (a live table), `jsonl`, or a class of your own as
    `package.module:Name` or `path/to/file.py:Name`. With options: `{name: stdout, rows: 5}`."""
    tracker_kwargs: dict[str, Any] = args_by_name(TRACKERS)
    """Options by tracker, see below. One of your own gets them as keyword arguments."""
    print_summary: bool = True
    """Print the closing tables: what was achieved, where the time went, where the files are. false: where another
    program reads the files."""
    num_nodes: int = number(1, ge=1, le=65_536)
    """Machines. With more than one the run joins the Ray cluster that `ray start` made of them: the one that this
    machine belongs to, or that `RAY_ADDRESS` names. See docs/cluster.md."""
    num_gpus_per_node: int = number(1, ge=1, le=65_536)
    """Device slots per machine: accelerators, or CPU workers where there are none. Every `device_mapping` must fit."""
    max_steps: int | None = number(100, ge=0)
    """Steps of the pipeline. 0 or null: `num_train_epochs` decides, in a pipeline that has it; with both, what comes
    first."""
    save_steps: int | None = number(0, ge=0)
    """Steps between checkpoints; the last step is then saved too. 0 or null: none, but for `save_best`."""
    logging_steps: int | None = number(1, ge=0)
    """Steps between rows in the trackers. 0 or null: only the last."""
    eval_steps: int | None = acting(0, VALIDATES, idle=(None,), bounds={"ge": 0})
    """Steps between validations; the last step is then validated too. 0 or null: none."""
    save_best: str | None = acting(None, VALIDATES, needs("eval_steps", fix="eval_steps=10, or remove save_best"))
    """Metric of the validations, such as `val/accuracy`, whose best checkpoint is kept: each validation that is better
    than all before it is saved, whatever `save_steps` says, and the best one stays besides the newest (`max_to_keep`).
    `max:` or `min:` in front says which way is better, where the metric's name doesn't. null: off."""
    resume_from_checkpoint: bool | str = False
    """false: start from scratch. true: newest complete checkpoint, an error if there is none. `auto`: the newest if
    there is one. `best`: the one that `save_best` has chosen. Else a checkpoint's folder, or its address
    (`s3://...`)."""
    export_model: bool = True
    """Write the trained model as a Hugging Face folder at the end of the run. false: its weights stay in checkpoints
    only, and without `save_steps` nowhere."""
    export_dir: str | None = None
    """Folder of that model: the `pretrain` of what comes next. null: `<output_dir>/hf_model`."""
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints: contents, place, retention."""
    sequence_length: int | None = number(None, ge=1)
    """Longest sequence in tokens. null: `prompt_length + response_length`, else at least that; required where
    rows are finished (`sft`, `dpo`, `reward_model`)."""
    balance_batch: bool = True
    """Give data-parallel ranks equal token counts. false: equal row counts in order."""
    balance_by: Literal["tokens", "flops"] = acting("tokens", needs("balance_batch"))
    """What they are given equal counts of. `flops` also counts what attention costs, which grows with the square of a
    sequence's length: for lengths that differ much. By the model's config.json."""
    pretrain: str | None = None
    """Model of every role that names none itself."""
    external_lib: tuple[str, ...] = one_or_many()
    """Packages or files (`package.module`, `path/to/file.py`) that register models or tokenizers with transformers:
    every process imports them before it loads any. See also `model_args.external_lib`."""
    max_grad_norm: float | None = number(1.0, gt=0)
    """Gradient norm above which gradients are scaled down, for every role that trains. null: no clipping."""
    prepare: str | None = None
    """A function of your own that is called with the configuration before anything is read, as `path/to/file.py:name`
    or `package.module:name`: makes data or a starting model if they aren't there. null: nothing is made."""

    profile_steps: tuple[int, ...] = one_or_many()
    """Steps that are profiled, one or several; 0 is the validation before the first. Empty: none. What is recorded says
    `profiler`; see docs/profiling.md."""
    profiler_output_dir: str | None = None
    """Folder of the profiles. null: `<logging_dir>/profiler`."""
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    """What is recorded in these steps."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    """Spans of steps and episodes for OpenTelemetry."""

    @property
    def output_path(self) -> Path:
        """Folder of the run."""
        return Path(self.output_dir)

    @property
    def logging_path(self) -> Path:
        """Folder of logs and trackers."""
        return Path(self.logging_dir) if self.logging_dir else self.output_path / "logs"

    @property
    def profiler_path(self) -> Path:
        """Folder of the profiles."""
        return Path(self.profiler_output_dir) if self.profiler_output_dir else self.logging_path / "profiler"

    @property
    def profiles(self) -> bool:
        """Return whether the profiler writes anything."""
        return bool(self.profile_steps) or self.profiler.ray_timeline

    @property
    def checkpoint_path(self) -> Path:
        """Folder of the checkpoints on the disk."""
        chosen = self.checkpoint_config.output_dir
        return Path(chosen) if chosen and not is_address(chosen) else self.output_path / "checkpoints"

    @property
    def export_path(self) -> Path:
        """Folder of the trained model."""
        return Path(self.export_dir) if self.export_dir else self.output_path / "hf_model"

    @property
    def exports(self) -> bool:
        """Return whether the run ends with a trained model that is written to `export_path`."""
        return self.export_model and not self.only_validates

    @property
    def prompt_templates(self) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Templates of the policy's prompts, in the words of `data_args.template`, with their variables."""
        return (("native", self.chat_template_kwargs),)

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, whichever way it was given."""
        raise NotImplementedError

    @property
    def one_token_responses(self) -> bool:
        """Return whether a response is one token by its definition, so that its length says nothing."""
        return False

    @property
    def sections(self) -> dict[str, WorkerConfig]:
        """Return the model roles that the configuration has a section for, by name."""
        # A key that can't be a role isn't looked at: it may hold a STAND_IN, which would end the rules about roles.
        specs = [spec for spec in fields(self) if not _NO_ROLE.fullmatch(str(spec.type))]
        values = {spec.name: getattr(self, spec.name) for spec in specs}
        return {name: value for name, value in values.items() if isinstance(value, WorkerConfig)}

    def kind_of(self, role: str) -> Literal["policy", "value", "reward"]:
        """Return what the model of a role gives: log-probs of tokens, values of tokens, or a score."""
        if role.startswith("reward_model"):
            return "reward"
        return "value" if role == "critic" else "policy"

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        """Return those of them that will be started."""
        return self.sections

    @property
    def trained_roles(self) -> dict[str, TrainConfig]:
        """Return those that will be trained."""
        return {role: worker for role, worker in self.roles.items() if isinstance(worker, TrainConfig)}

    @property
    def validates(self) -> bool:
        """Return whether there is something held out to validate on."""
        raise NotImplementedError

    @property
    def only_validates(self) -> bool:
        """Return whether nothing is trained."""
        return False

    @property
    def joins_ray(self) -> bool:
        """Return whether the run joins a Ray cluster that is there; else it starts one of its own."""
        return self.num_nodes > 1

    @property
    def makes_model(self) -> bool:
        """Return whether the run itself makes its starting model if that isn't there."""
        return self.prepare is not None

    @property
    def num_train_epochs(self) -> int | None:
        """Passes over the training rows, in a pipeline that has some; 0 or None: `max_steps` decides."""
        return None

    @property
    def known_steps(self) -> int | None:
        """Return the steps of the run; None where only rows or a recording tell."""
        return None if self.num_train_epochs else self.max_steps

    @property
    def extra_output_dirs(self) -> dict[str, str | None]:
        """Folders besides output, logs and checkpoints that the run writes to, by key."""
        dirs: dict[str, str | None] = {"export_dir": str(self.export_path)} if self.exports else {}
        return {**dirs, "profiler_output_dir": str(self.profiler_path)} if self.profiles else dirs

    @property
    def output_folders(self) -> dict[str, Path]:
        """Return all folders that the run writes into, by their keys."""
        extra = {key: Path(name) for key, name in self.extra_output_dirs.items() if name}
        return {
            "output_dir": self.output_path,
            "logging_dir": self.logging_path,
            "checkpoint_config.output_dir": self.checkpoint_path,
            **extra,
        }

    @property
    def exclusive_folders(self) -> dict[str, Path]:
        """Folders in which two runs at once would replace each other's files, by their keys. That of
        checkpoints has a lock of its own."""
        own = ("output_dir", "logging_dir", "rollout_dump_dir")
        return {key: folder for key, folder in self.output_folders.items() if key in own}

    @property
    def critic_warmup_steps(self) -> int:
        """First steps in which the actor isn't trained."""
        return 0

    @property
    def temperature(self) -> float:
        """Return the temperature of the distribution that log-probs are of."""
        return 1.0

    @property
    def l2_coef(self) -> float:
        """Coefficient of the actor's pull towards its starting weights."""
        return 0.0

    @property
    def batch(self) -> BatchPlan:
        """Return how a step's rows become optimizer steps."""
        raise NotImplementedError

    def default_model(self, role: str) -> str | None:  # noqa: ARG002 - for subclasses
        """Model of a role that names none."""
        actor = self.sections.get("actor_train")
        return self.pretrain or (actor.model_args.model_name_or_path if actor is not None else None)

    def model_path(self, role: str) -> str:
        """Model of a role: the one it names, else its default; raises `ValueError` when there is neither."""
        worker = self.sections.get(role)
        own = worker.model_args.model_name_or_path if worker is not None else None
        path = own or self.default_model(role)
        if path is None:
            raise ValueError(f"no model for {role}: set {role}.model_args.model_name_or_path or pretrain")
        return path

    def tokenizer_path(self, role: str) -> str | None:
        """Return a role's own tokenizer, or that of the actor whose tokens it reads; None: its model's."""
        own = self.sections[role].model_args.tokenizer_name_or_path
        actor = self.sections.get("actor_train")
        reads_actors = role in ("actor_infer", "reference", "critic") and actor is not None
        return actor.model_args.tokenizer_name_or_path if reads_actors and actor is not None else own

    @property
    def placement(self) -> PlacementPlan:
        """Slots of every rank that will be started."""
        roles = {}
        for name, worker in self.roles.items():
            per_rank, slots = worker.num_gpus_per_worker, worker.slots
            roles[name] = tuple(slots[i : i + per_rank] for i in range(0, len(slots), per_rank))
        return PlacementPlan(num_nodes=self.num_nodes, num_gpus_per_node=self.num_gpus_per_node, roles=roles)

    @property
    def hazards(self) -> tuple[str, ...]:
        """Return what was asked for that puts the machine at risk; the plan and the summary repeat it."""
        return ()

    def explain_results(self) -> str:
        """Return what the run leaves behind, in words, and what it puts at risk."""
        return "\n".join((self._explain_files(), *self._explain_profile(), *self.hazards))

    def _explain_profile(self) -> tuple[str, ...]:
        if not self.profile_steps:
            return ()
        options = self.profiler
        of = ", ".join(options.roles) or "every role"
        ranks = f"rank {', '.join(map(str, options.ranks))}" if options.ranks else "every rank"
        steps = ", ".join(map(str, sorted(set(self.profile_steps))))
        tools = f", with {', '.join(options.tools)} on {ranks} of {of}" if options.tools else ""
        return (f"profiles: step {steps}, in {self.profiler_path}{tools}",)

    def _explain_files(self) -> str:
        if self.only_validates:
            return "validation only: no model is written"
        when = [f"every {self.save_steps} steps"] if self.save_steps else []
        when += [f"whenever {self.save_best} is better than before"] if self.save_best else []
        every = f"{' and '.join(when)}, in {self.checkpoint_path}"
        every += f", and uploaded to {self.checkpoint_config.address}" if self.checkpoint_config.address else ""
        model = str(self.export_path) if self.exports else "not written (export_model is false)"
        return f"trained model: {model}\ncheckpoints: {every if when else 'none (save_steps is 0)'}"
