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
from refused import refusals

from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.validate import warnings_of

REPOSITORY = Path(__file__).parents[2]
TRAIN = "actor_train.training_args"
DATA = "actor_train.data_args"
SAMPLING = "actor_infer.generating_args"

BAND = "{threshold_down: 9, threshold_up: 9}"
BROKEN = [
    # id, overrides, fragments of the one violation's text, and its path unless it is the last override's key
    ("a typo at the top", ["rollout_batchsize=4"], ["did you mean 'rollout_batch_size'"]),
    ("a typo below", [f"{TRAIN}.learning_rat=1"], ["'learning_rate'", f"a key of {TRAIN}"]),
    ("a key at the wrong level", ["actor_train.learning_rate=1e-6"], [f"belongs at {TRAIN}.learning_rate"]),
    ("a model of a role", ["actor_infer.pretrain=x"], ["write actor_infer.model_args.model_name_or_path"]),
    ("another project's word", ["train_batch_size=4"], ["write rollout_batch_size"]),
    ("an agentic key", ["train_env_manager={}"], ["agentic", "not available", "remove it"][::2]),
    ("fp16 where a role trains", ["actor_train.model_args.dtype=fp16"], ["bf16"]),
    ("a string for a number", [f"{TRAIN}.learning_rate='fast'"], ["a number", "'fast'"]),
    ("a quoted number", ["seed='42'"], ["a whole number", "without quotes"]),
    ("a float for an integer", ["rollout_batch_size=4.0"], ["a whole number", "write 4"]),
    ("a switch for a number", ["rollout_batch_size=true"], ["got true", "a whole number"]),
    ("a number for a switch", ["balance_batch=1"], ["true or false"]),
    ("a number for text", ["exp_name=3"], ["quote it: '3'"]),
    ("null for a required value", ["rollout_batch_size=null"], ["can't be null"]),
    ("a section without keys", ["rewards=null"], ["section with keys", "no value in the file"]),
    ("a value for a section", ["actor_train.model_args=big"], ["a section with keys"]),
    ("a missing required key", ["~validation.data_args"], ["test.jsonl"], "validation.data_args.file_name"),
    ("out of bounds", [f"{TRAIN}.warmup_ratio=1.5"], [">= 0 and < 1"]),
    ("not a number at all", [f"{TRAIN}.learning_rate=.nan"], ["a number"]),
    ("a choice misspelt", ["truncation=midle"], ["did you mean 'middle'"]),
    ("a choice of three dots", ["pretrain=???"], ["in place of ???", "pretrain=..."]),
    ("an option of vLLM elsewhere", ["actor_infer.gpu_memory_utilization=0.5"],
     ["mem_fraction_static", "actor_infer.strategy_args.strategy_config"]),
    ("an unknown engine", ["actor_infer.strategy_args.strategy_name=hf_inferr"], ["did you mean 'hf_infer'"]),
    ("an engine in the wrong role", ["actor_infer.strategy_args.strategy_name=fsdp2_train"],
     ["hf_infer or vllm or sglang, which can do the work of actor_infer"]),
    ("an option of another engine",
     ["actor_infer.strategy_args={strategy_name: hf_infer, strategy_config: {reduce_dtype: fp32}}"],
     ["a key of actor_infer.strategy_args"], "actor_infer.strategy_args.strategy_config.reduce_dtype"),
    ("no checkpoint to keep", ["checkpoint_config.max_to_keep=0"], [">= 1"]),
    ("an unknown content", ["checkpoint_config.save_contents=[model,optimiser]"],
     ["model, optimizer, extra", "did you mean 'optimizer'"], "checkpoint_config.save_contents[1]"),
    ("no content", ["checkpoint_config.save_contents=[]"],
     ["one or several of model, optimizer, extra, hf_model", "save_steps=0 saves nothing"]),
    ("an optimizer's state without weights", ["checkpoint_config.save_contents=[optimizer,extra]"],
     ["model too: optimizer and extra can't be used without the weights"]),
    ("a content twice", ["checkpoint_config.save_contents=[model,model]"], ["each content once"]),
    ("checkpoints that the run itself couldn't resume",
     ["checkpoint_config.save_contents=[model,extra]", "save_steps=5", "resume_from_checkpoint=auto"],
     ["bit for bit", "its moments are lost (AdamW's: 8 bytes for every weight that trains)", "add optimizer"],
     "checkpoint_config.save_contents"),
    ("contents to load where nothing is loaded", ["checkpoint_config.load_contents=[model]"],
     ["resume_from_checkpoint is false", "or remove the key"]),
    ("a start over at each restart", ["checkpoint_config.load_contents=[model]", "resume_from_checkpoint=auto"],
     ["each start would throw away the steps of the one before", "name the checkpoint's folder"],
     "checkpoint_config.load_contents"),
    ("a Hugging Face folder to resume from",
     ["checkpoint_config.load_contents=[hf_model]", "resume_from_checkpoint=model"], ["pretrain=<checkpoint>/hf_model"],
     "checkpoint_config.load_contents"),
    ("moments to load without weights",
     ["checkpoint_config.load_contents=[optimizer,extra]", "resume_from_checkpoint=model"], ["model among them"],
     "checkpoint_config.load_contents"),
    ("a checkpoint to delete that isn't loaded", ["checkpoint_config.delete_after_load=true"],
     ["resume_from_checkpoint is false"]),
    ("an address of no protocol", ["checkpoint_config.output_dir=nowhere://bucket"], ["nowhere"]),
    ("a tracker twice", ["track_with=[jsonl,jsonl]"], ["each tracker once"]),
    ("an option that the tracker lacks", ["track_with=[{name: stdout, row: 3}]"],
     ["an option of stdout", "did you mean 'rows'"], "tracker_kwargs.stdout.row"),
    ("an option of a tracker without any", ["track_with=[{name: jsonl, path: x}]"],
     ["an option of jsonl, which has none"], "tracker_kwargs.jsonl.path"),
    ("a table without rows", ["track_with=[{name: stdout, rows: 0}]"], [">= 1"], "tracker_kwargs.stdout.rows"),
    ("a word for rows", ["track_with=[{name: stdout, rows: nine}]"], ["a whole number"], "tracker_kwargs.stdout.rows"),
    ("a word for a live table", ["track_with=[{name: stdout, live: perhaps}]"], ["true or false"],
     "tracker_kwargs.stdout.live"),
    ("options of a silent tracker", ["track_with=[jsonl]", "tracker_kwargs.stdout.rows=3"], ["track_with is jsonl"],
     "tracker_kwargs.stdout"),
    ("another pipeline", ["pipeline=distil"], ["distill"]),
    ("an estimator misspelt", ["adv_estimator=gpro"], ["did you mean 'grpo'"]),
    ("an agentic estimator", ["adv_estimator=gigpo"], ["credits the turns of an environment"]),
    ("verl's column of the reward", ["reward_fn_key=kind"], ["write actor_train.data_args.tag"]),
    ("verl's dataset class", [f"{DATA}.custom_cls={{path: a.py, name: B}}"], ["data_args.dataset"]),
    ("verl's fire sampling", ["use_fire_sampling=true"], ["fire_temperature: 30"]),
    ("verl's callback", ["completion_callback=a.b"], ["rewards.<domain>.rollout"]),
    ("verl's validation order", ["validation.validation_shuffle=true"], ["write validation.shuffle"]),
    ("verl's images", [f"{DATA}.image_key=images"], ["write actor_train.data_args.images"]),
    ("verl's baseline for turns", ["adv_estimator=tir_optimal_token_baseline"], ["write optimal_token_baseline"]),
    ("an estimator misspelt", ["kl_penalty=k4"], ["one of kl, abs, mse, low_var_kl, full"]),
    ("tokens of a KL that is an estimate", ["kl_top_k=8"], ["full"]),
    ("a loss misspelt", ["policy_loss=cipso"], ["did you mean 'cispo'"]),
    ("a reference to nowhere", ["exp_name=${experiment}"], ["'experiment' not found"]),
    # groups and batches
    ("a group of one with GRPO", ["num_return_sequences_in_group=1", f"{TRAIN}.gradient_accumulation_steps=1"],
     ["at least 2", "adv_estimator grpo", "every advantage is 0"], "num_return_sequences_in_group"),
    ("a group of one with group norm", ["num_return_sequences_in_group=1", "adv_estimator=reinforce",
                                        "reward_norm=group", f"{TRAIN}.gradient_accumulation_steps=1"],
     ["reward_norm group", "every advantage is 0"], "num_return_sequences_in_group"),
    ("normalised scores against a greedy one", ["adv_estimator=remax", "reward_norm=batch"],
     ["remax subtracts the greedy response's score", "reward_norm=null"]),
    ("a buffer beyond the longest response", ["overlong_shaping.buffer=9", f"{SAMPLING}.max_new_tokens=8"],
     ["at most 8"], "overlong_shaping.buffer"),
    # 4 per device x 3 accumulation x 1 rank = 12; 4 prompts x 4 responses = 16 = 12 + 4. 4 x 2 = 8 and 4 x 4 = 16 fit.
    ("a mini-batch that doesn't divide", [f"{TRAIN}.gradient_accumulation_steps=3"],
     ["= 12 doesn't divide", "4 prompts x 4 responses = 16", "remainder 4", "rollout_batch_size=3 or 6",
      "gradient_accumulation_steps=2 or 4"], TRAIN),
    ("a mini-batch larger than the step", [f"{TRAIN}.gradient_accumulation_steps=8"],
     ["= 32 doesn't divide", "rollout_batch_size=8"], TRAIN),
    ("GAE without a critic", ["adv_estimator=gae"], ["adv_estimator is gae", "add a critic section"], "critic"),
    ("a critic without GAE", ["critic={}"], ["acts only with adv_estimator gae", "adv_estimator=gae, or remove it"]),
    ("a warm-up without a critic", ["critic_warmup=1"], ["acts only with adv_estimator gae"]),
    # KL
    ("both KL terms", ["use_kl_loss=true", "add_token_level_kl=true", "reference={}"],
     ["one KL term", "allow_both_kl=true"], "use_kl_loss"),
    ("a KL without a reference", ["use_kl_loss=true"], ["use_kl_loss is on", "add a reference section"], "reference"),
    ("a KL target without KL", ["target_kl=0.1"],
     ["add_token_level_kl is false", "add_token_level_kl=true, or remove it"]),
    ("a horizon without its target", ["kl_horizon=9"], ["acts only with target_kl, and target_kl is null"]),
    ("a dual clip that is off", ["dual_clip_c=2"], ["dual_clip_loss is false", "dual_clip_loss=true, or"]),
    ("a threshold without its mask", ["difficulty_low_threshold=0.2"], ["difficulty_mask"]),
    ("a length without its mask", ["error_max_len_threshold=9"], ["error_max_len_clip"]),
    ("further prompts without the switch", ["max_additional_running_prompts=3"],
     ["is_use_additional_prompts is false"]),
    # rewards
    ("no domain", ["~rewards", "+rewards={}"], ["at least one domain"]),
    ("no process for a reward", ["rewards.math.world_size=0"], [">= 1"]),
    ("no time for a reward", ["rewards.math.timeout_s=0"], ["> 0"]),
    ("fewer attempts than one", ["reward_retries=-1"], [">= 0"]),
    ("an unknown reward", ["rewards.math.name=mathrule"], ["did you mean 'math_rule'"]),
    ("a reward by a dotted path", ["rewards.math.name=my.rewards.score"], ["my.rewards:score"]),
    ("two domains with one tag", ["rewards.words.tag_included=algebra"], ["'algebra' is also in rewards.math"]),
    ("a custom reward without its function", ["rewards.math.name=custom"], ["name: custom"], "custom_reward_function"),
    ("an empty band of scores",
     ["rewards.math.query_filter_config={type: mean_filter, filter_args: {threshold_down: 1, threshold_up: 0}}"],
     ["every group is dropped"], "rewards.math.query_filter_config.filter_args.threshold_down"),
    ("a response filter without a bound", ["rewards.math.response_filter_config.type=score_filter"],
     ["threshold_down or threshold_up"], "rewards.math.response_filter_config.filter_args"),
    ("a response filter that lets nothing through",
     [f"rewards.math.response_filter_config={{type: length_filter, filter_args: {BAND}}}"],
     ["every response is dropped"], "rewards.math.response_filter_config.filter_args.threshold_down"),
    ("a bound of no filter", ["rewards.math.response_filter_config.filter_args.threshold_up=9"],
     ["no effect", "type=score_filter"]),
    ("shares of an unknown domain", [f"{DATA}.domain_interleave_probs={{math: 0.5, words: 0.5, word: 0.0}}"],
     ["a domain of rewards: math, words"], f"{DATA}.domain_interleave_probs.word"),
    ("shares that don't sum to one", [f"{DATA}.domain_interleave_probs={{math: 0.5, words: 0.6}}"],
     ["0.5 + 0.6 = 1.1"]),
    ("shares that miss a domain", [f"{DATA}.domain_interleave_probs={{math: 1.0}}", "validation=null"],
     ["a share for every domain"], f"{DATA}.domain_interleave_probs.words"),
    # lengths
    ("an impossible length", ["sequence_length=40"], ["32 + 16 = 48"]),
    ("longer than the model", ["prompt_length=64"], ["got 80", "at most 64 tokens"], "sequence_length"),
    ("responses beyond their limit", [f"{SAMPLING}.max_new_tokens=17"], ["response_length (16)"]),
    ("a token budget below one row",
     ["actor_train.use_dynamic_batching_in_train=true", "actor_train.max_tokens_per_microbatch_in_train=47"],
     ["at least the longest sequence, 48"]),
    ("a switch without its budget", ["actor_train.use_dynamic_batching_in_infer=true"],
     ["use_dynamic_batching_in_infer is on"], "actor_train.max_tokens_per_microbatch_in_infer"),
    # sampling
    ("greedy training", [f"{SAMPLING}.temperature=0"], ["above 0", "all the same"]),
    ("top-p that the trainer ignores", [f"{SAMPLING}.top_p=0.9"], ["train_infer_correction"]),
    ("pass@k beyond n", ["validation.pass_at_k=[1,4]"], ["1 to num_return_sequences (1)"]),
    ("a hot first token in validation", ["validation.generating_args.fire_temperature=30"],
     ["validation samples as the policy does"]),
    ("a hot first token and a stop string", [f"{SAMPLING}.fire_temperature=30", f"{SAMPLING}.stop_strings=x"],
     ["isn't found"], f"{SAMPLING}.fire_temperature"),
    ("a hot first token alone", [f"{SAMPLING}.fire_temperature=30", f"{SAMPLING}.max_new_tokens=1"],
     ["have none that the policy chose"], f"{SAMPLING}.fire_temperature"),
    ("likeliest tokens of nothing", [f"{SAMPLING}.fire_top_k=4"], ["fire_temperature"]),
    ("maj@k beyond n", ["validation.maj_at_k=[2]"], ["1 to num_return_sequences (1)"]),
    ("a vote on nothing", ["validation.maj_at_k=1", "rewards.math.name=none", "rewards.words.name=none"],
     ["no reward says which answer a response states"], "validation.maj_at_k"),
    ("many greedy responses",
     ["validation.generating_args.num_return_sequences=4", "validation.generating_args.temperature=0"],
     ["all responses of a prompt would be the same"], "validation.generating_args.num_return_sequences"),
    # data
    ("no data", [f"{DATA}.file_name=[]", f"{DATA}.prompt=null"], ["a file, or procedural tasks"], f"{DATA}.file_name"),
    ("prompt and messages", [f"{DATA}.messages=chat"], ["only one of prompt and messages"], f"{DATA}.prompt"),
    ("a missing file", [f"{DATA}.file_name=trian.jsonl"], ["no data file", "'train.jsonl'"]),
    ("an empty file", [f"{DATA}.file_name=empty.jsonl"], ["no rows"]),
    ("a blank file", [f"{DATA}.file_name=blank.jsonl"], ["no rows"]),
    ("a header without rows", [f"{DATA}.file_name=header.csv"], ["no rows"]),
    ("a torn row", [f"{DATA}.file_name=torn.jsonl"], ["torn.jsonl:1"]),
    ("a folder for a file", [f"{DATA}.file_name=hollow"], ["holds no data file"]),
    ("an unknown format", [f"{DATA}.file_name=notes.txt"], [".jsonl"]),
    ("a missing column", [f"{DATA}.prompt=problem"], ["question, ground_truth, tag"]),
    ("an unknown procedural dataset", [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sums}}]"],
     ["did you mean 'chain_sum'"], f"{DATA}.procedural[0].dataset"),
    ("a tag of no domain", [f"{DATA}.procedural=[{{tag: algebr, dataset: chain_sum}}]"], ["algebra, words"],
     f"{DATA}.procedural[0].tag"),
    ("a template misspelt", [f"{DATA}.template=nativ"], ["did you mean 'native'"]),
    ("a template for no tag", ["tag_to_template={word: plain}"], ["did you mean 'words'"], "tag_to_template.word"),
    ("examples without answers",
     [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, few_shot: 2, example_template: Q}}]"], ["{answer}"],
     f"{DATA}.procedural[0].example_template"),
    ("a question without a question",
     [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, question_template: solve this}}]"],
     ["a text with {question}"], f"{DATA}.procedural[0].question_template"),
    ("a size in two places", [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, config: {{size: 3}}}}]"],
     ["procedural[0].size=3"], f"{DATA}.procedural[0].config.size"),
    ("an option that the dataset hasn't",
     [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, config: {{min_term: 3}}}}]"],
     ["did you mean 'min_terms'"], f"{DATA}.procedural[0].config.min_term"),
    ("an option of another type",
     [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum, config: {{min_terms: many}}}}]"], ["int"],
     f"{DATA}.procedural[0].config.min_terms"),
    ("a domain without rows", [f"{DATA}.procedural=[{{tag: algebra, dataset: chain_sum}}]", f"{DATA}.file_name=[]"],
     ["no procedural task has one of its tags (words)"], "rewards.words"),
    ("files for a procedural reward", ["rewards.words.name=reasoning_gym"], ["scores procedural tasks only"]),
    # schedule
    ("no end", ["max_steps=0"], ["num_train_epochs is off too"]),
    ("evaluation of nothing", ["eval_steps=1", "~validation"], ["acts only with validation"], "eval_steps"),
    ("parts of one reward", ["adv_estimator=gdpo"], ["no domain has the reward `weighted`"]),
    ("a start without a warm-up", [f"{TRAIN}.warmup_init_ratio=0.1"], ["warmup_steps"]),
    ("waves of a line", [f"{TRAIN}.num_cycles=2", f"{TRAIN}.lr_scheduler_type=linear"], ["cosine"],
     f"{TRAIN}.num_cycles"),
    ("a fall that ends before it begins",
     [f"{TRAIN}.warmup_steps=5", f"{TRAIN}.lr_decay_steps=5", f"{TRAIN}.lr_scheduler_type=linear"],
     ["more than warmup_steps (5)"], f"{TRAIN}.lr_decay_steps"),
    ("a style of no schedule", [f"{TRAIN}.weight_decay_incr_style=cosine"], ["end_weight_decay"]),
    ("Muon's keys with AdamW", [f"{TRAIN}.muon_momentum=0.9"], ["optimizer muon"]),
    ("Muon on DeepSpeed", [f"{TRAIN}.optimizer=muon", "actor_train.strategy_args.strategy_name=deepspeed_train"],
     ["Muon needs whole matrices"], f"{TRAIN}.optimizer"),
    ("Muon of adapters", [f"{TRAIN}.optimizer=muon", "actor_train.model_args.lora_rank=4"], ["adamw with LoRA"],
     f"{TRAIN}.optimizer"),
    ("two warm-ups", [f"{TRAIN}.warmup_steps=1", f"{TRAIN}.warmup_ratio=0.1"], ["keep one"]),
    ("resuming from nothing", ["resume_from_checkpoint=true"], ["there are none"]),
    ("resuming from nowhere", ["resume_from_checkpoint=old/step-3"], ["no folder 'old'"]),
    # machine
    ("a slot that isn't there", ["executor=ray", "actor_infer.device_mapping=[0,1]"],
     ["1 x 1 = 1; 1 isn't there", "num_gpus_per_node=2"]),
    ("a mapping nobody can read", ["actor_infer.device_mapping='range(two)'"],
     ["'two' isn't a slot number", "list(range(0, 8))"]),
    ("a slot named twice", ["actor_infer.device_mapping=[0,0]"], ["0 appears twice"]),
    ("a size that contradicts the slots",
     ["executor=ray", "actor_infer.world_size=2", "actor_infer.device_mapping=[0]"], ["1, the number of slots"],
     "actor_infer.world_size"),
    ("two ranks inline", ["num_gpus_per_node=2", "actor_infer.device_mapping=0-1"], ["one rank with executor inline"]),
    ("variables for no process", ["system_envs={A: b}"], ["executor is inline", "already read its environment"]),
    ("a model that isn't there", ["pretrain=./modle"], ["a model folder that exists"]),
    ("no model", ["pretrain=null"], ["neither this nor pretrain"], "actor_train.model_args.model_name_or_path"),
    ("a folder without a model", ["pretrain=hollow"], ["config.json"]),
    ("an output that is a file", ["output_dir=notes.txt/run"], ["notes.txt is a file"]),
    ("a custom reward without a file",
     ["rewards.math.name=custom", "custom_reward_function={path: reward.py, name: score}"], ["'rewards.py'"],
     "custom_reward_function.path"),
    ("a custom reward without a function",
     ["rewards.math.name=custom", "custom_reward_function={path: rewards.py, name: scor}"], ["it has score"],
     "custom_reward_function.path"),
    ("a custom reward that doesn't parse",
     ["rewards.math.name=custom", "custom_reward_function={path: broken.py, name: score}"], ["broken.py:1"],
     "custom_reward_function.path"),
    ("a reward in no file", ["rewards.math.name='reward.py:score'"], ["'rewards.py'"]),
    ("a reward that isn't there", ["rewards.math.name='rewards.py:scor'"], ["'score'"]),
    ("a class in place of a reward", ["rewards.math.name='things.py:Thing'"],
     ["a function, plain or async; Thing is a class"]),
    ("an option that one's own reward lacks",
     ["rewards.math.name='rewards.py:score'", "rewards.math.reward_kwargs={scal: 1}"], ["there is no such option"],
     "rewards.math.reward_kwargs.scal"),
    ("an option that a built-in reward lacks", ["rewards.math.name=gsm8k", "rewards.math.reward_kwargs={mod: strict}"],
     ["did you mean 'mode'"], "rewards.math.reward_kwargs.mod"),
    ("a rollout class without a class", ["rewards.math.rollout=episodes"], ["file.py:Class", "episodes.py:MyEpisode"]),
    ("a rollout class in no file", ["rewards.math.rollout='reward.py:Score'"],
     ["a Python file that exists", "'rewards.py'"]),
    ("a rollout class that isn't there", ["rewards.math.rollout='rewards.py:Score'"],
     ["a class 'Score' in rewards.py; it has none"]),
    ("a rollout class in no package", ["rewards.math.rollout='nowhere_to_be.found:Mine'"], ["no package"]),
    ("a folder of other things for the model", ["export_dir=."], ["holds", "name a new folder"]),
    ("the model's own folder", ["export_dir=model"], ["other than that of the model of actor_train"]),
    ("the run's folder for the model", ["export_dir=output"],
     ["for the trained model alone, not that of output_dir or one around it", "name a new folder"]),
    ("a folder around the run's for the model", ["export_dir=new", "output_dir=new/deep/run"],
     ["not that of output_dir"], "export_dir"),
    ("the logs' folder for the model", ["export_dir=output/../output/logs"], ["not that of logging_dir"]),
    ("a folder around the checkpoints for the model", ["export_dir=m", "checkpoint_config.output_dir=m/c"],
     ["not that of checkpoint_config.output_dir"], "export_dir"),
    ("the rollouts' folder for the model", ["export_dir=dump", "rollout_dump_dir=dump"],
     ["not that of rollout_dump_dir"], "export_dir"),
    ("a preparation without a colon", ["prepare=foo"], ["package.module:name or path/to/file.py:name"]),
    ("a preparation in no module", ["prepare='.:foo'"], ["no package ''"]),
    ("options beside no section of trackers", ["track_with=[{name: stdout, rows: 5}]", "tracker_kwargs=null"],
     ["a section with keys", "has no value in the file"]),
    ("options beside text for trackers", ["track_with=[{name: stdout, rows: 5}]", "tracker_kwargs=text"],
     ["a section with keys"]),
    ("an estimator in no package", ["adv_estimator='nowhere_to_be.found:mine'"], ["no package"]),
]  # fmt: skip


def problem_of(job: Path, overrides: list[str]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", overrides))
    return caught.value


def test_the_job_that_the_table_breaks_is_sound(job):
    check_prerequisites(load_config(job, "job"))


@refusals(BROKEN)
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


def test_an_unusable_value_hides_no_message_about_another_key_that_does_nothing(job):
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", ["+profiler=3", "critic_warmup=1", "+actor_train.model_args.lora_alpha=8"])
    assert [violation.path for violation in caught.value.violations] == [
        "profiler", "critic_warmup", "actor_train.model_args.lora_alpha",
    ]  # fmt: skip
