"""Tool calls are read off responses in every form, and no text breaks or slows the reading."""

from __future__ import annotations

import json
import random
import time

import pytest

from roll.configs.catalog.tool_table import TOOL_PARSERS
from roll.envs.tools.parsing import parse_calls, split_thinking
from roll.envs.tools.parsing.base import MAX_CALLS
from roll.types.chat import ToolSpec

SEARCH = ToolSpec(
    "search",
    "Find.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "exact": {"type": "boolean"},
            "tags": {"type": "array"},
            "floor": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    },
)
PYTHON = ToolSpec("python", "Run.", {"type": "object", "properties": {"code": {"type": "string"}}})


def called(text: str, parser: str) -> list[tuple[str, object]]:
    parsed = parse_calls(text, parser, tools=[SEARCH, PYTHON])
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


ONE = ("search", {"query": "a < b", "limit": 3})
SAID = {
    "hermes": '<tool_call>\n{"name": "search", "arguments": {"query": "a < b", "limit": 3}}\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function=search>\n<parameter=query>\na < b\n</parameter>\n<parameter=limit>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "search", "parameters": {"query": "a < b", "limit": 3}}',
    "seed_oss": "<seed:tool_call>\n<function=search>\n<parameter=query>a < b</parameter>\n"
    "<parameter=limit>3</parameter>\n</function>\n</seed:tool_call>",
    "glm": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a < b</arg_value>\n<arg_key>limit</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "mistral": '[TOOL_CALLS]search[ARGS]{"query": "a < b", "limit": 3}',
    "gemma": '<|tool_call>call:search{limit:3,query:<|"|>a < b<|"|>}<tool_call|>',
    "harmony": "<|start|>assistant to=functions.search<|channel|>commentary json<|message|>"
    '{"query": "a < b", "limit": 3}<|call|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
    '{"query": "a < b", "limit": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
    '{"query": "a < b", "limit": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "json": '{"name": "search", "arguments": {"query": "a < b", "limit": 3}}',
}
BETWEEN = {"llama": "; ", "mistral": "", "harmony": ""} | {
    name: "\n" for name in SAID if name not in ("llama", "mistral", "harmony")
}


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_one_call_and_parallel_calls_are_read_in_order_with_ids_of_their_own(parser: str):
    assert called(SAID[parser], parser) == [ONE]
    parsed = parse_calls(BETWEEN[parser].join([SAID[parser]] * 3), parser, tools=[SEARCH], first=7)
    assert [call.id for call in parsed.calls] == ["call00007", "call00008", "call00009"]
    assert [json.loads(call.arguments) for call in parsed.calls] == [ONE[1]] * 3
    assert parsed.content == "" and parsed.problems == ()


@pytest.mark.parametrize("parser", [name for name in TOOL_PARSERS if name != "llama"])
def test_what_is_said_around_the_calls_is_content(parser: str):
    parsed = parse_calls(f"I will look.\n{SAID[parser]}\nThen we see.", parser, tools=[SEARCH])
    assert len(parsed.calls) == 1
    assert parsed.content.split("\n")[0] == "I will look." and parsed.content.endswith("Then we see.")
    assert "search" not in parsed.content


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize(
    "text", ["", "The answer is 4.", "<tool_call", '{"x": 1}', '{"name": "Bob"}', "[1, 2]", "f(x) = {x}", "{", "[{}]"]
)
def test_a_response_without_calls_is_content_as_it_stands(parser: str, text: str):
    assert parse_calls(text, parser, tools=[SEARCH]).content == text
    assert parse_calls(text, parser, tools=[SEARCH]).calls == ()
    assert parse_calls(text, parser, tools=[SEARCH]).problems == ()


