"""What an engine or a trainer would refuse of a model, seen in its config.json before anything is started.

Types that every engine and trainer is tested with aren't looked into. Of others transformers builds the module without
memory, which takes seconds and is asked what the start asks. Code of the folder's own isn't run, and what only a
forward pass shows is left to the start.
"""

from __future__ import annotations

import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from roll.configs.catalog.family_table import family_of
from roll.configs.catalog.family_ways import CACHE_ARGUMENTS, CAPPED, RECURRENT, Way, closed_ways
from roll.configs.checks.machine_checks import Machine
from roll.configs.checks.vllm_models import vllm_problems
from roll.configs.errors import Violation, problem
from roll.configs.rules.rotations_rules import rotation_obstacle
from roll.configs.schema.engine_config import VllmConfig
from roll.configs.schema.model_shape import RECURRENT_LAYERS, config_file
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.strategy_config import StrategyArgs
from roll.configs.schema.worker_config import ForwardConfig, ModelArgs, TrainConfig, WorkerConfig

CACHED_LAYERS = frozenset(
    {"full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "mlp", "moe"}
)
"""Layers whose state is one key and value per position, with a mask that only looks at distances, recurrent or
convolution states, both, or nothing: all that `hf_infer` can run."""
OTHER_ENGINES = "sample with vllm or sglang, which pad no rows and have layers of their own, if they know this model"
LOSES_CAP = (
    "this model caps the logits of its attention (attn_logit_softcapping), which sdpa leaves out: it would be trained "
    "as another model than engines sample from"
)
_PADDED = "; such layers train on padded rows (use_sequence_packing: false)"


def family_checks(config: RunConfig, machine: Machine) -> Iterator[Violation]:
    """Engines can compute a model's rotations and heads, by its config.json alone."""
    for role, worker in config.roles.items():
        tree = _tree(config.model_path(role), worker.model_args)
        if tree is None:
            continue
        name = worker.strategy_args.strategy_name
        key = f"{role}.strategy_args.strategy_name"
        capped = tree.get("attn_logit_softcapping") is not None
        if capped and name not in ("vllm", "sglang") and worker.model_args.attn_implementation == "sdpa":
            yield problem(f"{role}.model_args.attn_implementation", LOSES_CAP, "auto or eager", "sdpa")
        flash = worker.model_args.attn_implementation == "fa2"  # has caps and sinks, and packs by itself
        if isinstance(worker, ForwardConfig) and not name.startswith("megatron") and not flash:
            closed = CAPPED if capped else closed_ways(tree.get("model_type"))
            if family_of(tree.get("model_type")).tested or RECURRENT in closed.values():  # others are measured
                yield from _closed_ways(role, worker, closed)
        if name in ("vllm", "sglang") and role == "actor_infer":
            yield from _rotation(config, worker, tree, key)
        if name == "hf_infer" and (why := _clamped("this model", tree.get("time_step_limit"))):
            yield problem(key, why, OTHER_ENGINES, name)
        if isinstance(worker, ForwardConfig):
            yield from _whole_rows(role, worker, tree)
        if name == "vllm":
            yield from vllm_problems(config, role, tree, machine)


def has_untested_family(config: RunConfig) -> bool:
    """Return whether a role has a model of a type that isn't tested with every engine and trainer."""
    return any(True for _ in untested_roles(config))


def family_problems(config: RunConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, sentence, fix) of what engine or trainer would refuse of such a model; builds it without memory. A
    reward model is looked at when it is loaded."""
    for role, worker, file in untested_roles(config):
        name = worker.strategy_args.strategy_name
        key = f"{role}.strategy_args.strategy_name"
        if name == "hf_infer":
            yield from ((key, sentence, fix) for sentence, fix in sampler_obstacles(file))
        elif isinstance(worker, ForwardConfig) and _is_policy(role) and not name.startswith("megatron"):
            recomputes = isinstance(worker, TrainConfig) and not worker.model_args.disable_gradient_checkpointing
            for sentence, fix in trainer_obstacles(file, recomputes=recomputes):
                switch = "disable_gradient_checkpointing" in fix
                yield f"{role}.model_args.disable_gradient_checkpointing" if switch else key, sentence, fix


def untested_roles(config: RunConfig) -> Iterator[tuple[str, WorkerConfig, Path]]:
    """Yield (role, its section, its config.json) of roles with a model of a type that isn't tested with everything."""
    for role, worker in config.roles.items():
        file, tree = config_file(config.model_path(role)), _tree(config.model_path(role), worker.model_args)
        kind = None if tree is None or worker.model_args.trust_remote_code else tree.get("model_type")
        family = family_of(kind)
        if file is not None and isinstance(kind, str) and not family.tested and family.pictures is None:
            yield role, worker, file


def _is_policy(role: str) -> bool:
    return role in ("actor_train", "reference", "teacher") or role.startswith("teachers.")


def _tree(name: str, args: ModelArgs) -> dict[str, Any] | None:
    """Return the config.json of a model that is at hand, its language model's part first, with the user's changes."""
    file = config_file(name)
    try:
        tree = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except ValueError:
        return None  # transformers says it better when it loads the model
    if not isinstance(tree, dict):
        return None
    text = tree.get("text_config")
    own = {"model_type": tree["model_type"]} if family_of(tree.get("model_type")).pictures is not None else {}
    return {**tree, **(text if isinstance(text, dict) else {}), **own, **args.model_config_kwargs}


def _closed_ways(role: str, worker: ForwardConfig, closed: Mapping[Way, str]) -> Iterator[Violation]:
    packs = worker.use_sequence_packing or worker.model_args.sequence_ranks > 1
    if packs and "packed" in closed:
        fix = "false" if worker.use_sequence_packing else "false, and one rank to a row"
        yield problem(f"{role}.use_sequence_packing", f"rows can't be laid end to end: {closed['packed']}", fix)
    if worker.use_prefix_sharing and "shared" in closed:
        sentence = f"what rows have in common can't be computed once: {closed['shared']}"
        yield problem(f"{role}.use_prefix_sharing", sentence, "remove it")


def _whole_rows(role: str, worker: ForwardConfig, tree: Mapping[str, Any]) -> Iterator[Violation]:
    """Recurrent layers go through a row from its first token: no rank can do a part of it."""
    kinds = tree.get("layer_types") or tree.get("layers_block_type") or ()
    recurrent = sorted({kind for kind in kinds if kind in (*RECURRENT_LAYERS, "hybrid")})
    decoder = family_of(tree.get("model_type")).decoder
    if not recurrent and decoder is not None and decoder.delta_rule is not None:
        recurrent = ["linear_attention"]
    for key in ("ulysses_size", "ring_attention_size"):
        size = getattr(worker.model_args, key)
        if size > 1 and recurrent:
            why = (
                f"layers of type {', '.join(recurrent)} carry a state through a row and need it whole, and here every "
                "rank has a part of it"
            )
            yield problem(f"{role}.model_args.{key}", why, "1", size)


def _rotation(config: RunConfig, worker: WorkerConfig, tree: dict[str, Any], key: str) -> Iterator[Violation]:
    args: StrategyArgs = worker.strategy_args
    max_model_len = args.strategy_config.max_model_len if isinstance(args.strategy_config, VllmConfig) else None
    why = rotation_obstacle(args.strategy_name, tree, config.max_sequence_length, max_model_len)
    if why and args.strategy_name == "vllm":
        path = "actor_infer.strategy_args.strategy_config.max_model_len"
        yield problem(path, why, "remove it: it is the run's longest row then", max_model_len)
    elif why:
        yield problem(key, why, "vllm or hf_infer, which choose once for the whole run, or shorter rows", "sglang")


def clamped_steps(model: Any) -> str:
    """Return why decode steps of a transformers model compute something else than a pass over the row; empty: they
    don't.

    transformers clamps the time steps of state-space layers where it computes several tokens, and not in steps of one.
    """
    limits = (getattr(module, "time_step_limit", None) for module in model.modules())
    return next((why for limit in limits if (why := _clamped(type(model).__name__, limit))), "")


def _clamped(name: str, limit: Any) -> str:
    # transformers writes an infinite number as {"__float__": "Infinity"}.
    try:
        low, high = (float(end["__float__"] if isinstance(end, dict) else end) for end in limit or (0.0, math.inf))
    except (KeyError, TypeError, ValueError):
        return ""  # no pair of numbers: transformers says so where it reads the file
    if low <= 0 and high == math.inf:
        return ""
    return (
        f"hf_infer can't run {name}: its state-space layers keep their time steps between {low:g} and {high:g}, and "
        "transformers forgets that in steps of one token"
    )


def sampler_obstacles(file: Path) -> Iterator[tuple[str, str]]:
    """Yield why `hf_infer` would refuse the model of this config.json, and what to do instead."""
    model = _built(file)
    if model is None:
        return
    name, config = type(model).__name__, model.config.get_text_config()
    other = sorted(set(getattr(config, "layer_types", None) or ()) - CACHED_LAYERS)
    parameters, inner = (inspect.signature(part.forward).parameters for part in (model, model.get_decoder() or model))
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    if getattr(config, "max_position_embeddings", None) is None:
        yield f"{name} states no context length (max_position_embeddings), by which rows end", "a model that states one"
    elif other:
        sentence = f"hf_infer can't run {name}: it has layers of type {', '.join(other)}"
        yield sentence, OTHER_ENGINES + _PADDED
    elif parameters.keys().isdisjoint(CACHE_ARGUMENTS):
        yield f"hf_infer can't run {name}: its forward pass takes no cache of keys and values", OTHER_ENGINES
    elif shared:
        yield f"hf_infer can't run {name}: {shared} of its layers have no keys and values of their own", OTHER_ENGINES
    elif why := clamped_steps(model):
        yield why, OTHER_ENGINES
    elif "input_ids" in inner and "position_ids" not in inner:
        sentence = f"hf_infer can't run {name}: it pads rows at the left, and this model counts positions itself"
        yield sentence, OTHER_ENGINES


def trainer_obstacles(file: Path, *, recomputes: bool) -> Iterator[tuple[str, str]]:
    """Yield why the trainers that run transformers' modules would refuse a model's config.json, and what to do."""
    model = _built(file)
    if model is None:
        return
    name, decoder, head = type(model).__name__, model.get_decoder(), model.get_output_embeddings()
    inside = {id(parameter) for part in (decoder, head) if part is not None for parameter in part.parameters()}
    beside = [key for key, parameter in model.named_parameters() if id(parameter) not in inside]
    separate = (
        decoder is not None and decoder is not model and "input_ids" in inspect.signature(decoder.forward).parameters
    )
    if head is None or not separate or type(decoder) is type(model):
        yield f"{name} can't be trained: its decoder and its output head can't be told apart", "another model"
    elif beside:
        sentence = f"{name} can't be trained: its logits come from more than an output head ({beside[0]})"
        yield sentence, "another model"
    elif recomputes and not model.supports_gradient_checkpointing:
        sentence = f"{name} can't compute activations again in the backward pass"
        yield sentence, "disable_gradient_checkpointing=true"


@cache
def _built(file: Path) -> Any:
    """Return transformers' causal language model of a config.json, without memory; None: it isn't known there, or says
    better itself what is wrong with it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        config = AutoConfig.from_pretrained(file.parent)
        if family_of(config.model_type).trained_as_text:
            config = config.get_text_config()
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001 - the start loads the model whole and says what is wrong with it
        return None
    finally:
        log.setLevel(level)
