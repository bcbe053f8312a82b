"""One small job of every pipeline, and in which layouts, on which backends and from which states it must be the same.

`test_pipelines_contract.py` and `test_pipelines_resume.py` assert each claim once for all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import preferences
from agents_run import AGENTS, endpoint, write_run
from preferences import LORA, TRAINING
from small import SMALL
from tiny_classifiers import build_tiny_classifier
from tiny_models import build_tiny_model
from toy import write_toy
from toy_env import write_toy_env
from toy_sft import write_sft

Keys = tuple[str, ...]

ACTOR = "actor_train.strategy_args.strategy_name"
STAGE = "+actor_train.strategy_args.strategy_config"
SHARDED = f"{ACTOR}=deepspeed_train"
MEGATRON = f"{ACTOR}=megatron_train"
ZERO_3 = (SHARDED, f"{STAGE}={{zero_optimization: {{stage: 3}}}}")
BACKENDS = {"zero 3": ZERO_3, "megatron": (MEGATRON,)}
PACKED = "actor_train.use_sequence_packing=true"
HELD_OUT = ("validation_share=0.2", "eval_steps=3")
CRITIC = (
    "critic.model_args.disable_gradient_checkpointing=true",
    "critic.training_args.per_device_train_batch_size=32",
    "critic.training_args.gradient_accumulation_steps=2",
    "critic.training_args.learning_rate=1e-2",
)
MIXED = (
    MEGATRON,
    "adv_estimator=gae",
    "ppo_epochs=2",
    "use_kl_loss=true",
    "kl_loss_coef=0.001",
    "reference.strategy_args.strategy_name=fsdp2_infer",
    "critic.strategy_args.strategy_name=deepspeed_train",
    *CRITIC,
)
ADAPTERS = (
    *("actor_train.model_args.lora_rank=8", "actor_train.model_args.lora_alpha=32"),
    f"{TRAINING}.learning_rate=5e-3",
)
BOTH_KL = ("use_kl_loss=true", "kl_loss_coef=0.1", "add_token_level_kl=true", "allow_both_kl=true", "ppo_epochs=2")


def by_tokens(limit: int) -> Keys:
    """Micro-batches of so many tokens."""
    key = "actor_train.max_tokens_per_microbatch_in_train"
    return ("actor_train.use_dynamic_batching_in_train=true", f"{key}={limit}")


def passes(rows: int, count: int) -> Keys:
    """So many rows in each of so many micro-batches."""
    return (f"{TRAINING}.per_device_train_batch_size={rows}", f"{TRAINING}.gradient_accumulation_steps={count}")


def write_distill(folder: Path, model: Path) -> Path:
    """Write the toy with another model that teaches."""
    teacher = build_tiny_model(folder / "teacher", seed=7)
    return _replaced(write_toy(folder, model), "pipeline: rlvr", f"pipeline: distill\n{_role('teacher', teacher)}")


def write_reference(folder: Path, model: Path) -> Path:
    """Write the toy with another model as the reference."""
    reference = build_tiny_model(folder / "reference", seed=7)
    return _replaced(write_toy(folder, model), "pipeline: rlvr", f"pipeline: rlvr\n{_role('reference', reference)}")


def write_scored(folder: Path, model: Path) -> Path:
    """Write the toy with a random classifier for `reward_pretrain`."""
    path = build_tiny_classifier(folder / "classifier")
    return _replaced(write_toy(folder, model), "pipeline: rlvr", f"pipeline: rlvr\nreward_pretrain: {path}")


def write_judged(folder: Path, model: Path) -> Path:
    """Write the toy with the model itself as the judge of every response."""
    judge = (
        f"judge: {{model_args: {{model_name_or_path: {model}}}, prompt: '{{response}}', max_length: 120, "
        "score_pattern: '([0-9])', score_max: 9, unparsed_score: 0.25, max_in_flight: 4, "
        "generating_args: {temperature: 0.0, max_new_tokens: 4}}"
    )
    return _replaced(write_toy(folder, model), "pipeline: rlvr", f"pipeline: rlvr\n{judge}")


def write_agents(folder: Path, model: Path) -> Path:
    """Write a run whose episodes a function plays, on rows of a file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"word": f"w{i}"}) + "\n" for i in range(3)))
    game = endpoint(agent=f"{AGENTS}:lower", tasks=str(folder / "tasks.jsonl"))
    return write_run(folder, model, {"game": game})


