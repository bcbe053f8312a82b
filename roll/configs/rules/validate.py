"""Rules between keys, without touching anything outside the configuration; `environment` does that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

from roll.configs.catalog.pipeline_table import pipeline_of
from roll.configs.errors import Violation
from roll.configs.rules import acts_if_rules as acts_if
from roll.configs.rules import agentic_rules as agentic
from roll.configs.rules import async_generation, router_replay, save_best
from roll.configs.rules import data_rules as data
from roll.configs.rules import deepspeed_rules as deepspeed
from roll.configs.rules import endpoint_rules as endpoint
from roll.configs.rules import engine_rules as engines
from roll.configs.rules import judge_rules as judge
from roll.configs.rules import offline_rules as offline
from roll.configs.rules import picture_rules as pictures
from roll.configs.rules import policy_rules as policy
from roll.configs.rules import reward_model_rules as reward_model
from roll.configs.rules import rewards_rules as rewards
from roll.configs.rules import roles_rules as roles
from roll.configs.rules import run_rules as run
from roll.configs.rules import tools_rules as tools
from roll.configs.schema.engine_config import EngineConfig, VllmConfig
from roll.configs.schema.reward_config import RewardModelConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.configs.stand_in import collect
from roll.utils.importing import load_object

Rule = Callable[[Any], Iterator[Violation]]


def _batch_rules(config: RLConfig) -> Iterator[Violation]:
    plan = config.batch
    # Without a whole data-parallel size `layout_rules` has said why.
    if all(worker.data_parallel for worker in plan.roles.values()):
        yield from plan.violations()


_RUN: tuple[Rule, ...] = (
    acts_if.acts_if_rules,
    run.end_rules,
    run.schedule_rules,
    run.checkpoint_rules,
    save_best.save_best_rules,
    run.name_rules,
    run.token_budget_rules,
    run.profiler_rules,
    roles.role_rules,
    deepspeed.deepspeed_rules,
    roles.placement_rules,
)
_ROLLOUTS: tuple[Rule, ...] = (
    policy.estimator_rules,
    policy.stage_rules,
    policy.reward_norm_rules,
    policy.kl_rules,
    policy.loss_rules,
    policy.teacher_rules,
    endpoint.endpoint_teacher_rules,
    rewards.sandbox_rules,
    tools.tool_rules,
    run.length_rules,
    run.sampling_rules,
    async_generation.lora_sync_rules,
    engines.engine_rules,
    async_generation.async_rules,
    async_generation.transport_rules,
    run.replay_rules,
    router_replay.router_replay_rules,
    _batch_rules,
)
RLVR_RULES: tuple[Rule, ...] = (
    *_ROLLOUTS,
    rewards.score_rules,
    rewards.reward_rules,
    tools.domain_rules,
    reward_model.reward_model_rules,
    judge.judge_rules,
    data.data_rules,
    data.validation_rules,
    pictures.prompt_picture_rules,
    *_RUN,
)
AGENTIC_RULES: tuple[Rule, ...] = (*_ROLLOUTS, *agentic.RULES, tools.env_tool_rules, *_RUN)
DISTILL_RULES = RLVR_RULES
SFT_RULES: tuple[Rule, ...] = (*offline.RULES, policy.teacher_rules, endpoint.endpoint_teacher_rules, *_RUN)
DPO_RULES: tuple[Rule, ...] = (*offline.DPO_RULES, *_RUN)
REWARD_MODEL_RULES: tuple[Rule, ...] = (*offline.REWARD_MODEL_RULES, *_RUN)
"""In the order of their messages; `roll/configs/catalog/pipeline_table.py` says whose they are."""


def _listed(config: RunConfig, kind: Literal["rules", "warnings"]) -> tuple[Callable[[Any], Iterator[Any]], ...]:
    functions: tuple[Callable[[Any], Iterator[Any]], ...]
    functions = load_object(getattr(pipeline_of(config.pipeline), kind), key="pipeline")
    return functions


def validate(config: RunConfig, *, sound: bool = True) -> list[Violation]:
    """Everything that contradicts itself or can't act. Not `sound`: some values are `STAND_IN`."""
    return collect(_listed(config, "rules"), config, sound=sound)


