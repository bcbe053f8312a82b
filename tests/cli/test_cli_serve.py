"""`roll serve`: a model behind the endpoint; what its calls may change, and what is said when it can't start."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys

import openai
import pytest
from tiny_models import build_tiny_model, char_tokenizer

from roll.cli.__main__ import main
from roll.cli.serve import _name, _usual_length
from roll.gateway.base import ChatCall, RefusedCall
from roll.gateway.reading import ResponseReader
from roll.gateway.serving import ServedModel
from roll.rollout.chat_format import ChatTemplate
from roll.strategies.base import Completion, SamplingParams
from roll.types.chat import Message

HELLO = (Message("user", "hello"),)


class Engines:
    def __init__(self) -> None:
        self.requests, self.ended, self.error = [], [], None

    async def generate(self, episode, request):
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return Completion(
            id=request.id, token_ids=(10, 11), logprobs=(-1.0, -1.0), versions=(0, 0), finish_reason="stop"
        )

    def mark_ended(self, episode):
        self.ended.append(episode)


def served(use, **changes):
    """Await `use(model, engines)`."""
    tokenizer, engines = char_tokenizer(), Engines()
    reading = ResponseReader(decode=lambda ids: tokenizer.decode(ids), token_text=str)
    params = SamplingParams(**{"max_new_tokens": 50, "temperature": 0.5, **changes})

    async def main_():
        model = ServedModel(engines, ChatTemplate(tokenizer), reading, params, name="tiny", max_length=200)
        return await use(model, engines)

    return asyncio.run(main_())


def test_a_call_changes_what_the_engine_can_do():
    async def use(model, engines):
        await model.complete(ChatCall(model="tiny", messages=HELLO))
        own = ChatCall(
            model="tiny", messages=HELLO, temperature=0.0, top_p=0.9, top_k=0, repetition_penalty=1.2, max_tokens=500,
            stop=("!",),
        )  # fmt: skip
        await model.complete(own)
        return [request.params for request in engines.requests], await model.count(own), engines.ended

    (usual, changed), tokens, ended = served(use, top_k=7)
    assert usual == SamplingParams(max_new_tokens=50, temperature=0.5, top_k=7)
    # As many tokens as the context has left.
    assert changed == SamplingParams(
        max_new_tokens=200 - tokens, temperature=0.0, top_p=0.9, top_k=-1, repetition_penalty=1.2, stop_strings=("!",)
    )
    assert ended == ["serve/0", "serve/1"]


def test_the_same_seed_draws_the_same_and_each_of_n_its_own():
    async def use(model, engines):
        for seed in (1, 1, 2, None, None):
            await model.complete(ChatCall(model="tiny", messages=HELLO, seed=seed, n=2))
        return [request.seed for request in engines.requests]

    seeds = served(use)
    assert seeds[0:2] == seeds[2:4]
    assert len(set(seeds)) == 8


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        (ChatCall(model="gpt-4o", messages=HELLO), 404, "model_not_found"),
        (ChatCall(model="tiny", messages=(Message("user", "x" * 300),)), 400, "context_length_exceeded"),
        # What would make an engine fail, for everybody.
        (ChatCall(model="tiny", messages=HELLO, temperature=1e-300), 400, ""),
        (ChatCall(model="tiny", messages=HELLO, top_p=0.0), 400, ""),
        (ChatCall(model="tiny", messages=HELLO, repetition_penalty=0.01), 400, ""),
    ],
)
def test_a_call_that_can_not_be_answered_is_refused_before_the_engine_sees_it(call, status, code):
    async def use(model, engines):
        with pytest.raises(RefusedCall) as caught:
            await model.complete(call)
        return caught.value, engines.requests

    refused, requests = served(use)
    assert (refused.status, refused.code, requests) == (status, code, [])


def test_an_engine_that_fails_ends_the_command_and_tells_the_client_nothing_of_it():
    async def use(model, engines):
        engines.error = RuntimeError("out of memory at 0x7f")
        with pytest.raises(RefusedCall) as caught:
            await model.complete(ChatCall(model="tiny", messages=HELLO))
        with pytest.raises(RuntimeError, match="out of memory"):
            await model.until_failed()
        return caught.value

    refused = served(use)
    assert refused.status == 503 and "memory" not in str(refused)


def test_names_and_lengths_follow_from_the_model(tmp_path):
    assert [_name(model) for model in ("Qwen/Qwen2.5-0.5B", "a b/", "/")] == ["Qwen2.5-0.5B", "a-b", "model"]
    assert _usual_length(str(build_tiny_model(tmp_path / "m", max_position_embeddings=300))) == 300


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "70000"], "--port: got 70000"),
        (["--max_new_tokens", "0"], "--max_new_tokens: got 0"),
        (["--api_key_env", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY isn't set"),
        (["--step", "3"], "--step: nowhere is no run"),
        (["--ignore_fields", "n"], "--ignore_fields: without 'n' a request says something else"),
    ],
)
def test_what_can_not_be_served_is_said_at_once(arguments, said, capsys):
    assert main(["serve", "nowhere", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_without_its_packages_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve", "nowhere"]) == 2
    assert "pip install 'roll-rl[serve]'" in capsys.readouterr().err


def test_a_model_is_served_until_it_is_interrupted(tmp_path):
    folder = build_tiny_model(tmp_path / "tiny", "qwen2")
    command = [sys.executable, "-m", "roll.cli", "serve", str(folder), "--port", "0", "--api_key_env", "KEY"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "KEY": "sk-of-mine"})
    try:
        line = next(line for line in process.stderr if line.startswith("serving tiny at "))
        address = line.split(" at ")[1].split(";")[0]
        with openai.OpenAI(base_url=address, api_key="sk-of-mine") as client:
            asked = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "seed": 1, "max_tokens": 8}
            both = [client.chat.completions.create(**asked).choices[0].message.content for _ in range(2)]
            assert both[0] == both[1]
            streamed = "".join(
                chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
            )
            assert streamed == both[0]
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="sk-other").models.list()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_run_is_served_by_its_last_model(tmp_path, monkeypatch):
    from roll.cli import serve

    (tmp_path / "config.yaml").touch()
    exported = tmp_path / "exported"
    monkeypatch.setattr(serve, "CONFIG_FILE", "config.yaml")
    asked = []
    monkeypatch.setattr("roll.cli.runs.export", asked.append)  # first: what it imports isn't to have the next one
    monkeypatch.setattr("roll.api.launch.stored_config", lambda folder: argparse.Namespace(export_path=exported))
    options = argparse.Namespace(model=str(tmp_path), step=None)
    with serve._model(options, tmp_path / "staging") as model:
        assert model == str(tmp_path / "staging" / "model")
    assert (asked[0].run_folder, asked[0].step, asked[0].role) == (str(tmp_path), None, "actor_train")
    exported.mkdir()
    (exported / "config.json").touch()
    with serve._model(options, tmp_path / "staging") as model:
        assert model == str(exported)
