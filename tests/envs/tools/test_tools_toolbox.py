"""Tools by themselves: what the policy is told of them, calls, time limits, whose fault it is that one fails."""

from __future__ import annotations

import asyncio
import json
import random
import time

import pytest

from roll.configs.schema.tool_config import ToolConfig
from roll.envs.tools.base import ToolError
from roll.envs.tools.calculator import Calculator, shown, worked_out
from roll.envs.tools.retrieval import Retrieval
from roll.envs.tools.toolbox import Toolbox
from roll.types.chat import ToolCall
from roll.types.trajectory import EpisodeError, Task

TASK = Task(id="t", source="s", payload={}, seed=0, tag="t", domain="d")
OWN = '''
import asyncio
import time
from typing import Literal, Optional

from roll.envs.tools.base import Tool, ToolFailure, ToolReply


def search(query: str, limit: int = 3, mode: Optional[Literal["all", "any"]] = None, *, folder: str = "") -> str:
    """Find pages.

    Looks everywhere.

    Args:
        query: what to look for
        limit: how many
        mode: of the words
        folder: where
    """
    return f"{query} {limit} {mode} {folder}"


async def later(seconds: float) -> str:
    """Wait.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return "done"


def blocks(seconds: float) -> str:
    """Block a thread.

    Args:
        seconds: how long
    """
    time.sleep(seconds)
    return "done"


def undocumented(x):
    return x


def breaks() -> str:
    """Break."""
    return {}["missing"]


def numbers() -> int:
    """Give no text."""
    return 3


class Pays(Tool):
    description = "Pays."

    def __init__(self, reward, metric=0.0):
        self.reward, self.metric = reward, metric

    def call(self, arguments, state):
        return ToolReply("paid", reward=self.reward, metrics={"m": self.metric})


class Gone(Tool):
    description = "Is gone."

    def __init__(self, size: int):
        self.size = size

    def call(self, arguments, state):
        raise ToolFailure("its service is gone")
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)


def run(tools, *calls, names=None):
    """What becomes of calls (name, arguments)."""

    async def called():
        with Toolbox(tools) as toolbox:
            episode = toolbox.open(names or [tool.name for tool in tools], TASK, {})
            made = [ToolCall(f"c{i}", name, json.dumps(a)) for i, (name, a) in enumerate(calls)]
            try:
                return await episode.run(made)
            finally:
                await episode.aclose()

    return asyncio.run(called())


def own_tool(name, **more):
    return ToolConfig(name=name, path=f"own.py:{name}", **more)


def test_a_function_tells_by_its_hints_and_docstring_what_it_takes(own):
    tool = own_tool("search", options={"folder": "x"})
    with Toolbox([tool]) as toolbox:
        (spec,) = toolbox.specs(["search"])
    assert spec.description == "Find pages.\n\nLooks everywhere."
    assert spec.parameters["required"] == ["query"]
    assert list(spec.parameters["properties"]) == ["query", "limit", "mode"]  # what the options give isn't shown
    assert spec.parameters["properties"]["query"] == {"type": "string", "description": "what to look for"}
    assert spec.parameters["properties"]["mode"]["type"] == ["string", "null"]
    (called,) = run([tool], ("search", {"query": "a", "limit": 2}))
    assert called.text == "a 2 None x"


def test_a_schema_and_a_description_of_the_users_own_win(own):
    schema = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 3}}, "required": ["x"]}
    tool = own_tool("undocumented", parameters=schema, description="Gives x.")
    with Toolbox([tool]) as toolbox:
        assert toolbox.specs(["undocumented"])[0].for_template()["function"] == {
            "name": "undocumented", "description": "Gives x.", "parameters": schema,
        }  # fmt: skip
    (called,) = run([tool], ("undocumented", {"x": 2}))
    assert called.text == "Error: wrong arguments at x: 2 is less than the minimum of 3"


@pytest.mark.parametrize(
    ("tool", "said"),
    [
        (ToolConfig(name="x", path="own.py:undocumented"), "doesn't say what its arguments are"),
        (ToolConfig(name="x", path="own.py:searc"), "did you mean 'search'"),
        (ToolConfig(name="x", path="own.py:Gone", options={"sizes": 3}), "did you mean 'size'"),
        (ToolConfig(name="x", path="own.py:time"), "neither a function nor a class"),
        (ToolConfig(name="x", path="own.py:search", parameters={"type": 3}), "must have type: object"),
        (ToolConfig(name="x", path="own.py:breaks", parameters={"properties": 3}), "are no JSON schema at properties"),
        (ToolConfig(name="x", path="own.py:undocumented", parameters={}), "has no description"),
        (ToolConfig(name="retrieval", options={"folder": "none"}), "there is no folder 'none'"),
        (ToolConfig(name="python", options={"packages": ["no_such_thing"]}), "no package 'no_such_thing'"),
    ],
)
def test_a_tool_that_cannot_be_made_is_named(own, tool, said):
    with pytest.raises(ValueError, match=said):
        Toolbox([tool])


NESTED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/list"}},
    "$defs": {"list": {"type": "array", "items": {"$ref": "#/$defs/list"}}},
}


def test_arguments_that_are_nested_too_deep_are_refused_by_a_schema_that_refers_to_itself(own):
    deep = []
    for _ in range(300):
        deep = [deep]
    (called,) = run([own_tool("breaks", parameters=NESTED)], ("breaks", {"a": deep}))
    assert called.text == "Error: the arguments are nested too deep"
    assert called.counts == {"errors": 1.0, "bad_arguments": 1.0}


@pytest.mark.parametrize("address", ["http://localhost:1/schema", "#/$defs/missing"])
def test_a_schema_that_refers_to_what_is_not_there_fails_its_tool_and_not_the_run(own, address):
    schema = {"type": "object", "properties": {"a": {"$ref": address}}}
    with pytest.raises(EpisodeError, match="the tool breaks failed: its schema refers to") as raised:
        run([own_tool("breaks", parameters=schema)], ("breaks", {"a": 1}))
    assert raised.value.status == "env_error"


def test_async_calls_and_calls_that_block_run_side_by_side_within_their_time(own):
    tools = [own_tool("later", timeout_s=5), own_tool("blocks", timeout_s=0.3)]
    begun = time.monotonic()
    waited = [("later", {"seconds": 0.2})] * 4 + [("blocks", {"seconds": 0.1})] * 4 + [("blocks", {"seconds": 2})]
    called = run(tools, *waited)
    assert time.monotonic() - begun < 1.5
    assert [one.text for one in called[:-1]] == ["done"] * 8
    assert called[-1].text == "Error: blocks didn't answer within 0.3 s"
    assert called[-1].counts == {"errors": 1.0, "timeouts": 1.0}


def test_a_call_that_hangs_keeps_its_place_and_others_wait_within_their_time(own):
    tools = [own_tool("blocks", timeout_s=0.2, concurrency=1)]
    called = run(tools, ("blocks", {"seconds": 0.4}), ("blocks", {"seconds": 0}))
    assert [one.counts for one in called] == [{"errors": 1.0, "timeouts": 1.0}] * 2


def test_what_a_tool_raises_is_told_to_the_policy_and_a_failure_ends_the_episode(own):
    (called,) = run([own_tool("breaks")], ("breaks", {}))
    assert called.text == "Error: KeyError: 'missing'" and called.counts == {"errors": 1.0, "failed": 1.0}
    with pytest.raises(EpisodeError, match="the tool gone failed: its service is gone") as raised:
        run([ToolConfig(name="gone", path="own.py:Gone", options={"size": 1})], ("gone", {}))
    assert raised.value.status == "env_error"
    with pytest.raises(EpisodeError, match="returned int, expected a text or a ToolReply"):
        run([own_tool("numbers")], ("numbers", {}))


@pytest.mark.parametrize("options", [{"reward": float("nan")}, {"reward": 0.0, "metric": float("inf")}])
def test_a_reward_or_a_metric_that_is_no_number_fails_the_episode_and_is_never_trained_on(own, options):
    with pytest.raises(EpisodeError, match="the tool pays gave (nan as its reward|inf as its metric 'm')") as raised:
        run([ToolConfig(name="pays", path="own.py:Pays", options=options)], ("pays", {}))
    assert raised.value.status == "env_error"


# --- calculator -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * 12 / 7", "12"), ("2^10", "1024"), ("10/4", "2.5"), ("sqrt(16)", "4"), ("sqrt(2)", "1.41421356237"),
        ("0.1+0.2", "0.3"), ("-7 // 2", "-4"), ("-7 % 3", "2"), ("comb(5, 2)", "10"), ("2**0.5*2**0.5", "2"),
        ("2 × 3 ÷ 6 =", "1"), ("(-1)**99999999", "-1"), ("factorial(20)", "2432902008176640000"), ("1e3", "1000"),
    ],
)  # fmt: skip
def test_the_calculator_works_out(expression, value):
    assert Calculator().call({"expression": expression}, None) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1/0", "9**9**9", "10**100000", "__import__('os')", "x", "(lambda: 1)()", "[1]", "'a' * 3", "True",
        "1 if 1 else 2", "1e308*10", "(-8)**0.5", "factorial(10**6)", "(" * 900, "1" * 2000, "abs(x=1)", "max(1)",
        "1,2", "", "0^-100000",
    ],
)  # fmt: skip
def test_the_calculator_refuses_with_a_sentence(expression):
    with pytest.raises(ToolError):
        worked_out(expression)


def test_rounding_to_far_more_places_than_a_number_has_costs_nothing():
    begun = time.monotonic()
    assert worked_out("round(7, -3000000)") == 0 and worked_out("round(7, 3000000)") == 7
    assert worked_out("round(1234.5678, 2) + round(1266, -2)") == pytest.approx(2534.57)
    assert time.monotonic() - begun < 0.5


def test_the_calculator_agrees_with_python_on_random_expressions():
    draw = random.Random(0)

    def expression(depth):
        if depth == 0:
            return str(draw.choice([draw.randint(0, 99), round(draw.uniform(0, 9), 2)]))
        return f"({expression(depth - 1)} {draw.choice('+-*/')} {expression(depth - 1)})"

    for _ in range(300):
        text = expression(draw.randint(1, 4))
        try:
            expected = eval(text)
        except ZeroDivisionError:
            continue
        assert shown(worked_out(text)) == shown(expected)


# --- retrieval --------------------------------------------------------------------------------------------------------


def test_passages_are_ranked_by_bm25_as_worked_by_hand(tmp_path):
    (tmp_path / "a.txt").write_text("cat dog")
    (tmp_path / "b.txt").write_text("cat cat bird fish")
    (tmp_path / "c.md").write_text("bird")
    tool = Retrieval(str(tmp_path))
    ranked = dict(tool.ranked("cat", 3))
    # Lengths with the words of the titles (a, txt): 4, 6, 3; mean 13/3. n(cat) = 2 of 3: idf = ln(1 + 1.5/2.5).
    # a: 1 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 4 / (13/3)));  b: 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 6 / (13/3)))
    assert ranked[0] == pytest.approx(0.4700036 * 2.2 / (1 + 1.2 * (0.25 + 0.75 * 12 / 13)), rel=1e-6)
    assert ranked[1] == pytest.approx(0.4700036 * 4.4 / (2 + 1.2 * (0.25 + 0.75 * 18 / 13)), rel=1e-6)
    assert list(ranked) == [1, 0]
    assert tool.call({"query": "fish bird", "top_k": 2}, None) == "[1] b.txt\ncat cat bird fish\n\n[2] c.md\nbird"
    assert tool.call({"query": "zebra"}, None) == "Nothing was found."


def test_texts_are_cut_between_lines_and_rows_have_titles(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("one two three\nfour five six\n\nseven " + "eight " * 12)
    (tmp_path / "b.jsonl").write_text('{"title": "B", "contents": "alpha"}\n\n{"text": "beta"}\n')
    tool = Retrieval(str(tmp_path), passage_words=10)
    assert [text for _, text in tool._passages] == [
        "alpha", "beta", "one two three\nfour five six", "seven" + " eight" * 9, "eight eight eight",
    ]  # fmt: skip
    assert [title for title, _ in tool._passages][:3] == ["B", "b.jsonl:3", "deep/a.txt"]
    (tmp_path / "b.jsonl").write_text("[1]")
    with pytest.raises(ValueError, match=r"b\.jsonl:1 isn't a JSON object"):
        Retrieval(str(tmp_path))