def test_arguments_stay_the_text_that_was_said():
    said = '{"b": 1.50, "a": "\\u00e9",  "a2": 1e400}'
    call = parse_calls(f'<tool_call>{{"name": "f", "arguments": {said}}}</tool_call>', "hermes").calls[0]
    assert call.arguments == said


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        ('{"name": "f"}', "{}"),
        ('{"arguments": {"x": 1}, "name": "f"}', '{"x": 1}'),
        ('{"name": "f", "parameters": {"x": 1}}', '{"x": 1}'),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', '{"x": 1}'),
        ('{"name": "f", "arguments": {"x": "</tool_call>"}}', '{"x": "</tool_call>"}'),
    ],
)
def test_hermes_takes_what_models_write(said: str, arguments: str):
    parsed = parse_calls(f"<tool_call>{said}</tool_call>", "hermes")
    assert [(call.name, call.arguments) for call in parsed.calls] == [("f", arguments)]
    assert parsed.content == "" and not parsed.problems
    # Cut off at a stop string or the end of the response: what is called is clear.
    assert parse_calls(f"<tool_call>{said}", "hermes").calls == parsed.calls


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ('{"name": "f", "arguments": {"x": 1}', "bad_json"),
        ("{'name': 'f', 'arguments': {}}", "bad_json"),
        ('{"name": "f", "arguments": {"x": 1},}', "bad_json"),
        ('{"name": "f", "arguments": {"x": NaN}}', "bad_json"),
        ('{"name": "f", "arguments": {"x": -Infinity}}', "bad_json"),
        ('{"name": 3, "arguments": {}}', "bad_call"),
        ('{"arguments": {}}', "bad_call"),
        ('{"name": "\\ud800", "arguments": {}}', "bad_call"),
        ('{"name": "f", "arguments": [1]}', "bad_call"),
        ('{"name": "f", "arguments": "x"}', "bad_call"),
        ('{"name": "f", "arguments": ' + "[" * 5000 + "}", "bad_json"),
        ('{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}", "bad_json"),
        ("", "bad_json"),
    ],
)
def test_a_call_that_cannot_be_made_is_a_problem_and_stays_in_the_content(said: str, kind: str):
    good = SAID["hermes"]
    parsed = parse_calls(f"<tool_call>{said}</tool_call>{good}", "hermes")
    assert [problem.kind for problem in parsed.problems] == [kind]
    assert "<tool_call>" in parsed.problems[0].message
    assert [call.name for call in parsed.calls] == ["search"]
    assert parsed.content == f"<tool_call>{said}</tool_call>"
    cut = parse_calls('<tool_call>{"name": "f", "argum', "hermes")
    assert [problem.kind for problem in cut.problems] == ["unclosed"] and not cut.calls


def test_qwen_coder_types_its_values_by_the_schema_and_keeps_text_as_it_is():
    values = {"query": "12", "limit": "7", "exact": "True", "tags": '["a", 1]', "floor": "None", "other": "5"}
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    expected = {"query": "12", "limit": 7, "exact": True, "tags": ["a", 1], "floor": None, "other": "5"}
    assert called(f"<function=search>\n{body}</function>", "qwen_coder") == [("search", expected)]
    code = "if a:\n    print('</function>')\n"
    text = f"<tool_call><function=python>\n<parameter=code>\n{code}\n</parameter>\n</function></tool_call>"
    assert called(text, "qwen_coder") == [("python", {"code": code})]
    # A number that isn't one stays text: the schema refuses it later, with a sentence.
    assert called("<function=search><parameter=limit>\nmany\n</parameter></function>", "qwen_coder") == [
        ("search", {"limit": "many"})
    ]


def test_qwen_coder_forgives_a_missing_closing_tag_of_a_parameter_and_reports_a_call_cut_short():
    text = "<function=search>\n<parameter=query>\nx\n<parameter=limit>\n2\n</function>"
    assert called(text, "qwen_coder") == [("search", {"query": "x", "limit": 2})]
    for cut in (
        "<tool_call>\n<function=search>\n<parameter=query>\nx",
        "<function=search>",
        "<tool_call>{}</tool_call>",
    ):
        parsed = parse_calls(cut, "qwen_coder", tools=[SEARCH])
        assert len(parsed.problems) == 1 and not parsed.calls
        assert parsed.content == cut


