"""An episode that answers calls: tokens as sampled, budgets, roles, names of models, what of a request may act."""

from __future__ import annotations

import asyncio

import pytest
from tiny_models import char_tokenizer

from roll.gateway.base import ChatCall, RefusedCall
from roll.gateway.protocols import wire_formats
from roll.gateway.reading import ResponseReader
from roll.gateway.session import EpisodeSession, SessionSettings
from roll.rollout.agent import Agent
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.episode import Episode, EpisodeKey
from roll.rollout.message_graph import MessageGraph
from roll.strategies.base import Completion, SamplingParams
from roll.types.chat import Message, ToolCall, ToolSpec
from roll.types.trajectory import Task

TOKENIZER = char_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
TOOL = ToolSpec("weather", "of a city", {"type": "object", "properties": {"city": {"type": "string"}}})


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False).input_ids)


class Engines:
    """Says what it is told to, one reply after another; None: the scheduler stops the episode."""

    def __init__(self, *replies: str | None) -> None:
        self.replies = list(replies)
        self.requests = []

    async def generate(self, episode, request):
        self.requests.append(request)
        reply = self.replies.pop(0)
        await asyncio.sleep(0)
        ids = () if reply is None else (*ids_of(reply), END)[: request.params.max_new_tokens]
        reason = "abort" if reply is None else "stop" if ids[-1] == END else "length"
        n = len(ids)
        return Completion(id=request.id, token_ids=ids, logprobs=(-0.5,) * n, versions=(0,) * n, finish_reason=reason)

    def mark_busy(self, episode, doing):
        pass

    def give_up(self, episode):
        pass


def make(*replies, tool_parser="hermes", thinking_tags=None, length=2000, max_new_tokens=100, **settings):
    engines, agent = Engines(*replies), Agent(TOKENIZER)
    task = Task(id="t", source="s", payload={}, seed=0, tag="a", domain="a")
    key = EpisodeKey(seed=1, purpose="train", step=1, position=0, member=0)
    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.7)
    episode = Episode(engines, agent, None, task, key, params, length)
    reading = ResponseReader(
        decode=lambda ids: agent.decode_response(ids, ()),
        token_text=lambda token: TOKENIZER.decode([token]),
        tool_parser=tool_parser,
        thinking_tags=thinking_tags,
    )
    session = EpisodeSession(episode, MessageGraph(ChatTemplate(TOKENIZER)), reading, SessionSettings(**settings))
    return session, episode, engines


def ask(*messages: Message, **options) -> ChatCall:
    return ChatCall(**{"model": "policy", "messages": messages, **options})


def run(coroutine):
    return asyncio.run(coroutine)


def refused(session, call) -> RefusedCall:
    with pytest.raises(RefusedCall) as caught:
        run(session.complete(call))
    return caught.value


HELLO = Message("user", "hello")


def test_a_conversation_is_one_branch_of_the_tokens_that_were_sampled():
    session, episode, engines = make("one", "two")
    first = run(session.complete(ask(HELLO))).choices[0]
    assert (first.message, first.reason) == (Message("assistant", "one"), "stop")
    assert first.token_ids == (*ids_of("one"), END)
    answer = run(session.complete(ask(HELLO, first.message, Message("user", "more"))))
    episode.finish(1.0)
    played = episode.finished()
    (branch,) = played.contexts
    sampled = [turn.response_ids for turn in branch]
    assert sampled == [first.token_ids, answer.choices[0].token_ids]
    # The engine was shown exactly what the row has before the second response.
    assert engines.requests[1].prompt_ids == (*branch[0].prompt_ids, *branch[0].response_ids, *branch[1].prompt_ids)
    assert answer.prompt_tokens == len(engines.requests[1].prompt_ids)
    shown = TOKENIZER.decode(engines.requests[1].prompt_ids)
    assert shown == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\none<|im_end|>\n<|im_start|>user\nmore" \
        "<|im_end|>\n<|im_start|>assistant\n"  # fmt: skip
    assert (session.calls, session.sampled_tokens, session.last_answer.content) == (2, 8, "two")


