"""Agentic reinforcement learning: (environment, seed) pairs as tasks, several turns, rewards from the environment."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from roll.configs.catalog.env_table import ENDPOINT
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.env_config import EnvManager
from roll.configs.schema.worker_config import GeneratingArgs
from roll.envs.env_pool import EnvPool
from roll.envs.env_registry import bare_env, check_roles, env_spec
from roll.envs.episode_pictures import save_replay
from roll.envs.tools.toolbox import Toolbox
from roll.envs.wrappers import EnvSpec
from roll.pipelines.rollouts.agent_workload import RunAgents
from roll.pipelines.rollouts.eval_table import results_by_tag
from roll.pipelines.rollouts.rollout_metrics import role_values
from roll.pipelines.rollouts.validation import validation_samples
from roll.pipelines.rollouts.workload import Split, TrainingSource, Workload, query_filter
from roll.rollout.agent import Agent
from roll.rollout.conversation import Conversation, ConversationRollout
from roll.rollout.engine_driver import EngineDriver
from roll.rollout.env_tasks import EnvTasks
from roll.rollout.episode import EpisodeEnv, Rollout
from roll.rollout.episode_envs import NoEnv, PooledEnv
from roll.rollout.episode_key import add_up
from roll.rollout.episode_player import EpisodePlayer
from roll.rollout.tool_turns import tool_turns
from roll.tracking.base import Sample
from roll.tracking.names import name_part
from roll.types.metrics import Metrics
from roll.types.trajectory import Group, Task

logger = logging.getLogger(__name__)


class EnvWorkload(Workload):
    """Environments in processes of their own, met by the policy in a conversation. See the base class.

    Raises:
        ValueError: an environment can't be found or made, or a template doesn't fit; before any process starts.
    """

    def __init__(self, config: AgenticConfig, tokenizer: Any, toolbox: Toolbox | None = None) -> None:
        self._config = config
        self._toolbox = toolbox
        self._tokenizer = tokenizer
        train, val = config.train_env_manager, config.val_env_manager
        managers = ([] if config.val_only else [train]) + ([] if val is None else [val])
        self._agents = RunAgents(config, tokenizer, {tag for one in managers for tag in config.tags_of(one)})
        self._specs: dict[Split, dict[str, EnvSpec]] = {"train": {} if config.val_only else self._specs_of(train)}
        self._specs["val"] = {} if val is None else self._specs_of(val)
        self._conversations = {
            tag: self._conversation(tag, spec) for specs in self._specs.values() for tag, spec in specs.items()
        }
        self.source: TrainingSource | None = None if config.val_only else self._tasks(train, "train")
        self.validation_tasks: Sequence[Task] | None = None
        self.validation_group_size = 1
        if val is not None:
            self.validation_tasks = self._tasks(val, "val").validation_tasks(config.validation_groups)
            self.validation_group_size = val.group_size
        self._pools = self._start_pools()
        self._counted: dict[str, int] = {}
        self._idle: set[str] = set()
        self._unsteady: set[str] = set()  # Tags that were warned of, here and above

    def _specs_of(self, manager: EnvManager) -> dict[str, EnvSpec]:
        config, python = self._config, self._config.env_workers.python
        tags = [tag for tag in config.tags_of(manager) if tag not in self._agents.envs]
        return {tag: env_spec(tag, config.custom_envs[tag], manager, python) for tag in tags}

    def _conversation(self, tag: str, spec: EnvSpec) -> Conversation:
        env = bare_env(spec)
        check_roles(spec, env)
        section, unit = self._config.custom_envs[tag], self._config.sample_unit
        return Conversation(tag=tag, env=section, instructions=env.instructions, roles=env.roles, sample_unit=unit)

    def _tasks(self, manager: EnvManager, split: Split) -> EnvTasks:
        config = self._config
        tags = config.tags_of(manager)
        env_types = {tag: config.custom_envs[tag].env_type for tag in tags}
        rows = self._agents.rows
        return EnvTasks(tags, config.partition_of(manager), env_types, seed=config.seed, split=split, rows=rows)

    def _start_pools(self) -> dict[Split, EnvPool]:
        """Start one pool for training and validation, or one each where they differ in what an action costs."""
        workers = self._config.env_processes
        start = partial(
            EnvPool,
            num_processes=workers.world_size,
            timeout_s=workers.timeout_s,
            max_envs_per_process=workers.max_env_num_per_worker,
            memory_limit_mb=workers.memory_limit_mb,
        )
        nonempty = {split: specs for split, specs in self._specs.items() if specs}
        merged = {tag: spec for specs in nonempty.values() for tag, spec in specs.items()}
        if all(merged[tag] == spec for specs in nonempty.values() for tag, spec in specs.items()):
            return dict.fromkeys(nonempty, start(merged))
        return {split: start(specs) for split, specs in nonempty.items()}

    def wait_ready(self) -> None:
        """Wait until every process has loaded its environments; raises `EnvLoadError`."""
        for pool in set(self._pools.values()):
            pool.wait_ready()
        self._agents.wait_ready()

    def _agent(self, args: GeneratingArgs, tag: str | None = None) -> Agent:
        """Return the agent of a kind of environments; None: of any."""
        variables = self._config.chat_template_kwargs if tag is None else self._config.template_variables(tag)
        return Agent(self._tokenizer, keep_stop_string=args.include_stop_str_in_output, variables=variables)

    def player(self, driver: EngineDriver, split: Split) -> EpisodePlayer:
        config = self._config
        args = config.actor_infer.generating_args
        if split == "val":
            assert config.val_env_manager is not None
            args = config.val_env_manager.generating_args
        agent = self._agent(args)
        manager = config.train_env_manager if split == "train" else config.val_env_manager
        assert manager is not None
        agents = {tag: self._agent(args, tag) for tag in config.tags_of(manager)}
        rollouts: dict[str, Rollout] = {**self._agents.rollouts(driver, agents)}
        rollouts |= {tag: self._rollout(agents[tag], tag) for tag in self._specs[split]}
        return EpisodePlayer(
            driver,
            agent,
            partial(self._make_env, split),
            max_sequence_length=config.max_sequence_length,
            rollouts=rollouts,
            max_episodes=config.env_processes.room if self._specs[split] else None,
            traced_share=config.tracing.episode_share,
        )

    def _make_env(self, split: Split, task: Task, name: str) -> EpisodeEnv:
        return NoEnv() if task.tag in self._agents.envs else PooledEnv(self._pools[split], task, name)

    def _rollout(self, agent: Agent, tag: str) -> Rollout:
        names, turns = self._config.custom_envs[tag].tools, None
        if names:
            turns = tool_turns(self._config, agent, self._tokenizer, self._toolbox, names)
        return ConversationRollout(agent, self._conversations[tag], turns)

    def keep(self, group: Group) -> str | None:
        return query_filter(group, self._config.train_env_manager.group_filter)

    def warn(self, groups: Sequence[Group]) -> None:
        """Warn, once each, of an environment in which no response was an action, and of one that shows the members of a
        group different beginnings."""
        groups = [group for group in groups if group.task.tag not in self._agents.envs]
        done: dict[str, float] = defaultdict(float)
        for group in groups:
            done[group.task.tag] += sum(turn.metrics.get("actions", 0) for t in group.survivors for turn in t.turns)
        for group in groups:
            tag = group.task.tag
            if len({t.turns[0].prompt_ids for t in group.survivors if t.turns}) > 1 and tag not in self._unsteady:
                self._unsteady.add(tag)
                logger.warning(
                    "custom_envs.%s: members of the group %s were shown different beginnings for one seed: different "
                    "tasks are compared. reset must follow from its seed and options alone; see `roll envs test`",
                    tag,
                    group.task.id,
                )
            if not done[tag] and group.survivors and tag not in self._idle:
                self._idle.add(tag)
                section, response = self._config.custom_envs[tag], group.survivors[0].turns[0].response_ids
                logger.warning(
                    "custom_envs.%s: no response of this step led to an action, e.g. %r (%s). action_pattern is %r; "
                    "the environment's actions and system_template say what is expected",
                    tag,
                    self._tokenizer.decode(response),
                    group.survivors[0].id,
                    section.action_pattern,
                )

    def take_metrics(self) -> Metrics:
        totals: dict[str, int] = defaultdict(int)
        for pool in set(self._pools.values()):
            for name, count in pool.counters.items():
                totals[name] += count
        metrics = Metrics()
        for name, count in totals.items():
            metrics.add_sum(f"env/{name}", count - self._counted.get(name, 0))
        self._counted = dict(totals)
        return metrics.merge(self._agents.take_metrics())

    def validation_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return success, reward and length by tag. An episode without a reward counts as failed, and in no mean."""
        values: dict[str, float] = {}
        succeeded = episodes = 0.0
        for tag_result in sorted(results_by_tag(groups), key=lambda result: result.tag):
            numbers = {"reward": tag_result.reward, "length_mean": tag_result.tokens, "turns_mean": tag_result.turns}
            numbers |= {"failed": float(tag_result.failed), "accuracy": tag_result.success}
            values |= {
                f"val/{name_part(tag_result.tag)}/{name}": value for name, value in numbers.items() if value is not None
            }
            if tag_result.success is not None:
                episodes += tag_result.episodes - tag_result.failed
                succeeded += tag_result.success * (tag_result.episodes - tag_result.failed)
        for name, role_numbers in role_values((group.task.tag, t) for group in groups for t in group.survivors):
            tag, _, rest = name.partition("/")
            values[f"val/{tag}/role/{rest}"] = fmean(role_numbers)
        if episodes:
            values["val/accuracy"] = succeeded / episodes
        if rewards := [t.reward for group in groups for t in group.survivors]:
            values["val/reward"] = fmean(rewards)
        values["val/responses"] = float(sum(len(t.turns) for group in groups for t in group.trajectories))
        # Taken here, or the next training step would show them, unless the run is resumed in between.
        counted = self.take_metrics().result()
        if self._pools:
            values["val/env_restarts"], values["val/env_timeouts"] = counted["env/restarts"], counted["env/timeouts"]
        for trajectory in (t for group in groups for t in group.survivors):
            add_up(counted, {name: count for name, count in trajectory.counts.items() if name.startswith("agent/")})
        return values | {f"val/{name}": count for name, count in counted.items() if name.startswith("agent/")}

    def samples(self, step: int, groups: Sequence[Group]) -> list[Sample]:
        config, count = self._config, self._config.log_val_generations
        if config.render_save_dir is not None:
            assert config.val_env_manager is not None
            args = config.val_env_manager.generating_args
            agent = self._agent(args)
            opened = {
                tag: self._agent(args, tag).forced_think_prefix(c.env.thinking_tags)
                for tag, c in self._conversations.items()
            }

            def response_text(task: Task, token_ids: Sequence[int]) -> str:
                return opened[task.tag] + agent.decode_response(token_ids, args.stop_strings)

            folder, timeout_s = Path(config.render_save_dir) / f"step-{step:06d}", config.env_workers.timeout_s
            drawn = [group for group in groups[:count] if group.task.tag in self._specs["val"]]
            draw_episodes(folder, self._specs["val"], drawn, response_text, timeout_s=timeout_s)
        return validation_samples(groups, self._tokenizer, count)

    def stop(self, driver: EngineDriver) -> None:
        self._agents.stop(driver)

    def close(self) -> None:
        self._agents.close()
        for pool in set(self._pools.values()):
            pool.shutdown()


def draw_episodes(
    folder: Path,
    specs: Mapping[str, EnvSpec],
    groups: Sequence[Group],
    response_of: Callable[[Task, Sequence[int]], str],
    *,
    timeout_s: float,
) -> None:
    """Play episodes again, in processes of their own, and draw them into `folder/<task>`: the first member of every
    group that was played to its end, as `validation_samples` shows it.

    What can't be drawn, or takes longer than `timeout_s`, is logged: a picture never ends a run. `response_of` gives
    the tokens of a response to a task as the text that the environment got. What a service said is nowhere kept, so
    episodes in which one plays a role aren't drawn.
    """
    for group in groups:
        if not group.survivors:
            continue
        task, played = group.task, group.survivors[0]
        if any(player.player == ENDPOINT for player in specs[task.tag].roles.values()):
            logger.warning("no picture of %s: a service plays one of its roles", task.id)
            continue
        responses: dict[str, list[str]] = defaultdict(list)
        for turn in played.turns:
            responses[turn.role].append(response_of(task, turn.response_ids))
        try:
            save_replay(specs[task.tag], task.seed, task.payload, responses, folder / task.id, timeout_s=timeout_s)
        except (RuntimeError, OSError) as error:
            logger.warning("no picture of %s: %s", task.id, error)
