"""One optimizer step of a file of TRL's: by TRL's own trainer, and by what `roll migrate` makes of the file.

Both start from the same weights, read the same rows and, where a policy is sampled, are given the same completions;
both run on the CPU in float32. What is compared is the loss and the gradient before it is clipped.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor

VERSION = "1.16.0"
VARIABLE = "ROLL_PEERS"
"""Folders with the peers' packages, as `pip install --no-deps --target` leaves them."""
JOBS = {
    "grpo": ("GRPOTrainer", "GRPOConfig", "trl.scripts.grpo.GRPOScriptArguments"),
    "rloo": ("RLOOTrainer", "RLOOConfig", "trl.scripts.rloo.RLOOScriptArguments"),
    "dpo": ("DPOTrainer", "DPOConfig", "trl.ScriptArguments"),
    "kto": ("KTOTrainer", "KTOConfig", "trl.ScriptArguments"),
    "sft": ("SFTTrainer", "SFTConfig", "trl.ScriptArguments"),
    "reward": ("RewardTrainer", "RewardConfig", "trl.ScriptArguments"),
}
"""Trainer, arguments and arguments of its script, by the command of TRL's CLI."""
HERE = ("bf16=False", "use_cpu=True", "dataloader_pin_memory=False", "disable_tqdm=True", "report_to=none",
        "save_strategy=no", "logging_steps=1")  # fmt: skip
"""What changes nothing of the training but where it runs, and in which precision."""


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""With the marks by which transformers tells the assistant's tokens, and nothing behind the end of a turn."""


@dataclass
class Step:
    """What was seen of an optimizer step."""

    loss: float = float("nan")
    gradient: dict[str, Tensor] = field(default_factory=dict)
    rate: float = float("nan")
    rows: float | None = None

    def differs(self, other: Step) -> tuple[float, float]:
        """Return how far the losses are apart, and the largest difference of a gradient's entry as a share of the
        largest entry of all."""
        assert self.gradient.keys() == other.gradient.keys(), self.gradient.keys() ^ other.gradient.keys()
        largest = max(float(entry.abs().max()) for entry in self.gradient.values())
        apart = max(float((entry - other.gradient[name]).abs().max()) for name, entry in self.gradient.items())
        return abs(self.loss - other.loss), apart / max(largest, 1e-12)


@dataclass(frozen=True)
class Case:
    """A file, its rows and what stands around it."""

    folder: Path
    job: str
    keys: dict[str, Any]

    @property
    def file(self) -> Path:
        """The YAML that `trl COMMAND --config FILE` takes."""
        return self.folder / "trl.yaml"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All rows of the data."""
        return [json.loads(line) for line in (self.folder / "data" / "train.jsonl").read_text("utf-8").splitlines()]


def write_case(folder: Path, job: str, model: Path, rows: Sequence[dict[str, Any]], **keys: Any) -> Case:
    """Write a file and its rows into `folder`."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "lower_case.py").write_text(REWARD)
    case = Case(folder, job, {"model_name_or_path": str(model), "dataset_name": str(folder / "data"), **keys})
    case.file.write_text(yaml.safe_dump(case.keys, sort_keys=False))
    return case


REWARD = '''"""The share of a completion in lower case."""


def share(completions, **kwargs):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(map(str.islower, text)) / max(1, len(text)) for text in texts]


def brief(completions, **kwargs):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [1 / (1 + len(text)) for text in texts]
'''


def completion_of(prompt: Sequence[int], member: int, limit: int, eos: int) -> list[int]:
    """Return the tokens of a group's member: letters of either case, every third cut off by the limit."""
    length = limit if (member + len(prompt)) % 3 == 2 else 2 + (3 * member + len(prompt)) % (limit - 2)
    letters = [40 + (7 * member + 3 * place + sum(prompt)) % 50 for place in range(length)]
    return letters if length == limit else [*letters[:-1], eos]