def test_n_responses_are_siblings_with_keys_of_their_own():
    session, episode, engines = make("one", "two", "three")
    answer = run(session.complete(ask(HELLO, n=2, top_logprobs=0)))
    assert [choice.message.content for choice in answer.choices] == ["one", "two"]
    assert answer.choices[0].tokens == ("o", "n", "e", "<|im_end|>")
    assert len({request.seed for request in engines.requests}) == 2
    run(session.complete(ask(HELLO, answer.choices[1].message, Message("user", "go on"))))
    episode.finish(0.0)
    assert [[turn.response_ids for turn in branch] for branch in episode.finished().contexts] == [
        [(*ids_of("one"), END)], [(*ids_of("two"), END), (*ids_of("three"), END)],
    ]  # fmt: skip


def test_a_seed_of_the_client_is_mixed_into_the_episodes_key():
    seeds = []
    for seed in (None, 1, 2, 1):
        session, _, engines = make("one")
        run(session.complete(ask(HELLO, seed=seed)))
        seeds.append(engines.requests[0].seed)
    assert seeds[1] == seeds[3] and len(set(seeds)) == 3


def test_tool_calls_are_read_off_a_response_and_go_back_as_they_were_sampled():
    said = 'let me see<tool_call>\n{"name": "weather", "arguments": {"city":  "Rome"}}\n</tool_call>'
    session, episode, engines = make(said, "sunny", said)
    first = run(session.complete(ask(HELLO, tools=(TOOL,)))).choices[0]
    assert first.reason == "tool_calls" and first.message.content == "let me see"
    (call,) = first.message.tool_calls
    assert (call.name, call.arguments) == ("weather", '{"city":  "Rome"}')
    # The client parses and writes arguments anew, with its own ids.
    back = Message("assistant", "let me see", tool_calls=(ToolCall("x", "weather", '{"city": "Rome"}'),))
    result = Message("tool", "25 degrees", tool_call_id="x", name="weather")
    run(session.complete(ask(HELLO, back, result, tools=(TOOL,))))
    episode.finish(1.0)
    assert len(episode.finished().contexts) == 1
    assert said in TOKENIZER.decode(engines.requests[1].prompt_ids)
    without = run(session.complete(ask(HELLO))).choices[0]
    assert without.message.content == said and without.reason == "stop"


def test_at_most_one_call_where_the_client_takes_no_more():
    one = '<tool_call>{"name": "weather"}</tool_call>'
    session, _, _ = make(one + one, one + one)
    assert len(run(session.complete(ask(HELLO, tools=(TOOL,)))).choices[0].message.tool_calls) == 2
    call = ask(HELLO, tools=(TOOL,), parallel_tool_calls=False)
    assert len(run(session.complete(call)).choices[0].message.tool_calls) == 1


def test_thoughts_are_kept_apart_where_tags_are_configured():
    session, _, _ = make("<think>hm</think>yes", thinking_tags=("<think>", "</think>"))
    message = run(session.complete(ask(HELLO))).choices[0].message
    assert (message.reasoning, message.content) == ("hm", "yes")


def test_an_edited_history_is_a_branch_and_is_counted():
    session, episode, _ = make("one", "two")
    run(session.complete(ask(HELLO)))
    run(session.complete(ask(HELLO, Message("assistant", "another"), Message("user", "more"))))
    episode.finish(1.0)
    played = episode.finished()
    assert len(played.contexts) == 2
    assert played.counts == {"agent/mismatch_edited": 1}


