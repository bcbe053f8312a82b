"""A game of two roles in which any text is an action, and a scripted player for it."""

from __future__ import annotations

from roll.envs.base import Env, Observation, ResetNeeded, StepResult
from roll.envs.players import Player


class Duel(Env):
    """Two rounds in which x and o say something in turn, by the seed o first; what comes later in the alphabet wins.

    The winner of a round gets 1 and the loser -1; both get 0.125 for each step.
    """

    roles = ("x", "o")
    instructions = "Say something."

    def __init__(self):
        self.said = None

    def reset(self, seed, options):
        self.said, self.first, self.points = [], seed // 2 % 2, 0
        return self.seen()

    def step(self, action):
        if self.said is None:
            raise ResetNeeded
        self.said.append(action)
        paid = {}
        if len(self.said) % 2 == 0:
            first, second = self.roles[self.first], self.roles[1 - self.first]
            winner = first if self.said[-2] > self.said[-1] else second
            paid = {role: 1.0 if role == winner else -1.0 for role in self.roles}
            self.points += paid["x"]
        if len(self.said) < 4:
            return StepResult(reward=0.125, terminated=False, observation=self.seen(), role_rewards=paid)
        self.said, won = None, self.points
        metrics = {"success/x": float(won > 0), "success/o": float(won < 0)}
        return StepResult(reward=0.125, terminated=True, role_rewards=paid, metrics=metrics)

    def seen(self):
        role = self.roles[(self.first + len(self.said)) % 2]
        return Observation.of(f"{len(self.said)}=", role=role)

    def sample_action(self, rng):
        return rng.choice("abcdefgh")


class Says(Player):
    """Always the same word."""

    def __init__(self, *, word="m"):
        self.word = word

    def act(self, observation, env, rng):
        return self.word
