"""Benchmarks that start processes with torch in them, at their smallest size."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from printed import rows
from tiny_models import build_tiny_model
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL_TASK = ("--prompts", 2, "--samples", 2, "--prompt-length", 4, "--response-length", 4, "--threads", 1)


def test_a_layout_against_the_plain_loop(bench):
    printed = bench("layouts", "--layouts", "FSDP2, 1 rank", "--families", "llama")
    (line,) = [line for line in printed.splitlines() if line.startswith("| FSDP2, 1 rank | llama |")]
    assert all(float(cell) < 1e-4 for cell in line.split("|")[3:-1])


def test_a_train_step_of_a_backend_beside_the_plain_loop(bench):
    printed = bench("train_step", "--backends", "fsdp2", "--rows", 2, "--per-pass", 2, "--longest", 16, "--rounds", 1)
    assert rows(printed) == ["contender", "bare", "fsdp2"]


def test_weights_through_transports_to_a_copying_receiver(bench):
    printed = bench(
        "weight_sync", "--gigabytes", 0.001, "--engines", 1, "--rounds", 1, "--bucket-mb", 1,
        "--trainers", 2, "--transports", "shared_memory", "buckets", "shares", "file", "delta",
    )  # fmt: skip
    ways = ["shared_memory", "buckets", "shares", "file", "delta"]
    assert rows(printed) == ["way", "memcpy", "copy per engine", "disk", *ways]
    sent = [float(line.split("|")[-2]) for line in printed.splitlines()[-2:]]
    assert sent[1] < 0.05 * sent[0], "2 % of the numbers changed"


def test_how_long_a_checkpoint_holds_up_a_step(bench, runs_start_here):
    printed = bench("checkpoint_saving", "--hidden", 16, "--layers", 1, "--steps", 4, "--every", 2)
    assert rows(printed) == ["backend", "fsdp2"]
    *_, line = printed.splitlines()
    assert all(float(cell.split()[0]) > 0 for cell in line.split("|")[2:5])


def test_whole_steps_and_their_parts_by_themselves_on_our_side(bench, tmp_path: Path):
    figures = tmp_path / "figures.json"
    printed = bench(
        "grpo_vs_trl", "--workloads", "even", "--only", "ours", "--rounds", 1, "--warm-up", 1, "--per-device", 4,
        "--bare", "--json", figures, *SMALL_TASK,
    )  # fmt: skip
    assert rows(printed)[:4] == ["workload", "---", "even", "workload"]
    measured = json.loads(figures.read_text())["workloads"]["even"]
    assert measured["rounds"]["ours"][0]["lengths"] == [4, 4, 4, 4]
    assert measured["rounds"]["ours"][0]["processor"] > 0
    assert measured["rounds"]["bare"][0]["generate"] > 0
    assert measured["peak_memory"]["ours"] > 100 << 20


def test_a_step_and_the_start_of_the_quickstart_on_our_side(bench, tmp_path: Path):
    model = build_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    figures = tmp_path / "figures.json"
    bench(
        "grpo_vs_trl", "--workloads", "quickstart", "start", "--only", "ours", "--rounds", 1, "--warm-up", 0,
        "--threads", 1, "--model", model, "--json", figures, "--set", "rollout_batch_size=2",
        "num_return_sequences_in_group=2", "prompt_length=1000",
        "actor_train.training_args.gradient_accumulation_steps=1",
    )  # fmt: skip
    measured = json.loads(figures.read_text())["workloads"]
    assert len(measured["quickstart"]["rounds"]["ours"][0]["lengths"]) == 4
    (start,) = measured["start"]["rounds"]["ours"]
    assert 0 < start["first line"] < start["first token"]


def test_whole_steps_of_trl(bench):
    pytest.importorskip("trl", reason="TRL has an environment of its own: benchmarks/requirements-trl.txt")
    printed = bench(
        "grpo_vs_trl", "--workloads", "even", "--only", "trl", "--trl-python", sys.executable, "--rounds", 1,
        "--warm-up", 0, *SMALL_TASK,
    )  # fmt: skip
    assert "| TRL |" in printed


def test_the_ratios_of_two_runs_and_their_range(monkeypatch):
    """Two rounds a run: TRL's seconds are 2 and 3 times ours, then 4 times in both; tokens are 10 against 20."""
    monkeypatch.syspath_prepend(EXAMPLES.parent / "benchmarks")
    from trl_report import compared

    def run(factors: tuple[float, float]) -> dict:
        ours = [{"seconds": 1.0, "processor": 1.0, "lengths": [20]} for _ in factors]
        trl = [{"seconds": factor, "processor": 2 * factor, "lengths": [10]} for factor in factors]
        return {"workloads": {"even": {"rounds": {"trl": trl, "ours": ours}, "load": [0.1, 0.2, 0.3]}}}

    # By the clock 2.5 (the median of 2 and 3), per token (2 + 3) / 20 over 2 / 40 = 5; the other run 4 and 8.
    first, second, both = compared([run((2.0, 3.0)), run((4.0, 4.0))], "trl", "ours")
    assert first == ["even", "1", "2.50 (2.25-2.75)", "5.00 (4.50-5.50)", "5.00", "10.00", "0.1, 0.2, 0.3"]
    assert second[2:6] == ["4.00 (4.00-4.00)", "8.00 (8.00-8.00)", "8.00", "16.00"]
    assert both == ["even", "all", "2.50 to 4.00", "5.00 to 8.00", "5.00 to 8.00", "10.00 to 16.00", ""]