def test_an_answer_that_the_agent_leaves_out_is_counted():
    session, episode, _ = make("hm", "two", "three", "four")
    system, complaint = Message("system", "be brief"), Message("user", "call a tool!")
    run(session.complete(ask(system, HELLO)))
    second = run(session.complete(ask(system, HELLO, complaint))).choices[0].message  # as if there had been no answer
    run(session.complete(ask(system, HELLO, complaint, second, Message("user", "more"))))
    run(session.complete(ask(system, HELLO)))  # asked again: nothing goes on from there
    episode.finish(1.0)
    assert episode.finished().counts == {"agent/mismatch_dropped_response": 1}


@pytest.mark.parametrize("by", ["model", "system message"])
def test_a_call_beside_the_task_is_answered_and_neither_trained_nor_counted(by):
    session, episode, engines = make(
        "A title", "one", "Titles", "Titles", max_calls=2, max_tokens=8, side_models=frozenset({"small"}),
        side_prompts=("You name things.",),
    )  # fmt: skip
    side = ask(HELLO, model="small") if by == "model" else ask(Message("system", "Hi! You name things."), HELLO)
    answer = run(session.complete(side))
    assert (answer.choices[0].message.content, answer.sampled) == ("A title", 8)
    assert (session.calls, session.sampled_tokens, session.side_calls, session.last_answer) == (0, 0, 1, None)
    first = run(session.complete(ask(HELLO)))
    seed = engines.requests[1].seed
    run(session.complete(side))
    why = refused(session, side)  # there are as many as calls
    assert (why.status, why.code, session.spent) == (429, "insufficient_quota", "")
    assert not session.insists.is_set.is_set()
    episode.finish(1.0)
    played = episode.finished()
    assert [turn.response_ids for turn in played.turns] == [first.choices[0].token_ids]
    assert played.counts == {"agent/side_calls": 2}
    alone, _, engines = make("one")
    run(alone.complete(ask(HELLO)))
    assert engines.requests[0].seed == seed  # what is trained is drawn as without the calls beside it


def test_responses_whose_text_has_other_tokens_are_counted_when_the_episode_ends(monkeypatch):
    session, episode, _ = make("one", "two", "three")
    told = [HELLO]
    for _ in range(3):
        answer = run(session.complete(ask(*told)))
        told += [answer.choices[0].message, Message("user", "more")]
    monkeypatch.setattr(ChatTemplate, "encode_after", lambda self, text: ())  # any tokens but the sampled ones
    session.count_retokenised()
    session.count_retokenised()  # nothing more
    episode.finish(1.0)
    assert episode.finished().counts == {"agent/mismatch_retokenised": 2}  # nothing went on from the third


def test_stop_strings_and_token_limits_reach_the_engine_and_the_text_ends_before_the_stop():
    session, _, engines = make("one. two", "a long story")
    choice = run(session.complete(ask(HELLO, stop=("!", ". ")))).choices[0]
    assert (choice.message.content, choice.stop_string, choice.reason) == ("one", ". ", "stop")
    assert engines.requests[0].params.stop_strings == ("!", ". ")
    cut = run(session.complete(ask(HELLO, max_tokens=5))).choices[0]
    assert (cut.message.content, cut.reason) == ("a lon", "length")
    assert engines.requests[0].params.max_new_tokens == 100  # the run's own limit


@pytest.mark.parametrize(
    ("options", "field"), [({"temperature": 0.0}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"top_k": 5}, "top_k"),
                           ({"repetition_penalty": 1.1}, "repetition_penalty")],
)  # fmt: skip
def test_an_episode_is_not_sampled_otherwise_than_its_run_says(options, field):
    session, _, engines = make("one")
    why = refused(session, ask(HELLO, **options))
    assert (why.status, why.field) == (400, field)
    assert not engines.requests and session.calls == 0
    run(session.complete(ask(HELLO, temperature=0.7, top_p=1.0, top_k=0, repetition_penalty=1.0)))


