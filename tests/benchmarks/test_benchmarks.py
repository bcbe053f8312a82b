"""Every benchmark runs, at its smallest size. Its figures mean nothing there; that it runs does."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from printed import rows

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_benchmark_is_run_by_a_test_of_this_folder():
    text = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    sides = {"trl_ours", "trl_task", "trl_theirs", "trl_sides", "trl_report", "gateway_clients", "gpu_model"}
    for name in sorted({path.stem for path in BENCHMARKS.glob("*.py")} - sides):
        assert re.search(rf'bench\(\s*"{name}"', text), name


def test_a_simulated_step_of_the_scheduler(bench):
    printed = bench(
        "scheduler_scale", "--sizes", "16:2", "--modes", "sync", "async:1", "--steps", 1, "--repeats", 1, "--median", 8
    )
    assert rows(printed) == ["trajectories", "16", "16"]


def test_a_roofline_by_hand(bench):
    printed = bench("roofline", "--models", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-7B", "--gpus", 1)
    assert "states of 122 GB don't fit into 80 GB" in printed
    table = {line.split(" | ")[0].strip("| "): line.split(" | ")[1:] for line in printed.splitlines() if "|" in line}
    # AdamW of two updates: 2 x 28 bytes x 596,049,920 parameters; the engine's bf16 copy: 2 bytes read, 2 written
    assert table["optimizer"][1] == "33.38"
    assert table["sync"][1] == "2.384"
    # A forward pass of 64 x 8 rows of 1,536 tokens: 2 x (596,049,920 - 65,536 of norms) per token, and of the attention
    # 2 x 28 layers x 2,048 x 1,536^2 per row. The scores are two of them.
    forward = 512 * (1536 * 2 * 595_984_384 + 2 * 28 * 2048 * 1536**2)
    assert float(table["score"][0]) == pytest.approx(2 * forward / 1e12, rel=1e-3)


def test_advantages_by_scan_and_by_loop(bench):
    assert "scan_seconds" in bench("gae", "--rows", 2, "--tokens", 8, "--repeats", 1)


def test_environments_in_loops_in_the_pool_and_in_gymnasium(bench):
    small = ("--rounds", 1, "--processes", 1, "--concurrent", 2, "--timed-episodes", 4, "--episodes", 4)
    ours = ["bare loop", "wrapped loop", "pool, 1 process"]
    lake = rows(bench("env_throughput", "--only", "frozen_lake", *small))
    gymnasium = ["gymnasium SyncVectorEnv", "gymnasium AsyncVectorEnv"]
    assert lake == ["way", *ours, *(gymnasium if importlib.util.find_spec("gymnasium") else [])]
    assert rows(bench("env_throughput", "--only", "sokoban", *small)) == ["way", *ours]
    held = bench("env_throughput", "--only", "concurrent", *small)
    assert rows(held) == ["processes", "1"]
    assert "| 0 of 4 |" in held


def test_rewards_in_a_loop_and_in_the_pool(bench):
    printed = bench("reward_throughput", "--rounds", 1, "--groups", 1, "--processes", 1)
    assert rows(printed) == ["way", "loop", "pool, 1 process"]


def test_programs_in_sandboxes(bench):
    printed = bench("sandbox", "--programs", 2, "--rounds", 1, "--only", "unconfined")
    assert rows(printed) == ["way", "cold interpreter", "unconfined"]


def test_the_tokens_of_fuzzed_agents(bench):
    printed = bench("agent_token_identity", "--turns", 24, "--templates", "qwen3", "--episodes", 2, "--hidden", 32)
    assert rows(printed) == ["engine", "hf_infer", "hf_infer"]
    assert "every sampled one is trained once" in printed


def test_fine_tuning_under_chat_templates(bench):
    printed = bench("chat_templates", "--only", "no system role", "--steps", 60)
    assert rows(printed) == ["template", "no system role"]
    line = next(line.split(" | ") for line in printed.splitlines() if "`<" in line)
    assert line[1] == "`<|end|>`"
    assert float(line[3].rstrip("%")) >= 95  # by transformers, with the exported folder alone


@pytest.mark.parametrize("name", ["trl_ours", "trl_task", "trl_theirs", "trl_sides", "trl_report"])
def test_the_sides_of_the_comparison_can_be_imported(bench, name: str):
    importlib.import_module(name)


def test_products_in_two_types(bench):
    printed = bench("processor_types", "--rows", 1, 4, "--layers", "k, v", "--rounds", 1)
    assert rows(printed) == ["layer", "k, v", "k, v"]
    assert "dtype: auto is " in printed


def test_a_step_and_its_products(bench, tiny_model):
    printed = bench("step_floor", "--model", tiny_model, "--rows", 2, "--tokens", 8, "--passes", 1, "--rounds", 1)
    assert rows(printed) == ["contender", "products", "small pages", "large pages"]
    steps = [line for line in printed.splitlines() if line.startswith(("| small", "| large"))]
    (digest,) = {line.split("|")[-2].strip() for line in steps}
    assert digest


@pytest.mark.parametrize("strategy", ["fsdp2_train", "megatron_train"])
def test_a_step_with_shared_beginnings_and_with_whole_rows(bench, tiny_model, strategy):
    small = ("--groups", 2, "--each", 2, "--few-shot", 6, "--prompt", 4, "--response", 2, "--rows", 2, "--rounds", 1)
    printed = bench("prefix_sharing", "--model", tiny_model, "--strategy", strategy, *small)
    assert rows(printed) == ["step", "whole rows", "shared beginnings"]
    # Examples of 6 tokens, two prompts of 4, responses of 1, 3, 2 and 1.
    assert "| shared beginnings | 1 | 21 |" in printed
    assert float(printed.rsplit(":", 1)[1]) < 1e-5
    if strategy == "fsdp2_train":  # responses of two tokens each
        printed = bench("prefix_sharing", "--model", tiny_model, "--even", *small)
        assert "| shared beginnings | 1 | 22 |" in printed


def test_responses_with_repeated_and_with_shared_heads(bench, tiny_model):
    printed = bench("decode_heads", "--model", tiny_model, "--prompts", 2, "--group", 2, "--tokens", 20, "--rounds", 1)
    assert rows(printed) == ["keys and values", "repeated", "shared"]
    assert "all tokens and log-probs equal: True" in printed


def test_decode_steps_as_they_are_and_without_what_makes_them_fast(bench):
    printed = bench("decode_steps", "--rows", 4, "--response", 4, "--tail", "--rounds", 1)
    assert rows(printed) == ["steps", "weights by output", "through transformers", "all threads", "as it is"]


def test_the_memory_plan_beside_a_measured_peak(bench):
    printed = bench("memory_plan", "--small", "--only", "fsdp2, packed")
    assert rows(printed) == ["case", "fsdp2, packed"]
    worst = re.search(r"largest difference: (\d+) %", printed)
    assert worst is not None
    assert int(worst[1]) <= 15


def test_the_endpoints_own_cost_and_many_streams(bench):
    small = ("--sessions", 2, "--requests", 3, "--turns", 2, "--engine-seconds", 0.01, "--clients", 3, "--rounds", 2)
    printed = bench("gateway", *small)
    assert rows(printed) == ["layer", *["bare", "server", "episodes"] * 3, "round", "1", "2"]
    assert re.search(r"^episodes: [\d.]+ ms of its own", printed, re.MULTILINE)
    assert "6 of 6 streams arrived whole" in printed


def test_columns_of_responses_from_the_engine_to_the_batch(bench):
    printed = bench("rollout_columns", "--responses", 2, "--tokens", 3, "--rounds", 1)
    assert rows(printed) == ["step", "recorded", "pickled", "read", "cut into rows"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm, which isn't installed")
def test_tokens_of_the_engine_core_one_by_one_and_whole(bench):
    printed = bench("engine_frontend", "--streams", 2, "--tokens", 3, "--rounds", 1)
    assert rows(printed) == ["tokens come", "one by one", "whole"]