def test_llama_reads_its_tag_its_built_in_calls_and_code():
    assert called('<|python_tag|>{"name": "search", "parameters": {}}<|eom_id|>', "llama") == [("search", {})]
    assert called('<|python_tag|>brave_search.call(query="x y")', "llama") == [("brave_search", {"query": "x y"})]
    assert called("<|python_tag|>print(1)\nprint(2)", "llama") == [("python", {"code": "print(1)\nprint(2)"})]
    assert called('<|python_tag|>f.call(query=__import__("os"))', "llama")[0][0] == "python"  # read as code, not run
    nobody = parse_calls("<|python_tag|>print(1)", "llama", tools=[SEARCH])
    assert [problem.kind for problem in nobody.problems] == ["bad_call"]
    broken = parse_calls('{"name": "search", "parameters": {"query": }}', "llama")
    assert [problem.kind for problem in broken.problems] == ["bad_json"]


def test_plain_json_reads_lists_fences_and_the_mark_of_mistral():
    two = '[{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": 1}}]'
    expected = [("a", {}), ("b", {"x": 1})]
    for text in (two, f"Well:\n```json\n{two}\n```\nDone.", f"[TOOL_CALLS]{two}"):
        assert called(text, "json") == expected
    assert parse_calls(f"Well:\n```json\n{two}\n```\nDone.", "json").content == "Well:\n\nDone."
    broken = parse_calls('{"name": "a", "arguments": {"x" 1}}', "json")
    assert [problem.kind for problem in broken.problems] == ["bad_json"] and not broken.calls


def test_more_calls_than_the_limit_are_not_made_and_that_is_said():
    for parser, said in SAID.items():
        parsed = parse_calls(BETWEEN[parser].join([said] * (MAX_CALLS + 5)), parser, tools=[SEARCH])
        assert len(parsed.calls) == MAX_CALLS
        assert [problem.kind for problem in parsed.problems] == ["too_many"], parser
    assert [p.kind for p in parse_calls("x" * 1_000_001, "hermes").problems] == ["too_long"]


PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>", "<|python_tag|>",
    '{"name": "f", "arguments": ', '{"name": "f"', "{", "}", "[", "]", '"', "\\", ",", ":", "\n", "\n{", "\n[",
    "```json\n", ";", "f.call(", "0", "1e999", "NaN", "é", "\ud800", "\x00", "[TOOL_CALLS]", '"arguments": {"a": [',
    "<function=", "<seed:tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f[ARGS]", "[CALL_ID]",
    "<|tool_call>", "call:f{", "x:", '<|"|>', "<tool_call|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>",
    "analysis", " to=functions.f", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|channel>", "<channel|>",
    "<start_function_call>", "<escape>",
]  # fmt: skip


@pytest.mark.parametrize("parser", TOOL_PARSERS)
def test_no_text_makes_the_reading_raise_and_calls_hold_objects(parser: str):
    draw = random.Random(parser)
    for _ in range(3000):
        text = "".join(draw.choices(PIECES, k=draw.randint(0, 30)))
        parsed = parse_calls(text, parser, tools=[SEARCH, PYTHON])
        assert all(call.name.encode() and call.arguments for call in parsed.calls)
        assert all(isinstance(json.loads(call.arguments), dict) and call.name for call in parsed.calls)
        if not parsed.calls and parser != "json":
            shows_all = "".join(parsed.content.split()) == "".join(text.split())
            assert shows_all or parser in ("llama", "harmony", "gemma")  # the last two have channels