def test_budgets_of_calls_and_tokens_end_an_episode_with_429():
    session, _, _ = make("one", "two", max_calls=1)
    run(session.complete(ask(HELLO)))
    why = refused(session, ask(HELLO))
    assert (why.status, why.again) == (429, False) and "max_calls" in session.spent
    session, _, engines = make("one", "two", "three", max_tokens=6)
    run(session.complete(ask(HELLO)))
    run(session.complete(ask(HELLO)))
    assert [request.params.max_new_tokens for request in engines.requests] == [6, 2]
    assert refused(session, ask(HELLO)).status == 429
    assert "max_tokens" in session.spent and session.sampled_tokens == 6


def test_calls_under_way_hold_their_part_of_the_budget():
    session, _, engines = make("one", "two", max_tokens=150)

    async def both():
        return await asyncio.gather(
            session.complete(ask(HELLO)), session.complete(ask(HELLO)), session.complete(ask(HELLO)),
            return_exceptions=True,
        )  # fmt: skip

    *answers, third = run(both())
    assert [request.params.max_new_tokens for request in engines.requests] == [100, 50]
    assert (third.status, third.again) == (429, True) and not session.spent
    assert all(len(answer.choices) == 1 for answer in answers)


def test_a_context_without_room_is_refused_as_the_original_does():
    session, _, _ = make("one", length=20)
    why = refused(session, ask(HELLO))
    assert (why.status, why.code) == (400, "context_length_exceeded")
    assert "maximum context length is 20 tokens" in session.spent
    assert (session.calls, why.limit) == (0, 20)


def test_an_agent_that_goes_on_with_a_shorter_context_has_spent_nothing():
    session, _, _ = make("one", "two", length=50, max_calls=2)
    assert refused(session, ask(Message("user", "hello" * 20))).code == "context_length_exceeded"
    assert session.spent
    run(session.complete(ask(HELLO)))
    assert not session.spent
    run(session.complete(ask(HELLO)))
    assert refused(session, ask(HELLO)).status == 429 and "max_calls" in session.spent


def test_a_call_that_its_client_cancels_is_not_counted():
    session, _, engines = make("one", "two", max_calls=1)
    engines.generate, answered = lambda *_: asyncio.sleep(60), engines.generate

    async def leaves():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(session.complete(ask(HELLO)), 0.01)

    run(leaves())
    engines.generate = answered
    assert (session.calls, session.spent) == (0, "")
    run(session.complete(ask(HELLO)))
    assert refused(session, ask(HELLO)).status == 429


@pytest.mark.parametrize("wanted", ["budget", "context"])
def test_an_agent_insists_once_it_asks_again_later_for_what_it_was_refused(monkeypatch, wanted):
    session, _, _ = make("one", "two", length=50, max_calls=1 if wanted == "budget" else 9)
    call = ask(HELLO) if wanted == "budget" else ask(Message("user", "hello" * 20))
    if wanted == "budget":
        run(session.complete(call))
    now = [100.0]
    monkeypatch.setattr("roll.gateway.budget.time.monotonic", lambda: now[0])
    for _ in range(3):  # calls that were sent together
        refused(session, call)
    assert not session.insists.is_set.is_set()
    now[0] += 1
    if wanted == "context":  # it was made shorter, though not enough
        refused(session, ask(Message("user", "hello" * 19)))
        assert not session.insists.is_set.is_set()
        now[0] += 1
    refused(session, call)
    assert session.insists.is_set.is_set()
    if wanted == "context":
        run(session.complete(ask(HELLO)))
        assert not session.insists.is_set.is_set() and not session.spent


