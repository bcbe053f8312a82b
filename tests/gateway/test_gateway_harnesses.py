"""What each agent harness was seen to send, sent again: it is answered, carried, and trained as it was sampled."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import pytest
from harness_requests import read_requests
from serving import served
from test_gateway_session import END, ids_of, make

from roll.configs.catalog.harness_table import SIDE_PROMPTS, expand_fields

RECORDED = read_requests()


@pytest.fixture(scope="module")
def server():
    with served() as one:
        yield one


def with_ids(value, ids):
    """The ids of calls as this endpoint gave them, in place of those in the recording."""
    if isinstance(value, dict):
        return {key: with_ids(inner, ids) for key, inner in value.items()}
    if isinstance(value, list):
        return [with_ids(inner, ids) for inner in value]
    return ids.get(value, value) if isinstance(value, str) else value


def results_of(body):
    """The ids whose results are sent."""
    return re.findall(r'"(?:call_id|tool_call_id|tool_use_id)": "(call \d+)"', json.dumps(body))


def post(url, body, key):
    """What the endpoint answers."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as reply:
            return reply.read().decode()
    except urllib.error.HTTPError as error:
        pytest.fail(f"{error.code}: {error.read().decode()}", pytrace=False)


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda one: f"{one['harness']} {one['protocol']}")
def test_what_a_harness_sends_is_answered_and_trained_as_it_was_sampled(recorded, server):
    requests = recorded["requests"]
    prompts = tuple(text for name in recorded["side_calls"] for text in SIDE_PROMPTS[name])
    says = [request["says"] for request in requests]
    trained = [request["says"] for request in requests if not any(text in json.dumps(request) for text in prompts)]
    session, episode, _ = make(*says, length=20_000, max_new_tokens=1000, side_prompts=prompts)
    address, key = server.open(session, ignore_fields=expand_fields(recorded["ignore_fields"]))
    ids: dict[str, str] = {}
    given: list[str] = []
    for request in requests:
        for sent in results_of(request["body"]):
            if sent not in ids:
                ids[sent] = given[len(ids)]
        body = json.dumps(with_ids(request["body"], ids)).encode()
        answer = post(f"{address}/{request['route']}", body, key)
        given += [one for one in dict.fromkeys(re.findall(r'"(call\d{5})"', answer)) if one not in given]
    server.close(key)
    episode.finish(1.0)
    contexts = episode.finished().contexts
    turns = {id(turn): turn for branch in contexts for turn in branch}.values()
    assert sorted(turn.response_ids for turn in turns) == sorted((*ids_of(said), END) for said in trained)
    assert len(contexts) == recorded["branches"]