@pytest.mark.parametrize("parser", TOOL_PARSERS)
@pytest.mark.parametrize(
    "piece", [*PIECES, "<parameter=x>\n<parameter=x>", '\n{"a":[1,', '\n{"a":}', '<tool_call>{"a":"', '\n[{"name":']
)
def test_reading_takes_linear_time(parser: str, piece: str):
    for text in (piece * (400_000 // len(piece)), "<function=f>" + piece * (400_000 // len(piece))):
        begun = time.perf_counter()
        parse_calls(text, parser, tools=[SEARCH, PYTHON])
        assert time.perf_counter() - begun < 1.5, repr(piece)


def test_thinking_is_split_off_and_calls_in_it_are_not_made():
    tags = ("<think>", "</think>")
    assert split_thinking("<think>\nhm\n</think>\n\nyes", tags) == ("hm", "yes")
    assert split_thinking("hm</think>yes", tags) == ("hm", "yes")  # opened by the prompt
    assert split_thinking("<think>" + SAID["hermes"], tags) == (SAID["hermes"], "")
    assert split_thinking("yes", tags) == ("", "yes")
    assert split_thinking("<think>a</think>b", None) == ("", "<think>a</think>b")


# As pydantic writes it: what has a name of its own stands in $defs.
PLACES = ToolSpec(
    "go",
    "Go.",
    {
        "$defs": {
            "Unit": {"enum": ["m", "km"], "type": "string"},
            "Level": {"enum": [1, 2, 3]},
            "Place": {"properties": {"x": {"type": "integer"}}, "title": "Place"},
            "Way": {"$ref": "#/$defs/Place"},
            "Loop": {"$ref": "#/$defs/Loop"},
        },
        "type": "object",
        "properties": {
            "unit": {"$ref": "#/$defs/Unit"},
            "level": {"allOf": [{"$ref": "#/$defs/Level"}], "default": 1},
            "place": {"$ref": "#/$defs/Place"},
            "way": {"anyOf": [{"$ref": "#/$defs/Way"}, {"type": "null"}]},
            "count": {"oneOf": [{"type": "integer"}, {"type": "null"}]},
            "kind": {"const": 7},
            "flag": {"enum": [True, False, None]},
            "mixed": {"enum": ["1", 2, "auto", None]},
            "share": {"type": ["number", "null"]},
            "name": {"type": ["string", "null"]},
            "points": {"items": {"$ref": "#/$defs/Place"}},
            "table": {"additionalProperties": {"type": "integer"}},
            "old": {"type": "integer", "nullable": True},
            "loop": {"$ref": "#/$defs/Loop"},
            "gone": {"$ref": "#/$defs/Nowhere"},
            "elsewhere": {"$ref": "https://example.org/schema"},
            "any": {},
            "both": {"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]},
        },
    },
)


@pytest.mark.parametrize(
    ("key", "said", "value"),
    [
        ("unit", "km", "km"),
        ("level", "2", 2),
        ("place", '{"x": 1}', {"x": 1}),
        ("way", '{"x": 1}', {"x": 1}),
        ("way", "null", None),
        ("way", "None", None),
        ("count", "5", 5),
        ("count", "null", None),
        ("kind", "7", 7),
        ("flag", "True", True),
        ("flag", "null", None),
        ("mixed", "1", "1"),
        ("mixed", "2", 2),
        ("mixed", "auto", "auto"),
        ("mixed", "null", None),
        ("share", "0.5", 0.5),
        ("share", "1e400", "1e400"),  # no JSON text holds infinity: the schema refuses it later, with a sentence
        ("name", "5", "5"),
        ("name", "true", "true"),
        ("name", "null", None),
        ("points", '[{"x": 1}]', [{"x": 1}]),
        ("table", '{"a": 1}', {"a": 1}),
        ("old", "3", 3),
        ("old", "null", None),
        ("loop", "3", "3"),
        ("gone", "3", "3"),
        ("elsewhere", "3", "3"),
        ("any", "3", "3"),
        ("both", "3", 3),
        ("nobody", "3", "3"),
        ("count", str(2**80), 2**80),
        ("count", "many", "many"),
    ],
)
@pytest.mark.parametrize("form", ["qwen_coder", "glm"])
def test_an_argument_has_the_type_that_the_schema_names_elsewhere(form, key, said, value):
    text = {
        "qwen_coder": f"<tool_call>\n<function=go>\n<parameter={key}>\n{said}\n</parameter>\n</function>\n</tool_call>",
        "glm": f"<tool_call>go\n<arg_key>{key}</arg_key>\n<arg_value>{said}</arg_value>\n</tool_call>",
    }[form]
    (call,) = parse_calls(text, form, tools=[PLACES]).calls
    back = json.loads(call.arguments)[key]
    assert back == value and type(back) is type(value)


def test_a_schema_whose_references_name_each_other_very_often_costs_little():
    wide = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 30} for i in range(14)}
    tool = ToolSpec("go", "", {"$defs": wide, "properties": {"x": {"$ref": "#/$defs/n0"}}})
    begun = time.perf_counter()
    parse_calls("<function=go><parameter=x>\n1\n</parameter></function>", "qwen_coder", tools=[tool])
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize(
    ("said", "calls", "content", "thought"),
    [
        # gpt-oss itself writes the recipient after the channel.
        ('<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.search '
         '<|constrain|>json<|message|>{"query": "x"}<|call|>', [("search", {"query": "x"})], "", "Hm."),
        (' to=functions.search<|channel|>commentary json<|message|>{}', [("search", {})], "", ""),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.f<|channel|>commentary json"
         "<|message|>{}<|call|>", [("f", {})], "I look.", ""),
        ("<|channel|>analysis<|message|>I could say to=functions.f {}<|end|><|start|>assistant<|channel|>final"
         "<|message|>No.<|return|>", [], "No.", "I could say to=functions.f {}"),
        ("<|channel|>analysis<|message|>cut off", [], "", "cut off"),
    ],
)  # fmt: skip
def test_harmonys_channels_are_thought_content_and_calls(said, calls, content, thought):
    parsed = parse_calls(said, "harmony", tools=[SEARCH])
    assert [(call.name, json.loads(call.arguments)) for call in parsed.calls] == calls
    assert (parsed.content, parsed.thought, parsed.problems) == (content, thought, ())