def test_an_answer_that_was_lost_is_given_again_and_not_sampled_anew():
    session, episode, _ = make("one", "two", "three", max_calls=3)
    sent, other = {"body_hash": b"1"}, {"body_hash": b"2"}
    first = run(session.complete(ask(HELLO, **sent)))
    assert run(session.complete(ask(HELLO, **sent, repeated=True))) is first
    assert run(session.complete(ask(HELLO, **sent, repeated=True))) is first
    assert run(session.complete(ask(HELLO, **sent))) is not first  # the same on purpose: another sample
    third = run(session.complete(ask(HELLO, **other, repeated=True)))  # nothing of it was answered
    assert third.choices[0].message.content == "three"
    assert refused(session, ask(HELLO)).status == 429
    assert run(session.complete(ask(HELLO, **other, repeated=True))) is third  # also when the budget is spent
    episode.finish(1.0)
    assert (len(episode.finished().turns), session.calls) == (3, 3)


def test_of_equal_requests_the_one_that_was_not_answered_is_sampled_when_it_is_repeated():
    session, _, engines = make("one", "two")
    sent = {"body_hash": b"1"}
    run(session.complete(ask(HELLO, **sent)))
    engines.replies.insert(0, None)  # the engine lets the second one down
    refused(session, ask(HELLO, **sent))
    assert run(session.complete(ask(HELLO, **sent, repeated=True))).choices[0].message.content == "two"


def test_ids_of_tool_calls_are_unique_in_an_episode_also_when_the_history_gets_shorter():
    said = '<tool_call>{"name": "weather"}</tool_call>'
    session, _, _ = make(*[said] * 5)
    ids, history = [], [HELLO]
    for _ in range(3):
        message = run(session.complete(ask(*history, tools=(TOOL,)))).choices[0].message
        ids += [call.id for call in message.tool_calls]
        history = [HELLO, message, Message("tool", "fine", tool_call_id=ids[-1])]  # the first rounds are left out
    assert ids == ["call00000", "call00001", "call00002"]
    answer = run(session.complete(ask(HELLO, tools=(TOOL,), n=2)))
    ids += [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 5
    made_up = Message("assistant", "", tool_calls=(ToolCall("call00000", "weather", "{}"),))
    session, _, _ = make(said)
    history = [HELLO, made_up, Message("tool", "fine", tool_call_id="call00000")]
    (call,) = run(session.complete(ask(*history, tools=(TOOL,)))).choices[0].message.tool_calls
    assert call.id != "call00000"


def test_an_episode_that_is_given_up_answers_409():
    session, episode, _ = make(None)
    assert refused(session, ask(HELLO)).status == 409
    episode.end()
    assert refused(session, ask(HELLO)).status == 409


def test_names_of_models_are_the_policys_its_roles_or_refused():
    session, episode, _ = make("one", "two", "three", names=("tiny",))
    run(session.complete(ask(HELLO, model="policy/planner")))
    run(session.complete(ask(HELLO, model="tiny")))
    why = refused(session, ask(HELLO, model="gpt-4o"))
    assert (why.status, why.code) == (404, "model_not_found") and "policy, tiny" in str(why)
    assert refused(session, ask(HELLO, model="policy/" + "x" * 65)).status == 404
    episode.finish(0.0)
    assert {turn.role for turn in episode.finished().turns} == {"planner", ""} == session.roles
    session, _, _ = make("one", any_name=True)
    run(session.complete(ask(HELLO, model="gpt-4o")))


def test_another_model_answers_without_a_turn_of_the_episode():
    judge, _, _ = make("as the judge says", names=("judge",))
    session, episode, _ = make(models={"judge": judge}, max_calls=0)
    answer = run(session.complete(ask(HELLO, model="judge")))
    assert answer.choices[0].message.content == "as the judge says"
    assert (session.calls, session.models) == (0, ("policy", "judge"))
    assert run(session.count(ask(HELLO, model="judge"))) == run(session.count(ask(HELLO)))
    assert not episode.finished().turns


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
def test_where_any_name_is_the_policys_the_names_of_roles_and_of_other_models_still_act(route):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1} if route != "responses" else {"input": "x"}
    wire = wire_formats()[route]
    asked = [wire.read({**body, "model": name}, {"model"}).call.model for name in ("judge", "policy/planner", "gpt-4o")]
    assert asked == ["judge", "policy/planner", "gpt-4o"]
    assert wire.read({**body, "model": 3}, {"model"}).call.model == ""


