"""Launch scripts and YAML of four projects with keys dropped, retyped, misspelt, quoted oddly, behind variables."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from roll.workbench.migrate.overrides import leaves_of
from roll.workbench.migrate.report import MigrationReport, as_yaml
from roll.workbench.migrate.translate import migrate

_A = "actor_rollout_ref"
_VERL: dict[str, Any] = {
    "algorithm.adv_estimator": "grpo", "algorithm.use_kl_in_reward": False, "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.rollout_correction.rollout_is": "token", "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "data.train_files": "/d/train.parquet", "data.val_files": ["/d/a.parquet", "/d/b.parquet"],
    "data.train_batch_size": 256, "data.max_prompt_length": 512, "data.max_response_length": 1024,
    "data.apply_chat_template_kwargs.enable_thinking": False, f"{_A}.model.path": "Qwen/Qwen3-8B",
    f"{_A}.model.lora_rank": 16, f"{_A}.actor.optim.lr": 1e-6, f"{_A}.actor.optim.lr_warmup_steps_ratio": 0.1,
    f"{_A}.actor.ppo_mini_batch_size": 64, f"{_A}.actor.ppo_micro_batch_size_per_gpu": 4,
    f"{_A}.actor.use_kl_loss": True, f"{_A}.actor.kl_loss_type": "low_var_kl", f"{_A}.actor.clip_ratio_high": 0.28,
    f"{_A}.actor.policy_loss.loss_mode": "gspo", f"{_A}.actor.loss_agg_mode": "seq-mean-token-mean",
    f"{_A}.rollout.name": "vllm", f"{_A}.rollout.n": 8, f"{_A}.rollout.temperature": 0.9,
    f"{_A}.rollout.val_kwargs.top_p": 0.95, f"{_A}.rollout.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8, "trainer.nnodes": 2, "trainer.logger": ["console", "wandb"],
    "trainer.save_freq": 20, "trainer.test_freq": 5, "trainer.total_epochs": 3, "trainer.resume_mode": "auto",
}  # fmt: skip
_SFT: dict[str, Any] = {
    "data.train_files": "/d/train.parquet", "data.train_batch_size": 64, "data.micro_batch_size_per_gpu": 4,
    "data.max_length": 2048, "data.messages_key": "messages", "model.partial_pretrain": "Qwen/Qwen2.5-0.5B",
    "optim.lr": 1e-5, "optim.betas": [0.9, 0.95], "optim.lr_scheduler": "cosine", "trainer.total_epochs": 2,
    "trainer.experiment_name": "a", "ulysses_sequence_parallel_size": 2,
}  # fmt: skip
_TRL: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B", "dataset_name": "trl-lib/data", "learning_rate": 1e-6,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "num_train_epochs": 2, "bf16": True,
    "lr_scheduler_type": "cosine", "warmup_steps": 0.1, "save_steps": 100, "save_total_limit": 3, "use_peft": True,
    "lora_r": 32, "lora_target_modules": ["q_proj", "v_proj"], "max_grad_norm": 0.5, "report_to": "wandb",
}  # fmt: skip
_GRPO = {**_TRL, "num_generations": 8, "max_completion_length": 256, "beta": 0.04, "loss_type": "dr_grpo",
         "use_vllm": True, "reward_funcs": ["mod.a", "mod.b"], "reward_weights": [1.0, 0.5], "temperature": 0.8,
         "chat_template_kwargs": {"enable_thinking": False}}  # fmt: skip
_DPO = {**_TRL, "beta": 0.1, "label_smoothing": 0.1, "loss_type": ["sigmoid"], "max_length": 1024}
_OPENRLHF: dict[str, Any] = {
    "actor.model_name_or_path": "Qwen/Qwen2.5-0.5B", "data.prompt_dataset": "d.jsonl", "ds.zero_stage": 3,
    "algo.advantage.estimator": "rloo", "rollout.n_samples_per_prompt": 8, "rollout.max_new_tokens": 512,
    "algo.kl.init_coef": 0.001, "train.micro_batch_size": 4, "train.batch_size": 64, "ds.packing_samples": True,
    "vllm.num_engines": 2, "data.input_key": "prompt", "actor.adam.lr": 1e-6, "ds.param_dtype": "bf16",
}  # fmt: skip
_ODD: tuple[Any, ...] = (
    [], {}, "text", -1, 0, 1e400, True, None, "1,2", "[1", [1, 2], [None], {"x": {"y": 1}}, "", "???", "1e-6", "0.1_2",
    10**30, "${a.b}", "naïve", "a b  c", "q'u\"e", "two\nlines", "\x1b[2J", 0.5,
)  # fmt: skip
_CASES = Path(__file__).parent / "workbench" / "migrate" / "cases"


def _roll(name: str) -> dict[str, Any]:
    return dict(leaves_of(yaml.safe_load((_CASES / f"{name}.yaml").read_text("utf-8"))))


def mutated(seed: int, folder: Path) -> tuple[Path, list[str]]:
    """Write the file of a seed; return it and the keys that it has."""
    rng = random.Random(seed)
    kinds = ("verl.sh", "verl.yaml", "sft.sh", "grpo.yaml", "dpo.sh", "openrlhf.sh", "rlvr.yaml", "agentic.yaml")
    kind = kinds[seed % len(kinds)]
    name, _, suffix = kind.partition(".")
    base = {"verl": _VERL, "sft": _SFT, "grpo": _GRPO, "dpo": _DPO, "openrlhf": _OPENRLHF}.get(name) or _roll(name)
    keys = _changed({str(key): value for key, value in base.items()}, rng)
    file = folder / f"{seed}_{kind}"
    if suffix == "yaml":
        tree = _nested(keys)
        file.write_text(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True), "utf-8")
        return file, [key for key, _ in leaves_of(tree)]
    start, form = {
        "verl": ("python3 -m verl.trainer.main_ppo", "{}={}"),
        "sft": ("torchrun --nproc_per_node=4 -m verl.trainer.sft_trainer", "{}={}"),
        "dpo": ("accelerate launch --num_processes 4 dpo.py", rng.choice(["--{} {}", "--{}={}"])),
        "openrlhf": ("python3 -m openrlhf.cli.train_ppo_ray", "--{} {}"),
    }[name]
    lines, words = ["set -x", "# a comment's 'quote"], [start]
    for key, value in keys.items():
        if form[0] == "-" and value is True and rng.random() < 0.7:
            words.append(f"--{key}")
            continue
        several = form == "--{} {}" and isinstance(value, list) and value
        text = " ".join(map(_shell, value)) if several else _behind(rng, _shell(value), lines)
        words.append(form.format(key, text))
    file.write_text("\n".join([*lines, " \\\n    ".join(words), ""]), "utf-8")
    return file, list(keys)


def _changed(keys: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in keys.items():
        chance = rng.random()
        if chance < 0.1:
            continue
        if chance < 0.25:
            value = rng.choice(_ODD)
        elif chance < 0.35:
            at = rng.randrange(len(key))
            key = rng.choice([key[:at] + key[at + 1 :], key[:at] + key[at] * 2 + key[at + 1 :], key + "_", key.upper()])
            key = key.strip(".").replace("..", ".") or "x"
        found[key] = value
    return {key: value for key, value in found.items()
            if not any(other.startswith(f"{key}.") or key.startswith(f"{other}.") for other in found)}  # fmt: skip


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        node = tree
        *sections, last = key.split(".")
        for word in sections:
            node = node.setdefault(word, {})
        node[last] = value
    return tree


def _shell(value: Any) -> str:
    text = {None: "null", True: "True", False: "False"}.get(value) if isinstance(value, bool | None) else None
    text = text or (str(value).replace(" ", "") if isinstance(value, list | dict) else str(value))
    return shlex.quote(text)


def _behind(rng: random.Random, text: str, lines: list[str]) -> str:
    """A word with the same value: in other quotes, behind variables; or one that nobody knows."""
    number = len(lines)
    if (chance := rng.random()) < 0.6:
        return text
    if chance < 0.7:
        return f"{text}''" if chance < 0.65 else f'""{text}'
    if chance < 0.9:
        lines += [f"export V{number}={text}", f'W{number}="${{V{number}}}"', f'A{number}=(x "$W{number}")']
        forms = (f'"$W{number}"', f'"${{A{number}[1]}}"', f'"${{NOT_SET:-$V{number}}}"', f'"${{V{number}:-"other"}}"')
        return rng.choice(forms)
    return rng.choice(["$1", "$(nproc)", "$((8 * 4))", '"$HOME/x"', "${NOWHERE}", "`date`", "$((N - 1))"])


def problems(file: Path, keys: list[str]) -> Iterator[str]:
    """What is wrong with what `roll migrate` says of a file: nothing for a sentence, or a report with every key."""
    try:
        report, tree = migrate(file)
    except ValueError as error:
        if not str(error) or "Traceback" in str(error) or len(str(error)) > 3000:
            yield f"{file.name}: no sentence: {error}"
        return
    listed = [use.key for use in report.uses]
    for key in keys:
        if not any(key == use or key.startswith(f"{use}.") or use.startswith(f"{key}.") for use in listed):
            yield f"{file.name}: {key} is lost"
    yield from (f"{file.name}: {key} is there twice" for key in {key for key in listed if listed.count(key) > 1})
    yield from _silent(report, tree or {})
    text = report.text() + ("" if tree is None else as_yaml(report, tree))
    if any(ord(letter) < 32 and letter not in "\n\t" for letter in text):
        yield f"{file.name}: control characters"


def _silent(report: MigrationReport, tree: Mapping[str, Any]) -> Iterator[str]:
    """Keys that are translated and went nowhere, or are asked for and the new file doesn't ask."""
    places = {path for path, _ in leaves_of(tree)}
    for use in report.uses:
        there = [place for place in use.ours if any(path == place or path.startswith(f"{place}.") for path in places)]
        if use.fate == "translated" and not use.note and not there:
            yield f"{report.source}: {use.key} is translated and nowhere"
        asks = any(line.startswith(f"{place}:") for place in use.ours for line in report.missing)
        if use.fate == "absent" and not asks:
            yield f"{report.source}: {use.key} is absent and nothing asks"