def _role(name: str, model: Path) -> str:
    return f"{name}: {{model_args: {{model_name_or_path: {model}}}}}"


def _replaced(folder: Path, old: str, new: str) -> Path:
    file = folder / "toy.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return folder


@dataclass(frozen=True, eq=False)
class Job:
    """A small run, and the variants of it that must take the same steps."""

    write: Callable[..., Path]
    """Writes `toy.yaml` for a folder and a model."""
    keys: Keys
    metrics: Keys
    """What says which steps were taken, in training and in validation."""
    abs: float = 1e-5
    models: bool = False
    """Whether every backend must export the same weights; advantages of a group cancel in gradients of RL."""
    layouts: Mapping[str, Keys] = field(default_factory=dict)
    backends: Mapping[str, Keys] = field(default_factory=dict)
    resumed: Mapping[str, Keys] = field(default_factory=dict)
    same: Keys = ()
    """The metrics that two runs of one seed share to the bit; none: all but seconds."""


OF_RL = ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/lr", "actor/optimizer_steps")
OF_PREFERENCES = (
    # No accuracy: in the first step the policy is the reference, and rounding says which margin is above 0.
    *("preference/loss", "preference/margin", "actor/grad_norm", "preference/tokens"),
    *("val/loss", "val/accuracy", "val/margin", "val/chosen_reward", "val/rejected_logprob"),
)
OF_PAIRS = {
    "one pair at a time": passes(2, 6),
    "all pairs at once": passes(12, 1),
    "packed": (PACKED,),
    "by tokens": by_tokens(100),
}
IN_ORDER = ("actor_train.data_args.shuffle=false",)
TAUGHT = {
    "layouts": {
        "packed": (PACKED, "teacher.use_sequence_packing=true"),
        "by tokens": by_tokens(60),
        "two passes": (*passes(2, 2), "teacher.infer_batch_size=1"),
    },
    "backends": {"zero 3": (SHARDED,), "megatron": (MEGATRON, "teacher.strategy_args.strategy_name=megatron_infer")},
}
ONE_STEP = (*SMALL, "num_return_sequences_in_group=2")
BY_LOSS = (*ONE_STEP, "distill.use_as=loss", "distill.top_k=null")
FULL_KL = (
    *(*SMALL, "use_kl_loss=true", "kl_loss_type=full", "kl_loss_coef=1", "rl_loss_coef=1", "add_token_level_kl=true"),
    *("kl_penalty=full", "init_kl_coef=0.1", "adv_estimator=reinforce", "allow_both_kl=true", "kl_top_k=16"),
)
JUDGED = (
    *("rewards.case.name=judge", "custom_reward_function=null", "response_length=3", "rollout_batch_size=4"),
    *("rewards.case.weight=2", f"{TRAINING}.per_device_train_batch_size=16"),
)
REFERENCE = "reference={}"

