"""Keys and values that are refused with a reason of their own. Keys of other projects: `other_projects.py`."""

from __future__ import annotations

OTHER_PIPELINE_KEYS: dict[str, dict[str, str]] = {
    "rlvr": {
        "reward_normalization": "see reward_norm",
        "train_env_manager": "see rewards.<domain>.rollout for episodes of several turns",
        "val_env_manager": "see validation",
    },
    "agentic": {
        "rewards": "environments give the rewards, see custom_envs",
        "custom_reward_function": "environments give the rewards, see custom_envs; question_answer-v1 takes a function",
        "reward_model": "environments give the rewards, see custom_envs",
        "num_return_sequences_in_group": "write train_env_manager.group_size",
        "validation": "write val_env_manager",
        "global_template": "see custom_envs.<tag>.system_template and turn_template",
        "tag_to_template": "see custom_envs.<tag>.system_template and turn_template",
        "num_train_epochs": "environments have no epochs, write max_steps",
        "truncation": "a context that is too long ends its episode",
        "reward_retries": "a failed environment ends its episode; group_size_redundancy makes up for it",
        "cosine_length": "it knows the limit of one response; max_tokens_per_step bounds a turn",
        "overlong_shaping": "it knows the limit of one response; max_tokens_per_step bounds a turn",
        **dict.fromkeys(
            ("reward_norm", "reward_shift", "reward_scale", "use_reward_scaling", "use_reward_norm"),
            "see reward_normalization",
        ),
        "data_args": "tasks are environments and seeds (custom_envs); prompts take the tokenizer's own chat template",
    },
    "sft": {"response_length": "write sequence_length", "prompt_length": "write sequence_length"},
    "dpo": {
        "response_length": "write sequence_length",
        "prompt_length": "write sequence_length",
        "ipo": "write loss_type: ipo",
        "chosen_key": "it stands in actor_train.data_args, with rejected_key",
        "rejected_key": "it stands in actor_train.data_args, with chosen_key",
    },
    "reward_model": {"response_length": "write sequence_length", "prompt_length": "write sequence_length"},
    "distill": {
        "custom_envs": "environments are of pipeline: agentic, which takes a section teacher, too",
        "messages": "prompts are in data_args.prompt; texts to learn from are rows of pipeline: sft with a teacher",
    },
}
"""By pipeline: keys that only others have, and what it has instead."""

_TURNS = "write optimal_token_baseline: it counts the action tokens of all turns"
UNSUPPORTED_VALUES: dict[str, dict[str, str]] = {
    "adv_estimator": {
        "tir_optimal_token_baseline": _TURNS,
        "grpo_passk": "write pass_at_k",
        "grpo_vectorized": "write grpo",
        "rloo_vectorized": "write rloo",
    },
    "strategy_name": {
        given: f"write {name}_train for a role that trains, {name}_infer for one that doesn't"
        for given, name in {"fsdp": "fsdp2", "fsdp2": "fsdp2", "deepspeed": "deepspeed", "megatron": "megatron"}.items()
    },
    "attn_implementation": {
        "flash_attention_3": "kernels are auto, eager, sdpa and fa2",
        "flex_attention": "kernels are auto, eager, sdpa and fa2",
    },
    "weight_decay_incr_style": {"constant": "without end_weight_decay it is constant; remove both"},
    "lr_scheduler_type": {
        "reduce_lr_on_plateau": "the learning rate follows the steps alone, not what is measured; see cosine and wsd"
    },
}
"""Values of the users' vocabulary, by key, that are refused with a reason of their own."""
