"""Cells of products of layouts, families and types that the full tier leaves to `make evidence`.

What stays has every value of each dimension, and every pair that shares code. docs/testing.md says, group by group,
which faults it still catches. A cell is written as the parameters between the brackets of a test's name.
"""

from __future__ import annotations

HOST2, HOST3 = "stage 2, optimizer on the host", "stage 3, all on the host"

_CELLS: dict[str, tuple[str, ...]] = {
    # DeepSpeed: each stage once, each type in at least two of them.
    "deepspeed_checkpoints.py::test_a_checkpoint_continues_bit_for_bit": (
        "fp32-stage 2", f"fp32-{HOST3}", "bf16-stage 0", "bf16-stage 1", "bf16-stage 3", f"bf16-{HOST2}",
    ),
    "deepspeed_checkpoints.py::test_an_export_loads_in_transformers_with_the_trained_weights": (
        "stage 1", "stage 2", HOST3,
    ),
    "deepspeed_layouts.py::test_two_ranks_equal_a_plain_loop": (
        "the other cells",
    ),
    "deepspeed_layouts.py::test_one_rank_equals_a_plain_loop": ("stage 0", "stage 2", HOST3),
    "deepspeed_layouts.py::test_roles_that_do_not_train_score_like_fsdp2": (
        "stage 2-fp32", "stage 3-bf16", f"{HOST3}-fp32",
    ),
    "deepspeed_layouts.py::test_training_goes_on_after_sleep_as_if_nothing_had_been": (
        "stage 0-bf16", "stage 1-fp32", "stage 2-bf16", "stage 3-fp32", f"{HOST2}-fp32", f"{HOST3}-bf16",
    ),
    "deepspeed_steps.py::test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks_and_leaves_no_trace": (
        "fp32-stage 1", "fp32-stage 3", f"fp32-{HOST2}", "bf16-stage 0", "bf16-stage 2", f"bf16-{HOST3}",
    ),
    "deepspeed_steps.py::test_without_clipping_the_norm_is_reported_all_the_same": ("stage 1", "stage 2", HOST3),
    "deepspeed_steps.py::test_l2_pulls_towards_the_start_before_clipping": ("stage 0", "stage 2", HOST3),
    "deepspeed_steps.py::test_l2_in_bf16_counts_from_the_fp32_weights": ("stage 0", "stage 1", HOST3),
    "deepspeed_steps.py::test_frozen_prefixes_stay_and_the_rest_moves": ("stage 1", "stage 2", HOST3),
    "deepspeed_steps.py::test_a_critic_starts_at_zero_and_learns_its_target": ("stage 0", "stage 2", HOST2, HOST3),
    "deepspeed_steps.py::test_bf16_computes_close_to_fp32_from_exact_fp32_weights": ("stage 1", HOST2, HOST3),
    "deepspeed_steps.py::test_rates_follow_their_schedules": ("stage 0", "stage 2", HOST2, HOST3),
    # Megatron: the cells themselves are named there.
    "megatron_layouts.py::test_so_do_those_of_the_other_cells": (
        "ranks 1", "ranks 2", "ranks 2, pipeline_model 2", "ranks 2, context 2", "ranks 2, tensor_model 2",
        "ranks 4, context 2, tensor_model 2", "ranks 2, pipeline_model 2, virtual_pipeline_model 2",
        "ranks 4, pipeline_model 2, virtual_pipeline_model 2",
        "ranks 4, pipeline_model 2, tensor_model 2, virtual_pipeline_model 2",
        "ranks 2, expert_tensor 1, tensor_model 2", "ranks 2, expert_model 2",
        "ranks 2, expert_model 2, expert_tensor 1, tensor_model 2", "ranks 4, expert_model 2, pipeline_model 2",
        "ranks 2, expert_tensor 2", "ranks 4, expert_model 2", "ranks 4, expert_model 2, tensor_model 2",
    ),
    "megatron_strategy.py::test_anchor_and_clipping_do_what_they_do_on_fsdp2": (
        "1-options0-changes0", "2-options1-changes1", "2-options2-changes0", "2-options3-changes1",
    ),
    "megatron_strategy.py::test_frozen_prefixes_stay_and_the_rest_trains_as_on_fsdp2": (
        "1-options0-embedding", "1-options0-a layer", "1-options0-a whole stage", "2-options1-a whole stage",
        "2-options1-norms", "2-options2-a layer", "2-options2-norms", "2-options3-embedding", "2-options3-a layer",
        "2-options3-a whole stage",
    ),
    "megatron_strategy.py::test_a_critic_learns_as_on_fsdp2": ("1-options0", "2-options5"),
    "megatron_vocab_parallel.py::test_scores_and_gradients_of_a_split_vocabulary": (
        "1-37-None-False", "1-37-None-True", "1-37-4-False", "1-64-None-True", "1-64-4-False", "1-64-4-True",
        "2-40-None-False", "2-40-4-True", "2-80-None-True", "2-80-4-False",
    ),
    # Sequence parallelism and LoRA on FSDP2 and DeepSpeed.
    "expert_replay.py::test_megatron_gives_the_numbers_and_gradients_of_hugging_face_models": (
        "expert 2", "context 2", "tensor 2, sequence",
    ),
    "megatron_prefix_sharing.py::test_outputs_loss_and_gradients_are_those_of_rows_by_themselves": (
        "expert 2 over data ranks", "tensor 2, sequence",
    ),
    "ring_attention.py::test_ranks_of_a_ring_train_as_one_rank_does": (
        "a ring of 4, more than key heads", "two rings", "a ring of 2",
    ),
    "hf_lora.py::test_with_adapters_off_it_is_the_base_model": (
        "one rank", "FSDP2 replicated", "ZeRO 0", "ZeRO 2", "ZeRO 3 alone",
    ),
    "hf_lora.py::test_a_checkpoint_goes_on_bit_for_bit": ("one rank", "ZeRO 0", "ZeRO 1", "ZeRO 3 alone"),
}  # fmt: skip

THINNED = tuple(f"strategies/test_{test}[{cell}]" for test, cells in _CELLS.items() for cell in cells)
