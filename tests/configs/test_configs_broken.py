"""Each broken configuration gives one clear error, quickly, before anything heavy is imported."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.validate import warnings_of

REPOSITORY = Path(__file__).parents[2]
TRAIN = "actor_train.training_args"
DATA = "actor_train.data_args"
SAMPLING = "actor_infer.generating_args"

BAND = "{threshold_down: 9, threshold_up: 9}"
BROKEN: list[tuple[str, list[str], str, list[str]]] = [
    # id, overrides, path of the one violation, fragments of its text
    ("a typo at the top", ["rollout_batchsize=4"], "rollout_batchsize", ["did you mean 'rollout_batch_size'"]),
    ("a typo below", [f"{TRAIN}.learning_rat=1"], f"{TRAIN}.learning_rat", ["'learning_rate'", f"a key of {TRAIN}"]),
    (
        "a key at the wrong level",
        ["actor_train.learning_rate=1e-6"],
        "actor_train.learning_rate",
        [f"belongs at {TRAIN}.learning_rate"],
    ),
    (
        "a model of a role",
        ["actor_infer.pretrain=x"],
        "actor_infer.pretrain",
        ["write actor_infer.model_args.model_name_or_path"],
    ),
    ("another project's word", ["train_batch_size=4"], "train_batch_size", ["write rollout_batch_size"]),
    ("an agentic key", ["train_env_manager={}"], "train_env_manager", ["agentic", "not available", "remove it"][::2]),
    ("fp16 where a role trains", ["actor_train.model_args.dtype=fp16"], "actor_train.model_args.dtype", ["bf16"]),
    ("a string for a number", [f"{TRAIN}.learning_rate='fast'"], f"{TRAIN}.learning_rate", ["a number", "'fast'"]),
    ("a quoted number", ["seed='42'"], "seed", ["a whole number", "without quotes"]),
    ("a float for an integer", ["rollout_batch_size=4.0"], "rollout_batch_size", ["a whole number", "write 4"]),
    ("a switch for a number", ["rollout_batch_size=true"], "rollout_batch_size", ["got true", "a whole number"]),
    ("a number for a switch", ["balance_batch=1"], "balance_batch", ["true or false"]),
    ("a number for text", ["exp_name=3"], "exp_name", ["quote it: '3'"]),
    ("null for a required value", ["rollout_batch_size=null"], "rollout_batch_size", ["can't be null"]),
    ("a section without keys", ["rewards=null"], "rewards", ["section with keys", "no value in the file"]),
    ("a value for a section", ["actor_train.model_args=big"], "actor_train.model_args", ["a section with keys"]),
    ("a missing required key", ["~validation.data_args"], "validation.data_args.file_name", ["test.jsonl"]),
    ("out of bounds", [f"{TRAIN}.warmup_ratio=1.5"], f"{TRAIN}.warmup_ratio", [">= 0 and < 1"]),
    ("not a number at all", [f"{TRAIN}.learning_rate=.nan"], f"{TRAIN}.learning_rate", ["a number"]),
    ("a choice misspelt", ["truncation=midle"], "truncation", ["did you mean 'middle'"]),
    ("a choice of three dots", ["pretrain=???"], "pretrain", ["in place of ???", "pretrain=..."]),
    (
        "an option of vLLM elsewhere",
        ["actor_infer.gpu_memory_utilization=0.5"],
        "actor_infer.gpu_memory_utilization",
        ["mem_fraction_static", "actor_infer.strategy_args.strategy_config"],
    ),
    (
        "an unknown engine",
        ["actor_infer.strategy_args.strategy_name=hf_inferr"],
        "actor_infer.strategy_args.strategy_name",
        ["did you mean 'hf_infer'"],
    ),
    (
        "an engine in the wrong role",
        ["actor_infer.strategy_args.strategy_name=fsdp2_train"],
        "actor_infer.strategy_args.strategy_name",
        ["hf_infer or vllm or sglang, which can do the work of actor_infer"],
    ),
    (
        "an option of another engine",
        ["actor_infer.strategy_args={strategy_name: hf_infer, strategy_config: {reduce_dtype: fp32}}"],
        "actor_infer.strategy_args.strategy_config.reduce_dtype",
        ["a key of actor_infer.strategy_args"],
    ),
    ("no checkpoint to keep", ["checkpoint_config.max_to_keep=0"], "checkpoint_config.max_to_keep", [">= 1"]),
    (
        "an unknown content",
        ["checkpoint_config.save_contents=[model,optimiser]"],
        "checkpoint_config.save_contents[1]",
        ["model, optimizer, extra", "did you mean 'optimizer'"],
    ),
    (
        "no content",
        ["checkpoint_config.save_contents=[]"],
        "checkpoint_config.save_contents",
        ["one or several of model, optimizer, extra, hf_model", "save_steps=0 saves nothing"],
    ),
    (
        "an optimizer's state without weights",
        ["checkpoint_config.save_contents=[optimizer,extra]"],
        "checkpoint_config.save_contents",
        ["model too: optimizer and extra can't be used without the weights"],
    ),
    (
        "a content twice",
        ["checkpoint_config.save_contents=[model,model]"],
        "checkpoint_config.save_contents",
        ["each content once"],
    ),
    (
        "checkpoints that the run itself couldn't resume",
        ["checkpoint_config.save_contents=[model,extra]", "save_steps=5", "resume_from_checkpoint=auto"],
        "checkpoint_config.save_contents",
        ["bit for bit", "its moments are lost (AdamW's: 8 bytes for every weight that trains)", "add optimizer"],
    ),
    (
        "contents to load where nothing is loaded",
        ["checkpoint_config.load_contents=[model]"],
        "checkpoint_config.load_contents",
        ["resume_from_checkpoint is false", "or remove the key"],
    ),
    (
        "a start over at each restart",
        ["checkpoint_config.load_contents=[model]", "resume_from_checkpoint=auto"],
        "checkpoint_config.load_contents",
        ["each start would throw away the steps of the one before", "name the checkpoint's folder"],
    ),
    (
        "a Hugging Face folder to resume from",
        ["checkpoint_config.load_contents=[hf_model]", "resume_from_checkpoint=model"],
        "checkpoint_config.load_contents",
        ["pretrain=<checkpoint>/hf_model"],
    ),
    (
        "moments to load without weights",
        ["checkpoint_config.load_contents=[optimizer,extra]", "resume_from_checkpoint=model"],
        "checkpoint_config.load_contents",
        ["model among them"],
    ),
    (
        "a checkpoint to delete that isn't loaded",
        ["checkpoint_config.delete_after_load=true"],
        "checkpoint_config.delete_after_load",
        ["resume_from_checkpoint is false"],
    ),
    (
        "an address of no protocol",
        ["checkpoint_config.output_dir=nowhere://bucket"],
        "checkpoint_config.output_dir",
        ["nowhere"],
    ),
    ("a tracker twice", ["track_with=[jsonl,jsonl]"], "track_with", ["each tracker once"]),
    (
        "an option that the tracker lacks",
        ["track_with=[{name: stdout, row: 3}]"],
        "tracker_kwargs.stdout.row",
        ["an option of stdout", "did you mean 'rows'"],
    ),
    (
        "an option of a tracker without any",
        ["track_with=[{name: jsonl, path: x}]"],
        "tracker_kwargs.jsonl.path",
        ["an option of jsonl, which has none"],
    ),
    ("a table without rows", ["track_with=[{name: stdout, rows: 0}]"], "tracker_kwargs.stdout.rows", [">= 1"]),
    ("a word for rows", ["track_with=[{name: stdout, rows: nine}]"], "tracker_kwargs.stdout.rows", ["a whole number"]),
    (
        "a word for a live table",
        ["track_with=[{name: stdout, live: perhaps}]"],
        "tracker_kwargs.stdout.live",
        ["true or false"],
    ),
    (
        "options of a silent tracker",
        ["track_with=[jsonl]", "tracker_kwargs.stdout.rows=3"],
        "tracker_kwargs.stdout",
        ["track_with is jsonl"],
    ),
    ("another pipeline", ["pipeline=distil"], "pipeline", ["distill"]),
    ("an estimator misspelt", ["adv_estimator=gpro"], "adv_estimator", ["did you mean 'grpo'"]),
    ("an agentic estimator", ["adv_estimator=gigpo"], "adv_estimator", ["credits the turns of an environment"]),
    ("verl's column of the reward", ["reward_fn_key=kind"], "reward_fn_key", ["write actor_train.data_args.tag"]),
    (
        "verl's dataset class",
        [f"{DATA}.custom_cls={{path: a.py, name: B}}"],
        f"{DATA}.custom_cls",
        ["data_args.dataset"],
    ),
    ("verl's fire sampling", ["use_fire_sampling=true"], "use_fire_sampling", ["fire_temperature: 30"]),
    ("verl's callback", ["completion_callback=a.b"], "completion_callback", ["rewards.<domain>.rollout"]),
    (
        "verl's validation order",
        ["validation.validation_shuffle=true"],
        "validation.validation_shuffle",
        ["write validation.shuffle"],
    ),
    ("verl's images", [f"{DATA}.image_key=images"], f"{DATA}.image_key", ["rows with pictures are refused"]),
    (
        "verl's baseline for turns",
        ["adv_estimator=tir_optimal_token_baseline"],
        "adv_estimator",
        ["write optimal_token_baseline"],
    ),
    ("an estimator misspelt", ["kl_penalty=k4"], "kl_penalty", ["one of kl, abs, mse, low_var_kl, full"]),
    ("tokens of a KL that is an estimate", ["kl_top_k=8"], "kl_top_k", ["full"]),
    ("a loss misspelt", ["policy_loss=cipso"], "policy_loss", ["did you mean 'cispo'"]),
    ("a reference to nowhere", ["exp_name=${experiment}"], "exp_name", ["'experiment' not found"]),
    # groups and batches
    (
        "a group of one with GRPO",
        ["num_return_sequences_in_group=1", f"{TRAIN}.gradient_accumulation_steps=1"],
        "num_return_sequences_in_group",
        ["at least 2", "adv_estimator grpo", "every advantage is 0"],
    ),
    (
        "a group of one with group norm",
        [
            "num_return_sequences_in_group=1",
            "adv_estimator=reinforce",
            "reward_norm=group",
            f"{TRAIN}.gradient_accumulation_steps=1",
        ],
        "num_return_sequences_in_group",
        ["reward_norm group", "every advantage is 0"],
    ),
    (
        "normalised scores against a greedy one",
        ["adv_estimator=remax", "reward_norm=batch"],
        "reward_norm",
        ["remax subtracts the greedy response's score", "reward_norm=null"],
    ),
    (
        "a buffer beyond the longest response",
        ["overlong_shaping.buffer=9", f"{SAMPLING}.max_new_tokens=8"],
        "overlong_shaping.buffer",
        ["at most 8"],
    ),
    # 4 per device x 3 accumulation x 1 rank = 12; 4 prompts x 4 responses = 16 = 12 + 4. 4 x 2 = 8 and 4 x 4 = 16 fit.
    (
        "a mini-batch that doesn't divide",
        [f"{TRAIN}.gradient_accumulation_steps=3"],
        TRAIN,
        [
            "= 12 doesn't divide",
            "4 prompts x 4 responses = 16",
            "remainder 4",
            "rollout_batch_size=3 or 6",
            "gradient_accumulation_steps=2 or 4",
        ],
    ),
    (
        "a mini-batch larger than the step",
        [f"{TRAIN}.gradient_accumulation_steps=8"],
        TRAIN,
        ["= 32 doesn't divide", "rollout_batch_size=8"],
    ),
    ("GAE without a critic", ["adv_estimator=gae"], "critic", ["adv_estimator is gae", "add a critic section"]),
    (
        "a critic without GAE",
        ["critic={}"],
        "critic",
        ["acts only with adv_estimator gae", "adv_estimator=gae, or remove it"],
    ),
    ("a warm-up without a critic", ["critic_warmup=1"], "critic_warmup", ["acts only with adv_estimator gae"]),
    # KL
    (
        "both KL terms",
        ["use_kl_loss=true", "add_token_level_kl=true", "reference={}"],
        "use_kl_loss",
        ["one KL term", "allow_both_kl=true"],
    ),
    ("a KL without a reference", ["use_kl_loss=true"], "reference", ["use_kl_loss is on", "add a reference section"]),
    (
        "a KL target without KL",
        ["target_kl=0.1"],
        "target_kl",
        ["add_token_level_kl is false", "add_token_level_kl=true, or remove it"],
    ),
    (
        "a horizon without its target",
        ["kl_horizon=9"],
        "kl_horizon",
        ["acts only with target_kl, and target_kl is null"],
    ),
    (
        "a dual clip that is off",
        ["dual_clip_c=2"],
        "dual_clip_c",
        ["dual_clip_loss is false", "dual_clip_loss=true, or"],
    ),
    ("a threshold without its mask", ["difficulty_low_threshold=0.2"], "difficulty_low_threshold", ["difficulty_mask"]),
    ("a length without its mask", ["error_max_len_threshold=9"], "error_max_len_threshold", ["error_max_len_clip"]),
    (
        "further prompts without the switch",
        ["max_additional_running_prompts=3"],
        "max_additional_running_prompts",
        ["is_use_additional_prompts is false"],
    ),
    # rewards
    ("no domain", ["~rewards", "+rewards={}"], "rewards", ["at least one domain"]),
    ("no process for a reward", ["rewards.math.world_size=0"], "rewards.math.world_size", [">= 1"]),
    ("no time for a reward", ["rewards.math.timeout_s=0"], "rewards.math.timeout_s", ["> 0"]),
    ("fewer attempts than one", ["reward_retries=-1"], "reward_retries", [">= 0"]),
    ("an unknown reward", ["rewards.math.name=mathrule"], "rewards.math.name", ["did you mean 'math_rule'"]),
    ("a reward by a dotted path", ["rewards.math.name=my.rewards.score"], "rewards.math.name", ["my.rewards:score"]),
    (
        "two domains with one tag",
        ["rewards.words.tag_included=algebra"],
        "rewards.words.tag_included",
        ["'algebra' is also in rewards.math"],
    ),
    ("a custom reward without its function", ["rewards.math.name=custom"], "custom_reward_function", ["name: custom"]),
    (
        "an empty band of scores",
        ["rewards.math.query_filter_config={type: mean_filter, filter_args: {threshold_down: 1, threshold_up: 0}}"],
        "rewards.math.query_filter_config.filter_args.threshold_down",
        ["every group is dropped"],
    ),
    (
        "a response filter without a bound",
        ["rewards.math.response_filter_config.type=score_filter"],
        "rewards.math.response_filter_config.filter_args",
        ["threshold_down or threshold_up"],
    ),
    (
        "a response filter that lets nothing through",
        [f"rewards.math.response_filter_config={{type: length_filter, filter_args: {BAND}}}"],
        "rewards.math.response_filter_config.filter_args.threshold_down",
        ["every response is dropped"],
    ),
    (
        "a bound of no filter",
        ["rewards.math.response_filter_config.filter_args.threshold_up=9"],
        "rewards.math.response_filter_config.filter_args.threshold_up",
        ["no effect", "type=score_filter"],
    ),
    (
        "shares of an unknown domain",
        [f"{DATA}.domain_interleave_probs={{math: 0.5, words: 0.5, word: 0.0}}"],
        f"{DATA}.domain_interleave_probs.word",
        ["a domain of rewards: math, words"],
    ),
    (
        "shares that don't sum to one",
        [f"{DATA}.domain_interleave_probs={{math: 0.5, words: 0.6}}"],
        f"{DATA}.domain_interleave_probs",
        ["0.5 + 0.6 = 1.1"],
    ),
    (
        "shares that miss a domain",
        [f"{DATA}.domain_interleave_probs={{math: 1.0}}", "validation=null"],
        f"{DATA}.domain_interleave_probs.words",
        ["a share for every domain"],
    ),
    # lengths
    ("an impossible length", ["sequence_length=40"], "sequence_length", ["32 + 16 = 48"]),
    ("longer than the model", ["prompt_length=64"], "sequence_length", ["got 80", "at most 64 tokens"]),
    (
        "responses beyond their limit",
        [f"{SAMPLING}.max_new_tokens=17"],
        f"{SAMPLING}.max_new_tokens",
        ["response_length (16)"],
    ),
    (
        "a token budget below one row",
        ["actor_train.use_dynamic_batching_in_train=true", "actor_train.max_tokens_per_microbatch_in_train=47"],
        "actor_train.max_tokens_per_microbatch_in_train",
        ["at least the longest sequence, 48"],
    ),
    (
        "a switch without its budget",
        ["actor_train.use_dynamic_batching_in_infer=true"],
        "actor_train.max_tokens_per_microbatch_in_infer",
        ["use_dynamic_batching_in_infer is on"],
    ),
    # sampling
    ("greedy training", [f"{SAMPLING}.temperature=0"], f"{SAMPLING}.temperature", ["above 0", "all the same"]),
    ("top-p that the trainer ignores", [f"{SAMPLING}.top_p=0.9"], f"{SAMPLING}.top_p", ["train_infer_correction"]),
    ("pass@k beyond n", ["validation.pass_at_k=[1,4]"], "validation.pass_at_k", ["1 to num_return_sequences (1)"]),
    (
        "a hot first token in validation",
        ["validation.generating_args.fire_temperature=30"],
        "validation.generating_args.fire_temperature",
        ["validation samples as the policy does"],
    ),
    (
        "a hot first token and a stop string",
        [f"{SAMPLING}.fire_temperature=30", f"{SAMPLING}.stop_strings=x"],
        f"{SAMPLING}.fire_temperature",
        ["isn't found"],
    ),
    (
        "a hot first token alone",
        [f"{SAMPLING}.fire_temperature=30", f"{SAMPLING}.max_new_tokens=1"],
        f"{SAMPLING}.fire_temperature",
        ["have none that the policy chose"],
    ),
    ("likeliest tokens of nothing", [f"{SAMPLING}.fire_top_k=4"], f"{SAMPLING}.fire_top_k", ["fire_temperature"]),
    ("maj@k beyond n", ["validation.maj_at_k=[2]"], "validation.maj_at_k", ["1 to num_return_sequences (1)"]),
    (
        "a vote on nothing",
        ["validation.maj_at_k=1", "rewards.math.name=none", "rewards.words.name=none"],
        "validation.maj_at_k",
        ["no reward says which answer a response states"],
    ),
    (
        "many greedy responses",
        ["validation.generating_args.num_return_sequences=4", "validation.generating_args.temperature=0"],
        "validation.generating_args.num_return_sequences",
        ["all responses of a prompt would be the same"],
    ),
    # data
    ("no data", [f"{DATA}.file_name=[]", f"{DATA}.prompt=null"], f"{DATA}.file_name", ["a file, or procedural tasks"]),
    ("prompt and messages", [f"{DATA}.messages=chat"], f"{DATA}.prompt", ["only one of prompt and messages"]),
    ("a missing file", [f"{DATA}.file_name=trian.jsonl"], f"{DATA}.file_name", ["no data file", "'train.jsonl'"]),
    ("an empty file", [f"{DATA}.file_name=empty.jsonl"], f"{DATA}.file_name", ["no rows"]),
    ("a blank file", [f"{DATA}.file_name=blank.jsonl"], f"{DATA}.file_name", ["no rows"]),
    ("a header without rows", [f"{DATA}.file_name=header.csv"], f"{DATA}.file_name", ["no rows"]),
    ("a torn row", [f"{DATA}.file_name=torn.jsonl"], f"{DATA}.file_name", ["torn.jsonl:1"]),
    ("a folder for a file", [f"{DATA}.file_name=hollow"], f"{DATA}.file_name", ["holds no data file"]),
    ("an unknown format", [f"{DATA}.file_name=notes.txt"], f"{DATA}.file_name", [".jsonl"]),
    ("a missing column", [f"{DATA}.prompt=problem"], f"{DATA}.prompt", ["question, ground_truth, tag"]),
    (
        "an unknown procedural dataset",
        [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sums}}]"],
        f"{DATA}.procedural[0].dataset",
        ["did you mean 'chain_sum'"],
    ),
    (
        "a tag of no domain",
        [f"{DATA}.procedural=[{{tag: algebr, dataset: chain_sum}}]"],
        f"{DATA}.procedural[0].tag",
        ["algebra, words"],
    ),
    ("a template misspelt", [f"{DATA}.template=nativ"], f"{DATA}.template", ["did you mean 'native'"]),
    ("a template for no tag", ["tag_to_template={word: plain}"], "tag_to_template.word", ["did you mean 'words'"]),
    (
        "examples without answers",
        [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, few_shot: 2, example_template: Q}}]"],
        f"{DATA}.procedural[0].example_template",
        ["{answer}"],
    ),
    (
        "a question without a question",
        [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, question_template: solve this}}]"],
        f"{DATA}.procedural[0].question_template",
        ["a text with {question}"],
    ),
    (
        "a size in two places",
        [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, config: {{size: 3}}}}]"],
        f"{DATA}.procedural[0].config.size",
        ["procedural[0].size=3"],
    ),
    (
        "an option that the dataset hasn't",
        [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, config: {{min_term: 3}}}}]"],
        f"{DATA}.procedural[0].config.min_term",
        ["did you mean 'min_terms'"],
    ),
    (
        "an option of another type",
        [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, config: {{min_terms: many}}}}]"],
        f"{DATA}.procedural[0].config.min_terms",
        ["int"],
    ),
    (
        "a domain without rows",
        [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum}}]", f"{DATA}.file_name=[]"],
        "rewards.words",
        ["no procedural task has one of its tags (words)"],
    ),
    (
        "files for a procedural reward",
        ["rewards.words.name=reasoning_gym"],
        "rewards.words.name",
        ["scores procedural tasks only"],
    ),
    # schedule
    ("no end", ["max_steps=0"], "max_steps", ["num_train_epochs is off too"]),
    ("evaluation of nothing", ["eval_steps=1", "~validation"], "eval_steps", ["acts only with validation"]),
    ("parts of one reward", ["adv_estimator=gdpo"], "adv_estimator", ["no domain has the reward `weighted`"]),
    ("a start without a warm-up", [f"{TRAIN}.warmup_init_ratio=0.1"], f"{TRAIN}.warmup_init_ratio", ["warmup_steps"]),
    (
        "waves of a line",
        [f"{TRAIN}.num_cycles=2", f"{TRAIN}.lr_scheduler_type=linear"],
        f"{TRAIN}.num_cycles",
        ["cosine"],
    ),
    (
        "a fall that ends before it begins",
        [f"{TRAIN}.warmup_steps=5", f"{TRAIN}.lr_decay_steps=5", f"{TRAIN}.lr_scheduler_type=linear"],
        f"{TRAIN}.lr_decay_steps",
        ["more than warmup_steps (5)"],
    ),
    (
        "a style of no schedule",
        [f"{TRAIN}.weight_decay_incr_style=cosine"],
        f"{TRAIN}.weight_decay_incr_style",
        ["end_weight_decay"],
    ),
    ("Muon's keys with AdamW", [f"{TRAIN}.muon_momentum=0.9"], f"{TRAIN}.muon_momentum", ["optimizer muon"]),
    (
        "Muon on DeepSpeed",
        [f"{TRAIN}.optimizer=muon", "actor_train.strategy_args.strategy_name=deepspeed_train"],
        f"{TRAIN}.optimizer",
        ["Muon needs whole matrices"],
    ),
    (
        "Muon of adapters",
        [f"{TRAIN}.optimizer=muon", "actor_train.model_args.lora_rank=4"],
        f"{TRAIN}.optimizer",
        ["adamw with LoRA"],
    ),
    ("two warm-ups", [f"{TRAIN}.warmup_steps=1", f"{TRAIN}.warmup_ratio=0.1"], f"{TRAIN}.warmup_ratio", ["keep one"]),
    ("resuming from nothing", ["resume_from_checkpoint=true"], "resume_from_checkpoint", ["there are none"]),
    ("resuming from nowhere", ["resume_from_checkpoint=old/step-3"], "resume_from_checkpoint", ["no folder 'old'"]),
    # machine
    (
        "a slot that isn't there",
        ["executor=ray", "actor_infer.device_mapping=[0,1]"],
        "actor_infer.device_mapping",
        ["1 x 1 = 1; 1 isn't there", "num_gpus_per_node=2"],
    ),
    (
        "a mapping nobody can read",
        ["actor_infer.device_mapping='range(two)'"],
        "actor_infer.device_mapping",
        ["'two' isn't a slot number", "list(range(0, 8))"],
    ),
    ("a slot named twice", ["actor_infer.device_mapping=[0,0]"], "actor_infer.device_mapping", ["0 appears twice"]),
    (
        "a size that contradicts the slots",
        ["executor=ray", "actor_infer.world_size=2", "actor_infer.device_mapping=[0]"],
        "actor_infer.world_size",
        ["1, the number of slots"],
    ),
    (
        "two ranks inline",
        ["num_gpus_per_node=2", "actor_infer.device_mapping=0-1"],
        "actor_infer.device_mapping",
        ["one rank with executor inline"],
    ),
    (
        "variables for no process",
        ["system_envs={A: b}"],
        "system_envs",
        ["executor is inline", "already read its environment"],
    ),
    ("a model that isn't there", ["pretrain=./modle"], "pretrain", ["a model folder that exists"]),
    ("no model", ["pretrain=null"], "actor_train.model_args.model_name_or_path", ["neither this nor pretrain"]),
    ("a folder without a model", ["pretrain=hollow"], "pretrain", ["config.json"]),
    ("an output that is a file", ["output_dir=notes.txt/run"], "output_dir", ["notes.txt is a file"]),
    (
        "a custom reward without a file",
        ["rewards.math.name=custom", "custom_reward_function={path: reward.py, name: score}"],
        "custom_reward_function.path",
        ["'rewards.py'"],
    ),
    (
        "a custom reward without a function",
        ["rewards.math.name=custom", "custom_reward_function={path: rewards.py, name: scor}"],
        "custom_reward_function.path",
        ["it has score"],
    ),
    (
        "a custom reward that doesn't parse",
        ["rewards.math.name=custom", "custom_reward_function={path: broken.py, name: score}"],
        "custom_reward_function.path",
        ["broken.py:1"],
    ),
    ("a reward in no file", ["rewards.math.name='reward.py:score'"], "rewards.math.name", ["'rewards.py'"]),
    ("a reward that isn't there", ["rewards.math.name='rewards.py:scor'"], "rewards.math.name", ["'score'"]),
    (
        "a class in place of a reward",
        ["rewards.math.name='things.py:Thing'"],
        "rewards.math.name",
        ["a function, plain or async; Thing is a class"],
    ),
    (
        "an option that one's own reward lacks",
        ["rewards.math.name='rewards.py:score'", "rewards.math.reward_kwargs={scal: 1}"],
        "rewards.math.reward_kwargs.scal",
        ["there is no such option"],
    ),
    (
        "an option that a built-in reward lacks",
        ["rewards.math.name=gsm8k", "rewards.math.reward_kwargs={mod: strict}"],
        "rewards.math.reward_kwargs.mod",
        ["did you mean 'mode'"],
    ),
    (
        "a rollout class without a class",
        ["rewards.math.rollout=episodes"],
        "rewards.math.rollout",
        ["file.py:Class", "episodes.py:MyEpisode"],
    ),
    (
        "a rollout class in no file",
        ["rewards.math.rollout='reward.py:Score'"],
        "rewards.math.rollout",
        ["a Python file that exists", "'rewards.py'"],
    ),
    (
        "a rollout class that isn't there",
        ["rewards.math.rollout='rewards.py:Score'"],
        "rewards.math.rollout",
        ["a class 'Score' in rewards.py; it has none"],
    ),
    (
        "a rollout class in no package",
        ["rewards.math.rollout='nowhere_to_be.found:Mine'"],
        "rewards.math.rollout",
        ["no package"],
    ),
    ("a folder of other things for the model", ["export_dir=."], "export_dir", ["holds", "name a new folder"]),
    ("the model's own folder", ["export_dir=model"], "export_dir", ["other than that of the model of actor_train"]),
    (
        "the run's folder for the model",
        ["export_dir=output"],
        "export_dir",
        ["for the trained model alone, not that of output_dir or one around it", "name a new folder"],
    ),
    (
        "a folder around the run's for the model",
        ["export_dir=new", "output_dir=new/deep/run"],
        "export_dir",
        ["not that of output_dir"],
    ),
    ("the logs' folder for the model", ["export_dir=output/../output/logs"], "export_dir", ["not that of logging_dir"]),
    (
        "a folder around the checkpoints for the model",
        ["export_dir=m", "checkpoint_config.output_dir=m/c"],
        "export_dir",
        ["not that of checkpoint_config.output_dir"],
    ),
    (
        "the rollouts' folder for the model",
        ["export_dir=dump", "rollout_dump_dir=dump"],
        "export_dir",
        ["not that of rollout_dump_dir"],
    ),
    ("a preparation without a colon", ["prepare=foo"], "prepare", ["package.module:name or path/to/file.py:name"]),
    ("a preparation in no module", ["prepare='.:foo'"], "prepare", ["no package ''"]),
    (
        "options beside no section of trackers",
        ["track_with=[{name: stdout, rows: 5}]", "tracker_kwargs=null"],
        "tracker_kwargs",
        ["a section with keys", "has no value in the file"],
    ),
    (
        "options beside text for trackers",
        ["track_with=[{name: stdout, rows: 5}]", "tracker_kwargs=text"],
        "tracker_kwargs",
        ["a section with keys"],
    ),
    ("an estimator in no package", ["adv_estimator='nowhere_to_be.found:mine'"], "adv_estimator", ["no package"]),
]


def problem_of(job: Path, overrides: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", overrides))
    return caught.value


def test_the_job_that_the_table_breaks_is_sound(job):
    check_prerequisites(load_config(job, "job"))


@pytest.mark.parametrize(
    ("overrides", "path", "fragments"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_a_broken_configuration_gives_one_clear_error(job, overrides, path, fragments):
    start = time.process_time()
    error = problem_of(job, overrides)
    assert time.process_time() - start < 2.0
    # `actor_infer` without a model of its own repeats what is wrong with the default.
    violation = error.violations[0]
    assert {v.path.split(".", 1)[-1] for v in error.violations} == {violation.path.split(".", 1)[-1]}, str(error)
    assert violation.path == path
    for fragment in fragments:
        assert fragment in str(error)


def test_an_unwritable_output_folder_is_refused(job):
    if os.access(job / "locked", os.W_OK):
        pytest.skip("this user may write anywhere")
    assert "can't" in str(problem_of(job, ["output_dir=locked/run"]))


def test_a_disk_without_room_for_the_trained_model_is_refused(job, monkeypatch):
    (job / "model" / "weights.safetensors").write_bytes(bytes(3 * 2**20))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 2**20))
    message = str(problem_of(job, []))
    assert "export_dir" in message
    assert "weights take 3.0 MiB or more" in message
    assert "has 1.0 MiB left" in message
    check_prerequisites(load_config(job, "job", ["export_model=false"]))


def test_losing_the_trained_weights_takes_a_warning(job):
    config = load_config(job, "job", ["export_model=false", "save_steps=0"])
    assert any("the trained weights are lost" in warning for warning in warnings_of(config))


def test_all_problems_are_shown_at_once(job):
    overrides = ["sead=1", "exp_name=3", f"{TRAIN}.learning_rate=fast", "rewards.math.nam=1", "truncation=no"]
    error = problem_of(job, overrides)
    assert [violation.path for violation in error.violations] == [
        "exp_name",
        "truncation",
        "rewards.math.nam",
        f"{TRAIN}.learning_rate",
        "sead",
    ] or {violation.path for violation in error.violations} == {
        "exp_name",
        "truncation",
        "rewards.math.nam",
        f"{TRAIN}.learning_rate",
        "sead",
    }
    assert str(error).startswith("5 problems in")


def test_unknown_keys_and_contradictions_are_shown_together(job):
    error = problem_of(job, ["sead=1", "use_kl_loss=true", "sequence_length=1"])
    assert {violation.path for violation in error.violations} == {"sead", "reference", "sequence_length"}


def test_a_refused_number_hides_nothing_about_the_roles(job):
    error = problem_of(job, ["max_steps=two", "~pretrain", "sequence_length=1"])
    assert {violation.path.rpartition(".")[2] for violation in error.violations} >= {
        "max_steps",
        "model_name_or_path",
        "sequence_length",
    }


YAMLS = [
    ("pipeline: rlvr\n\tseed: 1\n", "bad.yaml:2:1", "spaces"),
    ("pipeline: rlvr\nrewards: [1\n", "bad.yaml:3:1", "valid YAML"),
    ("pipeline: rlvr\nseed: 1\nseed: 2\n", "bad.yaml:3:1", "duplicate key seed\n      fix: remove one of the two"),
    ("", "bad.yaml", "keys and values"),
    ("- 1\n", "bad.yaml", "keys and values"),
    ("defaults: [absent, _self_]\npipeline: rlvr\n", "bad.yaml", "Could not load 'absent'"),
    ("seed: 1\n", "pipeline", "add pipeline: rlvr"),
]


@pytest.mark.parametrize(("text", "where", "fragment"), YAMLS)
def test_a_file_that_is_no_configuration_is_refused_with_its_place(tmp_path, text, where, fragment):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path, "bad")
    assert where in str(caught.value)
    assert fragment in str(caught.value)


def test_a_missing_file_names_those_there_are(job):
    with pytest.raises(ValueError, match=r"no configuration file .*jobs\.yaml; did you mean .*job\.yaml"):
        load_config(job, "jobs")
    with pytest.raises(ValueError, match=r"no configuration file .*nowhere/job\.yaml"):
        load_config(job / "nowhere", "job")


COMMANDS = [
    (["sead=1"], "did you mean 'seed'"),
    ([f"{DATA}.file_name=trian.jsonl"], "'train.jsonl'"),
    (["seed=[1"], "this isn't key=value with a value as YAML has it"),
]


@pytest.mark.parametrize(("overrides", "fragment"), COMMANDS)
def test_the_command_ends_with_code_2_and_no_traceback(job, overrides, fragment):
    command = [sys.executable, "-X", "importtime", REPOSITORY / "examples" / "start_pipeline.py"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [*command, "--config_path", ".", "--config_name", "job", *overrides],
        capture_output=True, text=True, timeout=60, cwd=job,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # computing time: others may want the cores too
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert done.returncode == 2, said
    assert fragment in said
    assert "Traceback" not in said
    assert not {"torch", "ray", "transformers", "datasets", "vllm"} & imported


def test_a_glob_and_a_folder_of_files_are_data_too(job):
    check_prerequisites(load_config(job, "job", [f"{DATA}.file_name='tr*.jsonl'"]))
    (job / "rows").mkdir()
    (job / "rows" / "one.jsonl").write_text((job / "train.jsonl").read_text())
    check_prerequisites(load_config(job, "job", [f"{DATA}.file_name=rows"]))


def test_a_data_file_that_the_run_itself_makes_need_not_be_there(job):
    (job / "make.py").write_text("def make(config): ...\n")
    missing = "actor_train.data_args.file_name=made.jsonl"
    with pytest.raises(ConfigError, match="no data file"):
        check_prerequisites(load_config(job, "job", [missing]))
    check_prerequisites(load_config(job, "job", [missing, "prepare='make.py:make'"]))
