"""The form of calls is found by trying; under templates of every family's kind two rounds of calls are one context."""

from __future__ import annotations

import json

import pytest
from chat_tokenizers import CHATML, QWEN25, bpe_tokenizer, ids_of
from family_templates import (
    BY_ID,
    CHANNELS,
    FAMILIES,
    FENCED,
    OPENS_AND_KEEPS,
    OPENS_OR_EMPTY,
    OPENS_XML,
    PAIRS,
    PYTHONIC,
    TELLS_ONLY,
    UNQUOTED,
    marked_tokenizer,
)
from tool_templates import LLAMA31, MISTRAL, QWEN3

from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.envs.tools.parsing import parse_calls, split_thinking
from roll.rollout.agent import Agent
from roll.rollout.chat_checks import check_template
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.tool_forms import resolve_parser, written_call
from roll.types.chat import ToolCall, ToolSpec

ASKED = Message("user", "Which?")
SPEC = ToolSpec(
    "mcp.look-up",
    "Look up.",
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "sure": {"type": "boolean"},
            "none": {"type": ["string", "null"]},
            "where": {"$ref": "#/$defs/Place"},
            "many": {"type": "array"},
        },
        "$defs": {"Place": {"type": "object"}},
    },
)
TEXTS = (
    "", "5", "true", "null", "a 'b' \"c\"", "\\n \\\\ \\u00e9", "line\n  indented\n\tmore\n", " blanks ", "é 日本 🙂",
    "</think>", "<b>&amp;</b>", '{"a": 1}', "[TOOL]", "a, b: c} ]", "%s {x}",
)  # fmt: skip
OTHERS = (
    {"count": 0}, {"count": -(2**70)}, {"share": 1.5e-7}, {"sure": True}, {"sure": False}, {"none": None}, {},
    {"where": {"a": {"b": [1, {"c": None}]}, "d": "x, y"}}, {"many": [{"k": 1}, {"k": [True, "x"]}]}, {"many": []},
    {"count": 1, "text": "two", "sure": False, "many": [1.5, "é"]},
)  # fmt: skip


