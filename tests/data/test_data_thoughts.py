"""Thoughts in rows: taught where the chat template puts them, one tiny template per kind."""

from __future__ import annotations

from typing import Any

import pytest
from test_data_chat_masks import CHATML, tokenizer, trained_texts

from roll.data.chat_masks import ConversationEncoder
from roll.data.templates import TemplateError
from roll.data.thought_spans import split_thought

_SPLIT = (
    "{% set r = m.reasoning_content or '' %}{% set c = m.content %}{% if '</think>' in c %}"
    "{% set r = c.split('</think>')[0].split('<think>')[-1].strip() %}{% set c = c.split('</think>')[-1].strip() %}"
    "{% endif %}"
)
_LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
KEEPS_LAST = (
    _LAST
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    + _SPLIT
    + "{% if loop.index0 > ns.last %}"
    "<think>\n{{ r }}\n</think>\n\n{% endif %}{{ c }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Qwen3's kind: the last answer alone keeps its thought."""
KEEPS_LAST_OPENS = KEEPS_LAST.replace(
    "<think>\n\n</think>\n\n{% endif %}{% endif %}", "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)
"""The same, whose prompt opens the thought: Qwen3-Thinking-2507's and Qwen3.5's kind."""
DROPS_ALL_OPENS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}{% else %}[/INST]"
    "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[/INST]<think>\n{% endif %}"
)
"""DeepSeek-R1's kind: no message that is shown has a thought."""
KEEPS_ALL_OPENS = DROPS_ALL_OPENS.replace(".split('</think>')[-1]", "")
KEY_OF_ITS_OWN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "[INST]analysis:{{ m.thinking }}"
    "<|eot_id|>{% endif %}[INST]final:{{ m.content }}{{ '</s>' if loop.last else '<|eot_id|>' }}{% else %}"
    "[INST]{{ m.role }}:{{ m.content }}<|eot_id|>{% endif %}{% endfor %}{% if add_generation_prompt %}[INST]{% endif %}"
)
"""gpt-oss' kind: thoughts in a message before the answer's, and another end for the last one."""

QUESTION = {"role": "user", "content": "2+2?"}
TAGS = {"role": "assistant", "content": "<think>\ntwo, two\n</think>\n\nIt is 4."}
KEY = {"role": "assistant", "content": "It is 4.", "reasoning_content": "two, two"}
THINKING = {"role": "assistant", "content": "It is 4.", "thinking": "two, two"}
NONE = {"role": "assistant", "content": "It is 4."}

KINDS = {
    # template: what a row with the thought teaches, and one without
    "keeps the last": (
        KEEPS_LAST,
        "<think>\ntwo, two\n</think>\n\nIt is 4.<|im_end|>",
        "<think>\n\n</think>\n\nIt is 4.<|im_end|>",
    ),
    "keeps the last, opens": (
        KEEPS_LAST_OPENS,
        "two, two\n</think>\n\nIt is 4.<|im_end|>",
        "\n</think>\n\nIt is 4.<|im_end|>",
    ),
    "drops all, opens": (DROPS_ALL_OPENS, "two, two\n</think>\n\nIt is 4.</s>", "\n</think>\n\nIt is 4.</s>"),
    "keeps all, opens": (KEEPS_ALL_OPENS, "two, two\n</think>\n\nIt is 4.</s>", "\n</think>\n\nIt is 4.</s>"),
    "a key": (KEY_OF_ITS_OWN, "analysis:two, two<|eot_id|>[INST]final:It is 4.</s>", "final:It is 4.</s>"),
    "as content": (CHATML, None, "It is 4.<|im_end|>"),
}


def prompt_of(own: Any, messages: list[dict[str, str]], **variables: Any) -> list[int]:
    """The tokens that a response to these messages is sampled after."""
    text = own.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
    ids: list[int] = own(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("answer", [TAGS, KEY, THINKING], ids=["tags", "reasoning_content", "thinking"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1] is not None])
