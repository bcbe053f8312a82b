"""From a checked configuration to a running pipeline: data, then reward processes, then clusters.

What is cheap and can be wrong comes first, so that a bad row or reward fails before a model is loaded.
"""

from __future__ import annotations

import contextlib
import logging

from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.data.sampler import TaskSource
from roll.distributed.cluster import Cluster
from roll.envs.tools.toolbox import open_toolbox
from roll.pipelines import log_plan
from roll.pipelines.credit.model_outputs import require_same_tokens
from roll.pipelines.rl.engine_pipeline import EnginePipeline
from roll.pipelines.rl.rlvr import PromptWorkload, training_data, validation_data
from roll.pipelines.rollouts.reward_router import RewardRouter
from roll.pipelines.run.clusters import start_clusters
from roll.pipelines.run.loop import own_folders
from roll.pipelines.run.run_dtype import settled
from roll.pipelines.run.warm_start import pending_warm_start
from roll.pipelines.workers.judge_endpoint import EndpointJudge
from roll.pipelines.workers.judge_engine import EngineJudge
from roll.pipelines.workers.judge_worker import JudgeClient
from roll.pipelines.workers.model_reward_worker import RewardModelClient, RewardTexts
from roll.pipelines.workers.train_worker import resolved_model_args
from roll.strategies.training.pretrained import load_tokenizer
from roll.tracking.replay_check import recording_of
from roll.utils.readers import DataError
from roll.utils.signals import ending_at_once

logger = logging.getLogger(__name__)


def planned_steps(config: RLVRConfig, source: TaskSource) -> int:
    """Return the steps of the run: the fewer of `max_steps` and what `num_train_epochs` give."""
    limits = [config.max_steps] if config.max_steps else []
    if source.remaining is not None:
        if source.remaining < config.rollout_batch_size:
            raise DataError(
                f"num_train_epochs ({config.num_train_epochs}) give {source.remaining} prompts, fewer than one step "
                f"takes: rollout_batch_size is {config.rollout_batch_size}; lower it, or raise num_train_epochs"
            )
        limits.append(source.remaining // config.rollout_batch_size)
    return min(limits, default=0)  # neither: a mere validation


def run_rlvr(config: RLVRConfig) -> None:
    """Run RLVR to its end."""
    if config.replays:
        run_replay(config)
        return
    with own_folders(config), RewardRouter(config) as rewards, open_toolbox(config) as toolbox:
        tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
        require_same_tokens(config, tokenizer)
        data = config.actor_train.data_args  # `val_only` may do without
        training = training_data(config, tokenizer, toolbox) if data.has_rows else None
        validation = None
        if config.validation is not None and (config.eval_steps or config.val_before_train or config.val_only):
            validation = validation_data(config, tokenizer, None if training is None else training[1], toolbox)
        texts = {role: RewardTexts.of(config, role) for role in config.roles if role.startswith("reward_model")}
        uses_endpoint = config.judge is not None and config.judge.endpoint is not None and config.domains_of("judge")
        rewards.wait_ready()
        total_steps = planned_steps(config, training[0]) if training is not None else 0
        _log_steps(config, total_steps)
        with contextlib.ExitStack() as stack:
            if uses_endpoint:
                rewards.models["judge"] = stack.enter_context(_judge(config, None))
            clusters = stack.enter_context(start_clusters(config, total_steps=total_steps))
            for role, cluster in clusters.reward_models.items():
                client = RewardModelClient(cluster, texts[role], retries=config.reward_retries)
                rewards.models[role] = stack.enter_context(client)
            if clusters.judge is not None:
                rewards.models["judge"] = stack.enter_context(_judge(config, clusters.judge))
            workload = PromptWorkload(
                config, tokenizer, training=training, validation=validation, rewards=rewards, toolbox=toolbox
            )
            pipeline = EnginePipeline(config, clusters, tokenizer, workload=workload, total_steps=total_steps)
            with contextlib.closing(pipeline):
                pipeline.run()


def _judge(config: RLVRConfig, cluster: Cluster | None) -> JudgeClient:
    assert config.judge is not None
    backend = EndpointJudge(config.judge) if cluster is None else EngineJudge(cluster, config)
    return JudgeClient(config.judge, backend, config.rewards)


def _log_steps(config: RLConfig, total_steps: int) -> None:
    """Say how many steps there are where that wasn't known before."""
    if not config.only_validates and config.known_steps != total_steps:
        logger.info("%d steps", total_steps)


def run_agentic(config: AgenticConfig) -> None:
    """Run environments to the end, after the warm start if there is one to do."""
    if config.replays:
        run_replay(config)
        return
    with ending_at_once():
        from roll.pipelines.rl.agentic import EnvWorkload
    with own_folders(config):
        warm_start(config)
        with open_toolbox(config) as toolbox:
            tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
            require_same_tokens(config, tokenizer)
            with contextlib.closing(EnvWorkload(config, tokenizer, toolbox)) as workload:
                workload.wait_ready()
                total_steps = 0 if config.val_only else config.max_steps or 0
                with start_clusters(config, total_steps=total_steps) as clusters:
                    pipeline = EnginePipeline(config, clusters, tokenizer, workload=workload, total_steps=total_steps)
                    with contextlib.closing(pipeline):
                        pipeline.run()


def run_replay(config: RLConfig) -> None:
    """Train on what another run has recorded: without engines, data, rewards and environments."""
    with ending_at_once():
        from roll.pipelines.rl.replay_pipeline import ReplayPipeline, shown_steps
    recording = recording_of(config)
    with own_folders(config):
        if isinstance(config, AgenticConfig):
            warm_start(config)
        tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
        require_same_tokens(config, tokenizer)
        logger.info("replaying %s of %s", shown_steps(recording.steps), recording.run)
        _log_steps(config, recording.schedule)
        with start_clusters(config, total_steps=recording.schedule) as clusters:
            ReplayPipeline(config, clusters, tokenizer, recording).run()


def warm_start(config: AgenticConfig) -> None:
    """Run the fine-tuning that makes the starting model, unless that model is there."""
    first = pending_warm_start(config)
    if first is None:
        return
    from roll.pipelines.offline.sft import run_sft

    logger.info("warm start with %s", config.warm_start)
    log_plan(first)
    run_sft(settled(first))
