"""Which tier a test belongs to: the one place that says so. docs/testing.md says what the tiers are for.

`fast` (`make test`) is what no other line claims. `full` (`make test-full`) needs a second process group, a foreign
engine, or more than some seconds. `evidence` (`make evidence`) are campaigns that no continuous integration runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from thinned import THINNED

TIERS = ("fast", "full", "evidence")

CLUSTERS = frozenset({"ranks", "duo", "ray_executor"})
"""Fixtures of several processes: what asks for one is full unless `SMALL_REAL_RUNS` names it."""

EVIDENCE = (
    "evidence/*",
    "rewards/test_rewards_references.py::test_every_reference_answer*",
    "data/test_data_memory.py::*[1 GB]",
    # The full tier keeps one or two of these kills each; tests/evidence/test_evidence_kills.py kills at random moments.
    "pipelines/test_pipelines_async.py::test_killed_and_resumed_no_prompt_is_skipped_or_repeated[scoring-360]",
    "pipelines/test_pipelines_resume.py::test_killed_and_resumed_equals_never_killed[agentic-checkpoint write-2]",
    "pipelines/test_pipelines_resume.py::test_killed_and_resumed_equals_never_killed[scored rlvr-scoring-150]",
    "pipelines/test_pipelines_resume.py::test_killed_and_resumed_equals_never_killed[rlvr-evaluation-4]",
    "pipelines/test_pipelines_resume.py::test_killed_and_resumed_equals_never_killed[rlvr-scoring-300]",
    "rewards/test_rewards_code_sets.py::test_every_*",
    "rewards/test_rewards_verifiers.py::test_every_verifier_scores_twenty*",
    # Benchmarks and an example that learn, 20 to 110 seconds of computing each. The full tier has shorter ones of the
    # same recipes: test_pipelines_learning.py, test_pipelines_agents.py, test_configs_files.py.
    "benchmarks/test_benchmarks_runs.py::test_preferences_are_learnt_for_two_steps",
    "benchmarks/test_benchmarks_runs.py::test_a_student_is_taught_for_two_steps",
    "benchmarks/test_benchmarks_runs.py::test_recipes_are_learnt_for_two_steps",
    "benchmarks/test_benchmarks_runs.py::test_the_quickstart_for_a_seed",
    "benchmarks/test_benchmarks_runs.py::test_a_tool_is_used_for_one_step",
    "benchmarks/test_benchmarks_runs.py::test_tiny_programs_are_learnt_for_one_step",
    "pipelines/test_pipelines_agents_example.py*",
    # Other users and containers, emulated: for an upgrade of sandlock, or of what confines.
    "isolation/test_sandbox_attacks.py::test_no_attack_does_harm_in_another_set_up*",
    "isolation/test_sandbox_programs.py::test_memory_and_open_files_stay_the_same_for_long",
    # Twelve times two ranks; the full tier has each family and each layout once.
    "strategies/test_pictures.py::test_the_other_families_and_layouts_on_two_ranks*",
)

FULL = (
    # A browser.
    "workbench/view/test_view_browser.py::*",
    "workbench/view/test_view_questions.py::*",
    # Other engines, and compilers.
    "strategies/test_engines_vllm*",
    "strategies/test_engines_device_buckets.py::test_vllm*",
    "test_claims_about_packages.py::test_*vllm*",
    "test_claims_about_packages.py::test_a_ray*",
    "strategies/test_engines_sglang*",
    "strategies/test_hf_compile.py::test_a_compiled_role*",
    "strategies/test_hf_half_stream.py::test_compiled_layers*",
    "strategies/test_deepspeed_start.py*",
    "strategies/test_fsdp2_start.py*",
    "strategies/test_strategies_quiet.py*",
    "pipelines/test_pipelines_vllm.py*",
    "pipelines/test_pipelines_lora_sync.py*",
    # Clusters of several processes, and what kills them.
    "benchmarks/test_benchmarks_gpu.py::test_a_dry_run*",
    "benchmarks/test_benchmarks_gpu.py::test_a_whole_step*",
    "benchmarks/test_benchmarks_gpu.py::test_the_parts*",
    "benchmarks/test_benchmarks_runs.py*",
    "benchmarks/test_benchmarks_view.py*",
    "benchmarks/test_benchmarks.py::test_the_tokens_of_fuzzed_agents",
    "data/test_data_memory.py*",
    "cli/test_cli_eval.py::test_two_engines*",
    "cli/test_cli_notebooks.py::test_a_notebook_runs*",
    "cli/test_cli_plan_measure.py*",
    "cli/test_cli_serve.py::test_a_model_is_served*",
    "distributed/test_distributed_executors.py::*[ray]",
    "distributed/test_distributed_gpu_slots.py*",
    "distributed/test_distributed_machines.py::test_a_role*",
    "distributed/test_distributed_processes.py*",
    "distributed/test_distributed_ray_options.py::test_a_ray*",
    "configs/test_configs_fuzz.py*",
    "pipelines/test_pipelines_async.py*",
    "envs/test_envs_hubs_elsewhere.py*",
    "envs/test_envs_pool_faults.py*",
    "extensions/test_extensions_pipeline.py::test_two_ranks*",
    "tracking/test_profiling_runs.py::test_ranks_under_ray*",
    "pipelines/test_pipelines_agentic_faults.py*",
    "pipelines/test_pipelines_agents.py::test_a_remote_agent_that_never*",
    "pipelines/test_pipelines_agents.py::test_an_unmodified*",
    "pipelines/test_pipelines_agents_faults.py*",
    "pipelines/test_pipelines_data.py*",
    "rewards/test_rewards_pool_mixups.py*",
    "pipelines/test_pipelines_exits.py*",
    "pipelines/test_pipelines_faults.py*",
    "pipelines/test_pipelines_checkpoints.py::test_killed*",
    "pipelines/test_pipelines_checkpoints.py::test_*same_run[ray]",
    "pipelines/test_pipelines_checkpoints.py::test_load_contents*",
    "pipelines/test_pipelines_checkpoints.py::test_two_ranks*",
    "pipelines/test_pipelines_checkpoints.py::test_a_run_goes_on_from_a_remote*",
    "pipelines/test_pipelines_keys_training.py*",
    "pipelines/test_pipelines_models.py::test_workers_import*",
    "pipelines/test_pipelines_multi_agent.py::test_self_play_is_the_same*",
    "pipelines/test_pipelines_replay.py::test_*are_replayed[run_letters]",
    "pipelines/test_pipelines_replay.py::test_*are_replayed[run_duel]",
    "pipelines/test_pipelines_contract.py::test_a_resumed*[judged-]",
    "pipelines/test_pipelines_contract.py::test_a_resumed*[reward_model-*]",
    "pipelines/test_pipelines_contract.py::test_a_resumed*megatron]",
    "pipelines/test_pipelines_contract.py::test_a_resumed*mixed]",
    "pipelines/test_pipelines_contract.py::test_a_resumed*zero *]",
    "pipelines/test_pipelines_contract.py::test_every_backend*",
    "pipelines/test_pipelines_contract.py::test_how_rows_are_laid_out*[distill*",
    "pipelines/test_pipelines_contract.py::test_two_ranks*",
    "pipelines/test_pipelines_resume.py*",
    "pipelines/test_pipelines_start.py::test_a_failure*",
    "pipelines/test_pipelines_senders.py::test_a_rank_that_is_killed*",
    "pipelines/test_pipelines_senders.py::test_engines_take_all*",
    "pipelines/test_pipelines_senders.py::test_two_ranks_send*",
    "pipelines/test_pipelines_sync.py::test_a_process_that_is_killed*",
    "pipelines/test_pipelines_teacher_endpoint.py::test_the_likeliest*",
    "pipelines/test_pipelines_sync.py::test_every_transport*",
    "pipelines/test_pipelines_sync.py::test_two_runs*",
    "pipelines/test_pipelines_sync.py::test_weights_are_read_where*",
    "isolation/test_sandbox_attacks.py::test_no_attack_does_harm",
    "isolation/test_sandbox_programs.py::test_memory_and_open_files_stay_the_same",
    "isolation/test_sandbox_programs.py::test_programs_end_with_their_caller",
    # Learning runs, a real model, benchmarks.
    "benchmarks/test_benchmarks*",
    "pipelines/test_pipelines_agentic.py::test_the_game_is_learnt*",
    "pipelines/test_pipelines_agentic.py::test_the_schedule*",
    "pipelines/test_pipelines_agentic_runs.py*",
    "pipelines/test_pipelines_backends.py*",
    "pipelines/test_pipelines_learning.py*",
    "pipelines/test_pipelines_pictures.py::test_two_ranks*",
    "pipelines/test_pipelines_pictures.py::test_deepspeed*",
    "pipelines/test_pipelines_reward_model.py::test_a_policy_learns*",
    "rewards/test_rewards_code_sets.py*",
    "rewards/test_rewards_verifiers.py::test_every_verifier_scores_three*",
    "rewards/test_rewards_references.py::test_a_sample*",
    "tracking/test_tracking_models.py::test_the_real_model*",
    "tracking/test_tracking_services.py*",
)
"""Patterns of test ids below tests/."""

SMALL_REAL_RUNS = (
    "strategies/test_fsdp2_ranks.py::test_two_shards_that_are_gathered_once_give_the_numbers_of_a_plain_loop",
    "strategies/test_deepspeed_layouts.py::test_one_rank_equals_a_plain_loop[stage 1]",
    "strategies/test_megatron_layouts.py::test_two_tensor_ranks_train_like_a_plain_loop",
    # The launcher: hf_infer and FSDP2 inline, DeepSpeed, Megatron; two ranks under Ray.
    "pipelines/test_pipelines_contract.py::test_every_backend_takes_the_steps_that_fsdp2_takes[rlvr-zero 1]",
    "pipelines/test_pipelines_contract.py::test_every_backend_takes_the_steps_that_fsdp2_takes[rlvr-megatron]",
    "pipelines/test_pipelines_learning.py::test_the_toy_is_solved[grpo]",
    "pipelines/test_pipelines_contract.py::test_two_ranks_under_ray_take_the_steps_of_one[rlvr]",
)
"""One small run each of hf_infer, FSDP2 on one and on two ranks, DeepSpeed, Megatron, `inline` and `ray`."""


def tier_of(test_id: str, fixtures: Collection[str] = ()) -> str:
    """Return the tier of a test such as `strategies/test_x.py::test_y[z]`, which uses `fixtures`."""
    if test_id in THINNED or _matches(test_id, EVIDENCE):
        return "evidence"
    if _matches(test_id, SMALL_REAL_RUNS):
        return "fast"
    return "full" if CLUSTERS & set(fixtures) or _matches(test_id, FULL) else "fast"


def may_hold(file: str, text: str, tier: str) -> bool:
    """Return whether a file such as `strategies/test_x.py` may have tests of `tier`; the others aren't imported."""
    if tier == "evidence" or _names(SMALL_REAL_RUNS, file):
        return True
    if _matches(file, EVIDENCE):
        return False
    if tier == "full":
        return _names(FULL, file) or any(fixture in text for fixture in CLUSTERS)
    return not _matches(file, FULL)


def starts_early(test_id: str, tier: str | None) -> bool:
    """Return whether the file of a test has long tests in `tier`: begun last, they would keep one core idle."""
    return _names(SMALL_REAL_RUNS if tier == "fast" else FULL, test_id.partition("::")[0])


def _names(patterns: Sequence[str], file: str) -> bool:
    """Return whether a pattern names the file, or a test in it."""
    return _matches(file, [pattern.partition("::")[0].rstrip("*") + "*" for pattern in patterns])


def _matches(test_id: str, patterns: Sequence[str]) -> bool:
    # Brackets are parameters here, not character classes.
    return any(fnmatchcase(test_id, pattern.replace("[", "[[]")) for pattern in patterns)


def is_named(test_id: str, arguments: Sequence[str]) -> bool:
    """Return whether the command line names this test or its file, which then runs whatever its tier."""
    for argument in arguments:
        path, _, name = argument.partition("::")
        if not path.endswith(".py"):
            continue
        file, _, own = test_id.partition("::")
        if Path(path).as_posix().endswith(f"tests/{file}") and (not name or own == name or own.startswith(f"{name}[")):
            return True
    return False
