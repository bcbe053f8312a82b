"""`env_config` of `env_type: endpoint`: agents that are written elsewhere, how they are run and how they are scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from roll.configs.catalog.harness_table import SIDE_PROMPTS, expand_fields
from roll.configs.schema.acts_if import needs, unless
from roll.configs.schema.fields import number, one_or_many, parsed

NEVER_IGNORED = ("messages", "input", "stream", "n", "tools", "system", "instructions")
"""Fields of requests that can't be left out and leave an answer that the client would understand."""
AGENT_ENV = "endpoint"
"""The value of `env_type` that means an agent of the user's."""

ScoreSource = Literal["callback", "return", "output", "exit", "reward"]

_PROGRAM = needs("command", why="only a program is started anew for each episode", fix="remove it, or use command")
_LOCAL = unless("remote", why="a remote agent is started by nobody here", fix="remove it, or remote")


def exit_codes(section: Any) -> dict[int, float] | None:
    """Return exit codes with their rewards, from YAML's numbers or texts of numbers; null as it is, as a run writes it.

    Raises `ValueError`.
    """
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise ValueError("it isn't a section")
    rewards = {int(str(code)): float(reward) for code, reward in section.items()}
    for code, reward in rewards.items():
        if not 0 <= code <= 255 or not -1e12 < reward < 1e12:
            raise ValueError(f"{code}: {reward} isn't a code from 0 to 255 with a finite reward")
    return rewards


@dataclass(frozen=True, kw_only=True)
class AgentReward:
    """The reward function of agents' final answers."""

    name: str
    """A built-in reward, or your own as `package.module:function` or `path/to/file.py:function`."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Its options."""
    world_size: int = number(1, ge=1)
    """Processes that score."""
    timeout_s: float = number(30.0, gt=0)
    """Seconds for one answer; beyond, the episode has status `reward_error`."""


@dataclass(frozen=True, kw_only=True)
class FrozenModel:
    """A model that agents may ask besides the policy, and that isn't trained: an opponent, a judge, a simulated
    user."""

    base_url: str
    """Address of an OpenAI-compatible service, such as `http://localhost:8000/v1`."""
    model: str | None = None
    """Its name there. null: the name it has here."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key, which agents never see. null: no key is sent."""


