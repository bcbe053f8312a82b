"""Whether a model has the layers that LoRA's keys name, for `roll check` where its folder is on this machine.

A run asks the same at its start. The model is built without memory for its weights, in a process of its own: a check
itself loads none of the libraries that models come with.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from roll.configs.errors import Violation, problem
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import ModelArgs

_SECONDS = 300.0
_KINDS = {"critic": "value"}


def adapter_violations(config: RunConfig) -> Iterator[Violation]:
    """Yield which roles' adapters don't fit their model; nothing where there are none, or no model is here."""
    asked = []
    for role, worker in config.roles.items():
        args = worker.model_args
        if args.uses_lora and Path(str(config.model_path(role))).expanduser().is_dir():
            args = replace(args, model_name_or_path=config.model_path(role))
            asked.append((role, _KINDS.get(role, "policy"), args))
    if not asked:
        return
    command = [sys.executable, "-m", "roll.pipelines.adapter_check"]
    try:
        done = subprocess.run(command, input=pickle.dumps(asked), capture_output=True, timeout=_SECONDS)
        answers = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return  # what can't be loaded here is said by those who load it
    for role, message in answers:
        key, _, sentence = message.partition(": ")
        yield problem(f"{role}.model_args.{key}", sentence)


def misfits(asked: Sequence[tuple[str, str, ModelArgs]]) -> list[tuple[str, str]]:
    """Return (role, `key: sentence`) of adapters that don't fit; builds the models on the meta device."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from roll.strategies.hf.adapter_config import adapter_config
    from roll.strategies.hf.hf_model import load_config

    makers = {"policy": AutoModelForCausalLM, "value": AutoModel}
    answers = []
    for role, kind, args in asked:
        with torch.device("meta"):
            model = makers[kind].from_config(load_config(args), trust_remote_code=args.trust_remote_code)
        try:
            adapter_config(model, args)
        except ValueError as error:
            answers.append((role, str(error)))
    return answers


if __name__ == "__main__":
    sys.stdout.write(json.dumps(misfits(pickle.loads(sys.stdin.buffer.read()))) + "\n")