def test_losses_of_preferences_beside_trl(bench):
    pytest.importorskip("trl", reason="TRL has an environment of its own: benchmarks/requirements-trl.txt")
    printed = bench("preference_vs_trl", "--trl-python", sys.executable, "--cases", "sigmoid", "simpo")
    assert rows(printed) == ["loss_type", "---", "sigmoid", "simpo"]


def test_losses_of_preferences_on_our_side(tmp_path: Path, monkeypatch):
    """SimPO without TRL: the batch, the loss and the gradients come from a plain loop."""
    monkeypatch.syspath_prepend(EXAMPLES.parent / "benchmarks")
    import preference_vs_trl as benchmark

    benchmark.write_files(tmp_path)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float64)
    ids = {"chosen": torch.tensor([[5, 6, 7]]), "rejected": torch.tensor([[5, 8, 9]])}
    mean = {side: policy(row).logits[0, :-1].log_softmax(-1)[[0, 1], row[0, 1:]].mean() for side, row in ids.items()}
    gap = 2.0 * (mean["chosen"] - mean["rejected"]) - 0.5
    loss = -0.9 * F.logsigmoid(gap) - 0.1 * F.logsigmoid(-gap)
    loss.backward()
    inputs = {}
    for side, row in ids.items():
        inputs |= {f"{side}_input_ids": row, f"{side}_attention_mask": torch.ones_like(row)}
        inputs[f"{side}_labels"] = row.where(torch.tensor([False, True, True]), -100)
    gradients = {name: weight.grad for name, weight in policy.named_parameters()}
    torch.save({"inputs": inputs, "loss": loss.detach(), "gradients": gradients}, tmp_path / "simpo.pt")
    found = benchmark.ours(tmp_path, "simpo")
    assert found["difference"] < 1e-12
    assert found["gradient_difference"] < 1e-12
    assert found["gradient"] > 0.01


def test_the_quickstart_for_a_seed(bench, tmp_path: Path):
    model = build_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    printed = bench(
        "quickstart", "--seeds", 7, "--out", tmp_path, "--set", f"pretrain={model}", "max_steps=1", "eval_steps=1",
        "save_steps=0", "rollout_batch_size=2", "num_return_sequences_in_group=2", "track_with=[jsonl]",
        "actor_train.training_args.gradient_accumulation_steps=1",
        "actor_train.training_args.per_device_train_batch_size=4", "prompt_length=1000",
    )  # fmt: skip
    assert rows(printed)[:2] == ["seed", "7"]
    assert "`time/step`" in rows(printed)


def test_recipes_are_learnt_for_two_steps(bench, runs_start_here, tmp_path: Path):
    picture = tmp_path / "recipes.png"
    short = ("--set", "max_steps=2")
    printed = bench(
        "recipes_learning", "--seeds", 4, "--only", "grpo", "cispo", "--output", tmp_path, "--plot", picture, *short
    )
    assert rows(printed)[-2:] == ["grpo", "cispo"]
    assert picture.is_file()


def test_a_student_is_taught_for_two_steps(bench, runs_start_here, tmp_path: Path):
    printed = bench("distill_learning", "--seeds", 4, "--output", tmp_path, "--set", "max_steps=2")
    assert rows(printed)[-1] == "4"


def test_preferences_are_learnt_for_two_steps(bench, runs_start_here, tmp_path: Path):
    printed = bench(
        "preference_learning", "--seeds", 4, "--losses", "sigmoid", "orpo", "--output", tmp_path, "--set", "max_steps=2"
    )
    assert rows(printed)[-4:] == ["dpo, sigmoid", "dpo, orpo", "reward_model", "rlvr with it"]


def test_tiny_programs_are_learnt_for_one_step(bench, runs_start_here, tmp_path: Path):
    printed = bench(
        "code_learning", "--seeds", 1, "--output", tmp_path, "--warm-steps", 1, "--set", "max_steps=1", "eval_steps=1",
        "sandbox=unconfined", "rollout_batch_size=2", "num_return_sequences_in_group=2",
        "actor_train.training_args.per_device_train_batch_size=4",
    )  # fmt: skip
    assert rows(printed) == ["seed", "1"]


