"""Texts and token ids without transformers' wrapping are those with it."""

from __future__ import annotations

import copy

import pytest
from chat_tokenizers import CHATML, QWEN25, bpe_tokenizer
from fakes import NumberTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, pre_tokenizers
from tool_templates import LLAMA31, QWEN3, end_of

from roll.envs.base import Message
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.message_graph import MessageGraph
from roll.rollout.tokenizing import decode, encode

TEXTS = (
    "",
    "a",
    " Up and\n\n down",
    "<|im_end|>\n<|im_start|>user\n",
    "é—漢字 \U0001f600",
    "<think>x</think> <|im_end|>",
)


def as_usual(tokenizer, text):
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


@given(st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=40)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_text_has_the_tokens_and_tokens_have_the_text_that_the_whole_tokenizer_gives(text, skip):
    tokenizer = bpe_tokenizer(CHATML)
    ids = encode(tokenizer, text)
    assert ids == as_usual(tokenizer, text)
    assert decode(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    half = ids[: len(ids) // 2]  # may end within a character
    assert decode(tokenizer, half, skip_special_tokens=skip) == tokenizer.decode(half, skip_special_tokens=skip)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_tokenizer_that_puts_spaces_before_words_does_so_here_too(scheme):
    tokenizer = copy.deepcopy(bpe_tokenizer(CHATML))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.backend_tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    for text in TEXTS:
        ids = encode(tokenizer, text)
        assert ids == as_usual(tokenizer, text)
        assert decode(tokenizer, ids, skip_special_tokens=False) == tokenizer.decode(ids)


def test_what_somebody_set_on_the_tokenizer_changes_nothing_that_it_would_not_change():
    text = "Up and <|im_end|> down and Up again"
    tokenizer = copy.deepcopy(bpe_tokenizer(CHATML))
    ids = as_usual(tokenizer, text)
    tokenizer(text, truncation=True, max_length=2)  # which leaves it cut short until the next call
    assert encode(tokenizer, text) == ids
    tokenizer.pad_token = "<|im_end|>"
    tokenizer(text, padding="max_length", max_length=50)
    assert encode(tokenizer, text) == ids
    tokenizer(text, split_special_tokens=True)
    assert encode(tokenizer, text) == ids
    tokenizer.split_special_tokens = True
    assert encode(tokenizer, text) == as_usual(tokenizer, text) != ids


def test_a_class_of_its_own_ways_is_asked_as_usual():
    class Shouting(type(bpe_tokenizer(CHATML))):
        def __call__(self, text, **options):
            return super().__call__(text.upper(), **options)

        def decode(self, token_ids, **options):
            return super().decode(token_ids, **options) + "!"

    tokenizer = copy.deepcopy(bpe_tokenizer(CHATML))
    usual = tokenizer.decode(encode(tokenizer, "UP"))
    tokenizer.__class__ = Shouting
    assert decode(tokenizer, encode(tokenizer, "up"), skip_special_tokens=False) == usual + "!"
    assert encode(NumberTokenizer(), "1 2") == as_usual(NumberTokenizer(), "1 2")


OPENS_AS_IT_CLOSES = (
    "{% for m in messages %}<|im_end|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_end|>assistant\n{% endif %}"
)
"""The token that ends a response stands twice behind it."""


@pytest.mark.parametrize("template", [CHATML, QWEN25, QWEN3, LLAMA31, OPENS_AS_IT_CLOSES])
@pytest.mark.parametrize("closes", [True, False])
def test_a_conversation_that_is_written_as_it_was_is_continued_by_the_same_tokens_as_by_a_mark(template, closes):
    tokenizer = bpe_tokenizer(template)
    chat = ChatTemplate(tokenizer)
    graph = MessageGraph(chat)
    sampled, messages = (), (Message("system", "Play."), Message("user", "Which way?"))
    for number in range(3):
        place = graph.place(messages)
        if number:
            *before, response, news = messages
            text, ids = chat.follow(chat.continuation(before, response, [news]), sampled)
            assert place.prompt_ids == ids and place.text.endswith(text) and not place.mismatches
        sampled = encode(tokenizer, f"Up {number}" + (end_of(template) if closes else ""))
        response = Message("assistant", f"Up {number}")
        graph.grow(place, sampled, response)
        messages = (*messages, response, Message("user", "And then?"))
