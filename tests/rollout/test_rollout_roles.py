"""Several roles in one episode: a conversation each, who is paid what and when, and frozen models behind a service."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

import pytest
from chat_tokenizers import Script, ScriptedEnv, bpe_tokenizer, conversation, group_of, play

from roll.configs.schema.env_config import RoleConfig
from roll.envs.base import Message, Observation, StepResult
from roll.pipelines.rollouts.assemble import assemble, split_by_role
from roll.pipelines.rollouts.validation import episode_success
from roll.rollout.agent import Agent
from roll.rollout.conversation import ConversationRollout
from roll.rollout.roles import ChatService, RoleLedger
from roll.types.trajectory import EpisodeError

PLAIN = bpe_tokenizer(None)


class Turns(ScriptedEnv):
    """Shows (role, text), one per step, and gives the result of each step from the list."""

    def __init__(self, shows, results=None):
        super().__init__(*[Observation.of(text, role=role) for role, text in shows])
        self.results = results or [{}] * len(shows)

    async def step(self, action):
        self.actions.append(action.text)
        turn = len(self.actions)
        over = turn == len(self.observations)
        given = {"reward": 0.0, **self.results[turn - 1]}
        return StepResult(terminated=over, observation=None if over else self.observations[turn], **given)


SHOWS = [("x", "A"), ("o", "B"), ("x", "C"), ("o", "D")]
ENDS = [
    {},
    {"role_rewards": {"o": 0.25}},
    {},
    {"role_rewards": {"x": -1.0, "o": 1.0}, "metrics": {"success/x": 0.0, "success/o": 1.0}},
]


def played(*answers, shows=SHOWS, results=ENDS, **keys):
    """(the engines, the trajectory, the environment)"""
    spec = conversation(instructions="S", **keys)
    spec = type(spec)(**{**{name: getattr(spec, name) for name in spec.__slots__}, "roles": ("x", "o")})
    agent = Agent(PLAIN, chat=False)
    engines, env = Script(PLAIN, *[(answer, "stop") for answer in answers]), Turns(shows, results)
    trajectory = play(engines, env, ConversationRollout(agent, spec), agent)
    assert trajectory.error == ""
    return engines, trajectory, env


# --- conversations ----------------------------------------------------------------------------------------------------


def test_every_role_has_a_conversation_of_its_own_and_a_row():
    engines, trajectory, env = played("a", "b", "c", "d", system_template="{instructions}{role}")
    assert engines.texts == ["SxA", "SoB", "SxAaC", "SoBbD"]
    assert env.actions == ["a", "b", "c", "d"]
    assert [turn.role for turn in trajectory.turns] == ["x", "x", "o", "o"]  # stored by conversation
    batch = assemble([group_of(trajectory)]).batch
    assert [PLAIN.decode(batch.row("token_ids", i)) for i in range(len(batch))] == ["SoBbDd", "SxAaCc"]


@pytest.mark.parametrize(("unit", "third"), [("step", "SC"), ("concat", "SxC")])
def test_contexts_are_reset_by_the_turns_of_the_role(unit, third):
    length = {"step": 0, "concat": None}[unit]
    engines, trajectory, _ = played("a", "b", "c", "d", sample_unit=unit, history_length=length)
    assert engines.texts == (["SA", "SB", "SC", "SD"] if unit == "step" else ["SA", "SB", "SAaC", "SBbD"])
    assert len(trajectory.branches) == (4 if unit == "step" else 2)
    assert sum(len(turn.response_ids) for turn in trajectory.turns) == 4


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_separate_rewards_reach_the_last_turn_of_each_role_and_split_the_group():
    _, trajectory, _ = played("a", "b", "c", "d")
    # x: turns a (0) and c; -1 comes with d, the other's action, and is c's. o: 0.25 for b, 1 for d.
    assert [turn.reward for turn in trajectory.turns] == [0.0, -1.0, 0.25, 1.0]
    assert trajectory.role_rewards == {"x": -1.0, "o": 1.25}
    assert trajectory.reward == pytest.approx(0.125)  # the mean over roles
    assert episode_success(trajectory) == 0.5
    parts = {part.task.id: part.trajectories[0] for part in split_by_role(group_of(trajectory))}
    assert {name: part.reward for name, part in parts.items()} == {"maze@x": -1.0, "maze@o": 1.25}
    assert [turn.reward for turn in parts["maze@o"].turns] == [0.25, 1.0]
    assert (episode_success(parts["maze@x"]), episode_success(parts["maze@o"])) == (0.0, 1.0)


def test_a_shared_reward_is_the_sum_over_the_policys_roles():
    results = [{"reward": 0.5}, {"role_rewards": {"o": 0.25}}, {}, {"reward": 2.0, "role_rewards": {"x": 1.0}}]
    _, trajectory, _ = played("a", "b", "c", "d", results=results, role_rewards="shared")
    assert trajectory.role_rewards == {}
    assert trajectory.reward == 0.5 + 0.25 + 2.0 + 1.0
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.0, 0.25, 3.0]
    assert split_by_role(group_of(trajectory)) == [group_of(trajectory)]


class Paid:
    """What a ledger does to an episode."""

    def __init__(self):
        self.turns, self.metrics, self.score, self.role_rewards = {}, {}, 0.0, {}

    def pay(self, turn, reward, metrics):
        self.turns[turn] = self.turns.get(turn, 0.0) + reward
        self.metrics.setdefault(turn, {}).update(metrics)

    def finish(self, reward, *, role_rewards):
        self.score, self.role_rewards = reward, dict(role_rewards)


def step(reward=0.0, **role_rewards):
    return StepResult(reward=reward, terminated=False, role_rewards=role_rewards)


def test_what_a_role_is_paid_before_its_first_turn_joins_that_turn():
    paid = Paid()
    ledger = RoleLedger(paid, ["x", "o"], "separate")
    paid.turns = {0: 0.5}  # `step_env` pays the step's own reward to the turn
    ledger.settle("x", 0, step(0.5, o=-0.25))
    assert paid.turns == {0: 0.5} and paid.role_rewards == {"x": 0.5, "o": 0.25}
    assert sum(paid.turns.values()) + paid.score == 0.375  # the mean of 0.5 and 0.5 - 0.25
    paid.turns[1] = 0.0
    ledger.settle("o", 1, step(0.0, x=1.0))
    assert paid.turns == {0: 1.5, 1: 0.25}
    assert sum(paid.turns.values()) + paid.score == (1.5 + 0.25) / 2


def test_steps_of_others_than_the_policy_pay_its_last_turn():
    for kind, expected in [("separate", {"x": 1.5}), ("shared", {})]:
        paid = Paid()
        ledger = RoleLedger(paid, ["x"], kind)
        paid.turns = {0: 0.0}
        ledger.settle("x", 0, step())
        ledger.settle("o", None, step(0.5, x=1.0, o=-1.0))  # nobody has paid its 0.5
        assert paid.turns == {0: 1.5} and paid.role_rewards == expected
        assert paid.score == 0.0


# --- frozen models ----------------------------------------------------------------------------------------------------


@pytest.fixture
def service():
    """A chat service whose replies are those of `plan`, a text or (status, body); keeps the requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append((body, self.path, self.headers.get("Authorization")))
            reply = server.plan.pop(0)
            if reply == "...":
                server.hold.wait(30)
                return
            status, text = (200, {"choices": [{"message": {"content": reply}}]}) if isinstance(reply, str) else reply
            data = json.dumps(text).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.plan, server.seen, server.hold = [], [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    server.server_close()


def frozen(service, **keys):
    address = f"http://127.0.0.1:{service.server_port}/v1"
    return RoleConfig(**{"player": "endpoint", "endpoint": address, "model": "old", "request_retries": 0, **keys})


def test_a_frozen_model_is_told_its_own_conversation_and_its_responses_are_no_turns(service):
    service.plan = ["b", "d"]
    roles = {"o": frozen(service, request_args={"temperature": 0.5})}
    engines, trajectory, env = played(
        "a", "c", system_template="{instructions}{role}", roles=roles, max_tokens_per_step=7
    )
    assert env.actions == ["a", "b", "c", "d"]
    assert engines.texts == ["SxA", "SxAaC"]
    bodies = [body for body, path, _ in service.seen if path == "/v1/chat/completions"]
    told = [[(m["role"], m["content"]) for m in body["messages"]] for body in bodies]
    assert told == [
        [("system", "So"), ("user", "B")],
        [("system", "So"), ("user", "B"), ("assistant", "b"), ("user", "D")],
    ]
    assert [(body["model"], body["max_tokens"], body["temperature"]) for body in bodies] == [("old", 7, 0.5)] * 2
    assert bodies[0]["seed"] != bodies[1]["seed"]
    assert [turn.role for turn in trajectory.turns] == ["x", "x"]
    assert trajectory.role_rewards == {"x": -1.0} and trajectory.reward == -1.0  # d ended the game and paid x's c
    assert [turn.reward for turn in trajectory.turns] == [0.0, -1.0]
    assert episode_success(trajectory) == 0.0


@pytest.mark.parametrize(
    ("reply", "said"),
    [((500, {}), "HTTP 500"), ((200, {"choices": []}), "gave no message with text"), ((401, {}), "HTTP 401")],
)
def test_a_frozen_model_that_fails_ends_the_episode_without_a_reward(service, reply, said):
    service.plan = [reply]
    spec = conversation(roles={"o": frozen(service)})
    spec = type(spec)(tag=spec.tag, env=spec.env, roles=("x", "o"))
    agent = Agent(PLAIN, chat=False)
    trajectory = play(Script(PLAIN, ("a", "stop")), Turns(SHOWS), ConversationRollout(agent, spec), agent)
    assert trajectory.status == "env_error" and not trajectory.trainable
    assert said in trajectory.error and "custom_envs.maze.roles.o" in trajectory.error


def asked(service, **keys):
    """The text of one response."""
    role = ChatService("custom_envs.maze.roles.o", frozen(service, **keys), {"OLD_KEY": "sk-1"})
    return asyncio.run(role.respond([Message("user", "B")], max_tokens=5, seed=3))


def test_a_frozen_model_is_asked_with_its_key_again_after_a_failure_and_not_for_ever(service):
    service.plan = [(503, {}), "b"]
    with mock.patch("roll.utils.json_service.random.uniform", return_value=0.0):
        assert asked(service, request_retries=1, api_key_env="OLD_KEY") == "b"
    assert [key for _, _, key in service.seen] == ["Bearer sk-1"] * 2
    service.plan = ["...", "b"]
    with pytest.raises(EpisodeError, match=r"didn't answer within 0.2 s"):
        asked(service, request_timeout_s=0.2)
    service.plan = ["b"]
    asked(service, request_args={"seed": None, "top_p": 0.5})
    body = service.seen[-1][0]
    assert body == {"model": "old", "messages": [{"role": "user", "content": "B"}], "max_tokens": 5, "top_p": 0.5}


def test_a_service_without_its_key_or_that_isnt_there_is_refused_before_the_first_episode(service):
    role = frozen(service, api_key_env="OLD_KEY")
    with pytest.raises(ValueError, match="roles.o.api_key_env: the environment variable OLD_KEY is not set"):
        ChatService("custom_envs.maze.roles.o", role, {})
    service.shutdown()
    service.server_close()
    with pytest.raises(ValueError, match="roles.o.endpoint: .*can't be reached"):
        ChatService("custom_envs.maze.roles.o", role, {"OLD_KEY": "k"})
