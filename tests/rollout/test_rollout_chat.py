"""Carried tokens are those of the tokenizer's own rendering, under every template that only adds to a conversation."""

from __future__ import annotations

import pytest
from chat_tokenizers import (
    CHATML,
    QWEN25,
    TEMPLATES,
    Script,
    ScriptedEnv,
    bpe_tokenizer,
    conversation,
    group_of,
    ids_of,
    play,
    rendered,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.templates import TemplateError, render_chat
from roll.envs.base import Message, Observation
from roll.pipelines.rollouts.assemble import assemble
from roll.rollout.agent import Agent
from roll.rollout.chat_checks import check_template
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.conversation import ConversationRollout
from roll.rollout.plain_text import PlainText

QUICK = settings(max_examples=25, deadline=None, derandomize=True)
LETTERS = st.text(alphabet="abUp é\n#P_<>{}/.?1", max_size=12)
ENDS = {"chatml": "<|im_end|>", "qwen2.5": "<|im_end|>", "llama3": "<|eot_id|>", "smollm2": "<|im_end|>"}
OPENS = dict.fromkeys(ENDS, "<|im_start|>assistant\n")
OPENS["llama3"] = "<|start_header_id|>assistant<|end_header_id|>\n\n"


@st.composite
def turns(draw):
    """What is shown, what is answered (no blanks around it, or it wouldn't round-trip), and whether it ended itself."""
    answer = LETTERS.map(lambda text: f"x{text.strip()}y")
    return draw(st.lists(st.tuples(LETTERS, answer, st.booleans()), min_size=1, max_size=4))


def span_mask(tokenizer, text, opening, answers):
    """Token mask of the answers, found by character in the whole text."""
    spans, at = [], 0
    for answer in answers:
        at = text.index(opening, at) + len(opening)
        assert text.startswith(answer, at)
        spans.append((at, at + len(answer)))
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return [any(start <= a and b <= end for start, end in spans) for a, b in offsets]


@pytest.mark.parametrize("name", TEMPLATES)
@given(system=st.none() | LETTERS, played=turns())
@QUICK
def test_an_episodes_tokens_and_mask_are_those_of_the_whole_conversation_rendered(name, system, played):
    tokenizer = bpe_tokenizer(name)
    end = ENDS[name]
    engines = Script(tokenizer, *[(a + end * ended, "stop" if ended else "length") for _, a, ended in played])
    agent = Agent(tokenizer, chat=True)
    rollout = ConversationRollout(agent, conversation(instructions=system or ""))
    trajectory = play(engines, ScriptedEnv(*[shown for shown, _, _ in played]), rollout, agent)

    messages = [Message("system", system)] if system else []
    for (shown, answer, _), context in zip(played, engines.contexts, strict=True):
        messages.append(Message("user", shown))
        assert context == ids_of(tokenizer, rendered(tokenizer, messages))
        messages.append(Message("assistant", answer))

    # Nothing is added to the last response: no closing token if it was cut, nor what the template writes after one.
    whole = rendered(tokenizer, messages, opens=False)
    whole = whole[: whole.rindex(end) + len(end) * played[-1][2]]
    batch = assemble([group_of(trajectory)]).batch
    assert tuple(batch.token_ids.tolist()) == ids_of(tokenizer, whole)
    chosen = [answer + end * ended for _, answer, ended in played]
    assert batch.action_mask.tolist() == span_mask(tokenizer, whole, OPENS[name], chosen)
    assert trajectory.status == "ok" and trajectory.reward == len(played)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_bundled_shapes_of_templates_carry(name):
    check_template(bpe_tokenizer(name), ("<reason>", "</reason>"))


STRIPS_THOUGHTS = CHATML.replace(
    "m.content", "(m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content)"
)
NUMBERS = CHATML.replace("m.role +", "m.role + loop.index | string +")
COUNTS_BACK = CHATML.replace("m.role +", "m.role + loop.revindex | string +")
OPENS_OTHERWISE = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\nWell: ")
FORGETS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
LAST_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content }}{% endif %}<|im_start|>{{ m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (STRIPS_THOUGHTS, r"rewrites what earlier responses thought .*<think>"),
        (NUMBERS, "rewrites earlier messages"),
        (COUNTS_BACK, "rewrites earlier messages"),
        (OPENS_OTHERWISE, "rewrites earlier messages: where the policy saw .*Well: "),
        (LAST_SYSTEM, "rewrites earlier messages"),
        (FORGETS, "doesn't show earlier responses"),
        (None, "has no chat template"),
    ],
)
def test_a_template_that_rewrites_history_is_refused_with_a_way_out(template, message):
    with pytest.raises(TemplateError, match=message) as caught:
        check_template(bpe_tokenizer(template))
    assert template is None or "sample_unit: step" in str(caught.value)


