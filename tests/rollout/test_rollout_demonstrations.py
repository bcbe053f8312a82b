"""Demonstrations: rows show what the policy would be shown, and end as its episodes would."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from chat_tokenizers import Script, bpe_tokenizer, group_of, play, rendered

from roll.configs.parsing.loader import load_config
from roll.envs.base import Message
from roll.envs.env_registry import bare_env, build_env, env_spec
from roll.pipelines.rollouts.assemble import assemble
from roll.rollout.agent import Agent
from roll.rollout.conversation import Conversation, ConversationRollout
from roll.rollout.demonstrations import demonstrations
from roll.rollout.env_tasks import EnvTasks

DIAL = f"{Path(__file__).parents[2]}/examples/custom_env/dial.py:Dial"
LAKE = {"env_type": "frozen_lake-v1", "max_steps": 12}
TOKENIZER = bpe_tokenizer("chatml")
ANSWER = "<answer>{action}</answer>"

MUTE = """
from roll.envs.base import Env, Observation, StepResult
class Mute(Env):
    def reset(self, seed, options):
        return Observation.of("?")
    def step(self, action):
        return StepResult(reward=0.0, terminated=True)
class Walk(Mute):
    "Solved by as many steps as it says; counts what is open."
    opened = 0
    actions = ("Go", "Stay")
    def __init__(self, steps=3, success=1.0):
        self._steps, self._success = steps, success
        type(self).opened += 1
    def reset(self, seed, options):
        self._left = self._steps
        return Observation.of(f"{self._left} left")
    def step(self, action):
        self._left -= action == "Go"
        over = self._left == 0
        seen = None if over else Observation.of(f"{self._left} left")
        said = {"success": self._success} if over else {}
        return StepResult(reward=0.0, terminated=over, observation=seen, metrics=said)
    def solution(self, max_actions):
        return ["Go"] * self._left
    def close(self):
        type(self).opened -= 1
class Lost(Walk):
    def solution(self, max_actions):
        return None