# --- TRL --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def in_reach(folder: Path) -> Iterator[dict[str, Path]]:
    """Inside, TRL can be imported; yields models: a policy, another one for its reference, a classifier."""
    import pytest
    from tiny_classifiers import build_tiny_classifier
    from tiny_models import build_tiny_model
    from transformers import AutoTokenizer

    where = peers(folder / "packages")
    if where is None:
        pytest.skip("the wheel of TRL can't be fetched")
    models = {
        "policy": build_tiny_model(folder / "policy", max_position_embeddings=2048),
        "other": build_tiny_model(folder / "other", max_position_embeddings=2048, seed=1),
        "classifier": build_tiny_classifier(folder / "classifier", max_position_embeddings=2048),
        "qwen2": build_tiny_model(folder / "qwen2", "qwen2", max_position_embeddings=2048),
    }
    for model in models.values():
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(model)
    before = set(sys.modules)
    sys.path.append(str(where))
    yield models
    sys.path.remove(str(where))
    for name in [name for name in set(sys.modules) - before if name.partition(".")[0] == "trl"]:
        del sys.modules[name]


def peers(folder: Path) -> Path | None:
    """Return the folder with TRL's package, installed into `folder` where nobody names one; None where it can't be."""
    for given in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        if (Path(given) / "trl").is_dir():
            return Path(given)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", str(folder), f"trl=={VERSION}"]
    return None if subprocess.run(command, capture_output=True, check=False).returncode else folder


def arguments(case: Case, *more: str, plainly: bool = False) -> tuple[Any, Any, Any]:
    """Return what TRL's parser makes of a file: the script's, the training's and the model's arguments. `plainly`: as
    they are, and not as these tests run it."""
    import trl

    _, config, script = JOBS[case.job]
    module, _, name = script.rpartition(".")
    classes = (getattr(importlib.import_module(module), name), getattr(trl, config), trl.ModelConfig)
    here = ("use_cpu=True",) if plainly else HERE
    flags = [word for entry in (f"output_dir={case.folder / 'theirs'}", *here, *more)
             for word in (f"--{entry.partition('=')[0]}", entry.partition("=")[2])]  # fmt: skip
    script_args, training, model = trl.TrlParser(classes).parse_args_and_config(["--config", str(case.file), *flags])
    return script_args, training, model


def their_trainer(case: Case, *more: str) -> Any:
    """Return TRL's trainer of a file, made as its script makes it."""
    import datasets
    import trl

    script, training, model = arguments(case, *more)
    training.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}
    named: dict[str, Any] = {}
    if case.job in ("grpo", "rloo"):
        sys.path.insert(0, str(case.folder))
        try:
            named["reward_funcs"] = [_function(name) for name in script.reward_funcs]
        finally:
            sys.path.remove(str(case.folder))
    return getattr(trl, JOBS[case.job][0])(
        model=model.model_name_or_path,
        args=training,
        train_dataset=datasets.Dataset.from_list(case.rows),
        peft_config=trl.get_peft_config(model),
        **named,
    )


def _function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    sys.modules.pop(module, None)
    return getattr(importlib.import_module(module), name)


def their_step(case: Case, *, reference: Path | None = None) -> Step:
    """Run TRL's trainer for one optimizer step; `reference` has the weights of its reference."""
    return their_run(case, "max_steps=1", reference=reference)[0]


def their_run(case: Case, *more: str, reference: Path | None = None) -> list[Step]:
    """Run TRL's trainer to its end."""
    trainer, steps = their_trainer(case, *more), list[Step]()
    if reference is not None:
        from transformers import AutoModelForCausalLM

        other = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
        trainer.ref_model.load_state_dict(other.state_dict())
    clip = trainer.accelerator.clip_grad_norm_

    def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        named = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        gradient = {_plain(name): p.grad.detach().clone() for name, p in named if p.grad is not None}
        steps.append(Step(gradient=gradient, rate=trainer.optimizer.param_groups[0]["lr"]))
        return clip(parameters, *args, **kwargs)

    def generate(self: Any, prompts: Any, *_: Any, **__: Any) -> Any:
        seen: Counter[tuple[int, ...]] = Counter()
        completions = []
        for ids in prompts:
            limit, eos = self.max_completion_length, self._tokenizer.eos_token_id
            completions.append(completion_of(ids, seen[tuple(ids)], limit, eos))
            seen[tuple(ids)] += 1
        return (completions, None) if case.job == "grpo" else completions

    trainer.accelerator.clip_grad_norm_ = watched
    forced = mock.patch.object(type(trainer), "_generate_single_turn", generate, create=True)
    with forced if case.job in ("grpo", "rloo") else contextlib.nullcontext():
        whole = trainer.train().training_loss
    if len(steps) == 1:  # rows of the log are rounded
        steps[0].loss = whole
    return steps


