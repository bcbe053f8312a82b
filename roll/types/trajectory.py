"""What is played: `Task -> Turn* -> Trajectory -> Group`. Plain frozen data, no torch.

An RLVR task is a dataset row played in one turn; an agentic task is an (environment, seed) pair. A failure of the
infrastructure is a `status`, never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from roll.types.chat import pictures_of
from roll.types.columns import Column, PackedColumns

if TYPE_CHECKING:
    from roll.types.picture import Picture

FinishReason = Literal["stop", "length", "abort"]
Status = Literal["ok", "truncated", "filtered", "unscored", "env_error", "reward_error", "timeout", "aborted"]
"""`filtered`: nothing went wrong, but the configuration says not to train on it (`response_filter_config`).
`unscored`: nothing went wrong either, but no reward function scores this row."""

LEFT_OUT: frozenset[Status] = frozenset({"filtered", "unscored"})
"""Statuses of what isn't trained on, though nothing failed."""

TRAINABLE: frozenset[Status] = frozenset({"ok", "truncated"})
"""Statuses whose reward says something about the policy."""


class EpisodeError(RuntimeError):
    """An episode can't go on. The message ends in its trajectory, the status in the counters."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status: Status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What to play: one dataset row, or one (environment, seed)."""

    id: str
    """Unique within a run; also the group's name."""
    source: str
    """Where it came from, e.g. a file name or an environment id."""
    payload: Mapping[str, Any]
    """What the environment needs: dataset columns, or environment options."""
    seed: int
    tag: str
    domain: str
    opens_thought: bool = False
    """Whether its prompt ends with `<think>`, as some chat templates have it: a response without `</think>` is then
    nothing but an unfinished thought. Known to reward functions; false elsewhere."""

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """Return what its prompt shows, in the order of their places."""
        return pictures_of(self.payload.get("messages") or ())


@dataclass(frozen=True, kw_only=True)
class Turn(PackedColumns):
    """One exchange: the tokens added to the context, then the tokens the policy chose."""

    prompt_ids: tuple[int, ...]
    """Tokens added before this response: the environment's reply, or a whole prompt where a context begins."""
    response_ids: Column[int] = Column("q")
    logprobs: Column[float] = Column("d")
    """Log-probability under which each response token was sampled (temperature applied)."""
    versions: Column[int] = Column("q")
    """Weight version that produced each response token."""
    finish_reason: FinishReason
    observation: str = ""
    """What the environment answered."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    resets_context: bool = False
    """The context before this turn was dropped: `prompt_ids` is all that the policy was shown."""
    after: int | None = None
    """Position of the turn whose context this one continues, where that isn't the one before: a branch. None: the turn
    before, or none where the context is reset."""
    role: str = ""
    """Who spoke, in an episode of several agents."""
    state: str = ""
    """Names what the policy was shown: equal texts are equal states. Empty: nothing."""
    pictures: tuple[Picture, ...] = field(default=(), repr=False)
    """What `prompt_ids` show, in the order of their places."""
    num_fire_tokens: int = 0
    """First tokens of the response that were drawn otherwise than the policy draws (`fire_temperature`): they are part
    of the response, but no actions of the policy, so nothing is trained on them."""
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)
    """int16 [prompt + response tokens, L, K], to which experts the engine sent the token *before* each: a turn's last
    token is read with the next turn. -1 where nobody has told. None: the engine wasn't asked."""

    def __post_init__(self) -> None:
        sizes = [self.size(name) for name in ("response_ids", "logprobs", "versions")]
        if not sizes[0] == sizes[1] == sizes[2]:
            raise ValueError(
                f"a turn needs one log-prob and one version per response token, got {sizes[0]} tokens, "
                f"{sizes[1]} log-probs, {sizes[2]} versions"
            )
        experts, tokens = self.routed_experts, self.num_tokens
        if experts is not None and len(experts) != tokens:
            raise ValueError(f"a turn of {tokens} tokens needs as many rows of routed experts, got {len(experts)}")
        if self.resets_context and self.after is not None:
            raise ValueError(f"a turn that resets the context continues none, got after={self.after}")

    @property
    def num_response_tokens(self) -> int:
        """Return the number of tokens the policy chose."""
        return self.size("response_ids")

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + self.num_response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One episode of a task by one group member."""

    task_id: str
    member: int
    turns: tuple[Turn, ...]
    reward: float
    """Meaningful only when `status` is trainable."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    role_rewards: Mapping[str, float] = field(default_factory=dict)
    """Reward of each role, in an episode of several agents that are paid apart. Empty: `reward` is everybody's."""
    status: Status = "ok"
    error: str = ""
    """What went wrong, for people; empty when nothing did."""
    answer: str | None = None
    """What it states as its answer, where the reward says so; None otherwise."""
    explanation: str = ""
    """Why the reward is what it is, where the reward function says so."""
    spans: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds by purpose (`generate`, `reward`, ...)."""
    trace: str = ""
    """Its name in a recording, as a W3C `traceparent`; empty: nobody recorded it."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What was counted on the way, by names of metrics (`agent/mismatch_edited`); a step's metrics have the sums."""

    def __post_init__(self) -> None:
        walk: list[int] = []  # From the root to the turn before
        for position, parent in enumerate(self.parents):
            while walk and walk[-1] != parent:
                walk.pop()
            if parent is not None and not walk:
                raise ValueError(
                    f"turn {position} of {self.id} continues turn {parent}, which isn't on the way from the root to "
                    f"turn {position - 1}: turns are stored depth first (roll/rollout/turn_tree.py)"
                )
            walk.append(position)

    @property
    def id(self) -> str:
        """Row id of this trajectory: task and member."""
        return f"{self.task_id}#{self.member}"

    @property
    def trainable(self) -> bool:
        """Return whether the policy chose tokens and the reward is about them, not about a failure of the
        infrastructure."""
        return self.status in TRAINABLE and self.num_response_tokens > 0

    @property
    def parents(self) -> tuple[int | None, ...]:
        """Position of the turn whose context each turn continues; None where a context begins."""
        return tuple(
            None
            if turn.resets_context or (turn.after is None and position == 0)
            else (position - 1 if turn.after is None else turn.after)
            for position, turn in enumerate(self.turns)
        )

    @property
    def branches(self) -> tuple[tuple[int, ...], ...]:
        """Walks from where a context begins to a turn that none continues, as positions of turns.

        In the order of their ends, so what is new in each walk (in none before) is consecutive. An episode that went
        straight on has one.
        """
        parents = self.parents
        continued = set(parents)
        walks = []
        for end in (position for position in range(len(parents)) if position not in continued):
            walk, at = [end], parents[end]
            while at is not None:
                walk.append(at)
                at = parents[at]
            walks.append(tuple(reversed(walk)))
        return tuple(walks)

    @property
    def contexts(self) -> tuple[tuple[Turn, ...], ...]:
        """Return the turns of each branch. Each is one training row, and a turn is trained in the first row that has
        it."""
        return tuple(tuple(self.turns[position] for position in branch) for branch in self.branches)

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens; a turn that branches share counts once."""
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def num_response_tokens(self) -> int:
        """Return the number of tokens the policy chose."""
        return sum(turn.num_response_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trajectories of one task: same prompt, same seed."""

    task: Task
    trajectories: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        wrong = [t.task_id for t in self.trajectories if t.task_id != self.task.id]
        if wrong:
            raise ValueError(f"group of task {self.task.id!r} got trajectories of {wrong}")

    @property
    def survivors(self) -> tuple[Trajectory, ...]:
        """Members that can be trained on."""
        return tuple(t for t in self.trajectories if t.trainable)
