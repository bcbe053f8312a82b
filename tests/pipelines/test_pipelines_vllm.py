"""The whole loop on the real vLLM, ahead of training, with an engine that is killed on the way."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
import time

import psutil
import pytest
from tiny_models import build_tiny_model
from toy import metrics_of, run_toy, write_toy

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, which isn't installed")

RUN = (
    "actor_infer.strategy_args={strategy_name: vllm, strategy_config: {kv_cache_memory_bytes: 67108864}}",
    "async_generation_ratio=1",
    "policy_loss=decoupled_ppo",
    "verify_weight_sync=logprob",
    "max_steps=40",
)


def kill_the_engine(after, killed):
    """SIGKILL to vLLM's engine core once the run has logged a step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if after.is_file() and after.read_text().count("\n") >= 2:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # one that has ended, which another test left to be reaped
                    if "EngineCore" in process.name() or "EngineCore" in " ".join(process.cmdline()):
                        process.kill()
                        killed.append(process.pid)
                        return
        time.sleep(0.02)


def test_it_learns_from_its_own_versions_and_outlives_the_death_of_its_engine(tmp_path):
    model = build_tiny_model(tmp_path / "model", "llama", hidden=128)
    folder = write_toy(tmp_path / "run", model)
    log, killed = folder / "output" / "logs" / "metrics.jsonl", []
    killer = threading.Thread(target=kill_the_engine, args=(log, killed), daemon=True)
    killer.start()
    rows = run_toy(folder, *RUN)
    killer.join(timeout=10)
    assert killed, "no engine process was found"
    assert rows == metrics_of(folder / "output" / "logs")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert sum(row["rollout/engine_restarts"] for row in rows) == 1
    assert max(row["staleness/max"] for row in rows) == 1
    assert rows[0]["mismatch/kl"] < 1e-9, "tokens of the trainer's own version"
    mean = [row["reward/mean"] for row in rows]
    assert sum(mean[-5:]) / 5 > 0.6 > sum(mean[:2]) / 2


def test_a_judge_on_vllm_grades_a_run(tmp_path):
    model = build_tiny_model(tmp_path / "model", "llama", hidden=128)
    rows = run_toy(
        write_toy(tmp_path / "run", model),
        "rewards.case.name=judge",
        "custom_reward_function=null",
        f"judge={{model_args: {{model_name_or_path: {model}}}, prompt: '{{response}}', max_length: 120, "
        "score_pattern: '([0-9])', score_max: 9, unparsed_score: 0.25, max_in_flight: 16, "
        "strategy_args: {strategy_name: vllm, strategy_config: {kv_cache_memory_bytes: 67108864}}, "
        "generating_args: {temperature: 0.0, max_new_tokens: 4}}",
        "executor=ray",
        "max_steps=2",
    )
    assert [row["step"] for row in rows] == [1, 2]
    asked = sum(row["judge/requests"] + row.get("judge/cache_hits", 0.0) for row in rows)
    assert asked == 2 * 64, "each response is graded, by the engine or from the cache"
    assert all(row["judge/completion_tokens"] > 0 for row in rows)
    assert not any("judge/failures" in row for row in rows)
    assert all(0.0 <= row["reward/mean"] <= 1.0 for row in rows)