def test_a_call_in_gemmas_thought_is_not_made_and_function_gemmas_marks_are_read():
    call = '<|tool_call>call:f{a:<|"|>x<|"|>}<tool_call|>'
    parsed = parse_calls(f"<|channel>thought\n{call}\n<channel|>No.", "gemma")
    assert (parsed.calls, parsed.content, parsed.thought) == ((), "No.", call)
    assert called("<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>", "gemma") == [("f", {"a": "x"})]
    deep = "<|tool_call>call:f{a:" + "[" * 5000
    assert [problem.kind for problem in parse_calls(deep, "gemma").problems] == ["unclosed"]


UNFINISHED = {
    "glm": "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>x",
    "mistral": '[TOOL_CALLS]search[ARGS]{"query": "x',
    "gemma": '<|tool_call>call:search{query:<|"|>x',
    "harmony": '<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{"query": "x',
    "deepseek": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>{"query": "x',
    "kimi": '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"query": "x',
    "seed_oss": "<seed:tool_call>\n<function=search>\n<parameter=query>x",
}


@pytest.mark.parametrize("parser", UNFINISHED)
def test_a_call_that_was_cut_off_is_not_made(parser):
    parsed = parse_calls(f"Well. {UNFINISHED[parser]}", parser, tools=[SEARCH])
    assert parsed.calls == () and [problem.kind for problem in parsed.problems] == ["unclosed"]
    assert parsed.content == f"Well. {UNFINISHED[parser]}"


def test_glms_value_ends_at_the_tag_that_the_call_goes_on_after():
    text = "<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>a</arg_value> b</arg_value>\n</tool_call>"
    assert called(text, "glm") == [("search", {"query": "a</arg_value> b"})]
    assert called("<tool_call>search<arg_key>query</arg_key><arg_value>x</arg_value></tool_call>", "glm") == [
        ("search", {"query": "x"})
    ]
    assert called("<tool_call>search</tool_call>", "glm") == [("search", {})]
