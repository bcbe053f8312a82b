"""What every pipeline has: names and folders, cluster, schedule, checkpoints, tracking, lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roll.configs.errors import did_you_mean
from roll.configs.fields import number, one_or_many, parsed


def _off_or(*names: str) -> Callable[[Any], str]:
    """A parser for one of `names`, or `off`, which YAML reads as false."""

    def parse(value: Any) -> str:
        value = "off" if value is False else value
        if value not in ("off", *names):
            raise ValueError(did_you_mean(str(value), ("off", *names)))
        return str(value)

    return parse


TrackerName = Literal["tensorboard", "stdout", "jsonl"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a checkpoint holds besides what resuming needs, where it goes and how many are kept."""

    output_dir: str | None = None
    """Folder of the checkpoints. null: `<output_dir>/checkpoints`."""

    max_to_keep: int | None = number(2, ge=1)
    """Newest complete checkpoints that stay. null: all."""

    save_hf_model: bool = False
    """Also write the actor as a Hugging Face folder into every checkpoint."""


@dataclass(frozen=True, kw_only=True)
class StdoutArgs:
    """Options of the `stdout` tracker."""

    live: bool | None = None
    """true: a table that is redrawn; false: one line a step; null: the table if the output is a terminal."""

    rows: int = number(20, ge=1)
    """Steps that the table shows, the latest."""