def test_thoughts_between_tags_of_the_users_own_are_looked_for_too():
    template = STRIPS_THOUGHTS.replace("</think>", "</reason>")
    check_template(bpe_tokenizer(template))
    with pytest.raises(TemplateError, match="<reason>"):
        check_template(bpe_tokenizer(template), ("<reason>", "</reason>"))


def test_a_template_without_system_messages_carries_but_says_so_when_given_one():
    tokenizer = bpe_tokenizer(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + CHATML
    )
    check_template(tokenizer)
    with pytest.raises(TemplateError, match=r"system, user: no system here.*system_template to null"):
        ConversationRollout(Agent(tokenizer, chat=True), conversation(system_template="Play."))


NO_SYSTEM = CHATML.replace("for m in messages", "for m in messages if m.role != 'system'")
NO_TOOL = CHATML.replace("for m in messages", "for m in messages if m.role != 'tool'")


def test_a_message_that_the_template_leaves_out_is_missed():
    with pytest.raises(TemplateError, match=r"leaves out a message of role system: 'Play\.'.*system_template to null"):
        ConversationRollout(Agent(bpe_tokenizer(NO_SYSTEM)), conversation(system_template="Play."))
    tokenizer = bpe_tokenizer(NO_TOOL)
    reply = Agent(tokenizer).reply(Observation((Message("tool", "RESULT 42"),)), ())
    assert "<|im_start|>user\n<tool_response>\nRESULT 42\n</tool_response><|im_end|>" in tokenizer.decode(reply)
    # Mistral's moves the system message to the last question; Llama's trims.
    moved = ChatTemplate(bpe_tokenizer(LAST_SYSTEM)).text([Message("system", "S."), Message("user", " at 0\n")])
    assert "S." in moved