def test_a_thought_is_taught_where_the_template_puts_it_however_the_row_gives_it(kind: str, answer: Any) -> None:
    template, thought, _ = KINDS[kind]
    own = tokenizer(template)
    marked = ConversationEncoder(own).encode([QUESTION, answer])
    assert trained_texts(own, marked) == [thought]
    assert list(marked.token_ids[: marked.trained.index(True)]) == prompt_of(own, [QUESTION])


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_without_a_thought_goes_on_from_the_prompt_that_is_sampled_from(kind: str) -> None:
    template, _, expected = KINDS[kind]
    own = tokenizer(template)
    marked = ConversationEncoder(own).encode([QUESTION, NONE])
    assert trained_texts(own, marked) == [expected]
    assert list(marked.token_ids[: marked.trained.index(True)]) == prompt_of(own, [QUESTION])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][1] is not None])
def test_every_turn_of_a_conversation_is_taught_after_the_prompt_of_that_turn(kind: str) -> None:
    own = tokenizer(KINDS[kind][0])
    first = THINKING if kind == "a key" else TAGS
    again = {**first, "content": first["content"].replace("It is 4", "Yes")}
    messages = [QUESTION, first, {"role": "user", "content": "Sure?"}, again]
    sequences = ConversationEncoder(own, train_on="all").encode_turns(messages)
    starts = [
        list(marked.token_ids[:k])
        for marked in sequences
        for k in range(1, len(marked.trained))
        if marked.trained[k] and not marked.trained[k - 1]
    ]
    assert starts == [prompt_of(own, [QUESTION]), prompt_of(own, messages[:3])]
    texts = [text for marked in sequences for text in trained_texts(own, marked)]
    thought = KINDS[kind][1]
    assert texts == [thought, thought.replace("It is 4", "Yes")]


def test_thoughts_in_content_stay_there_where_the_template_knows_nothing_of_them() -> None:
    own = tokenizer(CHATML)
    assert trained_texts(own, ConversationEncoder(own).encode([QUESTION, TAGS])) == [TAGS["content"] + "<|im_end|>"]


def test_a_thought_in_a_key_that_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(TemplateError, match=r"leaves out 'reasoning_content' of message 2 .*'two, two'"):
        ConversationEncoder(tokenizer(CHATML)).encode([QUESTION, KEY])


def test_a_thought_after_a_prompt_that_turns_thoughts_off_is_refused() -> None:
    encoder = ConversationEncoder(tokenizer(KEEPS_LAST), variables={"enable_thinking": False})
    own = tokenizer(KEEPS_LAST)
    assert trained_texts(own, encoder.encode([QUESTION, NONE])) == ["It is 4.<|im_end|>"]
    with pytest.raises(TemplateError, match="prompt for it closes the thought at once"):
        encoder.encode([QUESTION, TAGS])


def test_variables_of_the_template_reach_the_rows() -> None:
    own = tokenizer(KEEPS_LAST)
    marked = ConversationEncoder(own, variables={"enable_thinking": False}).encode([QUESTION, NONE])
    assert list(marked.token_ids[: marked.trained.index(True)]) == prompt_of(own, [QUESTION], enable_thinking=False)
    with pytest.raises(TemplateError, match="doesn't read the variable 'thinking'; it reads enable_thinking"):
        ConversationEncoder(own, variables={"thinking": False})
    with pytest.raises(TemplateError, match="'add_generation_prompt' isn't a variable of chat templates"):
        ConversationEncoder(own, variables={"add_generation_prompt": True})
    with pytest.raises(TemplateError, match=r"template 'Q: \{prompt\}' is a text"):
        ConversationEncoder(own, template="Q: {prompt}", variables={"enable_thinking": False})


@pytest.mark.parametrize(
    ("message", "thought", "answer"),
    [
        (TAGS, "two, two", "It is 4."),
        (KEY, "two, two", "It is 4."),
        (NONE, "", "It is 4."),
        ({"content": "two, two\n</think>\n\nIt is 4."}, "two, two", "It is 4."),  # as R1 says it after its prompt
        ({"content": "[THINK]two[/THINK]4"}, "two", "4"),
        ({"content": "So <think>two</think> 4"}, "", "So <think>two</think> 4"),  # not how it begins
        ({"content": "<think>two</think>4", "thinking": "three"}, "", "<think>two</think>4"),  # which of them?
        ({"content": None, "tool_calls": []}, "", ""),
    ],
)
def test_a_message_in_two_parts(message: Any, thought: str, answer: str) -> None:
    parts = split_thought(message)
    assert (parts.thought, parts.answer) == (thought, answer)
