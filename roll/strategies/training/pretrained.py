"""Load models, configurations and tokenizers of transformers, and read what they say of themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from roll.configs.catalog.family_table import family_of
from roll.configs.checks.model_families import LOSES_CAP
from roll.configs.errors import nearest
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.training.picture_folder import RENAMED, is_picture_model, language_config, require_copies
from roll.utils.importing import load_module, long_imports
from roll.utils.logging import errors_only
from roll.utils.models import leave_deepspeed_out
from roll.utils.response_ends import response_ends
from roll.utils.staging import staged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNUSABLE = (AssertionError, AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError)
"""What models raise where they lack something that is asked of them."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def source_of(args: ModelArgs, path: str | None = None) -> dict[str, Any]:
    """Return where `from_pretrained` finds the model, or `path`: a folder or hub id, or one GGUF file inside a folder.

    Imports `external_lib` before: nothing of a model is read without this.
    """
    for library in args.external_lib:
        load_module(library, key="external_lib")
    path = path or args.model_name_or_path
    assert path is not None, "configuration checks make sure that every started role has a model"
    common = {"trust_remote_code": args.trust_remote_code}
    if path.endswith(".gguf"):
        return {"pretrained_model_name_or_path": str(Path(path).parent), "gguf_file": Path(path).name, **common}
    return {"pretrained_model_name_or_path": path, **common}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars: a worker's log isn't a terminal."""
    from transformers.utils import logging

    leave_deepspeed_out()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_tokenizer(args: ModelArgs) -> Any:
    """Return the tokenizer of a model; one without a padding token pads with its end-of-sequence token.

    Raises `ValueError` if it is one of its own (`tokenizer_name_or_path`) and has tokens that the model hasn't.
    """
    source = source_of(args, args.tokenizer_name_or_path)
    # For some model types AutoTokenizer takes their usual class, even where the folder names the generic one; that
    # class puts its own rules for splitting text in place of those in tokenizer.json, and the tokens are others.
    # AutoTokenizer also imports all that models need.
    if "gguf_file" not in source and _names_generic_tokenizer(source["pretrained_model_name_or_path"]):
        del source["trust_remote_code"]
        with long_imports():
            from transformers import PreTrainedTokenizerFast
        tokenizer = PreTrainedTokenizerFast.from_pretrained(**source)
    else:
        with long_imports():
            from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(**source)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if args.tokenizer_name_or_path is not None:
        _require_rows(tokenizer, args)
    return tokenizer


def _require_rows(tokenizer: Any, args: ModelArgs) -> None:
    """Raise `ValueError` unless the model has a row for every token of a tokenizer that didn't come with it."""
    rows = load_config(args).get_text_config().vocab_size
    token, number = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if number >= rows:
        raise ValueError(
            f"tokenizer_name_or_path: {args.tokenizer_name_or_path} has the token {token!r} with number {number}, but "
            f"{args.model_name_or_path} has {rows} tokens, numbered from 0; take a tokenizer that was made for it"
        )


_GENERIC_TOKENIZERS = ("TokenizersBackend", "PreTrainedTokenizerFast")


def _names_generic_tokenizer(name: str) -> bool:
    """Return whether a folder, or a hub repository, says that its tokenizer.json is the whole tokenizer."""
    if Path(name).is_dir():
        if not Path(name, "tokenizer.json").is_file():
            return False
        file = Path(name, "tokenizer_config.json")
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    else:
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        config = get_tokenizer_config(name)
    return "auto_map" not in config and config.get("tokenizer_class") in _GENERIC_TOKENIZERS