JOBS: dict[str, Job] = {
    "rlvr": Job(
        write_toy, (), OF_RL, abs=1e-6,
        backends={"zero 1": (SHARDED, f"{STAGE}={{zero_optimization: {{stage: 1}}}}"), **BACKENDS},
        resumed={"zero 1": (SHARDED, f"{STAGE}={{zero_optimization: {{stage: 1}}}}"), **BACKENDS, "mixed": MIXED},
    ),
    "agentic": Job(
        write_toy_env, ("max_steps=2",), OF_RL, abs=1e-6,
        backends={f"{name}, by {unit}": (f"{ACTOR}={name}_train", f"sample_unit={unit}")
                  for name in ("deepspeed", "megatron") for unit in ("trajectory", "step")},
    ),
    "agents": Job(write_agents, (), OF_RL, resumed={"": ()}, same=("actor/loss", "reward/mean", "agent/calls")),
    "judged": Job(write_judged, JUDGED, OF_RL, resumed={"": ()}),
    "sft": Job(
        write_sft, HELD_OUT,
        ("sft/loss", "actor/grad_norm", "actor/lr", "sft/tokens", "val/loss", "val/token_accuracy"),
        abs=1e-12, models=True,
        layouts={"one row at a time": passes(1, 6), "all rows at once": passes(6, 1), "packed": (*passes(3, 2), PACKED),
                 "by tokens": by_tokens(100)},
        backends=BACKENDS,
        resumed={"": (), "lora": LORA, "in order": IN_ORDER, **BACKENDS},
    ),
    "dpo": Job(
        preferences.write, (*HELD_OUT, REFERENCE), OF_PREFERENCES, layouts=OF_PAIRS, backends=BACKENDS,
        resumed={"": (), "lora": (*LORA, "reference=null"), "computed beforehand": ("precompute_ref_log_probs=true",),
                 "in order": IN_ORDER},
    ),
    "kto": Job(partial(preferences.write, single=True), (*HELD_OUT, REFERENCE, "loss_type=kto"), OF_PREFERENCES,
               resumed={"": ()}),
    "reward_model": Job(
        partial(preferences.write, pipeline="reward_model"), HELD_OUT, OF_PREFERENCES, models=True, layouts=OF_PAIRS,
        backends=BACKENDS, resumed={"": (), "lora": LORA, **BACKENDS},
    ),
    "distill by advantage": Job(write_distill, ONE_STEP, (*OF_RL[:3], "distill/reverse_kl"), **TAUGHT),
    "distill by loss": Job(write_distill, BY_LOSS, (*OF_RL[:3], "distill/divergence"), resumed={"": ()}, **TAUGHT),
    "full kl": Job(
        write_reference, FULL_KL, (*OF_RL[:3], "actor/kl_loss", "kl/reference"),
        layouts={"packed": (PACKED, "reference.use_sequence_packing=true"),
                 "two passes": (*passes(2, 2), "reference.infer_batch_size=1")},
        backends={"zero": (SHARDED,), "megatron": (MEGATRON, "reference.strategy_args.strategy_name=megatron_infer")},
    ),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Ranks:
    """Two data-parallel ranks and one that does the work of both."""

    job: str
    keys: Keys
    alone: Keys = ()
    together: Keys = (f"{TRAINING}.gradient_accumulation_steps=1",)
    write: Callable[..., Path] | None = None
    of_the_actor: bool = True


ON_BOTH = "actor_infer.device_mapping='0-1'"
EPOCH = ("num_train_epochs=1", "max_steps=0", "validation_share=0", "eval_steps=0")
"""Steps of 6, 6, 6 and 2 rows."""
SCORED = ("rewards.case.name=reward_model", "custom_reward_function=null", "reward_model.template=plain")
RANKS = {
    "rlvr": Ranks("rlvr", ("max_steps=2",)),
    "rlvr with a reference and two engines": Ranks(
        "rlvr",
        ("max_steps=4", "adv_estimator=reinforce", "ppo_epochs=2", "use_kl_loss=true", "kl_loss_coef=0.1",
         "reference.infer_batch_size=16"),
        together=(f"{TRAINING}.gradient_accumulation_steps=1", ON_BOTH),
    ),
    "rlvr with adapters": Ranks("rlvr", ("max_steps=3", *ADAPTERS, *BOTH_KL)),
    "rlvr with ranks that score": Ranks(
        "rlvr", ("max_steps=2", *SCORED), together=("reward_model.device_mapping='0-1'",), write=write_scored,
        of_the_actor=False,
    ),
    "agentic": Ranks(
        "agentic", ("max_steps=3", "sample_unit=step", f"{TRAINING}.per_device_train_batch_size=16"),
        alone=(f"{TRAINING}.gradient_accumulation_steps=2",),
        together=(f"{TRAINING}.gradient_accumulation_steps=1", ON_BOTH, "env_workers.world_size=2"),
    ),
    "sft": Ranks("sft", EPOCH, passes(1, 6), passes(1, 3)),
    "dpo": Ranks("dpo", EPOCH, passes(2, 6), (*passes(2, 3), "reference.device_mapping='0-1'")),
    # Its KL is one number for the rows of the whole step, on whatever ranks they are.
    "kto": Ranks("kto", EPOCH, passes(1, 6), (*passes(1, 3), "reference.device_mapping='0-1'")),
}  # fmt: skip


def cells(table: str) -> list[Any]:
    """(job, variant) of one of a job's tables, for `parametrize`."""
    return [(name, variant) for name, job in JOBS.items() for variant in getattr(job, table)]
