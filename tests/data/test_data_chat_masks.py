"""Which tokens of a conversation are taught, under the chat templates that are about."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.chat_masks import ConversationEncoder, MarkedTokens
from roll.data.templates import TemplateError

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
)  # a system message of its own
SMOLLM = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe small<|im_end|>\n' }}{% endif %}" + CHATML
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Without a generation prompt."""
HEADERS = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}"
"""Neither a generation prompt nor special tokens."""
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last and '</think>' not in m.content %}<think>\n\n</think>\n\n{% endif %}"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Earlier answers lose their thoughts."""
OPENS_THOUGHT = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
"""What the model is asked to continue isn't what its answers look like."""
MOVES = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if loop.index0 == messages | length - 2 %}(rules) {% endif %}{{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Rules stand before the last question only."""
LAST_EOS = HEADERS.replace("\n{% endfor %}", "{% if loop.last %}{{ eos_token }}{% endif %}\n{% endfor %}")

ONE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
TWO = [*ONE, {"role": "user", "content": "So?"}, {"role": "assistant", "content": "No\nway"}]
RULES = [{"role": "system", "content": "Be kind"}, *TWO]


def tokenizer(template: str | None, *, words: bool = False) -> Any:
    """A token per character, or byte-level pieces of words with their blanks in front; special tokens as they are."""
    import string

    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if words:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merges = [("Ġ", "w"), ("a", "y"), ("Ġw", "ay"), ("Ċ", "Ċ"), ("Y", "e"), ("Ye", "s"), ("Ġ", "Yes")]
        pieces = [*alphabet, *("".join(pair) for pair in merges)]
        core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        core.decoder = decoders.ByteLevel()
        from tokenizers import processors

        core.post_processor = processors.ByteLevel(trim_offsets=True)
    else:
        letters = {letter: i for i, letter in enumerate(sorted(string.printable))}
        core = Tokenizer(models.WordLevel({**letters, "<unk>": len(letters)}, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template
    return fast


def taught(template: str, messages: Any, *, train_on: Any = "last", words: bool = False) -> list[str]:
    """The texts that are trained, in all sequences that a conversation becomes."""
    own = tokenizer(template, words=words)
    sequences = ConversationEncoder(own, train_on=train_on).encode_turns(messages)
    return [text for marked in sequences for text in trained_texts(own, marked)]


def trained_texts(own: Any, marked: MarkedTokens) -> list[str]:
    found: list[list[int]] = []
    for k, (token, trained) in enumerate(zip(marked.token_ids, marked.trained, strict=True)):
        if trained and k and marked.trained[k - 1]:
            found[-1].append(token)
        elif trained:
            found.append([token])
    return [own.decode(ids) for ids in found]


TEMPLATES = {
    "chatml": (CHATML, ["Yes<|im_end|>", "No\nway<|im_end|>"]),
    "qwen2.5": (QWEN, ["Yes<|im_end|>", "No\nway<|im_end|>"]),
    "smollm2": (SMOLLM, ["Yes<|im_end|>", "No\nway<|im_end|>"]),
    "llama3": (LLAMA, ["Yes<|eot_id|>", "No\nway<|eot_id|>"]),
    # The prompt ends with [/INST], and the model writes the blank itself.
    "no generation prompt": (INST, [" Yes</s>", " No\nway</s>"]),
    # Prompts end after the user's line: the model writes the header too, and in the end the end of sequence.
    "no special tokens": (HEADERS, ["ASSISTANT: Yes\n", "ASSISTANT: No\nway\n</s>"]),
    # The prompt has opened a thought, which an answer without one closes at once.
    "opens a thought": (OPENS_THOUGHT, ["\n</think>\n\nYes<|im_end|>", "\n</think>\n\nNo\nway<|im_end|>"]),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_assistants_words_and_its_end_token_are_taught(name: str) -> None:
    template, (first, last) = TEMPLATES[name]
    assert taught(template, TWO) == [last]
    assert taught(template, TWO, train_on="all") == [first, last]
    assert taught(template, ONE) == [first if name != "no special tokens" else first + "</s>"]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "no generation prompt"])
def test_a_system_message_changes_nothing(name: str) -> None:
    template, expected = TEMPLATES[name]
    assert taught(template, RULES, train_on="all") == expected


def test_the_tokens_are_those_of_the_whole_rendered_text() -> None:
    own = tokenizer(LLAMA, words=True)
    marked = ConversationEncoder(own).encode(TWO)
    assert list(marked.token_ids) == own.apply_chat_template(TWO, tokenize=True)["input_ids"]


def test_a_token_that_holds_the_blank_before_the_answer_is_taught_whole() -> None:
    assert taught(INST, ONE, words=True) == [" Yes</s>"]  # " Yes" is one token


def test_tokens_of_blanks_and_of_parts_of_a_letter_count_where_they_stand() -> None:
    answer = [ONE[0], {"role": "assistant", "content": " é 🙂\n\n"}]
    assert taught(CHATML, answer, words=True) == [" é 🙂\n\n<|im_end|>"]


def test_an_end_of_blanks_that_offsets_leave_out_is_taught() -> None:
    offsets = tokenizer(None, words=True)("Yes ", return_offsets_mapping=True)["offset_mapping"]
    assert offsets[-1] == (4, 4)  # this tokenizer trims blanks off its offsets
    assert taught(HEADERS.replace("\n{%", " {%"), ONE, words=True) == ["ASSISTANT: Yes </s>"]


def test_what_is_taught_begins_with_a_token_of_its_own_as_a_sampled_response_does() -> None:
    own = tokenizer(CHATML, words=True)  # "\n\n" is one token
    answer = [ONE[0], {"role": "assistant", "content": "\n Yes"}]
    assert taught(CHATML, answer, words=True) == ["\n Yes<|im_end|>"]
    prompt = own.apply_chat_template(answer[:1], add_generation_prompt=True, tokenize=True)["input_ids"]
    marked = ConversationEncoder(own).encode(answer)
    assert list(marked.token_ids[: marked.trained.index(True)]) == prompt


def test_a_template_that_trims_is_taught_as_it_writes() -> None:
    assert taught(LLAMA, [ONE[0], {"role": "assistant", "content": "  Yes \n"}]) == ["Yes<|eot_id|>"]


def test_what_the_model_itself_would_write_before_the_content_is_taught() -> None:
    assert taught(THINKS, ONE) == ["<think>\n\n</think>\n\nYes<|im_end|>"]
    thought = [ONE[0], {"role": "assistant", "content": "<think>\nhm</think>\n\nYes"}]
    assert taught(THINKS, thought) == ["<think>\nhm</think>\n\nYes<|im_end|>"]


def test_an_assistant_that_speaks_first_is_taught_too() -> None:
    first = [{"role": "assistant", "content": "Hello"}, *TWO]
    assert taught(CHATML, first, train_on="all") == ["Hello<|im_end|>", "Yes<|im_end|>", "No\nway<|im_end|>"]


@pytest.mark.parametrize("template", [THINKS, MOVES, LAST_EOS])
def test_a_turn_that_the_template_rewrites_later_is_taught_in_a_sequence_of_its_own(template: str) -> None:
    own = tokenizer(template)
    encoder = ConversationEncoder(own, train_on="all")
    first, both = encoder.encode_turns(TWO)
    assert first == ConversationEncoder(own).encode(ONE)  # as if nothing had followed
    assert both == ConversationEncoder(own).encode(TWO)
    assert len(taught(template, TWO)) == 1


def test_a_template_whose_frame_depends_on_the_content_is_refused() -> None:
    framed = "{% for m in messages %}{{ m.content | length }}> {{ m.content }}\n{% endfor %}"
    with pytest.raises(TemplateError, match="where message 2 .* begins and ends"):
        taught(framed, ONE)


def test_what_a_template_refuses_is_said() -> None:
    picky = "{% if messages | length > 2 %}{{ raise_exception('too many') }}{% endif %}" + CHATML
    with pytest.raises(TemplateError, match="refuses messages of user, assistant, user, assistant: too many"):
        taught(picky, TWO)


def test_two_tokens_of_beginning_are_refused() -> None:
    with pytest.raises(TemplateError, match="starts with '<s>' twice"):
        taught("{{ bos_token }}{{ bos_token }}" + CHATML, ONE)


def test_a_chat_template_needs_a_fast_tokenizer() -> None:
    own = tokenizer(CHATML)
    own.__class__ = type("Slow", (type(own),), {"is_fast": False})
    with pytest.raises(TemplateError, match=r"Slow .* needs a fast tokenizer"):
        ConversationEncoder(own)


def test_a_plain_template_is_prompt_then_response_then_the_end_token() -> None:
    own = tokenizer(None)
    marked = ConversationEncoder(own, template="Q: {prompt}\nA:").encode(ONE)
    assert own.decode(marked.token_ids) == "Q: Hi\nA:Yes</s>"
    assert trained_texts(own, marked) == ["Yes</s>"]
    assert marked.token_ids[-1] == own.eos_token_id


def test_a_plain_template_holds_one_exchange() -> None:
    with pytest.raises(TemplateError, match="4 messages doesn't fit a template with {prompt}"):
        ConversationEncoder(tokenizer(None), template="plain").encode(TWO)


def test_a_plain_template_needs_an_end_token() -> None:
    own = tokenizer(None)
    own.eos_token = None
    with pytest.raises(TemplateError, match="this tokenizer has none"):
        ConversationEncoder(own, template="plain")


WORDS = st.text(alphabet="ab Yes\n", min_size=1, max_size=8).filter(lambda text: text.strip() and text[0] != "\n")


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=2, max_size=6).filter(lambda texts: len(texts) % 2 == 0), st.booleans())
def test_every_answer_is_taught_and_nothing_else(texts: list[str], words: bool) -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    assert taught(CHATML, messages, train_on="all", words=words) == [text + "<|im_end|>" for text in texts[1::2]]


NO_TOOLS = CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'")
NO_RULES = INST.replace("{% else %}", "{% elif m.role == 'assistant' %}")
SHOWS_ANSWERS_ONLY = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
TOOL = [{"role": "tool", "content": "42"}]
THOUGHT = [ONE[0], {"role": "assistant", "content": "<think>why</think> Yes"}]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (NO_TOOLS, [*ONE, *TOOL, TWO[-1]], r"leaves out message 3 \(role tool\)"),
        (NO_RULES, RULES, r"leaves out message 1 \(role system\)"),
        (SHOWS_ANSWERS_ONLY, THOUGHT, r"leaves out message 2 \(role assistant\), or a part of it"),
    ],
)
def test_what_the_template_leaves_out_is_missed(template, messages, message):
    with pytest.raises(TemplateError, match=message):
        ConversationEncoder(tokenizer(template)).encode(messages)
    ConversationEncoder(tokenizer(THINKS), train_on="last").encode([*THOUGHT, *TWO])  # earlier thoughts may go