_ATTENTION = {"eager": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"}


def attention_option(args: ModelArgs, config: Any) -> dict[str, str]:
    """Return what tells transformers which attention a role wants; nothing where it may choose.

    transformers' sdpa leaves out a cap of attention logits (Gemma 2), which inference engines compute: such a model is
    run with eager attention, and `ValueError` is raised where sdpa is asked for.
    """
    caps = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if caps and args.attn_implementation == "sdpa":
        raise ValueError(f"attn_implementation: {LOSES_CAP}; write auto or eager")
    if args.attn_implementation == "auto":
        return {"attn_implementation": "eager"} if caps else {}
    return {"attn_implementation": _ATTENTION[args.attn_implementation]}


def _loaded(kind: Any, args: ModelArgs, dtype: torch.dtype, **options: Any) -> Any:
    options.setdefault("config", load_config(args))
    options |= attention_option(args, options["config"])
    of_picture_model = picture_config(args) is not None
    if of_picture_model:
        require_copies(weights_folder(args))
        options["key_mapping"] = RENAMED
    # Of a tower, whose weights aren't loaded on purpose, transformers would list them all.
    with quiet_transformers(), errors_only("transformers") if of_picture_model else contextlib.nullcontext():
        source = source_of(args)
        if args.use_shm:
            source["pretrained_model_name_or_path"] = weights_folder(args)
        loaded = kind.from_pretrained(**source, dtype=dtype, **options)
    if of_picture_model:  # its own files have the names of a model by itself
        (loaded[0] if isinstance(loaded, tuple) else loaded)._weight_conversions = None
    return loaded


def weights_folder(args: ModelArgs) -> str:
    """Return the folder or hub id to read weights from: with `use_shm` a copy of the model's folder."""
    assert args.model_name_or_path is not None, "configuration checks make sure that every started role has a model"
    return staged(args.model_name_or_path) if args.use_shm else args.model_name_or_path


def load_causal_lm(args: ModelArgs, dtype: torch.dtype) -> PreTrainedModel:
    """Return a causal language model on the CPU, in eval mode; raise `ValueError` where weights would be invented.

    One that reads pictures never says a token that stands for one.
    """
    model = _whole(language_model_class(load_config(args)), args, dtype)
    if family_of(model.config.model_type).pictures is not None:
        from roll.strategies.training.place_tokens import forbid_places

        forbid_places(model)
    return model


def language_model_class(config: Any) -> Any:
    """Return transformers' class for models that write text: of those that read pictures, too, the one that does."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM if family_of(config.model_type).pictures is None else AutoModelForImageTextToText


def load_backbone(args: ModelArgs, dtype: torch.dtype) -> PreTrainedModel:
    """Return the same architecture without its language-model head, on the CPU, in eval mode; raise `ValueError` where
    weights would be invented."""
    from transformers import AutoModel

    return _whole(AutoModel, args, dtype)


def _whole(kind: Any, args: ModelArgs, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model all of whose weights are there. transformers draws missing ones at random, with a warning."""
    model, loaded = _loaded(kind, args, dtype, output_loading_info=True)
    missing = sorted(loaded["missing_keys"])
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"{args.model_name_or_path} lacks weights of its own: {', '.join(missing[:3])}{more}. They would be random "
            "numbers. The folder is incomplete, or its config.json is another model's: get or save the model again"
        )
    whole: PreTrainedModel = model.eval()
    return whole


def load_classifier(args: ModelArgs, dtype: torch.dtype) -> PreTrainedModel:
    """Return a sequence classifier on the CPU in eval mode; raise `ValueError` where its head would be invented."""
    from transformers import AutoModelForSequenceClassification

    model, loaded = _loaded(AutoModelForSequenceClassification, args, dtype, output_loading_info=True)
    missing = sorted(loaded["missing_keys"])
    if missing:
        raise ValueError(
            f"{args.model_name_or_path} is no trained sequence classifier: it has no {', '.join(missing[:3])}; "
            "expected a model saved from AutoModelForSequenceClassification"
        )
    return model.eval()


def load_new_classifier(args: ModelArgs, dtype: torch.dtype) -> PreTrainedModel:
    """Return a sequence classifier with one output on the CPU in eval mode; a language model's has a head of zeros.

    Raises `ValueError` for a classifier with another number of outputs.
    """
    from transformers import AutoModelForSequenceClassification

    config = one_output(load_config(args), str(args.model_name_or_path))
    kind = AutoModelForSequenceClassification
    model, loaded = _loaded(kind, args, dtype, config=config, output_loading_info=True)
    missing = sorted(name for name in loaded["missing_keys"] if name != "score.weight")
    if missing:
        raise ValueError(f"{args.model_name_or_path} lacks {', '.join(missing[:3])}: a classifier can't be made of it")
    if loaded["missing_keys"]:
        torch.nn.init.zeros_(model.score.weight)
    return model.eval()


