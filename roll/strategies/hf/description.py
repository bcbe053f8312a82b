"""What an engine must know of a model without loading it: names and shapes of weights, context length, last tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.hf.checkpoint_names import CheckpointNames, WayBack
from roll.strategies.training.picture_folder import LanguageNames, language_names
from roll.strategies.training.pretrained import (
    context_length,
    eos_token_ids,
    load_config,
    load_tokenizer,
    named_tensors,
    picture_config,
    text_config,
    weights_folder,
)
from roll.strategies.training.safetensor_files import names_in_files


@dataclass(frozen=True)
class ModelDescription:
    """A causal LM as its folder describes it."""

    model_type: str
    """The architecture's name in transformers."""
    shapes: dict[str, tuple[int, ...]]
    """Hugging Face name -> shape of every tensor that a weight update brings (tied ones once)."""
    max_context: int
    """Positions the model was built for."""
    vocab_size: int
    """Tokens that the model has embeddings of."""
    eos_token_ids: frozenset[int]
    """Tokens that end a response."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text."""
    names: CheckpointNames
    """Of the tensors in files."""
    language: LanguageNames | None = None
    """Of them in the folder of a picture model, as which the engine then loads it; None: it loads a language model."""

    def bucket_bytes(self, most: int) -> int:
        """Return the size of a bucket for the weights: `most`, or what all of them need in case they are small."""
        return max(1, min(most, sum(8 * torch.Size(shape).numel() for shape in self.shapes.values())))

    async def complete(self, weights: AsyncIterator[tuple[str, Tensor]]) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield `weights` as they come; raises `ValueError` for a foreign or missing name, or a wrong shape.

        Engines load what they are given: a name they don't know, or one left out, would leave stale weights behind.
        """
        missing = set(self.shapes)
        async for name, tensor in weights:
            if name not in self.shapes:
                raise ValueError(f"weight update brought {name!r}, which the engine's model doesn't have")
            if self.shapes[name] != tuple(tensor.shape):
                raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}, expected {self.shapes[name]}")
            missing.discard(name)
            yield name, tensor
            del tensor  # its memory may be used again once nobody holds it
        if missing:
            raise ValueError(f"weight update left {len(missing)} tensors untouched, e.g. {sorted(missing)[:3]}")

    async def checkpoint(self, weights: AsyncIterator[tuple[str, Tensor]]) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield `complete` weights under the names of checkpoints."""
        way_back = WayBack(self.names)
        async for name, tensor in self.complete(weights):
            for stored, part in way_back.convert(name, tensor):
                yield stored if self.language is None else self.language.stored(stored), part
                del part
            del tensor


def describe_model(args: ModelArgs) -> ModelDescription:
    """Read a model's description from its folder; no weights are loaded."""
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(args)
    config = load_config(args)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=args.trust_remote_code)
    model.generation_config = generation_config(args, model)
    return ModelDescription(
        model_type=model.config.model_type,
        shapes={name: tuple(tensor.shape) for name, tensor in named_tensors(model)},
        max_context=context_length(model),
        vocab_size=text_config(model).vocab_size,
        eos_token_ids=eos_token_ids(model, tokenizer),
        decode=tokenizer.decode,
        names=CheckpointNames(model),
        language=None if picture_config(args) is None else language_names(names_in_files(weights_folder(args))),
    )


def generation_config(args: ModelArgs, model: Any) -> Any:
    """Return the folder's generation settings; without such a file those that the model's configuration implies."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(str(args.model_name_or_path))
    except OSError:
        return model.generation_config