@dataclass(frozen=True, kw_only=True)
class TrackerKwargs:
    """Options by tracker; `jsonl` and `tensorboard` have none."""

    stdout: StdoutArgs | None = None
    """Of `stdout`. null: its defaults."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """Keys that don't depend on what is trained."""

    pipeline: str
    """Which pipeline the file is for."""

    exp_name: str = "rlvr"
    """Name of the run in its closing summary and its checkpoints."""

    seed: int = number(42, ge=0)
    """Key of every random draw. Same seed, same run."""

    output_dir: str = "output"
    """Folder of everything a run writes, besides `logging_dir`. Created if absent. Relative to the working
    directory."""

    logging_dir: str | None = None
    """Folder of logs and trackers. null: `<output_dir>/logs`."""

    executor: Literal["ray", "inline"] = "ray"
    """`ray`: a process per rank, on one or more machines. `inline`: everything in this process, one rank per
    role; starts at once and breakpoints work."""

    rpc_timeout: float = number(3600.0, gt=0)
    """Seconds a call to a worker (with `executor: ray`) may take, or responses may wait for their rewards, before
    an error that names who was waited for."""

    system_envs: dict[str, str] = field(default_factory=dict)
    """Environment variables of every worker process (quote numbers). Not with `executor: inline`."""

    track_with: tuple[TrackerName, ...] = one_or_many(("stdout", "jsonl"))
    """Where metrics go: `tensorboard`, `stdout` (a live table), `jsonl`; one or several."""

    tracker_kwargs: TrackerKwargs = field(default_factory=TrackerKwargs)
    """Options by tracker."""

    num_nodes: int = number(1, ge=1)
    """Machines. With more than one the run joins the Ray cluster that `ray start` made of them: the one that this
    machine belongs to, or that `RAY_ADDRESS` names."""

    num_gpus_per_node: int = number(1, ge=1)
    """Device slots per machine: accelerators, or CPU workers where there are none. Every `device_mapping`
    must fit."""

    max_steps: int | None = number(100, ge=0)
    """Steps of the pipeline. 0 or null: `num_train_epochs` decides; with both, what comes first."""

    num_train_epochs: int | None = number(None, ge=0)
    """Passes over the training prompts. 0 or null: `max_steps` decides."""

    save_steps: int | None = number(0, ge=0)
    """Steps between checkpoints; the last step is then saved too. 0 or null: none at all."""

    logging_steps: int | None = number(1, ge=0)
    """Steps between rows in the trackers. 0 or null: only the last."""

    eval_steps: int | None = number(0, ge=0)
    """Steps between validations; the last step is then validated too. 0 or null: none. Needs `validation`."""

    val_before_train: bool = False
    """Validate the starting model. Needs `validation`."""

    val_only: bool = False
    """Validate and end. Needs `validation`; no optimizer is built."""

    resume_from_checkpoint: bool | str = False
    """false: start anew. true: newest complete checkpoint, an error if there is none. `auto`: the newest if
    there is one. Else a checkpoint's folder."""

    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoint folder and retention."""

    rollout_batch_size: int = number(64, ge=1)
    """Prompts per step."""

    val_batch_size: int | None = number(None, ge=1)
    """Validation prompts in flight at once. null: all."""

    prompt_length: int = number(1024, ge=1)
    """Longest prompt in tokens; see `truncation`."""

    response_length: int = number(1024, ge=1)
    """Longest response in tokens."""

    sequence_length: int | None = number(None, ge=1)
    """Longest prompt plus response in tokens. null: `prompt_length + response_length`, else at least that."""

    truncation: Literal["error", "left", "right", "middle", "filter"] = "error"
    """What happens to a longer prompt: stop with an error, cut its left, right or middle, or leave the row
    out (counted)."""

    rollout_dump_dir: str | None = None
    """Folder for all responses that are trained on as parquet, one file per step, with tokens, masks,
    log-probs, rewards, advantages. null: none."""

    log_val_generations: int = number(0, ge=0)
    """Validation samples shown in the log and the trackers. 0: none."""

    max_running_requests: int = number(128, ge=1)
    """Requests one engine works on at once: the decode batch of `hf_infer`, the requests in flight at `vllm` and
    `sglang`. With several engines each has as many."""

    is_use_additional_prompts: bool = False
    """Start more prompts than a step needs; when enough groups are complete the rest is aborted."""

    max_additional_running_prompts: int = number(16, ge=0)
    """How many more. Acts with the switch."""

    max_num_gen_batches: int = number(10, ge=1)
    """Budget of dynamic filtering and of failed groups: a step may start this many times `rollout_batch_size`
    prompts, then it ends with an error that shows the scores."""

    reward_retries: int = number(2, ge=0)
    """Further tries after a reward function raised or timed out; then the sample is dropped and counted."""

    async_generation_ratio: float = number(0.0, ge=0)
    """How far generation may run ahead of training: no token that is trained on is more than ceil(this) weight versions
    old. 0: generation and training take turns. Above 0 they work at once, on slots of their own, and the loss needs
    `train_infer_correction`, `policy_loss: decoupled_ppo` or `allow_uncorrected_async`."""

    partial_rollout: Literal["resume", "restart"] = "resume"
    """What a weight update does to responses on their way, with `async_generation_ratio` above 0: `resume` goes on from
    the tokens that are there, `restart` throws them away and begins anew under the new weights."""

    engine_restarts: int = number(1, ge=0)
    """How often one engine may be replaced in a run after it died; its responses then begin anew. 0: its death ends the
    run. For `vllm` and `sglang`."""

    weight_transport: Literal["auto", "object_store", "shared_memory", "broadcast", "file"] = "auto"
    """How new weights travel from `actor_train` to `actor_infer`. `auto`: what suits where the two live; see
    docs/engines.md."""

    model_update_buffer_size_mb: int = number(256, ge=1)
    """Weights travel in buckets of this size, in MiB, or of one tensor if that is larger; about two are under way at
    once."""

    lora_sync: Literal["merged", "adapters"] = "merged"
    """What the engines get of an actor that trains LoRA adapters. `merged`: all weights, with the adapters merged in.
    `adapters`: the base weights once and then the adapters alone, which the engine computes beside them. For `vllm`;
    see docs/engines.md."""

    verify_weight_sync: Literal["off", "checksum", "logprob"] = parsed(
        "off", _off_or("checksum", "logprob"), "off, checksum or logprob"
    )
    """After every update: `checksum` compares the bytes that arrived with those that left, `logprob` also compares
    log-probs of a few sampled tokens between engine and trainer. A difference ends the run."""

    balance_batch: bool = True
    """Give data-parallel ranks equal token counts. false: equal row counts in order."""

    pretrain: str | None = None
    """Model of every role that names none itself."""

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence in tokens, whichever way it was given."""
        return self.sequence_length or self.prompt_length + self.response_length

    @property
    def output_path(self) -> Path:
        """Folder of the run."""
        return Path(self.output_dir)

    @property
    def logging_path(self) -> Path:
        """Folder of logs and trackers."""
        return Path(self.logging_dir) if self.logging_dir else self.output_path / "logs"

    @property
    def checkpoint_path(self) -> Path:
        """Folder of the checkpoints."""
        chosen = self.checkpoint_config.output_dir
        return Path(chosen) if chosen else self.output_path / "checkpoints"