def one_output(config: Any, name: str) -> Any:
    """Return the configuration of a classifier with one output; raise `ValueError` for one of several."""
    own = any("ForSequenceClassification" in architecture for architecture in config.architectures or ())
    if own and config.num_labels != 1:
        raise ValueError(f"{name} is a classifier with {config.num_labels} outputs; expected one, or a language model")
    config.num_labels = 1
    return config


def load_config(args: ModelArgs) -> Any:
    """Return the model's own configuration with the user's changes; of a picture model that of its language model."""
    from transformers import AutoConfig

    config = language_config(AutoConfig.from_pretrained(**source_of(args)))
    for name, value in args.model_config_kwargs.items():
        if not hasattr(config, name):
            hint = nearest(name, (key for key in vars(config) if not key.startswith("_")))
            what = f"{args.model_name_or_path} has no such option" + (f"; {hint}" if hint else "")
            raise ValueError(f"model_config_kwargs.{name}: {what}")
        setattr(config, name, value)
    return config


def picture_config(args: ModelArgs) -> Any:
    """Return the configuration of the picture model whose language model is loaded; None for a model by itself."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(**source_of(args))
    return config if is_picture_model(config) else None


def eos_token_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Return every token that ends a response: the tokenizer's, those of the model's generation settings, and what the
    tokenizer's chat template ends the assistant's words with."""
    generation = getattr(model, "generation_config", None)
    return response_ends(tokenizer, None if generation is None else generation.eos_token_id)


def text_config(model: nn.Module) -> Any:
    """Return the model's configuration; of a multimodal one, that of its language model."""
    config: Any = model.config
    return config.get_text_config()


def context_length(model: nn.Module) -> int:
    """Return positions the model was built for. Raises `ValueError` for one that doesn't say."""
    length = getattr(text_config(model), "max_position_embeddings", None)
    if length is None:
        raise ValueError(
            f"{type(model).__name__} has no max_position_embeddings in its configuration; such models (recurrent ones, "
            "ALiBi) can't be used yet"
        )
    return int(length)


def head_size(config: Any) -> int:
    """Return numbers in a key of one attention head; some configurations leave it to be worked out."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


@torch.no_grad()
def lay_by_input(model: nn.Module) -> None:
    """Lay the float32 weights of linear layers out on the host by input, not by output: products of few rows read them
    fastest so. None stays behind in the file, see `leave_file`.

    They stay the same parameters of the same shape. An embedding that is the head, too, stays by rows.
    """
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if type(module) is nn.Linear and id(module.weight) not in embedded and module.weight.dtype == torch.float32:
            module.weight.data = module.weight.data.t().contiguous().t()
    leave_file(model)


@torch.no_grad()
def leave_file(model: nn.Module) -> None:
    """Give weights that lie in a file mapped into memory, as safetensors are loaded, memory of their own.

    One that stays keeps all of the file in memory.
    """
    for parameter in model.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters (tied ones once) and saved buffers under their Hugging Face names."""
    yield from model.named_parameters()
    saved = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


@torch.no_grad()
def load_named_tensors(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy `weights` into the model, casting to its dtype.

    Raises `ValueError` for a foreign name, a wrong shape or a missing tensor: the engine would go on with stale
    weights.
    """
    targets = dict(named_tensors(model))
    missing = set(targets)
    for name, value in weights:
        if name not in targets:
            raise ValueError(f"weight update brought {name!r}, which the engine's model doesn't have")
        if targets[name].shape != value.shape:
            raise ValueError(f"weight {name!r} has shape {tuple(value.shape)}, expected {tuple(targets[name].shape)}")
        target = targets[name]
        missing.discard(name)
        if target.data_ptr() == value.data_ptr():
            continue  # the trainer's own tensor, which the engine computes with (`borrow_weights`)
        if target.dim() == 2 and not target.is_contiguous():  # by columns: torch is fast in this direction only
            target, value = target.t(), value.t()
        target.copy_(value)
    if missing:
        raise ValueError(f"weight update left {len(missing)} tensors untouched, e.g. {sorted(missing)[:3]}")
