"""What pipelines with rollouts have in common: tasks are played by engines, and a policy learns from the groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from roll.configs.catalog.transport_table import TRANSPORTS
from roll.configs.schema.acts_if import acting, needs, unless
from roll.configs.schema.batch_plan import BatchPlan
from roll.configs.schema.distill_args import TEACHES, Distillation, TeacherConfig
from roll.configs.schema.fields import number, one_or_many
from roll.configs.schema.policy_config import USES_CRITIC, PolicyOptimisation
from roll.configs.schema.run_config import VALIDATES, RunConfig
from roll.configs.schema.tool_config import ToolConfig, ToolUseConfig
from roll.configs.schema.worker_config import (
    ActorInferConfig,
    GeneratingArgs,
    ReferenceConfig,
    TrainConfig,
    WorkerConfig,
)

UNCONFINED = "unconfined"
"""The value of `sandbox` that contains nothing."""
UNCONFINED_HAZARD = "sandbox: unconfined: what the model writes is run as this user, and nothing contains it"

WEIGHT_TRANSPORTS = ("auto", *(name for name, entry in TRANSPORTS.items() if entry.configurable))


_TOOLS = needs("tools", fix="tools: [{name: python}], or remove it")


@dataclass(frozen=True, kw_only=True)
class RLConfig(PolicyOptimisation, RunConfig):
    """Everything that a run with rollouts is told, whatever its tasks are. Inert and frozen; derived values are
    properties."""

    group_size_key: ClassVar[str]
    """The key that says how many episodes a group has, for messages."""

    val_before_train: bool = acting(False, VALIDATES)
    """Validate the starting model."""
    val_only: bool = acting(False, VALIDATES)
    """Validate and end, no optimizer is built."""
    rollout_batch_size: int = number(64, ge=1, le=10_000_000)
    """Prompts per step; in `pipeline: agentic` episodes, i.e. groups x `group_size`."""
    val_batch_size: int | None = number(None, ge=1, acts_if=(VALIDATES,))
    """Validation prompts in flight at once, null: all. In `pipeline: agentic` the episodes of a validation, null: one
    round of `val_env_manager`."""
    prompt_length: int = number(1024, ge=1)
    """Longest prompt in tokens."""
    response_length: int = number(1024, ge=1)
    """Longest response in tokens."""
    rollout_dump_dir: str | None = None
    """Folder for all responses as parquet, one file per step, with tokens, masks, log-probs, rewards, advantages;
    those that were dropped and those of validations in files of their own. `roll view` shows them. What an earlier run
    has recorded there is moved to `earlier.<n>` when a new one starts. null: none."""
    rollout_dump_outputs: tuple[Literal["old_logprobs", "entropies"], ...] = one_or_many(
        acts_if=(needs("rollout_dump_dir"), unless("val_only", why="nothing is trained"))
    )
    """Token columns that are computed for these files alone where the training doesn't need them, in a forward pass of
    the trainer before the update: `old_logprobs`, `entropies`. The training stays the same, bit for bit."""
    rollout_dump_gib: float | None = number(None, gt=0, acts_if=(needs("rollout_dump_dir"),))
    """Size in GiB above which the files of the oldest steps are deleted. null: no limit."""
    replay_from: str | None = None
    """Train on the episodes that another run has recorded (`rollout_dump_dir`), in place of new ones: `RUN` (its
    `output_dir`) replays all of its steps, `RUN:5` one, `RUN:5-8` several, each under the number that it had. No
    engine is started, no environment and no reward, and nothing is validated; log-probs, credit and updates are
    computed as in any run. See docs/replay.md. null: episodes are played."""
    log_val_generations: int = number(0, ge=0)
    """Validation samples shown in the log and the trackers. 0: none."""
    max_running_requests: int = number(128, ge=1)
    """Requests one engine works on at once: the decode batch of `hf_infer`, the requests in flight at `vllm` and
    `sglang`. With several engines each has as many."""
    is_use_additional_prompts: bool = acting(
        False, unless("async_generation_ratio", why="it keeps engines busy with the prompts of the steps to come")
    )
    """Start more prompts than a step needs; when enough groups are complete the rest is aborted."""
    max_additional_running_prompts: int = number(16, ge=1, acts_if=(needs("is_use_additional_prompts"),))
    """How many more."""
    max_num_gen_batches: int = number(10, ge=1)
    """Budget of dynamic filtering and of failed groups: a step may start this many times `rollout_batch_size`
    prompts, then it ends with an error that shows the scores."""
    async_generation_ratio: float = number(
        0.0, ge=0, acts_if=(unless("val_only", why="there is no training to run ahead of"),)
    )
    """How far generation may run ahead of training: no token that is trained on is more than ceil(this) weight versions
    old. 0: generation and training take turns. Above 0 they work at once, on slots of their own, and the loss needs
    `train_infer_correction`, `policy_loss: decoupled_ppo` or `allow_uncorrected_async`."""
    partial_rollout: Literal["resume", "restart"] = acting(
        "resume", needs("async_generation_ratio", fix="async_generation_ratio=1, or remove it")
    )
    """What a weight update does to responses on their way: `resume` goes on from
    the tokens that are there, `restart` throws them away and starts over under the new weights."""
    engine_restarts: int = number(1, ge=0)
    """How often one engine may be replaced in a run after it died; its responses then start over. 0: its death ends the
    run. For `vllm` and `sglang`."""
    weight_transport: str = acting("auto", choices=WEIGHT_TRANSPORTS, own=False)
    """How new weights travel from `actor_train` to `actor_infer`. `auto`: what suits where the two live; see
    docs/engines.md."""
    model_update_buffer_size_mb: int = number(256, ge=1)
    """Weights travel in buckets of this size, in MiB, or of one tensor if that is larger; each rank that sends has two
    under way."""
    lora_sync: Literal["merged", "adapters"] = "merged"
    """What the engines get of an actor that trains LoRA adapters. `merged`: all weights, with the adapters merged in.
    `adapters`: the base weights once and then the adapters alone, which the engine computes beside them. For `vllm`;
    see docs/engines.md."""
    router_replay: bool = acting(False, unless("val_only", why="nothing is trained"))
    """Models with experts: the policy that learns sends each token to the experts that the engine sent it to (rollout
    routing replay, R3, arXiv:2510.11370); scores and gradients are its own. For `vllm`; see docs/engines.md."""
    delta_weight_sync: bool = acting(
        False,
        needs("lora_sync", "merged", why="adapters are small, and the base weights are sent only once"),
        unless("val_only", why="weights are sent once at most"),
    )
    """Send only those numbers that changed since the last sync, after rounding to the engines' type. The trainer and
    each engine keep a copy of the weights in host memory for it; see docs/engines.md for when it pays."""
    verify_weight_sync: Literal["off", "checksum", "logprob"] = "off"
    """After every update: `checksum` compares the bytes that arrived with those that left, `logprob` also compares
    log-probs of a few sampled tokens between engine and trainer. A difference ends the run."""
    sandbox: str = "auto"
    """What contains model output that a reward or the tool `python` runs: `sandlock` (Landlock and seccomp), `bwrap`
    (namespaces), the first of them that works here (`auto`), a sandbox server's http(s) address, or nothing
    (`unconfined`)."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools that policies can call, for the domains (`rewards.<domain>.tools`) and environments
    (`custom_envs.<tag>.tools`) that name them."""
    tool_use: ToolUseConfig = field(default_factory=ToolUseConfig, metadata={"acts_if": (_TOOLS,), "idle": ()})
    """How they are called."""
    reward_pretrain: str | None = None
    """Model of the critic and of the reward model if they name none themselves. null: `pretrain` for the critic."""
    actor_train: TrainConfig = field(default_factory=TrainConfig)
    """The policy that learns."""
    actor_infer: ActorInferConfig = field(default_factory=ActorInferConfig)
    """Its copy that generates."""
    reference: ReferenceConfig | None = None
    """The frozen policy of the KL terms; started only if one of them is on. null: with LoRA, `actor_train` with its
    adapters off."""
    teacher: TeacherConfig | None = None
    """A model that teaches the policy on the policy's own samples (docs/distillation.md). null: rewards alone teach."""
    teachers: dict[str, TeacherConfig] = field(default_factory=dict, metadata={"acts_if": (TEACHES,), "idle": ()})
    """Further ones by name, each for the tasks of its `tags`; `teacher` teaches all others."""
    distill: Distillation = field(default_factory=Distillation, metadata={"acts_if": (TEACHES,), "idle": ()})
    """How it teaches."""
    critic: TrainConfig | None = acting(None, USES_CRITIC)
    """The value model of `adv_estimator: gae`; started only for it."""

    @property
    def hazards(self) -> tuple[str, ...]:
        return (UNCONFINED_HAZARD,) if self.sandbox == UNCONFINED else ()

    @property
    def group_size(self) -> int:
        """Episodes per task."""
        raise NotImplementedError

    @property
    def groups_per_step(self) -> int:
        """Tasks per step."""
        raise NotImplementedError

    @property
    def needs_group(self) -> tuple[tuple[str, str], ...]:
        """Return what a pipeline has of its own that compares the members of a group: (key, why)."""
        return ()

    @property
    def validation_sampling(self) -> tuple[str, GeneratingArgs] | None:
        """Return how validation samples, and the key that says so; None without validation."""
        section = getattr(self, self.validation_key)
        return None if section is None else (f"{self.validation_key}.generating_args", section.generating_args)

    def domain_weight(self, domain: str) -> float:
        """Factor on a domain's scores in training."""
        raise NotImplementedError

    def reward_terms(self, domain: str) -> dict[str, float]:
        """Return the parts that a domain's reward is the sum of, with their factors in training; empty: it is one."""
        del domain
        return {}

    @property
    def max_sequence_length(self) -> int:
        return self.sequence_length or self.prompt_length + self.response_length

    @property
    def roles(self) -> dict[str, WorkerConfig]:
        idle = {
            "reference": not self.uses_reference,
            "critic": not self.uses_critic,
            **dict.fromkeys(("teacher", "teachers"), self.val_only),
            **dict.fromkeys(("actor_infer", "reward_model", "reward_models", "judge"), self.replays),
        }
        return {role: worker for role, worker in self.sections.items() if not idle.get(role.split(".")[0], False)}

    @property
    def replays(self) -> bool:
        """Return whether episodes come from a recording; then nothing plays any."""
        return self.replay_from is not None

    @property
    def only_validates(self) -> bool:
        return self.val_only

    @property
    def known_steps(self) -> int | None:
        return None if self.replays else super().known_steps

    @property
    def extra_output_dirs(self) -> dict[str, str | None]:
        return {**super().extra_output_dirs, "rollout_dump_dir": self.rollout_dump_dir}

    @property
    def critic_warmup_steps(self) -> int:
        return self.critic_warmup if self.uses_critic else 0

    @property
    def sections(self) -> dict[str, WorkerConfig]:
        return {**super().sections, **{f"teachers.{name}": model for name, model in self.teachers.items()}}

    def teacher_of(self, tag: str) -> str:
        """Role of the teacher of tasks with this tag."""
        owners = {tag: f"teachers.{name}" for name, model in self.teachers.items() for tag in model.tags or (name,)}
        return owners.get(tag, "teacher")

    @property
    def teacher_advantages(self) -> bool:
        """Return whether sampled tokens have advantages by what the teacher says of them."""
        return self.teacher is not None and self.distill.use_as == "advantage"

    @property
    def teacher_loss(self) -> bool:
        """Return whether the loss compares the policy's distribution with the teacher's."""
        return self.teacher is not None and self.distill.use_as == "loss"

    @property
    def temperature(self) -> float:
        return self.actor_infer.generating_args.temperature

    @property
    def l2_coef(self) -> float:
        return self.l2

    @property
    def batch(self) -> BatchPlan:
        return BatchPlan(
            roles=self.trained_roles, tasks=self.groups_per_step, group_size=self.group_size, epochs=self.ppo_epochs
        )

    @property
    def validates(self) -> bool:
        return self.validation_sampling is not None

    @property
    def reference_is_actor(self) -> bool:
        """Return whether reference log-probs are those of `actor_train` without its adapters: no model is started for
        them."""
        return self.uses_reference and self.reference is None and self.actor_train.model_args.uses_lora

    def default_model(self, role: str) -> str | None:
        """Return no policy's model for a reward model: it is no classifier."""
        if role.split(".")[0] in ("reward_model", "reward_models"):
            return self.reward_pretrain
        if role.split(".")[0] in ("judge", "teacher", "teachers"):
            return None  # a policy that grades or teaches itself must be asked for
        own = self.reward_pretrain if role == "critic" else None
        return own or super().default_model(role)

    @property
    def redundancy(self) -> int:
        """Episodes per group beyond those that are needed."""
        return 0

    @property
    def max_open_groups(self) -> int | None:
        """Return the number of groups that are played at once; None: as many as there are."""
        return None

    @property
    def validation_chunk(self) -> int | None:
        """Validation tasks that are played at once; None: all."""
        return self.val_batch_size

    @property
    def task_budget(self) -> int:
        """Tasks that may be started for one step."""
        return self.max_num_gen_batches * self.groups_per_step

    @property
    def min_survivors(self) -> int:
        """Usable responses below which a group isn't trained on."""
        return min(2, self.group_size)