@pytest.mark.parametrize("route", ["chat/completions", "messages", "responses"])
def test_tools_that_come_with_every_request_are_read_once_and_again_when_they_change(route):
    def body(schema, *names):
        name = {"messages": "input_schema"}.get(route, "parameters")
        tools = [{"name": each, name: schema} for each in names]
        if route == "chat/completions":
            tools = [{"type": "function", "function": tool} for tool in tools]
        elif route == "responses":
            tools = [{"type": "function", "strict": False, **tool} for tool in tools]
        said = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        return {"model": "policy", "tools": tools, **({"input": "x"} if route == "responses" else said)}

    wire, schema = wire_formats()[route], {"type": "object", "properties": {}, "additionalProperties": True}

    def tools(*arguments):
        return wire.read(body(*arguments), ()).call.tools

    first = tools(schema, "look")
    assert tools(dict(schema), "look") is first
    assert [tool.name for tool in tools(schema, "look", "go")] == ["look", "go"]
    other = tools({**schema, "additionalProperties": 1}, "look")  # equal to True in Python, and other JSON
    assert other[0].parameters["additionalProperties"] is not True
    for _ in range(2):
        with pytest.raises(RefusedCall, match="a second tool with the name 'look'"):
            tools(schema, "look", "look")


def test_what_the_template_does_not_take_is_the_clients_mistake():
    session, _, _ = make("one")
    session._graph = MessageGraph(ChatTemplate(TOKENIZER))
    TOKENIZER.chat_template, before = "{{ raise_exception('no') }}", TOKENIZER.chat_template
    try:
        why = refused(session, ask(HELLO))
    finally:
        TOKENIZER.chat_template = before
    assert (why.status, why.field) == (400, "messages")


BEGUN = Message("assistant", "The answer ")


def test_a_response_goes_on_from_what_the_client_has_begun_and_is_trained_from_there():
    session, episode, engines = make("is 4.", "Yes.")
    first = run(session.complete(ask(HELLO, BEGUN, continues=True))).choices[0]
    assert first.message == Message("assistant", "is 4.")  # the beginning is the client's own
    asked = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nThe answer "
    assert TOKENIZER.decode(engines.requests[0].prompt_ids) == asked
    # Sent back as one message it is the same turn, and the next one goes on from its tokens.
    whole = Message("assistant", "The answer is 4.")
    run(session.complete(ask(HELLO, whole, Message("user", "sure?"))))
    shown = f"{asked}is 4.<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(engines.requests[1].prompt_ids) == shown
    episode.finish(1.0)
    (branch,) = episode.finished().contexts
    assert [turn.response_ids for turn in branch] == [(*ids_of("is 4."), END), (*ids_of("Yes."), END)]
    assert TOKENIZER.decode(branch[0].prompt_ids) == asked
    assert not [name for name in episode.finished().counts if "mismatch" in name]


def test_a_beginning_in_the_middle_of_a_conversation_continues_its_tokens():
    session, episode, engines = make("one", "two")
    first = run(session.complete(ask(HELLO))).choices[0]
    run(session.complete(ask(HELLO, first.message, Message("user", "more"), BEGUN, continues=True)))
    assert TOKENIZER.decode(engines.requests[1].prompt_ids).endswith(
        "more<|im_end|>\n<|im_start|>assistant\nThe answer "
    )
    episode.finish(1.0)
    (branch,) = episode.finished().contexts
    assert len(branch) == 2 and branch[0].response_ids == (*ids_of("one"), END)


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (Message("assistant", "", (ToolCall("a", "weather", "{}"),)), "must be text of the assistant's"),
        (Message("assistant", " \n"), "must be text of the assistant's"),
    ],
)
def test_what_no_response_can_go_on_from_is_refused(begun, said):
    session, *_ = make("one")
    error = refused(session, ask(HELLO, begun, continues=True))
    assert (error.status, error.field) == (400, "messages") and said in str(error)


