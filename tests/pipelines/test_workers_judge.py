"""A judge behind an endpoint: what is sent, tried again, counted and said, and what never is."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from roll.configs.schema.judge_config import JudgeConfig
from roll.configs.schema.reward_config import RewardConfig
from roll.distributed.worker_errors import Failure, WorkerFailed
from roll.pipelines.workers.judge_endpoint import EndpointJudge, JudgeUnavailable, Pace
from roll.pipelines.workers.judge_worker import JudgeClient
from roll.rewards.base import Reward, RewardRequest
from roll.types.trajectory import Task

KEY = "sk-very-secret"


def request(response="ok", id="r"):
    task = Task(id="t", source="", payload={"prompt": "2+2?"}, seed=0, tag="t", domain="d")
    return RewardRequest(id=id, domain="d", response=response, task=task)


@pytest.fixture
def service():
    """A service whose replies are those of `plan`, the last one for good: (status, body), or an answer's text."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.seen.append((body, self.headers.get("Authorization")))
            reply = server.plan.pop(0) if len(server.plan) > 1 else server.plan[0]
            if isinstance(reply, str):
                message = {"choices": [{"message": {"content": reply}}]}
                reply = (200, json.dumps({**message, "usage": {"prompt_tokens": 100, "completion_tokens": 10}}))
            if reply[0] == 0:
                server.hold.wait(30)
                return
            data = reply[1].encode()
            self.send_response(reply[0])
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.plan, server.seen, server.hold = ["Score: 5"], [], threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield server
    server.hold.set()
    server.shutdown()
    server.server_close()


def judge_of(service, **options):
    options = {"endpoint": f"http://127.0.0.1:{service.server_port}/v1", "model": "m", "retry_delay_s": 0.0, **options}
    config = JudgeConfig(**options)
    backend = EndpointJudge(config, {"JUDGE_KEY": KEY})
    return JudgeClient(config, backend, {"d": RewardConfig(name="judge")})


def test_a_response_is_graded_and_counted(service):
    with judge_of(service, api_key_env="JUDGE_KEY", input_cost=1.0, output_cost=5.0) as judge:
        result = judge.submit(request("4")).result(30)
        counted = judge.take_metrics().result()
    assert result.reward == Reward(0.5, {"judge": 0.5}, explanation="Score: 5")
    body, authorization = service.seen[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 512)
    assert authorization == f"Bearer {KEY}"
    # 100 tokens at 1 and 10 at 5 for a million
    assert counted["judge/cost"] == pytest.approx((100 * 1.0 + 10 * 5.0) / 1e6)
    assert (counted["judge/requests"], counted["judge/prompt_tokens"]) == (1, 100)


def test_the_same_request_is_made_once(service):
    with judge_of(service) as judge:
        futures = [judge.submit(request("4", id=str(i))) for i in range(5)]
        assert {future.result(30).reward.value for future in futures} == {0.5}
        assert judge.submit(request("4")).result(30).reward.value == 0.5
        judge.submit(request("5")).result(30)
        assert judge.take_metrics().result()["judge/cache_hits"] == 5
    assert len(service.seen) == 2


def test_a_passing_failure_is_tried_again(service):
    service.plan = [(503, "busy"), (429, "slow down"), "Score: 10"]
    with judge_of(service) as judge:
        assert judge.submit(request()).result(30).reward.value == 1.0
        assert judge.take_metrics().result()["judge/retries"] == 2


@pytest.mark.parametrize(
    ("reply", "requests", "text"),
    [
        ((500, "oops"), 2, "HTTP 500: oops"),
        ((401, f"wrong key {KEY}"), 1, r"HTTP 401: wrong key \*\*\*"),
        ((302, ""), 1, "HTTP 302"),
        ((200, "<html>"), 1, "isn't JSON"),
        ((200, "[]"), 1, "isn't a chat completion"),
        ((200, '{"choices": [{"message": {"content": null}}]}'), 1, "no text"),
        ("I won't say", 1, "states no score from 0 to 10"),
    ],
)
def test_no_answer_is_a_status_and_never_a_score(service, reply, requests, text):
    service.plan = [reply]
    with judge_of(service, api_key_env="JUDGE_KEY", request_retries=1) as judge:
        result = judge.submit(request()).result(30)
        assert judge.take_metrics().result()["judge/failures"] == 1
    assert (result.status, result.reward) == ("error", None)
    assert KEY not in result.error
    assert re.search(text, result.error)
    assert len(service.seen) == requests