@dataclass(frozen=True, kw_only=True)
class AgentEnv:
    """An agent for `env_type: endpoint`. It gets an address and a key for each episode and talks to the policy there by
    the protocols of OpenAI and Anthropic. One of `command`, `agent` and `remote`. See docs/agents.md."""

    command: tuple[str, ...] | str | None = None
    """A program that plays one episode: words, or a text that is split as a shell would, without being one. A first
    word `python` is the interpreter `python`. It finds the address and the task in its environment variables."""
    agent: str | None = None
    """A function that plays one episode, plain or `async`, as `path/to/file.py:function` or `package.module:function`:
    `f(task, base_url, api_key)`. It stays loaded in its process for further episodes."""
    remote: bool = False
    """Agents elsewhere ask for episodes, by `POST <address of the run>/work`."""
    python: str | None = field(default=None, metadata={"acts_if": (_LOCAL,), "idle": ()})
    """Interpreter for `agent`, and for a `command` that begins with `python`: of an environment with the agent's own
    packages. It needs none of this project's. null: the run's."""
    cwd: str | None = field(default=None, metadata={"acts_if": (_LOCAL,), "idle": ()})
    """Its working directory. null: the run's."""
    env: dict[str, str] = field(default_factory=dict, metadata={"acts_if": (_LOCAL,), "idle": ()})
    """Further environment variables."""
    pass_env: tuple[str, ...] = one_or_many(acts_if=(_LOCAL,))
    """Names of variables of the run that agents get as well. Without it they get paths, languages and caches, and
    nothing that sounds like a secret."""
    sandbox: bool = field(default=False, metadata={"acts_if": (_PROGRAM,), "idle": ()})
    """Run the program in a sandbox (`sandlock`): it reads the system's and the interpreter's files, its script, `cwd`
    and `sandbox_readable`, writes in a folder of its own (`ROLL_WORKSPACE`, gone after the episode), and reaches
    nothing but the endpoint."""
    sandbox_readable: tuple[str, ...] = one_or_many(acts_if=(needs("sandbox"),))
    """Further folders and files that it may read."""
    sandbox_memory_mb: int = number(4096, ge=64, acts_if=(needs("sandbox"),))
    """MiB of memory that the program may map, with all that it starts. Beyond, it is killed."""
    sandbox_disk_mb: int = number(1024, ge=1, acts_if=(needs("sandbox"),))
    """MiB that it may have on the disk. A larger file isn't written to its end; for more in all it is killed."""
    tasks: str | None = None
    """A jsonl file with a task per line, an object each. Training goes through them in an order of the seed's, again
    and again; validation in the file's order. null: the task is its seed alone."""
    score: ScoreSource | None = None
    """Where the reward comes from: `return` (what the function returns), `output` (the last line of JSON that the
    program prints), `exit` (its exit code), `callback` (`POST <base_url>/score`), or `reward` (a function scores the
    final answer). null: `return` for `agent`, `output` for `command`, `callback` for `remote`."""
    exit_rewards: dict[int, float] | None = parsed(
        None, exit_codes, "exit codes from 0 to 255, each with its reward, e.g. {0: 1.0, 3: 0.0}"
    )
    """`score: exit`, which needs them: rewards by exit code, e.g. `{0: 1.0, 3: 0.0}`; any other code is a failure. 1 is
    also the code of a Python program that crashed."""
    reward: AgentReward | None = field(default=None, metadata={"acts_if": (needs("score", "reward"),), "idle": ()})
    """`score: reward`: the function. It gets the text that `agent` returned, or else the last response without a tool
    call, and the task with the fields of its row."""
    truncated_reward: float | None = 0.0
    """Reward of an episode without a score that ran out of `max_calls`, `max_tokens` or of context: that is the
    policy's doing, and its status is `truncated`. null: such an episode fails."""
    timeout_s: float = number(600.0, gt=0)
    """Seconds of an episode on the clock, waiting for the engine included. Then the agent is killed with all that it
    started, and the episode has status `timeout`."""
    max_calls: int = number(64, ge=1)
    """Requests that an episode may make; later ones are refused with HTTP 429."""
    max_tokens: int | None = number(None, ge=1)
    """Tokens that the policy may sample in an episode. null: no limit but `sequence_length` in each context."""
    max_agents: int | None = number(16, ge=1)
    """Agents at once; further episodes wait. null: as many as are played."""
    history: Literal["carried", "rendered"] = "carried"
    """What later requests of an agent make of earlier responses. `carried`: one that is sent back unchanged stands as
    it was sampled, token by token. `rendered`: as the chat template writes it, where it differs in a row of its own."""
    ignore_fields: tuple[str, ...] = one_or_many()
    """Fields of requests that are ignored although their meaning is lost, e.g. `response_format`; without it they are
    refused with HTTP 400. The name of a harness, e.g. `claude-code` or `codex`, stands for those that it sends by
    itself and works without; `tools.<type>` leaves out tools of that type, e.g. `tools.web_search`."""
    side_calls: tuple[str, ...] = one_or_many()
    """Calls that a harness makes beside the task, such as for a title or a commit message: the policy answers them, and
    they are neither trained nor counted by `max_calls`. A text with blanks names those whose system message has it. A
    word is the name of a harness whose calls are known (`aider`, `opencode`), or a name that such calls give as their
    `model`."""
    tool_parser: str = "auto"
    """How tool calls are found in responses; `auto`: in the form that the chat template writes, as `tool_use.parser`
    does it. Where no parser gives that form back, the run is refused."""
    models: dict[str, FrozenModel] = field(default_factory=dict)
    """Further models by the name that a request's `model` gives. The policy's is `policy`; with `model` among
    `ignore_fields` any other name is the policy, too."""
    logs: Literal["failed", "all"] = "failed"
    """Which episodes' output is kept below `<logging_dir>/agents`, the first and the last 64 KiB of each."""

    @property
    def score_source(self) -> ScoreSource:
        """Return where the reward comes from."""
        if self.score is not None:
            return self.score
        return "callback" if self.remote else "return" if self.agent is not None else "output"

    @property
    def side_models(self) -> frozenset[str]:
        """Names of models among `side_calls`."""
        return frozenset(each for each in self.side_calls if len(each.split()) == 1 and each not in SIDE_PROMPTS)

    @property
    def side_prompts(self) -> tuple[str, ...]:
        """Return the texts of system messages among `side_calls`, with those of harnesses."""
        texts = [each for each in self.side_calls if len(each.split()) > 1]
        return (*texts, *(text for each in self.side_calls for text in SIDE_PROMPTS.get(each, ())))

    @property
    def ignored_fields(self) -> frozenset[str]:
        """Return `ignore_fields`, with those of harnesses."""
        return expand_fields(self.ignore_fields)

    @property
    def rewards_by_exit_code(self) -> Mapping[int, float]:
        """Return those of `score: exit`."""
        return self.exit_rewards or {}


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The endpoint of a run, for `env_type: endpoint`."""

    host: str = "127.0.0.1"
    """Address that it listens at. Anything else than loopback can be reached by others: every request needs a key, but
    nothing is encrypted."""
    port: int = number(0, ge=0, le=65_535)
    """Port. 0: a free one."""
    address: str | None = None
    """Address that agents are told, e.g. `http://trainer.internal:8800`, where they can't reach `host`. null: `host`
    and the port."""
    token_env: str | None = None
    """Environment variable that holds the token with which remote agents ask for work. null: a new one for each run, in
    `<output_dir>/agents.json`, which only its owner can read."""
    call_timeout_s: float = number(600.0, gt=0)
    """Seconds for one request of an agent; beyond, it is answered with HTTP 408."""
    max_body_mb: float = number(16.0, gt=0)
    """Largest body of a request, in MiB."""
