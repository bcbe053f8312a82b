"""What a client sends back finds the responses that it continues, and never changes their tokens."""

from __future__ import annotations

import copy
import json
import tracemalloc
from dataclasses import replace

import pytest
from chat_tokenizers import CHATML, QWEN25, bpe_tokenizer, ids_of
from tool_templates import COUNTS_BACK, LLAMA31, MISTRAL, NUMBERS, QWEN3, end_of

from roll.data.templates import TemplateError
from roll.envs.base import Message
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.message_graph import MessageGraph
from roll.rollout.plain_text import PlainText
from roll.rollout.tool_text import parsed_arguments
from roll.types.chat import ToolCall, ToolSpec

SYSTEM, USER, AGAIN = Message("system", "Play."), Message("user", "Which way?"), Message("user", "And then?")
LOOK = ToolSpec("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
THOUGHT = "<think>\nbecause\n</think>\n\nUp"


def said(text, *calls, **more):
    return Message("assistant", text, tool_calls=calls, **more)


def call(name="look", **arguments):
    return ToolCall("call_0000", name, json.dumps(arguments))


def result(text):
    return Message("tool", text, tool_call_id="call_0000", name="look")


class Chat:
    """A client, and a policy that says what it is told to."""

    def __init__(self, template=CHATML, history="carried"):
        self.tokenizer, self.end = bpe_tokenizer(template), end_of(template)
        self.chat = ChatTemplate(self.tokenizer)
        self.graph = MessageGraph(self.chat, history)

    def say(self, messages, text, message=None, *, tools=(), closes=True):
        placement = self.graph.place(messages, tools)
        ids = ids_of(self.tokenizer, text + (self.end if closes else ""))
        return self.graph.grow(placement, ids, message or said(text)), placement

    def ends_with(self, placement, node, text):
        """The context is all that the node saw and said, and then this."""
        before = self.graph.tokens(node)
        assert placement.parent == node and placement.context_ids == (*before, *placement.prompt_ids)
        assert self.tokenizer.decode(placement.prompt_ids) == text
        assert self.tokenizer.decode(placement.context_ids) == placement.text


@pytest.mark.parametrize("history", ["carried", "rendered"])
@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3])
def test_a_response_that_comes_back_as_it_was_is_continued(template, history):
    chat = Chat(template, history)
    first, root = chat.say([SYSTEM, USER], "Up")
    second, after = chat.say([SYSTEM, USER, said(" Up\n"), AGAIN], "Down", closes=False)
    third, last = chat.say([SYSTEM, USER, said("Up"), AGAIN, said("Down"), USER], "x")
    assert (root.parent, after.parent, last.parent) == (None, first, second)
    chat.ends_with(after, first, "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n")
    chat.ends_with(last, second, "<|im_end|>\n<|im_start|>user\nWhich way?<|im_end|>\n<|im_start|>assistant\n")
    assert not (root.mismatches or after.mismatches or last.mismatches) and len(chat.graph) == 3 and third == 2


def test_a_request_that_comes_again_is_a_sibling_and_the_answer_that_came_back_is_continued():
    chat = Chat()
    root, _ = chat.say([USER], "Up")
    left, first = chat.say([USER, said("Up"), AGAIN], "Left")
    right, retry = chat.say([USER, said("Up"), AGAIN], "Right")
    assert first.parent == retry.parent == root and first.prompt_ids == retry.prompt_ids and not retry.mismatches
    assert chat.graph.place([USER, said("Up"), AGAIN, said("Left"), USER]).parent == left
    assert chat.graph.place([USER, said("Up"), AGAIN, said("Right"), USER]).parent == right
    again, _ = chat.say([USER], "Down")
    assert again == 3 and chat.graph.place([USER, said("Up"), AGAIN]).parent == root


