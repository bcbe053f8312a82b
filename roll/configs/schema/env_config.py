"""Sections of `pipeline: agentic` about environments: what is played, how the policy meets it, how many at once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.catalog.env_table import ENDPOINT, POLICY
from roll.configs.schema.acts_if import acting, needs, unless
from roll.configs.schema.agents_config import AGENT_ENV, AgentEnv
from roll.configs.schema.fields import number, one_or_many
from roll.configs.schema.reward_config import QueryFilterConfig
from roll.configs.schema.worker_config import GeneratingArgs

_REMOTE = needs("player", ENDPOINT)


@dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """Who plays one role of an environment of several agents. Only what the policy plays is trained."""

    player: str = POLICY
    """`policy`: the model that is trained. `endpoint`: a model behind a chat service, frozen: another one, or an
    earlier checkpoint that `roll serve` serves. In the environment's process: `random` (draws from the actions that
    there are), `solution` (plays the environment's `solution`), or a class of your own derived from
    `roll.envs.players.Player`, as `package.module:Class` or `path/to/file.py:Class`."""
    player_config: dict[str, Any] = field(
        default_factory=dict, metadata={"acts_if": (unless("player", POLICY, ENDPOINT),), "idle": ()}
    )
    """Arguments of that class, e.g. `{mistakes: 0.2}` for `solution`: the share of its actions that are random."""
    endpoint: str | None = acting(None, _REMOTE)
    """Address of an OpenAI-compatible service, such as `http://localhost:8000/v1`: requests go to its
    `/chat/completions`. It is told the game as the policy is, and its responses are read in the same way."""
    model: str | None = acting(None, _REMOTE)
    """The model's name there."""
    api_key_env: str | None = acting(None, _REMOTE)
    """Environment variable that holds the service's key. The key itself never stands in a file, a log or an error.
    null: no key is sent."""
    request_args: dict[str, Any] = field(default_factory=dict, metadata={"acts_if": (_REMOTE,), "idle": ()})
    """Further fields of a request's body, e.g. `{temperature: 0.7}`; a null takes a field out."""
    request_timeout_s: float = number(120.0, gt=0, acts_if=(_REMOTE,))
    """Seconds for one request, from its first byte to its last."""
    request_retries: int = number(3, ge=0, acts_if=(_REMOTE,))
    """Further tries after a refused connection, a timeout, HTTP 408, 409, 429 or 5xx; then the episode fails with
    status `env_error`."""

    @property
    def scripted(self) -> bool:
        """Return whether it is played in the environment's process."""
        return self.player not in (POLICY, ENDPOINT)


@dataclass(frozen=True, kw_only=True)
class CustomEnv:
    """One kind of environment, and how the policy is shown it. Its name in `custom_envs` is the tag."""

    env_type: str
    """Id of a bundled environment, e.g. `sokoban-v1` (`roll envs list` shows all); one of another package as
    `gymnasium:ID`, `minigrid:ID`, `textarena:ID`, `gem:ID`, `reasoning_gym:NAME` or `openenv:URL`; a class of your own
    as `package.module:Class` or `path/to/file.py:Class`; or `endpoint` for an agent that is written elsewhere."""
    env_config: dict[str, Any] | AgentEnv = field(
        default_factory=dict, metadata={"sections_by": "env_type", "sections": {AGENT_ENV: AgentEnv}}
    )
    """Arguments of that class, and of the other package's environment; an unknown one is refused. For `endpoint` how
    its agents are run, see below."""
    max_steps: int = number(10, ge=1)
    """Responses per episode, with several roles of each; then it is cut off (`truncated`)."""
    max_tokens_per_step: int | None = number(None, ge=1)
    """Longest response in tokens. null: `generating_args.max_new_tokens`, else `response_length`."""
    max_actions_per_step: int = number(1, ge=1)
    """Actions that one response may name; those beyond are not done, and counted."""
    action_separator: str = "||"
    """What stands between two actions of one response. Acts with `max_actions_per_step` above 1."""
    action_pattern: str | None = "<answer>(.*?)</answer>"
    """Regular expression that finds the action in a response; its first group is the action, and the last match counts.
    A response without a match is a format error. null: the whole response is the action."""
    action_lookup: dict[str, str] = field(default_factory=dict)
    """What the policy may call an action, and what the environment calls it; case doesn't count. Empty: the
    environment's own names."""
    tools: tuple[str, ...] = one_or_many()
    """Names in `tools` that the policy can call before it acts: a response with calls is answered by the tools, and the
    environment is given the first without. Needs `sample_unit: trajectory`. Empty: none."""
    thinking_tags: tuple[str, str] | None = None
    """Opening and closing tag of text that is thought, e.g. `["<think>", "</think>"]`: no action is looked for in it,
    and it is left out where earlier responses are shown again (`history_length`). null: there are no such tags."""
    system_template: str | None = "{instructions}"
    """Text of the system message, with {instructions} of the environment, {role} (of whoever is told it; empty where
    there are none), {max_steps}, {max_actions_per_step}. null, or empty when filled in: no system message."""
    turn_template: str = "{observation}"
    """Text of every turn's message, with {observation}, {role}, {step} (from 1), {steps_left}, {max_steps},
    {max_actions_per_step}, {max_tokens}."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template in this environment's prompts, over the run's `chat_template_kwargs`. With
    `env_type: endpoint` a request's own come last."""
    history_length: int | None = number(None, ge=0, acts_if=(needs("^sample_unit", "step", "concat"),))
    """`sample_unit: step`: earlier exchanges (a message and its response) that a prompt shows before the new message.
    `concat`: exchanges that are carried on until the context is reset. null: all."""
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Who plays which role, in an environment of several agents. Roles that aren't named are the policy's: by default
    it plays all of them (self-play)."""
    swap_roles: bool = acting(False, needs("roles"))
    """Players change places by seed, so that none is favoured by its role; the episodes of a group share theirs."""
    role_rewards: Literal["separate", "shared"] = "separate"
    """What several roles of the policy are trained on. `separate`: each on its own reward, compared with the same role
    in the other episodes of the group. `shared`: all on the sum of theirs, as one team."""

    @property
    def agent(self) -> AgentEnv | None:
        """Return how its agents are run; None: it is an environment."""
        return self.env_config if isinstance(self.env_config, AgentEnv) else None


@dataclass(frozen=True, kw_only=True)
class EnvManager:
    """How many environments are played at once, of which tags, in groups of what size."""

    num_env_groups: int = number(8, ge=1, le=65_536)
    """Groups of environments that are played at once. The episodes of a group share task and seed."""
    group_size: int = number(8, ge=1, le=65_536)
    """Episodes per group."""
    group_size_redundancy: int = number(0, ge=0, le=65_536)
    """Further episodes per group; as soon as `group_size` have ended well, the rest is aborted."""
    tags: tuple[str, ...] = one_or_many()
    """Names in `custom_envs`. Empty: all of them."""
    num_groups_partition: tuple[int, ...] | None = None
    """Groups of each tag, in their order; adds up to `num_env_groups`. null: split evenly."""
    max_traj_per_env: int = number(-1, ge=-1)
    """Episodes that one environment plays in a step; a step may start so many times `num_env_groups` groups, those that
    are dropped included. -1: as many as `max_num_gen_batches` permits."""
    max_env_num_per_worker: int | None = number(None, ge=1)
    """Environments per process: as many processes as hold all that are played at once. Instead of `env_workers`. null:
    `env_workers` says how many."""
    format_penalty: float = 0.0
    """Added to a turn's reward when no action was found in the response; at most 0."""
    invalid_action_penalty: float = 0.0
    """Added for every action that the environment doesn't know; at most 0."""
    group_filter: QueryFilterConfig = field(default_factory=QueryFilterConfig)
    """Which groups are worth training on. Not in validation."""

    @property
    def episodes_at_once(self) -> int:
        """Return the episodes of all groups, redundant ones included."""
        return self.num_env_groups * (self.group_size + self.group_size_redundancy)


@dataclass(frozen=True, kw_only=True)
class ValEnvManager(EnvManager):
    """Environments of validation."""

    group_size: int = number(1, ge=1, le=65_536)
    """Episodes per task."""
    generating_args: GeneratingArgs = field(default_factory=GeneratingArgs)
    """Sampling in validation."""


@dataclass(frozen=True, kw_only=True)
class EnvWorkers:
    """The processes that environments live in."""

    world_size: int = number(1, ge=1)
    """Processes."""
    max_env_num_per_worker: int | None = number(None, ge=1)
    """Environments that one process holds at once; others wait. 1 keeps those apart that can't share a process. null:
    no limit."""
    timeout_s: float = number(60.0, gt=0)
    """Seconds for one `reset` or `step`; beyond, the process is killed and the episode has status `timeout`."""
    memory_limit_mb: int = number(4096, ge=64)
    """A process above this gets no further episodes: a successor does, and it is ended after its last one."""
    python: str | None = None
    """Interpreter of the processes, e.g. `/path/to/venv/bin/python`, Python 3.11 or newer: for environments whose
    packages clash with those of the run. It needs those packages and nothing of this project. null: that of the run."""

    @property
    def room(self) -> int | None:
        """Environments that all processes hold at once; None: no limit."""
        return None if self.max_env_num_per_worker is None else self.world_size * self.max_env_num_per_worker


@dataclass(frozen=True, kw_only=True)
class RewardNormalization:
    """How the rewards of episodes are compared (RAGEN, arXiv:2504.20073)."""

    grouping: Literal["state", "batch", "inductive", "traj_group", "tags"] = "traj_group"
    """Compare with episodes that began in the same state, with the whole batch, with those of the same tag (`tags`, and
    `inductive`), or with those of the same group."""
    method: Literal["mean_std", "mean", "asym_clip", "identity"] = "mean_std"
    """(r - mean) / std; r - mean; the first clamped to [-1, 3]; r itself."""


def split_evenly(num_groups: int, tags: Sequence[str]) -> tuple[int, ...]:
    """Return the groups of each tag when no partition is given; the first tags get what is left over."""
    if not tags:
        raise ValueError("there are no tags to split groups among; name the environments in custom_envs")
    each, left = divmod(num_groups, len(tags))
    return tuple(each + (i < left) for i in range(len(tags)))


SYSTEM_NAMES = ("instructions", "role", "max_steps", "max_actions_per_step")
"""What `system_template` may name."""

TURN_NAMES = ("observation", "role", "step", "steps_left", "max_steps", "max_actions_per_step", "max_tokens")
"""What `turn_template` may name."""

OTHER_NAMES = {
    "current_observation": "observation",
    "turn_idx": "step",
    "actions_left": "steps_left",
    "max_response_length": "max_tokens",
    "env_instruction": "instructions",
}
"""Names that templates of other frameworks have, and what they are called here."""

_SLOT = re.compile(r"\{\{(?P<literal>[A-Za-z_]\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)\}")


def names_in(template: str) -> list[str]:
    """Names that are filled in, in their order."""
    return [slot["name"] for slot in _SLOT.finditer(template) if slot["name"] is not None]


def unknown_names(template: str, known: Sequence[str]) -> list[str]:
    """Return the names in a template that aren't known, each once."""
    return [name for name in dict.fromkeys(names_in(template)) if name not in known]


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return the template with values filled in. What is filled in isn't looked at again: the text of an environment
    may have braces of its own."""
    return _SLOT.sub(lambda slot: f"{{{slot['literal']}}}" if slot["literal"] else str(values[slot["name"]]), template)