def test_an_endpoint_that_hangs_is_a_status(service):
    service.plan = [(0, "")]
    with judge_of(service, request_timeout_s=0.3, request_retries=1) as judge:
        result = judge.submit(request()).result(30)
    assert (result.status, result.attempts) == ("error", 2)
    assert "within 0.3 s" in result.error


def test_an_answer_without_a_score_may_have_one(service):
    service.plan = ["no idea"]
    with judge_of(service, unparsed_score=0.0) as judge:
        assert judge.submit(request()).result(30).reward == Reward(0.0, {"judge": 0.0}, explanation="no idea")


def test_what_is_under_way_is_cancelled_at_the_end(service):
    service.plan = [(0, "")]
    judge = judge_of(service)
    future = judge.submit(request())
    judge.close()
    assert future.done()
    assert not [thread for thread in threading.enumerate() if thread.name == "judge"]


def test_an_address_where_nobody_listens_and_a_missing_key_are_refused_by_name(service):
    with pytest.raises(JudgeUnavailable, match="JUDGE_KEY is not set"):
        EndpointJudge(JudgeConfig(endpoint="http://127.0.0.1:1/v1", model="m", api_key_env="JUDGE_KEY"), {})
    with pytest.raises(JudgeUnavailable, match=r"judge.endpoint: 127.0.0.1:1 can't be reached"):
        EndpointJudge(JudgeConfig(endpoint="http://127.0.0.1:1/v1", model="m"), {})


def test_requests_are_spaced_over_the_minute():
    now = [0.0]
    pace = Pace(60, clock=lambda: now[0])
    assert [pace.reserve() for _ in range(3)] == [0.0, 1.0, 2.0]
    now[0] = 10.0
    assert pace.reserve(2) == 0.0  # the time that passed isn't saved up
    pace.correct(-1)  # it was one after all
    assert pace.reserve() == 1.0
    assert [Pace(None).reserve(100) for _ in range(2)] == [0.0, 0.0]


def test_the_end_of_the_judges_cluster_is_raised_with_its_name():
    class Gone:
        special, retried, identity = (), 0, ("m",)

        def ask(self, _key, _messages):
            from concurrent.futures import Future

            future: Future = Future()
            failure = Failure(type_name="EngineDied", text="gone", traceback="", user_error=False)
            future.set_exception(WorkerFailed(failure, role="judge", rank=0, call="poll"))
            return future

        def close(self):
            pass

    judge = JudgeClient(JudgeConfig(), Gone(), {"d": RewardConfig(name="judge")})
    with judge, pytest.raises(WorkerFailed, match="judge rank 0"):
        judge.submit(request()).result(30)


def test_roll_judge_agree_compares_a_file_with_labels(service, tmp_path, capsys):
    from roll.cli.__main__ import main

    service.plan = ["Score: 9", "Score: 2", "Score: 8"]
    rows = [{"prompt": f"{i}?", "response": f"r{i}", "label": label} for i, label in enumerate([1, 0, 0])]
    data = tmp_path / "labels.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    example = Path(__file__).parents[2] / "examples" / "rlvr" / "rlvr_judge.yaml"
    address = f"judge.endpoint=http://127.0.0.1:{service.server_port}/v1"
    arguments = ["judge", "agree", str(example), str(data), address, "judge.score_min=0", "judge.score_max=10"]
    assert main([*arguments, "judge.max_in_flight=1", "judge.cache_file=null"]) == 0
    assert "accuracy              0.6667" in capsys.readouterr().out