"""


@pytest.fixture
def walks(tmp_path):
    """Writes the environments above; returns what to put before a class name."""
    (tmp_path / "walks.py").write_text(MUTE)
    return f"{tmp_path / 'walks.py'}:"


def config_of(folder, envs, **keys):
    tree = {"pipeline": "agentic", "pretrain": "none", "custom_envs": envs, "rollout_batch_size": 8, **keys}
    tree.setdefault("train_env_manager", {"num_env_groups": 2 * len(envs), "group_size": 4})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "game.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return load_config(folder, "game", [])


def messages_of(row):
    return [Message(message["role"], message["content"]) for message in row["messages"]]


class PlayedEnv:
    """An environment of the run, in this process."""

    waits_for = "environment"

    def __init__(self, env, seed):
        self.env, self.seed = env, seed

    async def reset(self, task):
        return self.env.reset(self.seed, {})

    async def step(self, action):
        return self.env.step(action.text)

    async def close(self):
        self.env.close()


def episode_of(config, tag, seed, answers):
    """(prompts that the engine was shown, the trajectory) of an episode with these answers."""
    section, manager = config.custom_envs[tag], config.train_env_manager
    spec = env_spec(tag, section, manager)
    agent = Agent(TOKENIZER, chat=True)
    instructions = bare_env(spec).instructions
    conversation = Conversation(tag=tag, env=section, instructions=instructions, sample_unit=config.sample_unit)
    engines = Script(TOKENIZER, *[(f"{answer}<|im_end|>", "stop") for answer in answers])
    played = PlayedEnv(build_env(spec), seed)
    length = config.actor_infer.generating_args.max_new_tokens or config.response_length
    rollout = ConversationRollout(agent, conversation)
    return engines.contexts, play(engines, played, rollout, agent, limit=100_000, max_new_tokens=length)


# A colon, not a line end, before the answer: nothing that a chat template would strip.
THOUGHT = "<think>so</think>: " + ANSWER
UNITS = {
    "whole episodes": {"sample_unit": "trajectory"},
    "steps": {"sample_unit": "step"},
    "steps with two exchanges": {"sample_unit": "step", "history_length": 2},
    "steps alone": {"sample_unit": "step", "history_length": 0},
    "contexts": {"sample_unit": "concat", "history_length": 1},
    "one context": {"sample_unit": "concat"},
}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("actions", [1, 2])
@pytest.mark.parametrize("unit", UNITS)
def test_rows_are_token_for_token_what_an_episode_shows_and_trains_on(tmp_path, unit, actions, thinks):
    keys = dict(UNITS[unit])
    lake = {
        **LAKE,
        "max_actions_per_step": actions,
        "action_separator": " then ",
        "turn_template": "{step} of {max_steps}, {steps_left} left, {max_tokens} tokens:\n{observation}",
        "system_template": "{instructions} {max_actions_per_step} at once.",
        **({"history_length": keys.pop("history_length")} if "history_length" in keys else {}),
        **({"thinking_tags": ["<think>", "</think>"], "max_tokens_per_step": 21} if thinks else {}),
    }
    config = config_of(tmp_path, {"lake": lake}, response_length=33, **keys)
    response = THOUGHT if thinks else ANSWER
    by_seed = defaultdict(list)
    for row in demonstrations(config, 6, response=response):
        by_seed[row["seed"]].append(row)
    assert len(by_seed) == 6, "every lake has a way of at most 12 steps"
    for seed, rows in by_seed.items():
        env = bare_env(env_spec("lake", config.custom_envs["lake"], config.train_env_manager))
        env.reset(seed, {})
        way = env.solution(100)
        turns = [" then ".join(way[first : first + actions]) for first in range(0, len(way), actions)]
        answers = [response.replace("{action}", turn) for turn in turns]
        contexts, trajectory = episode_of(config, "lake", seed, answers)
        assert trajectory.turns[-1].metrics["success"] == 1.0
        rollouts = assemble([group_of(trajectory)])
        assert len(rows) == len(rollouts.batch)
        for i, row in enumerate(rows):
            messages = messages_of(row)
            last = rollouts.row_turns[i].stop - 1
            prompt = TOKENIZER(rendered(TOKENIZER, messages[:-1]), add_special_tokens=False).input_ids
            assert tuple(prompt) == contexts[last]
            # What closes a conversation after its last token, a line end, no episode samples.
            whole = rendered(TOKENIZER, messages, opens=False).removesuffix("\n")
            assert TOKENIZER(whole, add_special_tokens=False).input_ids == rollouts.batch.row("token_ids", i).tolist()
            assert messages[-1] == Message("assistant", answers[last])


def test_seeds_are_drawn_for_demonstrations_alone_and_are_the_same_every_time(tmp_path):
    config = config_of(tmp_path, {"lake": LAKE, "dial": {"env_type": DIAL}})
    rows = list(demonstrations(config, 40, response=ANSWER))
    assert rows == list(demonstrations(config, 40, response=ANSWER))
    assert [row["tag"] for row in rows[:4]] == ["lake", "dial", "lake", "dial"]
    seeds = {row["seed"] for row in rows}
    types = {tag: env.env_type for tag, env in config.custom_envs.items()}
    tasks = EnvTasks(("lake", "dial"), (2, 2), types, seed=config.seed, split="train")
    training = {task.seed for task in tasks.take(2000)}
    validation = {task.seed for task in tasks.validation_tasks(2000)}
    assert seeds
    assert not seeds & training
    assert not seeds & validation
    assert not any(seed % 2 for seed in seeds), "odd seeds are for validation, of any run"
    other = config_of(tmp_path / "other", {"lake": LAKE}, seed=7)
    assert not seeds & {row["seed"] for row in demonstrations(other, 40, response=ANSWER)}


def test_only_the_tags_that_are_trained_on_are_demonstrated_in_their_shares(tmp_path, walks):
    manager = {"num_env_groups": 4, "group_size": 2, "tags": ["dial", "lake"], "num_groups_partition": [3, 1]}
    envs = {"lake": LAKE, "mute": {"env_type": f"{walks}Mute"}, "dial": {"env_type": DIAL, "max_steps": 100}}
    config = config_of(tmp_path, envs, train_env_manager=manager)
    tags = [row["tag"] for row in demonstrations(config, 8, response=ANSWER)]
    assert (tags.count("dial"), tags.count("lake")) == (6, 2)


def test_an_environment_without_a_solution_is_refused_by_its_tag(tmp_path, walks):
    config = config_of(tmp_path, {"lake": LAKE, "quiet": {"env_type": f"{walks}Mute"}})
    with pytest.raises(ValueError, match=r"custom_envs\.quiet\.env_type: Mute has no solution\(\).*tags"):
        list(demonstrations(config, 2, response=ANSWER))


@pytest.mark.parametrize(
    ("env", "solved"),
    [
        ({"env_config": {"steps": 4}, "max_steps": 4}, True),
        ({"env_config": {"steps": 5}, "max_steps": 4}, False),
        ({"env_config": {"steps": 8}, "max_steps": 4, "max_actions_per_step": 2}, True),
        ({"env_config": {"steps": 9}, "max_steps": 4, "max_actions_per_step": 2}, False),
        ({"env_config": {"success": 0.0}}, False),
        ({"env_config": {"steps": 0}}, False),
    ],
)
def test_episodes_that_would_be_cut_off_or_arent_solved_are_left_out(tmp_path, walks, env, solved):
    config = config_of(tmp_path, {"walk": {"env_type": f"{walks}Walk", **env}})
    assert len(list(demonstrations(config, 3, response=ANSWER))) == 3 * solved


def test_episodes_without_a_solution_are_left_out(tmp_path, walks):
    config = config_of(tmp_path, {"lost": {"env_type": f"{walks}Lost"}})
    assert list(demonstrations(config, 3, response=ANSWER)) == []


def test_actions_go_by_the_names_that_the_policy_knows(tmp_path, walks):
    lookup = {"forward": "Go", "onward": "Go", "wait": "Stay"}
    config = config_of(tmp_path, {"walk": {"env_type": f"{walks}Walk", "action_lookup": lookup}})
    (row, *_) = demonstrations(config, 1, response=ANSWER)
    assert [m.content for m in messages_of(row) if m.role == "assistant"] == ["<answer>forward</answer>"] * 3


def test_an_action_without_a_name_is_refused(tmp_path, walks):
    config = config_of(tmp_path, {"walk": {"env_type": f"{walks}Walk", "action_lookup": {"wait": "Stay"}}})
    with pytest.raises(ValueError, match=r"custom_envs\.walk\.action_lookup: solutions need 'Go'.* names for Stay"):
        list(demonstrations(config, 1, response=ANSWER))


@pytest.mark.parametrize(
    ("env", "response"),
    [
        ({}, "{action}"),
        ({}, "<answer>{action}!</answer>"),
        ({"thinking_tags": ["<think>", "</think>"]}, f"<think>{ANSWER}"),
        ({"max_actions_per_step": 3, "action_separator": "||"}, "<answer>{action}||Stay</answer>"),
    ],
)
def test_a_response_that_the_environment_wouldnt_understand_is_refused(tmp_path, walks, env, response):
    config = config_of(tmp_path, {"walk": {"env_type": f"{walks}Walk", "env_config": {"steps": 4}, **env}})
    with pytest.raises(ValueError, match=r"custom_envs\.walk: the response .*action_pattern"):
        list(demonstrations(config, 1, response=response))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (None, "Go||Go"),
        ("<answer>(.*?)</answer>", "<answer>Go||Go</answer>"),
        ("move: (.+)", "move: Go||Go"),
        (r"\[(\w+\|\|\w+)\]", None),
        (r"\[(.*)\]", None),
    ],
)
def test_a_response_is_by_default_what_the_pattern_looks_for(tmp_path, walks, pattern, said):
    env = {"action_pattern": pattern, "max_actions_per_step": 2, "env_config": {"steps": 2}}
    config = config_of(tmp_path, {"walk": {"env_type": f"{walks}Walk", **env}})
    if said is None:
        with pytest.raises(ValueError, match=r"custom_envs\.walk.*action_pattern"):
            list(demonstrations(config, 1))
    else:
        assert [messages_of(row)[-1].content for row in demonstrations(config, 1)] == [said]


def test_a_response_needs_a_place_for_the_action(tmp_path):
    with pytest.raises(ValueError, match=r"response: got 'Up', expected a text with \{action\}"):
        list(demonstrations(config_of(tmp_path, {"lake": LAKE}), 1, response="Up"))
    with pytest.raises(ValueError, match=r"response: got ''"):
        list(demonstrations(config_of(tmp_path / "empty", {"lake": LAKE}), 1, response=""))


def test_instances_are_closed_also_after_an_error(tmp_path, walks):
    from roll.envs.env_registry import load_env

    walk = load_env(f"{walks}Walk")
    for env, response in [({}, ANSWER), ({}, "{action}")]:
        config = config_of(tmp_path, {"walk": {"env_type": f"{walks}Walk", **env}, "lake": LAKE})
        try:
            assert list(demonstrations(config, 4, response=response))
        except ValueError:
            assert response != ANSWER
        assert walk.opened == 0


def test_every_role_of_a_game_has_rows_of_its_own(tmp_path):
    config = {
        "pipeline": "agentic", "pretrain": "x", "rollout_batch_size": 8,
        "custom_envs": {"nim": {
            "env_type": "nim-v1", "env_config": {"min_heap": 6, "max_heap": 6}, "system_template": "{role}",
            "roles": {"first": {"player": "random"}},
        }},
        "train_env_manager": {"num_env_groups": 1, "group_size": 8},
    }  # fmt: skip
    (tmp_path / "game.yaml").write_text(yaml.safe_dump(config))
    first, second = demonstrations(load_config(tmp_path, "game"), 1)
    told = [[(m["role"], m["content"]) for m in row["messages"]] for row in (first, second)]
    # 6 is won by taking 2; of 4 any move loses, and one stone makes it last; then the rest is taken.
    assert told == [
        [("system", "first"), ("user", "Stones: 6"), ("assistant", "<answer>2</answer>"),
         ("user", "Stones: 3"), ("assistant", "<answer>3</answer>")],
        [("system", "second"), ("user", "Stones: 4"), ("assistant", "<answer>1</answer>")],
    ]  # fmt: skip