def given_back(chat, parser, message):
    text = written_call(chat, message, [SPEC])
    thinks = text.strip().startswith(("</think>", "I need to know."))  # the thought that the prompt has opened
    opens = "<think>" if chat.opens_with(("<think>", "</think>")) and thinks else ""
    tags = ("<think>", "</think>") if opens or "<think>" in text else None
    parsed = parse_calls(split_thinking(opens + text, tags)[1], parser, tools=[SPEC])
    assert parsed.problems == () and parsed.content in ("", message.content)
    return [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_auto_gives_back_every_call_that_the_template_writes(family):
    template, parser = FAMILIES[family]
    tokenizer = marked_tokenizer(template)
    assert resolve_parser("auto", tokenizer) == parser
    chat = ChatTemplate(tokenizer)
    for arguments in [*({"text": text} for text in TEXTS), *OTHERS]:
        call = ToolCall("call00000", SPEC.name, json.dumps(arguments, ensure_ascii=False))
        for content in ("", "I will look."):
            assert given_back(chat, parser, Message("assistant", content, (call,))) == [(SPEC.name, arguments)]
    two = tuple(ToolCall(f"call0000{i}", SPEC.name, f'{{"count": {i}}}') for i in range(2))
    back = given_back(chat, parser, Message("assistant", "", two))
    assert back == [(SPEC.name, {"count": i}) for i in range(1 if parser == "harmony" else 2)]


@pytest.mark.parametrize(
    ("template", "parser"),
    [(QWEN3, "hermes"), (LLAMA31, "llama"), (MISTRAL, "mistral"), (CHATML, "hermes"), (QWEN25, "hermes")],
)
def test_auto_for_templates_that_were_known_before_and_for_those_without_tools(template, parser):
    assert resolve_parser("auto", bpe_tokenizer(template)) == parser


def test_a_form_that_no_parser_gives_back_is_refused_by_name_and_so_is_a_template_that_writes_no_calls():
    with pytest.raises(ValueError, match=r"none gives back what this one writes: '<\|tool_call_start\|>\[look_up\("):
        resolve_parser("auto", bpe_tokenizer(PYTHONIC))
    with pytest.raises(ValueError, match=r"tells of tools and writes no calls.*hermes, qwen_coder"):
        resolve_parser("auto", bpe_tokenizer(TELLS_ONLY))
    # A mark somewhere in the template decides nothing.
    with pytest.raises(ValueError, match="none gives back"):
        resolve_parser("auto", bpe_tokenizer("{# <tool_call> [TOOL_CALLS] #}" + PYTHONIC))
    assert resolve_parser("llama", bpe_tokenizer(PYTHONIC)) == "llama"
    with pytest.raises(ValueError, match="did you mean 'hermes'"):
        resolve_parser("herms", bpe_tokenizer(CHATML))


def test_of_several_templates_by_name_the_one_for_tools_is_tried_and_rendered():
    tokenizer = bpe_tokenizer(None)
    tokenizer.chat_template = {"default": CHATML, "tool_use": FAMILIES["mistral v13"][0]}
    assert resolve_parser("auto", tokenizer) == "mistral"
    assert ChatTemplate(tokenizer).text([ASKED], [SPEC]).startswith("<s>[AVAILABLE_TOOLS]")
    assert ChatTemplate(tokenizer).text([ASKED]).startswith("<|im_start|>user")


def test_a_template_that_writes_calls_and_tells_of_no_tools_has_them_told_in_its_own_form():
    untold = FENCED.replace("{% if tools %}", "{% if false %}")
    tokenizer = bpe_tokenizer(untold)
    assert resolve_parser("auto", tokenizer) == "deepseek"
    text = ChatTemplate(tokenizer).text([ASKED], [SPEC])
    assert '<｜tool▁sep｜>name\n```json\n{"argument": "value"}\n```' in text and "<tool_call>" not in text


def two_rounds(template, tags, *, thinks=True, make=marked_tokenizer):
    """What is carried over two rounds of calls, and what the template writes of the same conversation."""
    tokenizer = make(template)
    agent, chat = Agent(tokenizer), ChatTemplate(tokenizer)
    agent.check_carries_calls(tags, [SPEC])
    history, carried = [ASKED], list(agent.prompt([ASKED], [SPEC]))
    for number in range(2):
        call = ToolCall(f"call0000{number}", SPEC.name, '{"text": "a"}')
        said = Message("assistant", "", (call,), reasoning="I need to know." if thinks else "")
        news = Message("tool", f"result {number}", tool_call_id=call.id, name=call.name)
        text = chat.response_text(history, said, [SPEC])
        end = chat.unchecked([*history, said], [SPEC], opens=False)[
            len(chat.unchecked(history, [SPEC]) + text) :
        ].strip()
        sampled = ids_of(tokenizer, text + end)
        try:
            added = agent.reply_to_calls(said, [news], sampled, [SPEC])
        except TemplateError:
            added = agent.chat.reply([news], sampled)
        carried += [*sampled, *added]
        history += [said, news]
    return tokenizer.decode(carried), chat.text(history, [SPEC])


@pytest.mark.parametrize("tags", [None, ("<think>", "</think>")])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_rounds_of_calls_are_one_context_letter_for_letter(family, tags):
    thinks = family in ("qwen3.5", "qwen3.8", "nemotron3", "glm4.5", "gpt-oss", "gemma4")
    carried, rendered = two_rounds(FAMILIES[family][0], tags, thinks=thinks)
    assert carried == rendered


def test_conversations_carry_under_templates_that_open_the_thought_unless_they_leave_it_out_later():
    for template in (OPENS_AND_KEEPS, OPENS_OR_EMPTY):
        for tags in (None, ("<think>", "</think>")):
            check_template(bpe_tokenizer(template), tags)
    keeps_all = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    check_template(bpe_tokenizer(keeps_all))
    for template in (OPENS_XML, PAIRS):
        with pytest.raises(TemplateError, match="rewrites what earlier responses thought"):
            check_template(bpe_tokenizer(template))


def test_a_thought_that_the_prompt_has_closed_already_isnt_asked_of_the_model():
    closed = OPENS_AND_KEEPS.replace(
        "assistant\n<think>\n' }}{% endif", "assistant\n<think>\n\n</think>\n\n' }}{% endif"
    )
    check_template(bpe_tokenizer(closed))
    assert Agent(bpe_tokenizer(closed)).thought_tags(None) is None


def test_marks_that_are_special_tokens_reach_parsers_and_nobody_else():
    for family, (template, parser) in FAMILIES.items():
        tokenizer = marked_tokenizer(template)
        agent, chat = Agent(tokenizer), ChatTemplate(tokenizer)
        call = ToolCall("call00000", SPEC.name, '{"text": "a"}')
        said = Message("assistant", "", (call,), reasoning="Hm." if "think" in chat.opening else "")
        ids = ids_of(tokenizer, chat.response_text([ASKED], said, [SPEC]) + "<|endoftext|>")
        text = agent.decode_marked(ids, ())
        assert "<|endoftext|>" not in text, family
        parsed = parse_calls(split_thinking(text, ("<think>", "</think>"))[1], parser, tools=[SPEC])
        assert [made.name for made in parsed.calls] == [SPEC.name], family
        left = agent.marks.strip(parsed.content, ids)
        assert left.strip() == "", (family, left)
    plain = ids_of(tokenizer, "no calls<|im_end|>")
    assert agent.decode_marked(plain, ()) == agent.decode_response(plain, ()) == "no calls"


def test_a_call_that_the_template_closes_otherwise_than_a_text_is_closed_once():
    for template, end in ((UNQUOTED, "<|tool_response>"), (CHANNELS, "<|call|>"), (PAIRS, "<|observation|>")):
        tokenizer = marked_tokenizer(template)
        agent, call = Agent(tokenizer), ToolCall("call00000", SPEC.name, "{}")
        news = Message("tool", "found", tool_call_id=call.id, name=call.name)
        sampled = ids_of(tokenizer, "x" + end)
        added = agent.reply_to_calls(Message("assistant", "", (call,)), [news], sampled, [SPEC])
        assert not tokenizer.decode(added).startswith(end)
        cut = agent.reply_to_calls(Message("assistant", "", (call,)), [news], sampled[:-1], [SPEC])
        assert tokenizer.decode(cut).startswith(end)


def test_ids_of_calls_hold_their_names_where_the_template_writes_nothing_else():
    first, second = ToolCall("call00000", "f", "{}"), ToolCall("call00001", "g", "{}")
    history = [ASKED, Message("assistant", "", (first, second)), Message("tool", "1", tool_call_id="call00000")]
    text = ChatTemplate(marked_tokenizer(BY_ID)).text(history)
    assert "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>" in text
    assert "<|tool_call_begin|>functions.g:1" in text and "call0000" not in text


def test_a_model_without_a_system_role_is_told_of_tools_in_the_question():
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML
    text = ChatTemplate(bpe_tokenizer(no_system)).text([ASKED], [SPEC])
    assert text.startswith("<|im_start|>user\n# Tools") and text.endswith("Which?<|im_end|>\n<|im_start|>assistant\n")


def test_without_tags_a_thought_that_the_template_opens_is_apart_if_its_tags_can_be_seen():
    tokenizer = marked_tokenizer(OPENS_XML)
    assert Agent(tokenizer).thought_tags(None) == ("<think>", "</think>")
    assert Agent(tokenizer).thought_tags(("<r>", "</r>")) == ("<r>", "</r>")
    assert Agent(marked_tokenizer(PAIRS)).thought_tags(None) is None  # the model opens it, if it thinks
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    assert Agent(tokenizer).thought_tags(None) is None
    pictures = bpe_tokenizer("{% for m in messages %}{{ m.content[0].text }}{% endfor %}")
    assert Agent(pictures).thought_tags(None) is None