# --- ours -------------------------------------------------------------------------------------------------------------


def migrated(case: Case) -> tuple[Any, dict[str, Any]]:
    """Return the report on a file, and the new configuration, written beside it as `ours.yaml`."""
    from roll.workbench.migrate.translate import migrate

    report, ours = migrate(case.file, "trl")
    assert ours is not None
    (case.folder / "ours.yaml").write_text(yaml.safe_dump(ours, sort_keys=False))
    return report, ours


def lines_of(report: Any) -> list[str]:
    """Return all that a report says, a line each."""
    uses = [use.line() for use in (*report.uses, *report.filled)]
    return [*uses, *report.decisions, *report.missing]


def leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a tree with their values."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def our_config(case: Case, *overrides: str) -> Any:
    """Return the migrated configuration as `roll check` loads it, for the CPU and float32."""
    from roll.configs.parsing.loader import load_config

    here = (f"output_dir={case.folder / 'ours'}", "executor=inline", "track_with=jsonl",
            "actor_train.strategy_args.strategy_name=fsdp2_train", "actor_train.model_args.dtype=fp32",
            "actor_train.model_args.disable_gradient_checkpointing=true")  # fmt: skip
    tree = yaml.safe_load((case.folder / "ours.yaml").read_text("utf-8"))
    for role in ("reference", "actor_infer"):
        here += (f"{role}.model_args.dtype=fp32",) if role in tree else ()
    return load_config(case.folder, "ours", (*here, *overrides))


def our_step(case: Case, *overrides: str) -> Step:
    """Run the migrated configuration for one optimizer step."""
    return our_run(case, "max_steps=1", *overrides)[0]


def our_run(case: Case, *overrides: str) -> list[Step]:
    """Run the migrated configuration to its end."""
    from roll.configs.checks.prerequisites import check_prerequisites
    from roll.pipelines import run_pipeline
    from roll.strategies.hf.fsdp2 import Fsdp2Strategy

    config, steps = our_config(case, "save_steps=0", "logging_steps=1", *overrides), list[Step]()
    check_prerequisites(config)
    apply = Fsdp2Strategy._apply

    def watched(self: Any, lr: float) -> Any:
        named = self._module.named_parameters()
        gradient = {_plain(name): p.grad.detach().clone() for name, p in named if p.grad is not None}
        steps.append(Step(gradient=gradient, rate=lr))
        return apply(self, lr)

    with mock.patch.object(Fsdp2Strategy, "_apply", watched), _forced(config):
        run_pipeline(config)
    logged = [json.loads(line) for line in (config.logging_path / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in logged if "actor/lr" in row]
    name = {"sft": "sft/loss", "rlvr": "actor/loss"}.get(config.pipeline, "preference/loss")
    for step, row in zip(steps, rows, strict=True):
        step.loss, step.rows = row[name], row.get(f"{name.partition('/')[0]}/rows")
    return steps


def _plain(name: str) -> str:
    """Return what transformers calls a parameter."""
    for above in ("base_model.model.", "lm.", "classifier."):
        name = name.removeprefix(above)
    return name


@contextlib.contextmanager
def _forced(config: Any) -> Iterator[None]:
    """Have the engine draw the tokens of `completion_of`."""
    if config.pipeline != "rlvr":
        yield
        return
    from roll.strategies.engines.hf import hf_infer

    members: dict[str, int] = {}
    seen: Counter[tuple[int, ...]] = Counter()

    def draw(self: Any, logits: Tensor) -> list[Any]:
        reasons = []
        for row, sequence in enumerate(self._running):
            request = sequence.request
            if request.id not in members:
                members[request.id] = seen[request.prompt_ids]
                seen[request.prompt_ids] += 1
            eos = min(self._rules.eos_token_ids)
            tokens = completion_of(request.prompt_ids, members[request.id], request.params.max_new_tokens, eos)
            token = tokens[min(len(sequence.tokens), len(tokens) - 1)]  # a request of the start's check is longer
            scores = logits[row].double() / request.params.temperature
            logprob = float(torch.log_softmax(scores, 0)[token])
            reasons.append(sequence.record([token], [logprob], self._version, self._rules))
            sequence.steps += 1
        return reasons

    with mock.patch.object(hf_infer.HfInfer, "_draw", draw):
        yield
