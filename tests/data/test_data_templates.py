"""Templates: what text a task becomes, and which tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from data_tokenizers import stories_tokenizer, word_tokenizer

from roll.data.templates import PromptEncoder, TemplateError, missing_from
from roll.types.trajectory import Task


def task(prompt: str | None = "w1 w2", *, messages: Any = None, tag: str = "t") -> Task:
    return Task(id="t:1", source="t", payload={"prompt": prompt, "messages": messages}, seed=0, tag=tag, domain="d")


# ids of the word tokenizer: <unk> 0, <s> 1, </s> 2, <|system|> 3,
# <|user|> 4, <|assistant|> 5, <|end|> 6, w0 7, w1 8, w2 9
def test_native_writes_the_chat_template_and_its_one_bos() -> None:
    encoder = PromptEncoder(word_tokenizer())
    assert encoder.render(task()) == "<s><|user|> w1 w2 <|end|> <|assistant|>"
    assert encoder.encode(task()) == (1, 4, 8, 9, 6, 5)


def test_native_takes_a_conversation() -> None:
    messages = [{"role": "system", "content": "w0"}, {"role": "user", "content": "w1"}]
    assert PromptEncoder(word_tokenizer()).encode(task(None, messages=messages)) == (1, 3, 7, 6, 4, 8, 6, 5)


def test_plain_is_the_text_with_the_tokenizers_bos() -> None:
    assert PromptEncoder(word_tokenizer(), template="plain").encode(task()) == (1, 8, 9)
    assert PromptEncoder(word_tokenizer(adds_bos=False), template="plain").encode(task()) == (8, 9)


def test_a_text_template_is_filled_literally() -> None:
    encoder = PromptEncoder(word_tokenizer(), template="{prompt} w3 {other} {0} %s")
    assert encoder.render(task("{prompt} {{7*7}} {0.__class__}")) == "{prompt} {{7*7}} {0.__class__} w3 {other} {0} %s"


def test_a_named_template_and_one_per_tag() -> None:
    encoder = PromptEncoder(
        word_tokenizer(), template="native", tag_to_template={"a": "question_answer", "b": "w5 {prompt}"}
    )
    assert encoder.render(task(tag="a")) == "Question: w1 w2\nAnswer:"
    assert encoder.encode(task(tag="b")) == (1, 12, 8, 9)
    assert encoder.encode(task(tag="c")) == (1, 4, 8, 9, 6, 5)


def test_a_jinja_template_gets_the_messages_and_writes_its_own_bos() -> None:
    encoder = PromptEncoder(word_tokenizer(), template="{% for m in messages %}w9 {{ m['content'] }}{% endfor %}")
    assert encoder.encode(task()) == (16, 8, 9)


def test_a_single_message_fits_a_text_template() -> None:
    encoder = PromptEncoder(word_tokenizer(), template="plain")
    assert encoder.encode(task(None, messages=[{"role": "user", "content": "w4"}])) == (1, 11)


def test_the_real_tokenizer_adds_its_bos_once() -> None:
    tokenizer = stories_tokenizer()
    encoder = PromptEncoder(tokenizer, template="plain")
    ids = encoder.encode(task("Once upon a time"))
    assert list(ids) == tokenizer("Once upon a time")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "Once upon a time"


def build(**arguments: Any) -> PromptEncoder:
    return PromptEncoder(**{"tokenizer": word_tokenizer(), **arguments})


BROKEN = [
    (lambda: build(tokenizer=word_tokenizer(chat_template=None)), "no.*chat template|has none"),
    (lambda: build(template="qwen"), r"'qwen' is neither 'native', nor one of \['plain'"),
    (lambda: build(template="{prompt} and {prompt}"), "exactly one"),
    (lambda: build(tag_to_template={"a": "question"}), "'question' is neither"),
    (lambda: build(template="plain").encode(task("<s> w1")), "starts with '<s>' twice"),
    (lambda: build(template="{{ bos_token }}{{ bos_token }}{{ messages[0].content }}").encode(task()), "twice"),
    (lambda: build(tokenizer=word_tokenizer(adds_bos=False), template="plain").encode(task(" ")), "no tokens"),
    (
        lambda: build(template="plain").encode(task(None, messages=[{"role": "user", "content": "a"}] * 2)),
        "conversation of 2 messages",
    ),
]


@pytest.mark.parametrize(("make", "message"), BROKEN)
def test_a_template_that_does_not_fit_is_refused(make: Any, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        make()


def test_a_jinja_template_cannot_reach_python() -> None:
    encoder = build(template="{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(Exception, match="unsafe|access"):
        encoder.render(task())


@pytest.mark.parametrize(
    ("text", "contents", "missing"),
    [
        ("[a b]\n(c)", ["a  b", "c"], None),
        ("c, then a", ["a", "c"], 1),
        ("c", ["a", "c"], 0),
        ('"line\\n\\"quoted\\""', ['line\n"quoted"'], None),  # as JSON writes it
        ("", [" "], None),
    ],
)
def test_what_a_text_leaves_out(text, contents, missing):
    messages = [{"role": "user", "content": content} for content in contents]
    assert missing_from(text, messages) == missing
    moved = [{"role": "system", "content": "S"}, *messages]
    assert missing_from(f"{text}S", moved) == (None if missing is None else missing + 1)


@pytest.mark.parametrize(
    ("chat", "why"),
    [("{{ raise_exception('no system role') }}", "no system role"), ("{{ 1 // 0 }}", "ZeroDivisionError")],
)
def test_a_conversation_that_the_template_refuses_is_a_row_with_its_name(chat: str, why: str):
    encoder = PromptEncoder(word_tokenizer(chat_template=chat))
    with pytest.raises(TemplateError, match=rf"task '.+': the chat template refuses a conversation of user: {why}"):
        encoder.render(task())
