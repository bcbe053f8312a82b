"""Rules and checks of tools and simulated users: each contradiction is one sentence, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roll.configs.checks.tool_checks import tool_checks
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import read_tree
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.rlvr_config import RLVRConfig

RLVR = {"pipeline": "rlvr", "pretrain": "some/model", "max_steps": 1}
RLVR |= {"actor_train": {"data_args": {"file_name": "a.jsonl"}}}
MATH = {"rewards": {"math": {"name": "math_rule", "tools": ["t"]}}}
AGENTIC = {"pipeline": "agentic", "pretrain": "some/model", "max_steps": 1}


def config(**keys):
    reading = read_tree({**RLVR, **MATH, **keys})
    if reading.violations:
        raise ConfigError(reading.violations)
    assert isinstance(reading.config, RLVRConfig)
    return reading.config


def refused(**keys) -> str:
    with pytest.raises(ConfigError) as error:
        config(**keys)
    return str(error.value)


def test_a_tool_has_one_home_and_the_domains_name_it():
    made = config(tools=[{"name": "t", "path": "my.py:t", "options": {"x": 1}}], tool_use={"max_turns": 3})
    assert made.tools[0].options == {"x": 1} and made.tool_use.max_turns == 3
    assert made.rewards["math"].tools == ("t",)


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"name": "t"}, "'t' isn't built in (python, calculator, retrieval)"),
        ({"name": "t", "path": "my.py:t", "mcp": {"url": "http://x/mcp"}}, "at a path or on an MCP server"),
        ({"name": "t", "path": "my.t"}, "a function or class as package.module:name"),
        ({"name": "a b", "path": "my.py:t"}, "a name of at most 64 letters"),
        ({"name": "t", "mcp": {}}, "one of command and url"),
        ({"name": "t", "mcp": {"url": "http://x/mcp", "command": "y"}}, "one of command and url"),
        ({"name": "t", "mcp": {"url": "x"}}, "an address"),
        ({"name": "t", "mcp": {"url": "http://x/mcp", "env": {"A": "b"}}}, "no effect with url"),
        ({"name": "t", "mcp": {"command": "x", "token_env": "A"}}, "no effect with command"),
        ({"name": "t", "mcp": {"command": "x"}, "description": "y"}, "the server says what its tools are"),
        ({"name": "python", "path": "my.py:t"}, "the name of a built-in tool"),
        ({"name": "python", "options": {"second": 3}}, "did you mean 'seconds'"),
        ({"name": "python", "options": {"seconds": 0}}, "> 0"),
        ({"name": "calculator", "parameters": {"type": "object"}}, "built in and has its own"),
        ({"name": "retrieval"}, "the folder of the texts"),
    ],
)
def test_a_tool_that_contradicts_itself_is_refused(tool, said):
    rewards = {"math": {"name": "math_rule", "tools": [tool["name"]]}}
    assert said in refused(tools=[tool], rewards=rewards)


def test_names_that_are_wrong_twice_or_unused_are_refused():
    tool = {"name": "tt", "path": "my.py:t"}
    assert "did you mean 'tt'" in refused(tools=[tool])
    assert "rewards.<domain>.tools names tt nowhere" in refused(tools=[tool])
    assert "2 entries are called 't'" in refused(tools=[{"name": "t", "path": "my.py:t"}] * 2)
    assert "acts only with tools" in refused(rewards={"math": {"name": "math_rule"}}, tool_use={"max_turns": 3})


def test_how_tools_are_used_is_checked():
    tools = [{"name": "t", "path": "my.py:t"}]
    assert "did you mean 'hermes'" in refused(tools=tools, tool_use={"parser": "hermse"})
    assert "two different texts" in refused(tools=tools, tool_use={"thinking_tags": ["<t>", "<t>"]})
    assert "cut_replies" in refused(tools=tools, tool_use={"cut_replies": "top"})
    assert "plays this domain's episodes" in refused(
        tools=tools, rewards={"math": {"name": "math_rule", "tools": ["t"], "rollout": "my.py:Play"}}
    )
    assert "native, because rewards.math.tools makes conversations" in refused(tools=tools, global_template="plain")
    remote = refused(tools=[{"name": "python", "options": {"session": True}}], sandbox="http://host:1")
    assert "no effect with a sandbox server" in remote


def test_simulated_users_are_a_class_or_a_model():
    def users(*users, **more):
        return {"interactions": list(users), "rewards": {"math": {"name": "none", **more}}}

    assert config(**users({"name": "u", "path": "my.py:U"}, interaction="u")).interactions[0].name == "u"
    assert config(**users({"name": "u", "path": "my.py:U"})).interactions  # a row may name it
    assert "one of path and endpoint" in refused(**users({"name": "u"}))
    assert "no effect without path" in refused(
        **users({"name": "u", "endpoint": "http://x/v1", "model": "m", "config": {"a": 1}})
    )
    assert "no effect without endpoint" in refused(**users({"name": "u", "path": "my.py:U", "model": "m"}))
    assert "did you mean 'user'" in refused(**users({"name": "user", "path": "my.py:U"}, interaction="usr"))


def test_tools_of_environments_need_the_whole_episode_as_a_context():
    tree = {**AGENTIC, "tools": [{"name": "calculator"}]}
    envs = {"custom_envs": {"game": {"env_type": "countdown-v1", "tools": ["calculator"]}}}
    assert isinstance(read_tree({**tree, **envs}).config, AgenticConfig)
    told = [str(v) for v in read_tree({**tree, **envs, "sample_unit": "step"}).violations]
    assert any("no effect with sample_unit step" in text for text in told)
    idle = {"custom_envs": {"game": {"env_type": "countdown-v1"}}}
    assert any("names calculator nowhere" in str(v) for v in read_tree({**tree, **idle}).violations)


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    (tmp_path / "my.py").write_text(
        'def t(a: str, *, limit: int = 3):\n    """T."""\ndef bare(a):\n    """T."""\ndef silent(a: str): ...\n'
        "class T:\n    def __init__(self, size: int): ...\n"
    )
    return tmp_path


def checked(*tools, **more):
    made = config(tools=list(tools), rewards={"math": {"name": "none", "tools": [t["name"] for t in tools]}}, **more)
    return [str(violation) for violation in tool_checks(made)]


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        ({"path": "other.py:t"}, "a Python file that exists"),
        ({"path": "my.py:u"}, "a function 'u' in my.py; it has bare, silent, t"),
        ({"path": "no_such_package.x:t"}, "there is no package 'no_such_package'"),
        ({"path": "my.py:t", "options": {"limi": 3}}, "did you mean 'limit'"),
        ({"path": "my.py:t", "options": {"limit": "x"}}, "annotated as int"),
        ({"path": "my.py:T"}, "it has no default and must be given"),
        ({"mcp": {"command": "no-such-program --flag"}}, "'no-such-program' is neither on PATH"),
        ({"mcp": {"command": "python x.py", "cwd": "nowhere"}}, "a folder that exists"),
        ({"mcp": {"url": "http://x/mcp", "token_env": "NO_SUCH_TOKEN"}}, "NO_SUCH_TOKEN is not set"),
    ],
)
def test_what_a_tool_refers_to_is_looked_for_and_nothing_is_started(own, tool, said):
    (violation,) = checked({"name": "t", **tool})
    assert said in violation


def test_what_is_there_is_accepted(own):
    (own / "texts").mkdir()
    server = {"command": [sys.executable, "-m", "server"], "cwd": str(Path.cwd())}
    assert checked({"name": "a", "path": "my.py:t", "options": {"limit": 3}}, {"name": "b", "mcp": server}) == []
    assert checked({"name": "c", "path": "my.py:T", "options": {"size": 3}}) == []
    assert checked({"name": "retrieval", "options": {"folder": "texts"}}) == []
    assert "a folder that exists" in checked({"name": "retrieval", "options": {"folder": "txts"}})[0]
    assert "installed" in checked({"name": "python", "options": {"packages": ["no_such_package"]}})[0]
    users = [{"name": "u", "path": "my.py:V"}]
    assert "a class 'V' in my.py; it has T" in checked(interactions=users)[0]


WRONG = [
    ({"path": "my.py:silent"}, "a docstring of silent: it is what the policy is told"),
    ({"path": "my.py:bare"}, "a type hint for a of bare"),
    ({"path": "my.py:t", "parameters": {"type": "objectt"}}, "tools[0].parameters.type: got 'objectt'"),
    (
        {"path": "my.py:t", "parameters": {"properties": {"a": {"type": "stringg"}}}},
        "tools[0].parameters.properties.a.type: got 'stringg', expected what a JSON schema has there; types are string",
    ),
    ({"mcp": {"command": ["python", "my_servr.py"]}}, "got 'my_servr.py', expected a script that exists"),
]


@pytest.mark.parametrize(("tool", "said"), WRONG)
def test_a_tool_that_the_policy_could_not_be_told_of_is_named_before_it_is_imported(own, tool, said):
    (found,) = checked({"name": "t", **tool})
    assert said in found


@pytest.mark.parametrize("path", ["my.py:silent", "my.py:bare"])
def test_a_schema_of_ones_own_takes_the_place_of_hints(own, path):
    assert checked({"name": "t", "path": path, "parameters": {"properties": {"a": {"type": "string"}}}}) == []
