"""Environments of several roles: who plays which, what scripts do in between, and what each is paid."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

from roll.configs.schema.env_config import CustomEnv, EnvManager, RoleConfig
from roll.envs.base import Env, Observation, StepResult
from roll.envs.env_messages import is_packed, pack_step, unpack_step
from roll.envs.env_pool import EnvPool
from roll.envs.env_registry import EnvLoadError, build_env, env_spec
from roll.envs.nim import Nim
from roll.envs.players import Player, ScriptedRoles, players_of
from roll.envs.wrappers import EnvSpec, ResponseEnv, checked_observation, checked_result


class Count(Env):
    """Roles a, b, c say numbers in turn; each says what it adds, everybody is paid half of it and the speaker all."""

    roles = ("a", "b", "c")

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self.said: list[str] = []
        return Observation.of("0", role="a")

    def step(self, action: str) -> StepResult:
        speaker = self.roles[len(self.said) % 3]
        self.said.append(action)
        over, total = len(self.said) == 6, sum(map(int, self.said))
        return StepResult(
            reward=int(action) / 2,
            terminated=over,
            observation=None if over else Observation.of(str(total), role=self.roles[len(self.said) % 3]),
            role_rewards={speaker: float(action)},
            metrics={"said": 1.0, **({f"success/{role}": float(role == "b") for role in self.roles} if over else {})},
        )

    def sample_action(self, rng):
        return str(rng.randint(1, 9))


class Echo(Player):
    """Says the sum that it is shown, plus `more`."""

    def __init__(self, *, more: int = 1) -> None:
        self.more = more

    def act(self, observation, env, rng):
        return str(int(observation.text) + self.more)


def spec_of(**keys: Any) -> EnvSpec:
    return EnvSpec(tag="x", env_type="x", action_pattern=None, **keys)


def echo(**config: Any) -> RoleConfig:
    return RoleConfig(player=f"{__file__}:Echo", player_config=config)


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_scripts_play_in_between_and_their_steps_pay_the_others():
    env = ScriptedRoles(Count(), spec_of(roles={"b": echo(), "c": echo(more=2)}))
    assert env.reset(0, {}) == Observation.of("0", role="a")
    result = env.step("1")  # a says 1, b says 2 of the sum 1, c says 5 of the sum 3
    assert env._env.said == ["1", "2", "5"]
    assert (result.observation.text, result.observation.role) == ("8", "a")
    assert result.reward == (1 + 2 + 5) / 2  # what all get alike of the three steps
    assert result.role_rewards == {"a": 1.0}  # what the scripts got is dropped
    assert result.metrics == {"said": 3.0}
    end = env.step("1")
    assert end.terminated and end.metrics["success/a"] == 0 and "success/b" not in end.metrics


def test_scripts_that_begin_are_paid_for_in_the_first_step():
    env = ScriptedRoles(Count(), spec_of(roles={"a": echo(), "b": echo()}))
    assert env.reset(0, {}) == Observation.of("3", role="c")  # a says 1, b says 2
    result = env.step("4")  # then a says 8 of the sum 7, b says 16
    assert result.reward == (1 + 2 + 4 + 8 + 16) / 2 and result.role_rewards == {"c": 4.0}
    env.reset(0, {})
    assert env.step("4").reward == result.reward, "nothing is kept from the episode before"


def test_a_scripted_player_that_finds_no_valid_action_is_named():
    class Stuck(Nim):
        def sample_action(self, rng):
            return "9"

    env = ScriptedRoles(Stuck(), spec_of(roles={"second": RoleConfig(player="random")}))
    env.reset(0, {})
    with pytest.raises(ValueError, match=r"RandomPlayer, which plays second, chose 100 invalid actions.*'9'"):
        env.step("1")


def test_a_perfect_player_wins_what_can_be_won_and_mistakes_make_it_lose():
    def wins(**config: Any) -> float:
        roles = {"first": RoleConfig(player="solution", player_config=config)}
        env = ScriptedRoles(Nim(min_heap=5, max_heap=7), spec_of(roles=roles))  # first can win all of these
        won = 0
        for seed in range(40):
            env.reset(seed, {})
            result = env.step("1")
            while not result.terminated:
                result = env.step("1")
            won += result.metrics["success/second"] == 0
        return won / 40

    assert wins() == 1.0
    assert 0.2 < wins(mistakes=1.0) < 0.9


def test_players_change_places_by_seed_alone():
    section = CustomEnv(env_type="x", roles={"b": RoleConfig(player="random"), "c": echo()}, swap_roles=True)
    seen = [[p.player for p in players_of(section, Count.roles, seed).values()] for seed in range(300)]
    given = ["policy", "random", echo().player]
    turned = [given, given[1:] + given[:1], given[2:] + given[:2]]
    assert all(order in turned for order in seen)
    assert all(80 < seen.count(order) < 120 for order in turned)
    assert seen == [[p.player for p in players_of(section, Count.roles, seed).values()] for seed in range(300)]
    fixed = CustomEnv(env_type="x", roles=section.roles)
    assert [p.player for p in players_of(fixed, Count.roles, 1).values()] == given


# --- responses --------------------------------------------------------------------------------------------------------


def test_penalties_are_the_roles_own_and_it_is_asked_again():
    env = ResponseEnv(Nim(), spec_of(format_penalty=-0.5, invalid_action_penalty=-0.25))
    first = env.reset(3, {})
    nothing, wrong = env.step(""), env.step("9")
    assert nothing.observation.role == wrong.observation.role == "first"
    assert nothing.reward == wrong.reward == 0.0
    assert (nothing.role_rewards, wrong.role_rewards) == ({"first": -0.5}, {"first": -0.25})
    assert first.text in wrong.observation.text
    assert env.step("1").observation.role == "second"


def test_actions_beyond_a_roles_turn_are_not_done():
    env = ResponseEnv(Nim(), spec_of(max_actions_per_step=3))
    env.reset(3, {})
    result = env.step("1||1||1")
    assert (result.metrics["actions"], result.metrics["surplus_actions"]) == (1, 2)
    assert result.observation.role == "second"


def test_an_episode_is_cut_off_when_one_role_has_used_its_steps():
    env = ResponseEnv(Count(), spec_of(max_steps=1))
    env.reset(0, {})
    result = env.step("1")
    assert result.truncated and not result.terminated
    assert result.metrics["success/a"] == result.metrics["success/b"] == 0.0
    env = ResponseEnv(Count(), spec_of(max_steps=2))
    env.reset(0, {})
    steps = [env.step("1") for _ in range(4)]
    assert [step.truncated for step in steps] == [False, False, False, True]


def test_roles_that_there_arent_are_refused():
    with pytest.raises(TypeError, match="Observation with role 'd'.*one of its roles, a, b, c"):
        checked_observation(Count(), "reset", Observation.of("0", role="d"))
    with pytest.raises(TypeError, match="role_rewards of 'd'"):
        checked_result(Count(), StepResult(reward=0.0, terminated=True, role_rewards={"d": 1.0}))
    with pytest.raises(TypeError, match="names no roles"):
        checked_observation(Single(), "reset", Observation.of("0", role="a"))


class Single(Env):
    def reset(self, seed, options):
        return Observation.of("0")

    def step(self, action):
        return StepResult(reward=0.0, terminated=True)


# --- on the way -------------------------------------------------------------------------------------------------------


def test_roles_and_their_rewards_travel():
    result = StepResult(
        reward=1.0, terminated=False, observation=Observation.of("x", "s", "b"), role_rewards={"a": 1.0, "b": -1.0}
    )
    packed = pack_step(result)
    assert is_packed(packed, step=True) and unpack_step(packed) == result
    assert not is_packed((*packed[:6], {"a": "1"}), step=True)


def test_a_pool_plays_scripted_roles_and_plays_them_again_the_same():
    section = CustomEnv(
        env_type="nim-v1", action_pattern=None, roles={"second": RoleConfig(player="random")}, swap_roles=True
    )
    spec = env_spec("nim", section, EnvManager())
    assert pickle.loads(pickle.dumps(spec)) == spec

    async def episode(pool: EnvPool, name: str, seed: int) -> list[Any]:
        seen: list[Any] = [await pool.reset(name, "nim", seed, {})]
        while True:
            seen.append(await pool.step(name, "1"))
            if seen[-1].observation is None:
                await pool.close(name)
                return seen

    with EnvPool({"nim": spec}, num_processes=2) as pool:

        async def all_of() -> list[list[Any]]:
            return [await episode(pool, f"{seed}-{k}", seed) for seed in range(8) for k in range(2)]

        played = asyncio.run(all_of())
    assert played[0::2] == played[1::2]
    assert {seen[0].role for seen in played} == {"first", "second"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"roles": {"firstt": {"player": "random"}}}, r"roles\.firstt: nim-v1 has no such role.*did you mean .?first"),
        ({"roles": {"first": {"player": "radnom"}}}, r"roles\.first\.player: .*did you mean 'random'"),
        ({"roles": {"first": {"player": "solution", "player_config": {"mistake": 1}}}}, "config.mistake: .*mistakes"),
        ({"roles": {"first": {"player": "solution", "player_config": {"mistakes": 2}}}}, "expected a share"),
        ({"roles": {"first": {"player": "roll.envs.nim:Nim"}}}, "is not a player"),
        ({"env_type": "countdown-v1", "roles": {"first": {"player": "random"}}}, "a single agent plays it"),
        ({"env_type": "countdown-v1", "swap_roles": True}, "no roles to swap"),
    ],
)  # fmt: skip
def test_roles_that_dont_fit_are_refused_when_the_environment_is_loaded(keys, said):
    roles = {role: RoleConfig(**given) for role, given in keys.pop("roles", {}).items()}
    spec = env_spec("game", CustomEnv(**{"env_type": "nim-v1", "roles": roles, **keys}), EnvManager())
    with pytest.raises(EnvLoadError, match=said):
        build_env(spec)
