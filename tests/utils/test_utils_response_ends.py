"""What ends a response: asked of the chat template, beside the tokenizer and the generation settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch

from roll.data.chat_masks import ConversationEncoder
from roll.strategies.training.pretrained import eos_token_ids
from roll.utils.chat_templates import render_chat
from roll.utils.response_ends import TemplateEnds, missing_end, response_ends, template_ends, with_ends

SPECIAL = ["<bos>", "<eos>", "<end>", "<stop>", "<user>", "<tool>", "<bot>", "<call>", "</call>"]
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<user>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<user>model\n{% endif %}"
)
GLM = (
    "{% for m in messages %}<{{ 'bot' if m.role == 'assistant' else m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
PHI = GEMMA.replace(
    "{% if add_generation_prompt %}<user>model\n{% endif %}", "{% if not add_generation_prompt %}<eos>{% endif %}"
)
PAIR = GEMMA.replace("<end>\n", "<stop><end>")
"""Cohere's kind: two tokens close a turn."""
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }}<call>"
    "{% else %}{{ m.content }}{{ '<stop>' if loop.last else '<end>' }}{% endif %}{% else %}<user>{{ m.content }}<end>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)
TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def tokenizer(template: str | None) -> Any:
    """A token per character, and the special ones."""
    import string

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(sorted(string.printable))}
    core = Tokenizer(models.WordLevel({**letters, "<unk>": len(letters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def names(own: Any, ids: Any) -> list[str]:
    return sorted(own.convert_ids_to_tokens(sorted(ids)))


KINDS = {
    # template: what it writes itself, and the markers of next roles
    "gemma": (GEMMA, ["<end>"], {}),
    "glm": (GLM, [], {"user": "<user>", "tool": "<tool>"}),
    "phi": (PHI, ["<end>"], {}),
    "two tokens": (PAIR, ["<end>"], {}),
    "gpt-oss": (GPT_OSS, ["<call>", "<stop>"], {}),
    "text": (TEXT, [], {}),
    "refuses": ("{{ raise_exception('no') }}", [], {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_is_asked_for_what_ends_a_turn(kind: str) -> None:
    template, written, markers = KINDS[kind]
    own = tokenizer(template)
    ends = template_ends(own)
    assert names(own, ends.written) == written
    assert {role: own.decode([token]) for role, token in ends.next_role.items()} == markers
    assert template_ends(tokenizer(None), template) == ends


def test_all_that_ends_a_response_is_the_union_of_tokenizer_settings_and_template() -> None:
    own = tokenizer(GEMMA)
    stop = own.convert_tokens_to_ids("<stop>")
    assert names(own, response_ends(own)) == ["<end>", "<eos>"]
    assert names(own, response_ends(own, stop)) == ["<end>", "<eos>", "<stop>"]
    assert names(own, response_ends(own, [stop])) == ["<end>", "<eos>", "<stop>"]
    assert names(own, response_ends(own, None, [(GLM, {})])) == ["<eos>", "<tool>", "<user>"]  # of a run's own template
    assert names(own, response_ends(own, None, ())) == ["<eos>"]
    assert names(own, response_ends(tokenizer(None))) == ["<eos>"]


def test_declared_ends_keep_their_order_and_form() -> None:
    assert with_ends(None, ()) is None
    assert with_ends(None, {3}) == 3
    assert with_ends(3, {3}) == 3
    assert with_ends(3, {3, 1}) == [3, 1]
    assert with_ends([9, 2], {2, 1}) == [9, 2, 1]


def test_what_no_template_ends_is_ended_by_the_next_role_or_the_end_of_sequence() -> None:
    own = tokenizer(GLM)
    ends = template_ends(own)
    assert missing_end(own, ends) == own.convert_tokens_to_ids("<user>")
    assert missing_end(own, ends, "tool") == own.convert_tokens_to_ids("<tool>")
    assert missing_end(own, TemplateEnds()) == own.eos_token_id
    assert missing_end(own, TemplateEnds(frozenset({1}))) is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "refuses"])
def test_the_token_that_is_taught_last_ends_a_response(kind: str) -> None:
    own = tokenizer(KINDS[kind][0])
    marked = ConversationEncoder(own).encode([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    last = max(k for k, trained in enumerate(marked.trained) if trained)
    assert marked.token_ids[last] in response_ends(own)


def test_the_marker_of_the_next_role_is_taught_where_it_stands_and_behind_the_last_turn() -> None:
    own = tokenizer(GLM)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    (marked,) = ConversationEncoder(own, train_on="all").encode_turns(messages)
    tokens = own.convert_ids_to_tokens(marked.token_ids)
    assert "".join(tokens) == "<user>a<bot><call>f</call><tool>r<bot>b<user>c<bot>d<user>"
    taught = "".join(token if trained else "." for token, trained in zip(tokens, marked.trained, strict=True))
    assert taught == "...<call>f</call><tool>..b<user>..d<user>"
    (calls,) = ConversationEncoder(own).encode_turns(messages[:2])
    assert own.decode(calls.token_ids[-1:]) == "<tool>"  # the tool's turn comes after calls


def test_an_end_that_calls_alone_have_is_taught_and_ends_a_response() -> None:
    own = tokenizer(GPT_OSS)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    marked = ConversationEncoder(own).encode(messages)
    assert own.decode([i for i, trained in zip(marked.token_ids, marked.trained, strict=True) if trained]) == "f<call>"


@pytest.mark.parametrize("kind", ["gemma", "glm", "gpt-oss"])
def test_engines_end_responses_with_what_the_template_teaches(kind: str) -> None:
    from transformers import GenerationConfig

    own, model = tokenizer(KINDS[kind][0]), torch.nn.Module()
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id)
    assert eos_token_ids(model, own) == {own.eos_token_id} | template_ends(own).all


def test_runs_of_blanks_that_a_vocabulary_adds_end_nothing(tmp_path: Path) -> None:
    own = tokenizer(GEMMA.replace("<end>\n", "  \n<end>"))
    own.add_tokens(["  "])
    assert names(own, template_ends(own).written) == ["<end>"]


@pytest.mark.parametrize(
    "broken",
    [
        "{{ 1 // 0 }}",
        "{% for k in range(10 ** 9) %}{% endfor %}",  # the sandbox takes a hundred thousand
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_a_template_that_computes_what_cannot_be_has_no_ends(broken: str) -> None:
    own = tokenizer(broken + TEXT)
    assert template_ends(own) == TemplateEnds()
    with pytest.raises(jinja2.TemplateError, match="Error: "):
        render_chat(own, [{"role": "user", "content": "a"}])
