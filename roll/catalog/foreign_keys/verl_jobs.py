"""Keys of verl's stand-alone jobs: fine-tuning, generation, evaluation."""

from __future__ import annotations

from roll.catalog.foreign_keys.rows import ForeignKey, absent, dead, decided, moved
from roll.catalog.foreign_keys.verl import TRAINER
from roll.catalog.foreign_keys.verl_roles import _checkpoint, _fsdp, _megatron, _model, optimizer

_DATA, _VAL, _ROLE = "actor_train.data_args", "validation.data_args", "actor_train"

SFT: list[ForeignKey] = [
    moved("data.train_files", f"{_DATA}.file_name", how="files"),
    moved("data.val_files", f"{_VAL}.file_name", how="files"),
    moved("data.train_batch_size", f"{_ROLE}.training_args.gradient_accumulation_steps",
          "per_device_train_batch_size x gradient_accumulation_steps x data-parallel ranks", how="sft_batch",
          default=256),
    moved("data.micro_batch_size_per_gpu", f"{_ROLE}.training_args.per_device_train_batch_size", default=4),
    decided("data.micro_batch_size", f"{_ROLE}.training_args.per_device_train_batch_size",
            "of all devices: divided by them", how="micro_batch_all"),
    moved("data.use_dynamic_bsz", f"{_ROLE}.use_dynamic_batching_in_train"),
    moved("data.max_token_len_per_gpu", f"{_ROLE}.max_tokens_per_microbatch_in_train", how="token_budget"),
    moved("data.max_length", "sequence_length", default=1024),
    moved("data.truncation", "truncation", values={"left": "right"}),
    decided("data.prompt_key", f"{_DATA}.prompt {_VAL}.prompt", "columns with parts are named with a dot",
            how="sft_column"),
    decided("data.response_key", f"{_DATA}.response {_VAL}.response", "columns with parts are named with a dot",
            how="sft_column"),
    decided("data.prompt_dict_keys", f"{_DATA}.prompt {_VAL}.prompt", "columns with parts are named with a dot",
            how="sft_column"),
    decided("data.response_dict_keys", f"{_DATA}.response {_VAL}.response", "columns with parts are named with a dot",
            how="sft_column"),
    moved("data.multiturn.enable", f"{_DATA}.messages", how="sft_messages"),
    moved("data.multiturn.messages_key", f"{_DATA}.messages {_VAL}.messages", how="sft_messages"),
    moved("data.messages_key", f"{_DATA}.messages {_VAL}.messages", how="both"),
    moved("data.chat_template", f"{_DATA}.template {_VAL}.template", how="template"),
    moved("data.balance_dp_token", "balance_batch", how="if_true"),
    decided("data.custom_cls.path", f"{_DATA}.file_name", "fine-tuning reads files", how="none_is_none"),
    decided("data.custom_cls.name", f"{_DATA}.file_name", "fine-tuning reads files", how="none_is_none"),
    *dead("data.pad_mode data.num_workers data.use_shm", "rows are packed or padded by the backend",
          see=f"{_ROLE}.use_sequence_packing"),
    *absent("data.tools_key data.multiturn.tools_key data.enable_thinking_key data.multiturn.enable_thinking_key "
            "data.ignore_input_ids_mismatch", "a template of your own says it", see=f"{_DATA}.template"),
    moved("data.apply_chat_template_kwargs.**", "chat_template_kwargs", how="template_variables"),
    *absent("data.train_max_samples data.val_max_samples", "rows aren't counted out; cut the file",
            see=f"{_DATA}.file_name"),
    moved("model.partial_pretrain", "pretrain"),
    moved("model.path", "pretrain"),
    *_model("model", _ROLE)[1:],
    moved("model.strategy", f"{_ROLE}.strategy_args.strategy_name", values={"fsdp": "fsdp2_train",
          "fsdp2": "fsdp2_train", "megatron": "megatron_train"}, how=""),
    *_fsdp("model.fsdp_config", _ROLE),
    moved("engine.strategy", f"{_ROLE}.strategy_args.strategy_name", values={"fsdp": "fsdp2_train",
          "fsdp2": "fsdp2_train", "megatron": "megatron_train"}),
    *_fsdp("engine", _ROLE)[:-1],
    *_megatron("engine", _ROLE),
    *optimizer("optim", _ROLE, 1e-5),
    moved("ulysses_sequence_parallel_size", f"{_ROLE}.model_args.ulysses_size"),
    moved("use_remove_padding", f"{_ROLE}.use_sequence_packing"),
    *_checkpoint("checkpoint"),
    *(row for row in TRAINER if row.key not in ("trainer.total_epochs",)),
    moved("trainer.total_epochs", "num_train_epochs", default=4),
    *dead("profiler.** profiler", "profile_steps says when, profiler what", see="profile_steps profiler.tools"),
]  # fmt: skip
"""`sft_trainer`: `pipeline: sft`."""

GENERATION: list[ForeignKey] = [
    moved("data.path", "DATA"),
    moved("data.n_samples", "--samples"),
    moved("data.output_path", "-o"),
    moved("model.path", "--model"),
    moved("rollout.name", "--engine", values={"hf": "hf_infer"}),
    moved("rollout.temperature", "--temperature"),
    moved("rollout.response_length", "--max_new_tokens"),
    moved("rollout.prompt_length", "--prompt_length"),
    *(moved(f"rollout.{key}", f"actor_infer.generating_args.{key}") for key in ("top_p", "top_k", "ignore_eos")),
    moved("rollout.tensor_model_parallel_size", "actor_infer.strategy_args.strategy_config.tensor_parallel_size"),
    moved("rollout.gpu_memory_utilization", "actor_infer.strategy_args.strategy_config.gpu_memory_utilization"),
    moved("trainer.n_gpus_per_node", "num_gpus_per_node"),
    moved("trainer.nnodes", "num_nodes"),
    decided("data.prompt_key", "DATA", "the column is prompt or messages", how="prompt_column"),
    *dead("data.batch_size rollout.** actor.** ray_init.** model.external_lib **", "the command sees to it"),
]  # fmt: skip
"""`main_generation`: `roll eval generate`. Words that begin with a dash are options of the command."""

EVALUATION: list[ForeignKey] = [
    moved("data.path", "FILE"),
    moved("data.response_key", "--response"),
    moved("custom_reward_function.path", "--reward"),
    moved("custom_reward_function.name", "--reward"),
    *dead("data.prompt_key data.data_source_key data.reward_model_key data.last_user_msg_template",
          "the columns of verl's files are found by themselves"),
    *dead("**", "the command sees to it"),
]  # fmt: skip
"""`main_eval`: `roll eval score`."""
