"""A role's model as folders of transformers: exported with its weights, described without them beside a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from roll.configs.catalog.family_table import family_of
from roll.strategies.base import NamedWeights, TrainSpec
from roll.strategies.state_files import StateFiles
from roll.strategies.training.picture_folder import write_picture_config, write_picture_model
from roll.strategies.training.pretrained import picture_config, quiet_transformers, weights_folder
from roll.utils.response_ends import response_ends, with_ends

DESCRIPTION, ABOUT = "hf_config", "roll_model.json"
"""Folder beside a role's states: configuration and tokenizer as transformers has them, and a file of our own."""


class AdapterNotes(Protocol):
    """What a checkpoint says about the adapters of a model that has some."""

    def write_config(self, folder: Path) -> None:
        """Write peft's description of them."""

    def write_identity(self, folder: Path, files: StateFiles) -> None:
        """Write which base model and which adapters the checkpoint is about."""


class ModelFolder:
    """Writes a role's model on the rank that `writes`; on others it only goes through the weights.

    `model` returns the model as transformers has it, to say how its folder looks; its weights aren't read.
    """

    def __init__(
        self, spec: TrainSpec, tokenizer: Any, model: Callable[[], Any], adapters: AdapterNotes | None, *, writes: bool
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._bare_model = model
        self._adapters = adapters
        self._writes = writes

    def export(self, named_weights: NamedWeights, path: Path, files: StateFiles) -> None:
        """Write a folder that `from_pretrained` loads, tokenizer included; every rank calls it."""
        assert self._spec.kind != "value", "a critic has no Hugging Face form"
        weights = {}
        for name, tensor in named_weights:
            if self._writes:
                weights[name] = tensor.detach().to("cpu", copy=files.holds).contiguous()
        if self._writes:
            files.folder(path, partial(self._write, weights))

    def write_beside(self, path: Path, counts: str, text: str, files: StateFiles) -> None:
        """Write what of a checkpoint isn't tensors: the file `counts`, for how far the role is, and a description.

        With a description of the model, a checkpoint can be exported without the run's configuration and its model.
        """
        if not self._writes:
            return
        files.text(path / counts, text)
        files.folder(path / DESCRIPTION, self._describe)
        if self._adapters is not None:
            self._adapters.write_identity(path, files)

    def _model(self) -> Any:
        """Return the model with all that ends a response in its generation settings: what was taught as an end ends
        responses wherever the folder is loaded."""
        model = self._bare_model()
        if self._spec.kind == "policy" and model.can_generate():
            settings = model.generation_config
            ends = response_ends(self._tokenizer, settings.eos_token_id, self._spec.templates)
            settings.eos_token_id = with_ends(settings.eos_token_id, ends)
        return model

    def _write(self, weights: dict[str, Tensor], path: Path) -> None:
        args, model = self._spec.worker.model_args, self._model()
        picture = self._picture()
        with quiet_transformers():
            if picture is None:
                model.save_pretrained(path, state_dict=weights)
            else:
                write_picture_model(model, weights, picture, weights_folder(args), path)
        self._write_reading(path)

    def _write_reading(self, folder: Path) -> None:
        """Write what makes tokens of texts, and of pictures where the model is given some."""
        with quiet_transformers():
            self._tokenizer.save_pretrained(folder)
        if family_of(self._bare_model().config.model_type).pictures is not None:
            from roll.utils.picture_tokens import copy_processor

            copy_processor(str(self._spec.worker.model_args.model_name_or_path), folder)

    def _picture(self) -> Any:
        """Return the configuration of the picture model that a policy's folder is of; None: of none."""
        return picture_config(self._spec.worker.model_args) if self._spec.kind == "policy" else None

    def _describe(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        args, model = self._spec.worker.model_args, self._model()
        picture = self._picture()
        with quiet_transformers():
            if picture is None:
                model.config.save_pretrained(folder)
            else:
                write_picture_config(model, picture, folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        self._write_reading(folder)
        about = {"kind": self._spec.kind, "base_model": args.model_name_or_path, "lora": args.uses_lora}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        if self._adapters is not None:
            self._adapters.write_config(folder)