@pytest.mark.parametrize("history", ["carried", "rendered"])
def test_what_was_edited_branches_off_where_it_still_holds(history):
    chat = Chat(history=history)
    root, _ = chat.say([SYSTEM, USER], "Up")
    chat.say([SYSTEM, USER, said("Up"), AGAIN], "Left")
    edited = chat.graph.place([SYSTEM, USER, said("Up"), AGAIN, said("Right"), USER])
    chat.ends_with(
        edited,
        root,
        "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\nRight<|im_end|>\n"
        "<|im_start|>user\nWhich way?<|im_end|>\n<|im_start|>assistant\n",
    )
    summary = chat.graph.place([Message("system", "Went up."), said("Left"), AGAIN])
    asked_otherwise = chat.graph.place([SYSTEM, Message("user", "Where?"), said("Up"), AGAIN])
    other_agent = chat.graph.place([Message("system", "Guard."), USER])
    examples = chat.graph.place([Message("system", "Guard."), USER, said("I stay"), AGAIN])
    assert [p.parent for p in (summary, asked_otherwise, other_agent, examples)] == [None] * 4
    assert [p.mismatches for p in (edited, summary, asked_otherwise)] == [{"edited": 1}] * 3
    assert not other_agent.mismatches and not examples.mismatches, "a conversation of its own is no mismatch"


@pytest.mark.parametrize("history", ["carried", "rendered"])
def test_thinking_that_the_client_leaves_out_makes_a_branch(history):
    chat = Chat(CHATML, history)
    chat.say([USER], THOUGHT)
    placement = chat.graph.place([USER, said("Up"), AGAIN])
    assert placement.parent is None and placement.mismatches == {"dropped_thinking": 1}
    assert "because" not in placement.text


def test_thinking_that_stood_apart_is_carried_though_clients_do_not_send_it_back():
    chat = Chat(QWEN3)
    root, _ = chat.say([USER], THOUGHT, said("Up", reasoning="because"))
    placement = chat.graph.place([USER, said("Up"), AGAIN])
    chat.ends_with(placement, root, "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n")
    assert placement.mismatches == {"dropped_thinking": 1}
    rendered = Chat(QWEN3, "rendered")
    rendered.say([USER], THOUGHT, said("Up", reasoning="because"))
    assert rendered.graph.place([USER, said("Up"), AGAIN]).parent is None


def test_a_template_that_strips_thinking_is_a_mismatch_and_a_branch_only_where_it_is_asked():
    carried, rendered = Chat(QWEN3), Chat(QWEN3, "rendered")
    history = [USER, said(THOUGHT), AGAIN]
    root, _ = carried.say([USER], THOUGHT)
    placement = carried.graph.place(history)
    carried.ends_with(placement, root, "\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n")
    assert placement.mismatches == {"template": 1}
    rendered.say([USER], THOUGHT)
    placement = rendered.graph.place(history)
    assert placement.parent is None and placement.mismatches == {"template": 1}
    assert placement.text == rendered.chat.text(history) and "because" not in placement.text


def test_numbers_in_the_template_are_those_of_the_whole_conversation():
    chat = Chat(NUMBERS)
    root, _ = chat.say([SYSTEM, USER], "Up")
    placement = chat.graph.place([SYSTEM, USER, said("Up"), AGAIN])
    chat.ends_with(placement, root, "\n<|im_start|>user 4\nAnd then?<|im_end|>\n<|im_start|>assistant 5\n")
    assert not placement.mismatches
    chat = Chat(COUNTS_BACK)
    chat.say([SYSTEM, USER], "Up")
    assert chat.graph.place([SYSTEM, USER, said("Up"), AGAIN]).mismatches == {"template": 1}


