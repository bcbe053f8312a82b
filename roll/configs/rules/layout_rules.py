"""Rules about parallel layouts: sizes against ranks and against each other, and against a model's shape once known."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields

from roll.configs.catalog.family_table import FAMILIES, family_of
from roll.configs.errors import Violation, no_effect, problem
from roll.configs.rules.megatron_fields import field_rules
from roll.configs.schema.batch_plan import divisors
from roll.configs.schema.engine_config import EngineConfig, VllmConfig
from roll.configs.schema.megatron_config import RECOMPUTED, UNEVEN, MegatronConfig
from roll.configs.schema.model_shape import ModelShape
from roll.configs.schema.worker_config import ForwardConfig, TrainConfig, WorkerConfig


def layout_rules(role: str, worker: WorkerConfig) -> Iterator[Violation]:
    """Sizes against the role's ranks, options against each other; all that needs no model."""
    options, path = worker.strategy_args.strategy_config, f"{role}.strategy_args.strategy_config"
    together = worker.model_parallel_size
    if worker.ranks % together:
        sizes = " x ".join(f"{name} {size}" for name, size in worker.parallel_sizes.items())
        expected = f"a layout whose ranks ({sizes} = {together}) divide the role's {worker.ranks} rank(s)"
        key = "ulysses_size" if worker.model_args.ulysses_size > 1 else "ring_attention_size"
        key_path = path if isinstance(options, MegatronConfig) else f"{role}.model_args.{key}"
        more = -(-worker.ranks // together) * together
        yield Violation(key_path, expected, f"{more} ranks for {role}, or smaller sizes")
    if isinstance(options, MegatronConfig):
        yield from _megatron_sizes(path, worker.ranks, options)
        yield from field_rules(role, options)
        if isinstance(worker, TrainConfig):
            yield from _recompute(role, worker, options)


def _megatron_sizes(path: str, ranks: int, options: MegatronConfig) -> Iterator[Violation]:
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    virtual_stages = options.virtual_pipeline_model_parallel_size
    if virtual_stages is not None and virtual_stages > 1 and pp == 1:
        expected = "null, because pipeline_model_parallel_size is 1: there is no pipeline to interleave"
        fix = f"{path}.pipeline_model_parallel_size=2, or remove it"
        yield Violation(f"{path}.virtual_pipeline_model_parallel_size", expected, fix, virtual_stages)
    if options.sequence_parallel and tp == 1:
        expected = "false, because tensor_model_parallel_size is 1: it splits what tensor-parallel ranks would repeat"
        yield Violation(f"{path}.sequence_parallel", expected, f"{path}.sequence_parallel=false", True)
    ep, etp = options.expert_model_parallel_size, options.expert_tensor_parallel_size or tp
    if (ep > 1 or etp != tp) and ranks % (ep * etp * pp):
        expected = (
            f"expert sizes whose ranks (ep {ep} x expert tp {etp} x pp {pp} = {ep * etp * pp}) divide the role's "
            f"{ranks} rank(s)"
        )
        key = "expert_model_parallel_size" if ep > 1 else "expert_tensor_parallel_size"
        yield Violation(f"{path}.{key}", expected, f"{path}.{key}=1, or another number of ranks", ep if ep > 1 else etp)


def _recompute(role: str, worker: TrainConfig, options: MegatronConfig) -> Iterator[Violation]:
    """Check that what is recomputed is configured once: by the granularity, and by the keys that belong to it."""
    path, off = f"{role}.strategy_args.strategy_config", worker.model_args.disable_gradient_checkpointing
    granularity_set = options.recompute_granularity
    if granularity_set is not None and off:
        expected = f"null, because {role}.model_args.disable_gradient_checkpointing is true"
        yield Violation(f"{path}.recompute_granularity", expected, "keep one of the two", granularity_set)
        return
    effective = granularity_set or (None if off else "full")
    of = {"recompute_method": "full", "recompute_num_layers": "full", "recompute_modules": "selective"}
    for key, granularity in of.items():
        value = getattr(options, key)
        if value is not None and effective != granularity:
            expected = f"null, because recompute_granularity is {effective or 'off'}"
            value_set = list(value) if isinstance(value, tuple) else value
            yield Violation(f"{path}.{key}", expected, f"{path}.recompute_granularity={granularity}", value_set)
    modules = options.recompute_modules
    for name in modules or ():
        if name not in RECOMPUTED:
            yield Violation(f"{path}.recompute_modules", f"any of {', '.join(RECOMPUTED)}", "", name)
    if options.moe_layer_recompute and effective == "full":
        expected = "false, because whole layers are recomputed anyway"
        yield Violation(f"{path}.moe_layer_recompute", expected, f"{path}.recompute_granularity=selective", True)
    if "moe_act" in (modules or ()) and not options.moe_grouped_gemm:
        expected = "modules without moe_act, because moe_grouped_gemm is off"
        yield Violation(f"{path}.recompute_modules", expected, f"{path}.moe_grouped_gemm=true", "moe_act")
    if "shared_experts" in (modules or ()) and options.moe_shared_expert_overlap:
        expected = "modules without shared_experts, because moe_shared_expert_overlap is on"
        yield Violation(f"{path}.recompute_modules", expected, "keep one of the two", "shared_experts")


# --- with a model's shape --------------------------------------------------------------------------------------------


def shape_rules(role: str, worker: WorkerConfig, model: str, shape: ModelShape) -> Iterator[Violation]:
    """Sizes against the model that they divide."""
    args, options = worker.model_args, worker.strategy_args.strategy_config
    if isinstance(options, MegatronConfig):
        path = f"{role}.strategy_args.strategy_config"
        family = None if shape.model_type is None else family_of(shape.model_type)
        if family is not None and not family.megatron:
            why = f": {family.megatron_lacks}" if family.megatron_lacks else ""
            expected = f"a backend that knows models of type {shape.model_type!r}, as {model} is{why}"
            names = ", ".join(name for name, family in FAMILIES.items() if family.megatron)
            known = f"megatron_* knows {names}; fsdp2_* and deepspeed_* take any"
            yield Violation(f"{role}.strategy_args.strategy_name", expected, known, worker.strategy_args.strategy_name)
            return
        yield from _tensor_parallel(path, model, options, shape)
        yield from _pipeline_parallel(path, model, options, shape)
        if shape.experts:
            yield from _experts(path, model, options, shape)
        else:
            yield from _no_experts(path, model, options)
    elif isinstance(options, EngineConfig):
        tensor, key = options.tensor_parallel_size, f"{role}.strategy_args.strategy_config.tensor_parallel_size"
        yield from _divides(key, tensor, _shared_heads(tensor, shape.heads, shape.kv_heads), model)
        if isinstance(options, VllmConfig) and (options.max_model_len or 0) > (shape.positions or math.inf):
            expected = f"at most {shape.positions} tokens, all that {model} can hold"
            key = f"{role}.strategy_args.strategy_config.max_model_len"
            yield Violation(key, expected, "lower it, or remove it", options.max_model_len)
    elif args.ulysses_size > 1:
        key = f"{role}.model_args.ulysses_size"
        heads = _shared_heads(args.ulysses_size, shape.heads, shape.kv_heads)
        yield from _divides(key, args.ulysses_size, heads, model)


def _divides(key: str, size: int, counts: dict[str, int | None], model: str) -> Iterator[Violation]:
    """Report the first of a model's counts that `size` doesn't divide, with the sizes that would do."""
    for what, count in counts.items():
        if count is not None and 0 < count < 2**40 and count % size:
            legal = ", ".join(map(str, divisors(count)))
            yield Violation(key, f"a divisor of the {count} {what} of {model}", f"one of {legal}", size)
            return


def _shared_heads(ranks: int, heads: int | None, kv_heads: int | None) -> dict[str, int | None]:
    """Heads to spread over ranks. Fewer key-value heads than ranks are repeated, if they divide the ranks."""
    repeated = kv_heads is not None and ranks % kv_heads == 0
    return {"attention heads": heads, **({} if repeated else {"key-value heads": kv_heads})}


def _tensor_parallel(path: str, model: str, options: MegatronConfig, shape: ModelShape) -> Iterator[Violation]:
    tp, cp = options.tensor_model_parallel_size, options.context_parallel_size
    width = {} if shape.experts else {"columns of the MLP": shape.intermediate}
    counts = {**_shared_heads(tp, shape.heads, shape.kv_heads), **width}
    yield from _divides(f"{path}.tensor_model_parallel_size", tp, counts, model)
    if shape.heads is not None and shape.heads % tp == 0:
        which = model if tp == 1 else f"{model} on each of {tp} tensor-parallel ranks"
        yield from _divides(f"{path}.context_parallel_size", cp, {"attention heads": shape.heads // tp}, which)


def _pipeline_parallel(path: str, model: str, options: MegatronConfig, shape: ModelShape) -> Iterator[Violation]:
    pp, virtual_stages = options.pipeline_model_parallel_size, options.virtual_pipeline_model_parallel_size or 1
    if shape.layers is None or options.additional_configs.keys() & UNEVEN:
        return
    if shape.layers % (pp * virtual_stages) == 0:
        chunk, each = options.recompute_num_layers or 1, shape.layers // (pp * virtual_stages)
        if options.recompute_method != "block":  # which takes what there is
            yield from _divides(f"{path}.recompute_num_layers", chunk, {"layers": each}, f"{model} in each stage")
        return
    key = "pipeline_model_parallel_size" if shape.layers % pp else "virtual_pipeline_model_parallel_size"
    product = f"pp {pp} x {virtual_stages} virtual stages = {pp * virtual_stages}" if virtual_stages > 1 else f"pp {pp}"
    expected = f"stages that share the {shape.layers} layers of {model} evenly; {product} doesn't divide them"
    legal = ", ".join(str(d) for d in range(1, shape.layers + 1) if shape.layers % d == 0)
    yield Violation(f"{path}.{key}", expected, f"a product among {legal}", pp if shape.layers % pp else virtual_stages)


def _experts(path: str, model: str, options: MegatronConfig, shape: ModelShape) -> Iterator[Violation]:
    ep = options.expert_model_parallel_size
    yield from _divides(f"{path}.expert_model_parallel_size", ep, {"experts": shape.experts}, model)
    tp = options.tensor_model_parallel_size
    etp = options.expert_tensor_parallel_size or tp
    key = "expert_tensor_parallel_size" if options.expert_tensor_parallel_size else "tensor_model_parallel_size"
    yield from _divides(f"{path}.{key}", etp, {"columns of an expert": shape.intermediate}, model)
    if tp > 1 and not options.sequence_parallel:
        expected = f"true, because {model} has experts and tensor_model_parallel_size is {tp}: Megatron wants both"
        yield Violation(f"{path}.sequence_parallel", expected, f"{path}.sequence_parallel=true", False)
    if not shape.shared_expert:
        why = f", because {model} has no shared expert"
        if options.moe_shared_expert_overlap:
            yield no_effect(f"{path}.moe_shared_expert_overlap", why, "remove it", True)
        if "shared_experts" in (options.recompute_modules or ()):
            what = f"{model} has no shared expert to recompute"
            yield problem(f"{path}.recompute_modules", what, "remove it", "shared_experts")


def _no_experts(path: str, model: str, options: MegatronConfig) -> Iterator[Violation]:
    named = [name for name in options.recompute_modules or () if name in ("moe", "moe_act", "shared_experts")]
    if named:
        yield problem(f"{path}.recompute_modules", f"{model} has no experts to recompute", "remove them", named)
    for spec in fields(options):
        value = getattr(options, spec.name)
        if spec.name.startswith(("expert_", "moe_")) and value != spec.default:
            yield no_effect(f"{path}.{spec.name}", f": {model} has no experts", "remove it", value)
    for name, value in options.additional_configs.items():
        if name.startswith("moe_"):
            yield no_effect(f"{path}.additional_configs.{name}", f": {model} has no experts", "remove it", value)


def sharing_obstacle(worker: ForwardConfig) -> str | None:
    """Return what in a role's section rules it out, as a clause; None: nothing."""
    args = worker.model_args
    if args.ring_attention_size > 1:
        return "with model_args.ring_attention_size keys travel by rows, and a tree of rows isn't cut that way"
    if args.lora_dropout:
        return "with model_args.lora_dropout a token is another in every row that has it"
    if args.torch_compile and not worker.use_sequence_packing:
        return "with model_args.torch_compile it needs use_sequence_packing: true"
    if args.attn_implementation == "fa2" and args.ulysses_size == 1:
        return "with model_args.attn_implementation: fa2 attention is flash-attn's, which knows no tree of rows"
    if args.attn_implementation == "eager" and not (worker.use_sequence_packing or args.ulysses_size > 1):
        return "with model_args.attn_implementation: eager it needs use_sequence_packing: true"
    options = worker.strategy_args.strategy_config
    return _megatron_obstacle(options) if isinstance(options, MegatronConfig) else None


def _megatron_obstacle(options: MegatronConfig) -> str | None:
    if options.moe_aux_loss_coeff:
        return "strategy_config.moe_aux_loss_coeff balances the tokens of whole rows"
    if options.additional_configs.get("moe_z_loss_coeff"):
        return "additional_configs.moe_z_loss_coeff takes a mean over the tokens of whole rows"
    return None


def sharing_rules(role: str, worker: ForwardConfig) -> Iterator[Violation]:
    """Refuse the key where something else in the section rules it out."""
    why = sharing_obstacle(worker) if worker.use_prefix_sharing else None
    if why is not None:
        yield problem(f"{role}.use_prefix_sharing", f"it can't act: {why}", "remove one of the two")
