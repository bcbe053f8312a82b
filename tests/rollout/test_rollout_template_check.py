"""`roll check` refuses what a chat template can't do before a run finds it out at its start."""

from __future__ import annotations

import pytest
from chat_tokenizers import CHATML, bpe_tokenizer
from family_templates import OPENS_AND_KEEPS, OPENS_XML, PYTHONIC, TELLS_ONLY
from test_rollout_chat import NUMBERS, STRIPS_THOUGHTS

from roll.configs.parsing.loader import read_tree
from roll.pipelines.check_process import StartCheck
from roll.pipelines.run.template_check import answers, questions

TOOLS = {"tools": [{"name": "calculator"}]}
ROWS = {"pipeline": "rlvr", "max_steps": 1, "actor_train": {"data_args": {"file_name": "a.jsonl"}}}
USER = {"interactions": [{"name": "user", "path": "users.py:User"}]}
GAMES = {"pipeline": "agentic", "max_steps": 1}


def found(folder, template, tree):
    """What is wrong, by key, with a run of a model with this template."""
    tokenizer = bpe_tokenizer(template)
    config = read_tree({**tree, "pretrain": str(folder)}).config
    assert config is not None
    return dict(answers(tokenizer, list(questions(config))))


def rows(**reward):
    return {**ROWS, "rewards": {"sums": {"name": "none", **reward}}}


@pytest.mark.parametrize(
    ("template", "key", "says"),
    [
        (PYTHONIC, "tool_use.parser", "none gives back what this one writes"),
        (TELLS_ONLY, "tool_use.parser", "tells of tools and writes no calls"),
        (NUMBERS, "rewards.sums.tools", "rewrites what stood before the results of tools"),
        (CHATML, "", ""),
        (OPENS_XML, "", ""),
    ],
)
def test_tools_of_rows_need_a_form_that_is_read_and_a_template_that_adds(template, key, says, tmp_path):
    problems = found(tmp_path, template, {**rows(tools="calculator"), **TOOLS})
    assert list(problems) == ([key] if key else [])
    assert says in "".join(problems.values())


def test_a_users_answers_need_a_template_that_keeps_thoughts(tmp_path):
    problems = found(tmp_path, OPENS_XML, {**rows(interaction="user"), **USER})
    assert "rewrites what earlier responses thought" in problems["rewards.sums.interaction"]
    assert found(tmp_path, OPENS_AND_KEEPS, {**rows(interaction="user"), **USER}) == {}


def test_environments_that_carry_turns_and_agents_are_looked_at(tmp_path):
    games = {**GAMES, "custom_envs": {"nim": {"env_type": "nim-v1"}}}
    assert list(found(tmp_path, STRIPS_THOUGHTS, games)) == ["custom_envs.nim.env_type"]
    assert found(tmp_path, STRIPS_THOUGHTS, {**games, "sample_unit": "step"}) == {}
    agents = {**GAMES, "custom_envs": {"web": {"env_type": "endpoint", "env_config": {"command": "true"}}}}
    assert list(found(tmp_path, PYTHONIC, agents)) == ["custom_envs.web.env_config.tool_parser"]
    agents["custom_envs"]["web"]["env_config"]["tool_parser"] = "hermes"
    assert found(tmp_path, PYTHONIC, agents) == {}


def test_a_tokenizer_that_isnt_here_is_not_asked_for(tmp_path):
    config = read_tree({**rows(tools="calculator"), **TOOLS, "pretrain": "someone/model"}).config
    check = StartCheck()
    assert list(check.violations(config)) == []
    assert "someone/model isn't a folder here" in check.unread[0]
    assert found(tmp_path, PYTHONIC, rows()) == {}  # one prompt, one response


def test_a_check_asks_in_a_process_of_its_own(tmp_path):
    bpe_tokenizer(PYTHONIC).save_pretrained(tmp_path)
    config = read_tree({**rows(tools="calculator"), **TOOLS, "pretrain": str(tmp_path)}).config
    (violation,) = StartCheck().violations(config)
    assert violation.path == "tool_use.parser" and "none gives back" in str(violation)