def warnings_of(config: RunConfig) -> list[str]:
    """Return what is allowed but probably not meant."""
    warnings = [warning for of in _listed(config, "warnings") for warning in of(config)]
    for role, worker in config.trained_roles.items():
        if worker.model_args.dtype == "fp16":
            warnings.append(f"{role} trains in fp16 without loss scaling: small gradients vanish; bf16 is safer")
    if not (config.exports or config.save_steps or config.save_best or config.only_validates):
        warnings.append("export_model is false and save_steps is 0: the trained weights are lost when the run ends")
    return warnings


def _clips(config: RLConfig) -> tuple[float, float]:
    return config.loss_options["clip_low"], config.loss_options["clip_high"]


def _rollout_warnings(config: RLConfig) -> Iterator[str]:
    if config.reference is not None and not config.uses_reference:
        yield "reference is configured, but no KL term uses it: it won't be started"
    yield from run.replay_warnings(config)
    if config.validates and not (config.eval_steps or config.val_before_train or config.val_only):
        yield f"{config.validation_key} is configured, but eval_steps and val_before_train are off: it won't run"
    if config.adv_estimator == "dr_grpo" and config.loss_agg_mode != "seq-mean-token-sum-norm":
        yield "dr_grpo was published with loss_agg_mode: seq-mean-token-sum-norm"
    if config.policy_loss == "gspo" and max(_clips(config)) > 0.05:
        yield (f"gspo with a clip range of {max(_clips(config)):g} never clips; use about pg_clip=3e-4")
    idle_kl_loss = config.use_kl_loss and config.kl_loss_coef == 0
    if idle_kl_loss or (config.add_token_level_kl and config.init_kl_coef == 0):
        yield "a KL term has coefficient 0: it does nothing, and no reference is started for it"
    if config.reference_is_actor and config.actor_train.model_args.adapter_name_or_path is not None:
        yield (
            "the reference is the base model without the adapters that training starts from; to stay near those, merge "
            "them into a folder and name it in a reference section"
        )
    yield from _tiny_mini_batches(config)
    yield from _engine_warnings(config)


def _tiny_mini_batches(config: RLConfig) -> Iterator[str]:
    """Warn of the default of one response: many slow updates, each of a gradient that is mostly noise."""
    if config.val_only:
        return
    for batch in config.batch.train_batches:
        if batch.fits and batch.mini_batch < config.batch.group_size and batch.rows >= 16 * batch.mini_batch:
            args = f"{batch.role}.training_args"
            rows = f"{batch.mini_batch} response{'s' * (batch.mini_batch > 1)}"
            yield (
                f"each step makes {batch.optimizer_steps} optimizer steps of {rows} each, which is slow and noisy: set "
                f"{args}.per_device_train_batch_size (responses per pass) and {args}.gradient_accumulation_steps "
                f"(passes per optimizer step); their product x {batch.worker.data_parallel} data-parallel rank(s) = "
                f"{batch.rows} makes one optimizer step"
            )


def _rlvr_warnings(config: RLVRConfig) -> Iterator[str]:
    for role in config.sections:
        if role.startswith(("reward_model", "judge")) and not config.domains_of(role):
            yield f"{role} is configured, but no domain of rewards uses it: it won't be started"
    if config.rollout_batch_size < len(config.rewards):
        yield "rollout_batch_size is smaller than the number of domains: a step won't hold all of them"


def _engine_warnings(config: RLConfig) -> Iterator[str]:
    options = config.actor_infer.strategy_args.strategy_config
    if not isinstance(options, EngineConfig):
        return
    name = config.actor_infer.strategy_args.strategy_name
    for role, model in config.roles.items():
        if isinstance(model, RewardModelConfig) and (model.infer_batch_size > 1 or model.use_dynamic_batching_in_infer):
            yield (
                f"responses of {name} are scored as they come, so which ones share a pass of the reward model depends "
                f"on timing, and with it the last bits of their scores; {role}.infer_batch_size=1 avoids that"
            )
    quantised = options.quantization if isinstance(options, VllmConfig) else options.engine_args.get("quantization")
    if quantised and config.train_infer_correction is None and not config.val_only:
        yield (
            f"{name} samples from quantised weights ({quantised}), the trainer's aren't: set train_infer_correction, "
            "or the difference goes into the update"
        )


RLVR_WARNINGS = (_rollout_warnings, _rlvr_warnings)
AGENTIC_WARNINGS = (_rollout_warnings, agentic.warnings)
DISTILL_WARNINGS = RLVR_WARNINGS
SFT_WARNINGS = (offline.sft_warnings,)
DPO_WARNINGS = (offline.dpo_warnings,)
REWARD_MODEL_WARNINGS = (offline.warnings,)
"""Besides what holds for every run."""