def test_a_template_that_opens_a_thought_opens_it_for_the_reader_too():
    opens = bpe_tokenizer(CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"))
    tags = ("<think>", "</think>")
    assert Agent(opens).forced_think_prefix(tags) == "<think>"
    assert Agent(opens).forced_think_prefix(None) == ""
    assert Agent(opens, chat=False).forced_think_prefix(tags) == ""
    closed = bpe_tokenizer(CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think></think>"))
    assert Agent(closed).forced_think_prefix(tags) == Agent(bpe_tokenizer("chatml")).forced_think_prefix(tags) == ""


def test_tags_that_are_left_out_of_responses_are_refused():
    with pytest.raises(ValueError, match=r"thinking_tags: '<\|im_start\|>' is a special token"):
        Agent(bpe_tokenizer("chatml")).forced_think_prefix(("<|im_start|>", "</t>"))


def test_the_date_is_the_same_every_day():
    assert "Today Date: 26 Jul 2024" in ChatTemplate(bpe_tokenizer("llama3")).text([Message("user", "?")])


def test_a_template_has_its_dates_and_its_first_line_end():
    template = (
        "\n{% for m in messages %}{{ strftime_now('%A') }} {{ strftime_now( \"%Y\" ) }} {{ m.content }}{% endfor %}"
    )
    text = render_chat(bpe_tokenizer(CHATML), [{"role": "user", "content": "hello"}], template=template)
    assert text == "\nFriday 2024 hello"
    unknown = "{% set how = '%Y' ~ '!' %}{{ strftime_now(how) }}"
    assert render_chat(bpe_tokenizer(CHATML), [{"role": "user", "content": "x"}], template=unknown) == "26 Jul 2024"


def test_tool_messages_are_rendered_with_their_roles():
    tokenizer = bpe_tokenizer(QWEN25)
    news = (Message("tool", "7"), Message("tool", "8"), Message("user", "and?"))
    agent = Agent(tokenizer, chat=True)
    start = agent.prompt([Message("user", "add")])
    response = ids_of(tokenizer, "calls<|im_end|>")
    conversation = [Message("user", "add"), Message("assistant", "calls"), *news]
    expected = ids_of(tokenizer, rendered(tokenizer, conversation))
    assert (*start, *response, *agent.reply(Observation(news), response)) == expected
    assert "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n8" in tokenizer.decode(expected)


def test_a_response_that_another_stop_token_ended_is_closed_too():
    # It ended with <|endoftext|>, which the template doesn't write: the next message must begin after a closed one.
    tokenizer = bpe_tokenizer(CHATML)
    reply = ChatTemplate(tokenizer).reply([Message("user", "x")], ids_of(tokenizer, "yes<|endoftext|>"))
    assert tokenizer.decode(reply) == "<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"


def test_a_space_before_the_closing_token_isnt_written_after_a_response_that_closed_itself():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|> ' + m.content + ' <|end_header_id|>' }}"
        "{% else %}{{ m.content + ' <|eot_id|>' }}{% endif %}{% endfor %}"
    )
    tokenizer = bpe_tokenizer(template)
    check_template(tokenizer)
    chat = ChatTemplate(tokenizer)
    closed = chat.reply([Message("user", "x")], ids_of(tokenizer, "yes<|eot_id|>"))
    assert tokenizer.decode(closed) == "<|im_start|> x <|end_header_id|>"
    cut = chat.reply([Message("user", "x")], ids_of(tokenizer, "yes"))
    assert tokenizer.decode(cut) == " <|eot_id|><|im_start|> x <|end_header_id|>"


def test_a_template_without_special_tokens_drops_nothing():
    tokenizer = bpe_tokenizer("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}assistant: ")
    reply = ChatTemplate(tokenizer).reply([Message("user", "x")], ids_of(tokenizer, "a\n"))
    assert tokenizer.decode(reply) == "\nuser: x\nassistant: "


def test_a_tokenizer_that_puts_a_space_before_texts_puts_none_into_replies():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "▁", "a", "b", "\n", ":", "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{{ '<s>' }}{% for m in messages %}{{ m.content + '\n:' }}{% endfor %}"
    chat = ChatTemplate(fast)
    carried = (*chat.prompt([Message("user", "ab")]), *ids_of(fast, "b")[1:], *chat.reply([Message("user", "a")], (3,)))
    whole = [Message("user", "ab"), Message("assistant", "b"), Message("user", "a")]
    assert carried == ids_of(fast, rendered(fast, whole))


def test_plain_texts_are_joined_after_the_token_that_begins_a_text():
    tokenizer = bpe_tokenizer(None)
    messages = [Message("system", "Play. "), Message("user", "#P_")]
    assert PlainText(tokenizer).prompt(messages) == ids_of(tokenizer, "Play. #P_")
    assert PlainText(tokenizer).reply(messages[1:], (1,)) == ids_of(tokenizer, "#P_")


def test_a_turns_rendering_costs_the_same_however_long_the_episode_is(monkeypatch):
    tokenizer = bpe_tokenizer("qwen2.5")
    agent = Agent(tokenizer, chat=True)
    rollout = ConversationRollout(agent, conversation(max_steps=100))
    sizes = []
    render = ChatTemplate.text

    def counted(self, messages, tools=()):
        sizes.append(len(messages))
        return render(self, messages)

    monkeypatch.setattr(ChatTemplate, "text", counted)
    play(Script(tokenizer, *[("Up<|im_end|>", "stop")] * 50), ScriptedEnv(*["#P_"] * 50), rollout, agent)
    assert sizes == [1] + [3] * 49