@pytest.mark.parametrize(
    ("template", "text", "after"),
    [
        (QWEN3, '<tool_call>\n{"name":"look", "arguments":{"at":"a"}}\n</tool_call>',
         "\n<|im_start|>user\n<tool_response>\nwall\n</tool_response>\n<tool_response>\ndoor\n</tool_response>"
         "<|im_end|>\n<|im_start|>assistant\n"),
        (LLAMA31, '{"name": "look", "parameters": {"at": "a"}}',
         "<|start_header_id|>ipython<|end_header_id|>\n\nwall<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"
         "door<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        (MISTRAL, '[TOOL_CALLS][{"name":"look","arguments":{"at":"a"}}]',
         "[TOOL_RESULTS]wall[/TOOL_RESULTS][TOOL_RESULTS]door[/TOOL_RESULTS]"),
        (CHATML, '<tool_call>\n{"name":"look", "arguments":{"at":"a"}}\n</tool_call>',
         "\n<|im_start|>tool\nwall<|im_end|>\n<|im_start|>tool\ndoor<|im_end|>\n<|im_start|>assistant\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("closes", [True, False])
def test_calls_and_their_results_are_carried_whatever_the_template_makes_of_them(template, text, after, closes):
    chat = Chat(template)
    asked = said("", call(at="a"))
    root, first = chat.say([USER], text, asked, tools=[LOOK], closes=closes)
    assert '"look"' in first.text and '"at"' in first.text, "the policy knows the tool"
    back = said("", ToolCall("other", "look", '{ "at" : "a" }'))  # frameworks write arguments anew
    placement = chat.graph.place([USER, back, result("wall"), result("door")], [LOOK])
    chat.ends_with(placement, root, after if closes else chat.end + after)
    assert set(placement.mismatches) <= {"template"}
    assert chat.graph.place([USER, said("", call(at="b")), result("wall")], [LOOK]).mismatches == {"edited": 1}
    assert chat.graph.place([USER, back, result("wall")]).parent is None, "other tools are another prompt"


def test_a_call_that_ends_as_llama_ends_calls_is_not_closed_again():
    chat = Chat(LLAMA31)
    chat.tokenizer, chat.end = copy.deepcopy(chat.tokenizer), "<|eom_id|>"
    chat.tokenizer.add_tokens([chat.end], special_tokens=True)
    chat.graph = MessageGraph(ChatTemplate(chat.tokenizer))
    root, _ = chat.say([USER], "<|python_tag|>look()", said("", call()))
    opening = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    after = f"<|start_header_id|>ipython<|end_header_id|>\n\nwall<|eot_id|>{opening}"
    chat.ends_with(chat.graph.place([USER, said("", call()), result("wall")]), root, after)


def test_tools_are_told_as_text_to_a_template_that_does_not_know_them():
    chat = ChatTemplate(bpe_tokenizer(CHATML))
    text = chat.text([SYSTEM, USER, said("I look.", call(at="a"), call(at="b")), result("wall")], [LOOK])
    assert text.startswith("<|im_start|>system\nPlay.\n\n# Tools") and '"name": "look"' in text
    first = '<tool_call>\n{"name": "look", "arguments": {"at": "a"}}\n</tool_call>'
    second = first.replace('"a"', '"b"')
    assert f"assistant\nI look.\n{first}\n{second}<|im_end|>" in text
    assert "# Tools" not in chat.text([SYSTEM, USER])
    without_role = bpe_tokenizer(CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'"))
    text = ChatTemplate(without_role).text([USER, said("", call()), result("wall"), result("door")])
    results = "<tool_response>\nwall\n</tool_response>\n<tool_response>\ndoor\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in text


def test_a_template_refuses_in_words_what_it_cannot_show():
    with pytest.raises(TemplateError, match="refuses a conversation of user, assistant, tool: only one call at once"):
        ChatTemplate(bpe_tokenizer(LLAMA31)).text([USER, said("", call(at="a"), call(at="b")), result("x")])
    with pytest.raises(TemplateError, match="tools need a chat template"):
        PlainText(bpe_tokenizer(None)).prompt([USER], [LOOK])


def test_tokens_that_the_text_would_not_have_are_carried_and_counted():
    chat = Chat()
    placement = chat.graph.place([USER])
    letters = tuple(token for letter in "Up" for token in ids_of(chat.tokenizer, letter))
    assert letters != ids_of(chat.tokenizer, "Up")
    root = chat.graph.grow(placement, (*letters, *ids_of(chat.tokenizer, "<|im_end|>")), said("Up"))
    placement = chat.graph.place([USER, said("Up"), AGAIN])
    assert placement.parent == root and placement.mismatches == {"retokenised": 1}
    assert letters == placement.context_ids[len(placement.context_ids) - len(placement.prompt_ids) - 3 :][:2]


def test_bytes_that_are_no_text_are_carried():
    chat = Chat()
    broken = (*ids_of(chat.tokenizer, "é")[:1], *ids_of(chat.tokenizer, "<|im_end|>"))
    root = chat.graph.grow(chat.graph.place([USER]), broken, said("\ufffd"))
    assert (
        chat.graph.place([USER, said("\ufffd"), AGAIN]).context_ids[len(chat.graph.tokens(None)) :][
            len(chat.graph.tokens(root)) - 2 : len(chat.graph.tokens(root))
        ]
        == broken
    )


@pytest.mark.parametrize("arguments", ["{", "nonsense", "[" * 100_000, "NaN", '{"a": ' * 900 + "1" + "}" * 900])
def test_arguments_may_be_any_text(arguments):
    chat = Chat(QWEN3)
    asked = said("", ToolCall("call_0000", "look", arguments))
    root, _ = chat.say([USER], "<tool_call>", asked, tools=[LOOK])
    assert chat.graph.place([USER, asked, result("x")], [LOOK]).parent == root


def test_arguments_too_deep_to_be_written_again_stand_as_they_were_said():
    deep = ToolCall("call_0000", "look", '{"a": ' * 200 + "1" + "}" * 200)
    assert parsed_arguments(deep) == deep.arguments
    assert parsed_arguments(replace(deep, arguments='{"a": [1]}')) == {"a": [1]}


@pytest.mark.parametrize("history", ["carried", "rendered"])
@pytest.mark.parametrize("template", [CHATML, QWEN3, LLAMA31])
def test_a_conversation_may_hold_the_mark_that_stands_for_a_response_while_it_is_rendered(history, template):
    chat, asked = Chat(template, history), Message("user", "look <~sampled response~> here")
    root, _ = chat.say([asked], "Up")
    placement = chat.graph.place([asked, said("Up"), Message("user", "<~sampled response~>")])
    assert (placement.parent, placement.mismatches) == (root, {})
    added = chat.tokenizer.decode(placement.prompt_ids)
    assert "here" not in added and added.count("<~sampled response~>") == 1


def test_a_long_conversation_costs_memory_by_its_length_and_not_by_its_square():
    chat, history = Chat(), []

    def grown(turns):
        tracemalloc.start()
        for _ in range(turns):
            history.append(Message("user", "again and " * 100 + str(len(history))))
            chat.say([replace(each, content=f"{each.content} "[:-1]) for each in history], "Up")
            history.append(said("Up"))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held

    first = grown(12)
    assert grown(12) < 1.6 * first


def test_a_model_without_a_chat_template_has_its_texts_joined():
    tokenizer = bpe_tokenizer(None)
    graph = MessageGraph(PlainText(tokenizer))
    root = graph.grow(graph.place([Message("user", "x")]), ids_of(tokenizer, "yz"), said("yz"))
    placement = graph.place([Message("user", "x"), said("yz"), Message("user", "a")])
    assert (placement.parent, tokenizer.decode(placement.context_ids)) == (root, "xyza")
    assert graph.place([Message("user", "xy")]).parent is None


def test_nodes_are_named_by_their_turns_once():
    chat = Chat()
    placement = chat.graph.place([USER])
    assert chat.graph.grow(placement, (5,), said("x"), number=7) == 7
    with pytest.raises(ValueError, match="there is a node 7 already"):
        chat.graph.grow(placement, (5,), said("x"), number=7)
    with pytest.raises(ValueError, match="history 'kept' is none of carried, rendered"):
        MessageGraph(chat.chat, "kept")
