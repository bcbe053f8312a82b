"""Agents in the whole loop: programs, functions and remote ones, trained on what the policy said to them."""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from agents_run import AGENTS, command, endpoint, write_run
from rollout_files import read_rollouts
from toy import metrics_of, run_toy

from roll.cli.train import start_pipeline

sys.path.insert(0, str(AGENTS.parent))
from agents import ask, post

OPENAI = '''
import openai


def play(task, base_url, api_key):
    """Two turns in one context, then a third in one of its own."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": "a="}]
    for word in ("b=", "c="):
        message = client.chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": word}]
    last = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "d="}])
    said = last.choices[0].message.content
    return {"reward": float(said[:1].islower()), "success": said[:1].islower()}
'''


def rows_of(folder):
    return [row for file in sorted((folder / "dump").glob("rollouts-*.parquet")) for row in read_rollouts(file)]


def test_an_unmodified_openai_agent_is_trained_through_the_door_of_the_documentation(tiny_model, tmp_path):
    (tmp_path / "my_agent.py").write_text(OPENAI)
    folder = write_run(tmp_path, tiny_model, {"game": endpoint(agent=f"{tmp_path}/my_agent.py:play")})
    arguments = ["--config_path", str(folder), "--config_name", "toy", "eval_steps=2"]
    assert start_pipeline(arguments, Path("examples")) == 0
    rows = metrics_of(folder / "output" / "logs")
    assert [row["rollout/responses"] for row in rows] == [4, 4]
    assert [row["rollout/rows"] for row in rows] == [8, 8], "a row for the conversation, and one for the last question"
    assert [row["agent/calls"] for row in rows] == [12, 12]
    assert max(row["mismatch/kl"] for row in rows) < 1e-9
    assert "val/game/accuracy" in rows[-1]
    for row in rows_of(folder):
        assert sum(row.action_mask) in (2, 4), "every sampled token is trained, and nothing else"


def test_a_program_and_functions_with_rewards_of_their_own_play_rows_of_a_file(tiny_model, tmp_path):
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"word": f"w{i}"}) + "\n" for i in range(3)))
    (tmp_path / "rewards.py").write_text(
        "def known(response, task):\n    return float(task.payload['word'][0] == 'w' and len(response) > 0)\n"
    )
    tasks = str(tmp_path / "tasks.jsonl")
    reward = {"name": f"{tmp_path}/rewards.py:known"}
    envs = {
        "program": command("", score="exit", exit_rewards={"0": 1.0, "1": 0.0}, tasks=tasks),
        "plain": endpoint(agent=f"{AGENTS}:lower", tasks=tasks),
        "async": endpoint(agent=f"{AGENTS}:lower_async", python=sys.executable),
        "answer": endpoint(agent=f"{AGENTS}:ask_only", score="reward", reward=reward, tasks=tasks),
    }
    folder = write_run(tmp_path, tiny_model, envs)
    row = run_toy(folder, "max_steps=1", "eval_steps=1")[0]
    assert row["reward/program/mean"] == 1.0
    assert row["reward/answer/mean"] == 1.0
    assert 0 <= row["reward/plain/part/length"] <= 2
    assert {"val/plain/accuracy", "val/async/accuracy", "val/answer/reward"} <= set(row)
    assert row["agent/episodes"] == row["agent/calls"] == 16
    assert row["val/agent/episodes"] == row["val/agent/calls"] == row["val/responses"] > 0


def test_a_program_in_the_sandbox_reaches_the_policy_and_nothing_else(tiny_model, tmp_path):
    forbidden = tmp_path / "forbidden"
    forbidden.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        env = {"FORBIDDEN": str(forbidden), "OTHER_PORT": str(other.getsockname()[1])}
        cwd = tmp_path / "cwd"
        cwd.mkdir()
        game = command("tries to get out", sandbox=True, env=env, cwd=str(cwd))
        folder = write_run(tmp_path, tiny_model, {"game": game})
        run_toy(folder, "val_only=true")
    (episode,) = map(json.loads, (folder / "output" / "episodes.jsonl").read_text().splitlines())
    assert episode["status"] == "ok", episode
    assert not list(Path(tempfile.gettempdir()).glob("roll-agent-*/mine"))


def serve_as_remote_agent(folder, stop, played, after):
    """Ask for work until the run is over."""
    file = folder / "output" / "agents.json"
    while not stop.is_set():
        try:
            told = json.loads(file.read_text())
            status, work = post(f"{told['url']}/work", {"wait_s": 1}, told["token"], timeout=5)
        except (OSError, ValueError):
            time.sleep(0.05)
            continue
        if status == 200 and work["task"] is not None:
            said = ask(work["base_url"], work["api_key"])
            played.append(work["episode"])
            answer = {"reward": float(said[:1].islower()), "success": said[:1].islower()}
            status, _ = post(f"{work['base_url']}/score", answer, work["api_key"])
            assert status == 200
            if len(played) == 1:  # the others of its group are played meanwhile
                time.sleep(0.2)
                late = {"model": "policy", "messages": [{"role": "user", "content": "late"}]}
                after.append(post(f"{work['base_url']}/chat/completions", late, work["api_key"])[0])


def test_agents_elsewhere_ask_for_work(tiny_model, tmp_path):
    folder = write_run(tmp_path, tiny_model, {"far": endpoint(remote=True, timeout_s=30)})
    (told := folder / "output" / "agents.json").parent.mkdir()
    stop, played, after = threading.Event(), [], []
    arguments = (folder, stop, played, after)
    threads = [threading.Thread(target=serve_as_remote_agent, args=arguments) for _ in range(1)]
    for thread in threads:
        thread.start()
    try:
        rows = run_toy(folder, "max_steps=2")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [row["rollout/responses"] for row in rows] == [4, 4]
    assert len(played) == len(set(played)) == 8
    assert after == [409], "a call after the end of its episode"
    assert not told.exists()


def test_a_remote_agent_that_never_comes_is_said_to_be_missing(tiny_model, tmp_path):
    folder = write_run(tmp_path, tiny_model, {"far": endpoint(remote=True, timeout_s=0.5)})
    with pytest.raises(RuntimeError, match="for an agent to ask for this episode"):
        run_toy(folder, "max_steps=1")