def test_a_template_that_opens_a_thought_reads_it_apart_without_tags_and_no_call_in_it_is_made(monkeypatch):
    opens = TOKENIZER.chat_template.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%")
    assert opens != TOKENIZER.chat_template
    monkeypatch.setattr(TOKENIZER, "chat_template", opens)
    agent = Agent(TOKENIZER)
    tags = agent.thought_tags(None)
    assert tags == ("<think>", "</think>") and agent.forced_think_prefix(tags) == "<think>"
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    reading = ResponseReader(
        decode=lambda ids: agent.decode_response(ids, ()), token_text=str, tool_parser="hermes", thinking_tags=tags,
        opened=agent.forced_think_prefix(tags), marks=agent.marks,
    )  # fmt: skip

    def read(text, **options):
        ids = ids_of(text)
        done = Completion(
            id="r", token_ids=ids, logprobs=(0.0,) * len(ids), versions=(0,) * len(ids), finish_reason="stop"
        )
        return reading.choice(ask(HELLO, tools=(TOOL,), **options), done).message

    thought = read(f"I could {call}.\n</think>\n\nNo.")
    assert (thought.content, thought.tool_calls) == ("No.", ()) and thought.reasoning.startswith("I could")
    assert [made.name for made in read(f"Hm.</think>\n\n{call}").tool_calls] == ["weather"]
    assert read(f"I could {call}").tool_calls == ()  # cut off inside of the thought
    assert read("is 4.", continues=True).content == "is 4."


def test_an_episodes_history_that_the_template_leaves_out_is_refused_or_said_once(monkeypatch, caplog):
    # Like Llama 3.1's: one call per message, no text beside it, and tools in the first message, whoever's it is.
    llama = (
        "{% if tools %}{{ '[user]' + messages[0].content + tools[0].function.name + '<|im_end|>' }}"
        "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}{% if m.tool_calls %}"
        "{{ '[assistant]' + m.tool_calls[0].function.name + '<|im_end|>' }}{% else %}"
        "{{ '[' + m.role + ']' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
    )
    monkeypatch.setattr(TOKENIZER, "chat_template", llama)
    call = ToolCall("a", "weather", "{}")
    result, more = Message("tool", "25", tool_call_id="a", name="weather"), Message("user", "more")
    session, _, engines = make("one", "two", "three")
    greeting = refused(session, ask(Message("assistant", "Welcome."), HELLO, tools=(TOOL,)))
    assert greeting.status == 400 and "opening message as the user's" in str(greeting)
    run(session.complete(ask(Message("assistant", "Welcome."), HELLO)))  # without tools it is right
    assert TOKENIZER.decode(engines.requests[0].prompt_ids).startswith("[assistant]Welcome.")
    two = Message("assistant", "", (call, ToolCall("b", "other", "{}")))
    lost = refused(session, ask(HELLO, two, result, more, tools=(TOOL,)))
    assert lost.status == 400 and "leaves out calls of message 1" in str(lost)
    for _ in range(2):
        run(session.complete(ask(HELLO, Message("assistant", "I look.", (call,)), result, more, tools=(TOOL,))))
    assert caplog.text.count("leaves out text that an assistant says beside its calls, such as 'I look.'") == 1


def test_what_was_sampled_is_carried_whatever_the_template_leaves_out_of_it(monkeypatch):
    drops = TOKENIZER.chat_template.replace("m.content", "(m.content if m.role != 'assistant' else '')")
    monkeypatch.setattr(TOKENIZER, "chat_template", drops)
    session, *_ = make("one", "two")
    assert "leaves out the text of message 1" in str(refused(session, ask(HELLO, Message("assistant", "x"), HELLO)))