def test_a_tool_is_used_for_one_step(bench, runs_start_here, tmp_path: Path):
    printed = bench(
        "code_learning", "--example", "tools", "--seeds", 1, "--output", tmp_path, "--warm-steps", 1, "--set",
        "max_steps=1", "eval_steps=1", "sandbox=unconfined", "rollout_batch_size=2", "num_return_sequences_in_group=2",
        "actor_train.training_args.per_device_train_batch_size=4",
    )  # fmt: skip
    assert rows(printed) == ["seed", "1"]


@pytest.mark.parametrize("way", ["--search", "--seeds"])
def test_word_problems_are_learnt_for_one_step(bench, runs_start_here, tmp_path: Path, way: str):
    model = build_tiny_model(tmp_path / "model", max_position_embeddings=256)
    problems = [{"input": f"Add {n} and {n + 5} {name}s.", "target": 2.0 * n + 5} for n in (8, 9) for name in "abcdef"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    printed = bench(
        "word_problems_learning", tmp_path / "rows.jsonl", *([way] if way == "--search" else [way, 7, 8]),
        "--held-out", 4, "--solved", 2, "--output", tmp_path, "--only", "as it is", "--set-warm", f"pretrain={model}",
        "max_steps=1", "actor_train.training_args.per_device_train_batch_size=2", "--set", "max_steps=1",
        "eval_steps=1", "rollout_batch_size=2", "num_return_sequences_in_group=2", "response_length=4",
        "actor_train.training_args.per_device_train_batch_size=4",
        "actor_train.training_args.gradient_accumulation_steps=1",
    )  # fmt: skip
    if way == "--search":
        assert rows(printed) == ["settings, seed", "as it is, 101"]
    else:
        assert rows(printed) == ["seed", "7", "8"]
        assert "mean of 2 seeds on 4 problems: +0.0 points (+0.0 to +0.0)" in printed


def test_a_small_agent_learns_for_one_step(bench, runs_start_here, tmp_path: Path):
    file = EXAMPLES / "custom_env" / "agentic_dial.yaml"
    printed = bench(
        "agentic_learning", file, "--seeds", 1, "--output", tmp_path, "--set", "max_steps=1", "eval_steps=1",
        "train_env_manager.num_env_groups=1", "train_env_manager.group_size=4", "val_env_manager.num_env_groups=2",
        "rollout_batch_size=4", "actor_train.training_args.per_device_train_batch_size=4",
    )  # fmt: skip
    assert rows(printed) == ["seed", "1"]


def test_settings_of_a_small_agent_are_tried_for_one_step(bench, runs_start_here, tmp_path: Path, monkeypatch):
    import agentic_search

    tries = {"one": agentic_search.Try(1, 1, layers=1, episodes=20)}
    monkeypatch.setattr(
        agentic_search, "SEARCHES", {"lake": ("examples/frozen_lake/agentic_frozen_lake_cpu.yaml", tries)}
    )
    printed = bench(
        "agentic_search", "lake", "--seeds", 1, "--output", tmp_path, "--set", "eval_steps=1",
        "train_env_manager.num_env_groups=1", "train_env_manager.group_size=4", "val_env_manager.num_env_groups=2",
        "rollout_batch_size=4", "actor_train.training_args.per_device_train_batch_size=4",
    )  # fmt: skip
    assert rows(printed) == ["tried", "one"]


def test_unmodified_agents_of_frameworks_learn_for_one_step(bench, runs_start_here, tmp_path: Path, monkeypatch):
    """From a random model, which calls no tool yet."""
    names = ["openai"]
    python = Path(os.environ.get("AGENTS_PYTHON", EXAMPLES.parent / ".venv-agents/bin/python"))
    if python.is_file():
        monkeypatch.setenv("AGENTS_PYTHON", str(python))
        names += ["anthropic", "langgraph", "openai_agents", "smolagents"]
    monkeypatch.syspath_prepend(EXAMPLES / "agents")
    import toy_model

    toy_model.make_model(tmp_path / "model", ["What is red plus 4?"], seed=1)
    picture = tmp_path / "agents.png"
    printed = bench(
        "agents_learning", "--seeds", 1, "--only", *names, "--output", tmp_path, "--plot", picture, "--set",
        "warm_start=null", f"pretrain={tmp_path}/model", "max_steps=1", "eval_steps=1", "sequence_length=1100",
        "prompt_length=1000", "actor_infer.generating_args.max_new_tokens=8", "rollout_batch_size=2",
        "train_env_manager.num_env_groups=1", "train_env_manager.group_size=2", "val_env_manager.num_env_groups=1",
        "actor_train.training_args.per_device_train_batch_size=2",
    )  # fmt: skip
    assert rows(printed)[1:] == [{"openai_agents": "openai-agents", "langgraph": "LangGraph"}.get(n, n) for n in names]
    failed = [line.split("|")[-3].strip() for line in printed.splitlines() if line.startswith("|")][2:]
    assert failed == ["0"] * len(names), "an agent that raises at a budget's end has spent it"
    assert picture.is_file()
