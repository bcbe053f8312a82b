"""Every key of `MegatronConfig` does in Megatron what the documentation says: seen inside a role that runs."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from layout_contract import CP2, EP2, PP2, SP, TP2, VP2, each, layout_spec, my_rows
from test_megatron_model import config_for
from train_contract import LOSS, build, make_batch

pytest.importorskip("megatron.core")

from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.base import LossFn, LossTerms

ONE_PASS = {"training": {"per_device_train_batch_size": 6}}


def on_ranks(info, spec, scenario, *args):
    """`scenario(strategy, ...)` on one rank."""
    return scenario(build(spec, info), *args)


def watch(ranks, world, path, options, scenario, *args, **changes):
    """What `scenario` returns on every rank of a training role."""
    return ranks.run(on_ranks, world, layout_spec(path, "megatron_train", options, **changes), scenario, *args)


def watch_each(ranks, world, cases, scenario, *args):
    """The same of roles on one layout: `cases` of (path, options, changes); for each case a list by rank."""
    specs = [layout_spec(path, "megatron_train", options, **changes) for path, options, changes in cases]
    return zip(*ranks.run(each, world, on_ranks, specs, scenario, *args), strict=True)


# --- sizes -----------------------------------------------------------------------------------------------------------


def holdings(strategy):
    """Of one rank: sizes of its parts of the model, and tokens per row at the embedding and between the layers."""
    seen = {}

    def widths(name, dim):
        return lambda module, inputs: seen.update({name: inputs[0].shape[dim]})

    chunks = strategy._modules
    for chunk in chunks:
        if chunk.pre_process:
            chunk.embedding.word_embeddings.register_forward_pre_hook(widths("tokens", 1))
        for layer in chunk.decoder.layers:
            layer.input_layernorm.register_forward_pre_hook(widths("between", 0))
    strategy.forward(make_batch((8,)), ("logprobs",))
    layer = chunks[0].decoder.layers[0]
    held = {
        "layers": [[layer.layer_number for layer in chunk.decoder.layers] for chunk in chunks],
        "qkv": len(layer.self_attention.linear_qkv.weight),
        **seen,
    }
    if hasattr(layer.mlp, "experts"):
        experts = layer.mlp.experts.local_experts
        return {**held, "experts": len(experts), "columns": experts[0].linear_fc2.weight.shape[1]}
    return {**held, "columns": layer.mlp.linear_fc2.weight.shape[1]}


# 4 layers, 4 heads and 2 key-value heads of 8 (64 rows of QKV), MLPs of 64 columns; 4 experts of 32 columns.
SIZES = {
    "one rank": ("llama", 1, {}, [{"layers": [[1, 2, 3, 4]], "qkv": 64, "columns": 64, "tokens": 8, "between": 8}]),
    "tensor": ("llama", 2, TP2, [{"qkv": 32, "columns": 32, "tokens": 8, "between": 8}] * 2),
    "sequence": ("llama", 2, {**TP2, **SP}, [{"qkv": 32, "tokens": 8, "between": 4}] * 2),
    "context": ("llama", 2, CP2, [{"qkv": 64, "tokens": 4, "between": 4}] * 2),
    "pipeline": ("llama", 2, PP2, [{"layers": [[1, 2]], "tokens": 8}, {"layers": [[3, 4]], "between": 8}]),
    "interleaved": (
        "llama", 2, VP2, [{"layers": [[1], [3]]}, {"layers": [[2], [4]]}]
    ),
    "one virtual stage": (
        "llama", 2, {**PP2, "virtual_pipeline_model_parallel_size": 1}, [{"layers": [[1, 2]]}, {"layers": [[3, 4]]}]
    ),
    "uneven stages": (
        "llama", 2, {**PP2, "additional_configs": {"num_layers_in_first_pipeline_stage": 1}},
        [{"layers": [[1]]}, {"layers": [[2, 3, 4]]}],
    ),
    "experts whole": ("qwen3_moe", 1, {}, [{"experts": 4, "columns": 32}]),
    "experts shared": ("qwen3_moe", 2, EP2, [{"experts": 2, "columns": 32}] * 2),
    "experts cut": ("qwen3_moe", 2, {**TP2, **SP}, [{"experts": 4, "columns": 16}] * 2),
    "experts not cut": (
        "qwen3_moe", 2, {**TP2, **SP, "expert_tensor_parallel_size": 1}, [{"experts": 4, "columns": 32}] * 2
    ),
    "experts cut alone": ("qwen3_moe", 2, {"expert_tensor_parallel_size": 2}, [{"experts": 4, "columns": 16}] * 2),
}  # fmt: skip


@pytest.mark.parametrize("layout", SIZES)
def test_each_size_divides_what_it_says(ranks, model_of, layout):
    family, world, options, expected = SIZES[layout]
    found = watch(ranks, world, model_of(family, layers=4), options, holdings)
    for held, wanted in zip(found, expected, strict=True):
        assert {key: held[key] for key in wanted} == wanted


# --- recomputation ---------------------------------------------------------------------------------------------------


def calls(strategy):
    """How often each kind of module ran per layer in one forward/backward pass, and how often inputs were kept."""
    from megatron.core import tensor_parallel

    ran = collections.Counter()
    for chunk in strategy._modules:
        for layer in chunk.decoder.layers:
            kinds = {
                f"layer {layer.layer_number}": layer,
                "attention": layer.self_attention.core_attention,
                "norm": layer.input_layernorm,
                "norm 2": layer.pre_mlp_layernorm,
                "mlp": layer.mlp,
            }
            if hasattr(layer.mlp, "router"):
                kinds.update(mlp=layer.mlp.router, shared=layer.mlp.shared_experts)
            for kind, module in kinds.items():
                module.register_forward_pre_hook(lambda module, inputs, kind=kind: ran.update([kind]))
    with mock.patch.object(tensor_parallel, "checkpoint", wraps=tensor_parallel.checkpoint) as checkpoint:
        strategy.train_step(my_rows(strategy), LOSS)
    return dict(ran), checkpoint.call_count


OFF = {"disable_gradient_checkpointing": True}
SELECTED = {"recompute_granularity": "selective"}
# Two layers: everything runs twice a pass, once per layer, and what is recomputed twice as often.
WHOLE = {"layer 1", "layer 2", "attention", "mlp", "norm", "norm 2", "shared"}
RECOMPUTED = {
    "off": ({}, OFF, {}, 0),
    "whole layers": ({}, {}, WHOLE, 2),
    "whole layers, said": ({"recompute_granularity": "full"}, {}, WHOLE, 2),
    "two layers at a time": ({"recompute_num_layers": 2, "recompute_method": "uniform"}, {}, WHOLE, 1),
    "attention": (SELECTED, {}, {"attention"}, 2),
    "norms": ({**SELECTED, "recompute_modules": ("layernorm",)}, {}, {"norm", "norm 2"}, 0),
    "experts": ({**SELECTED, "recompute_modules": ("moe",)}, {}, {"mlp", "shared"}, 2),
    "experts, by their own key": ({"moe_layer_recompute": True}, OFF, {"mlp", "shared"}, 2),
    "experts and attention": (
        {**SELECTED, "recompute_modules": ("core_attn",), "moe_layer_recompute": True}, {},
        {"attention", "mlp", "shared"}, 4,
    ),
    "shared experts": ({**SELECTED, "recompute_modules": ("shared_experts",)}, {}, {"shared"}, 2),
}  # fmt: skip


def test_just_what_is_named_is_recomputed(ranks, model_of):
    path = model_of("qwen2_moe")
    cases = [(path, options, {"model": model, **ONE_PASS}) for options, model, _, _ in RECOMPUTED.values()]
    once = {"layer 1": 1, "layer 2": 1, "attention": 2, "mlp": 2, "norm": 2, "norm 2": 2, "shared": 2}
    found = watch_each(ranks, 1, cases, calls)
    for (kind, (_, _, recomputed, kept)), ((ran, checkpoints),) in zip(RECOMPUTED.items(), found, strict=True):
        assert ran == {name: count * (2 if name in recomputed else 1) for name, count in once.items()}, kind
        assert checkpoints == kept, kind


def test_the_first_so_many_layers_and_mlps_of_dense_models_are_recomputed(ranks, model_of):
    first = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    mlp = {**SELECTED, "recompute_modules": ("mlp",)}
    cases = [(model_of("llama"), options, ONE_PASS) for options in (first, mlp)]
    ((of_first, _),), ((of_mlp, _),) = watch_each(ranks, 1, cases, calls)
    assert (of_first["layer 1"], of_first["layer 2"]) == (2, 1)
    assert (of_mlp["mlp"], of_mlp["attention"], of_mlp["layer 1"]) == (4, 2, 1)


# --- experts ---------------------------------------------------------------------------------------------------------


def routing(strategy):
    """(type of the dispatcher, of what the router computes, of the model's weights)"""
    layer, types = strategy._modules[0].decoder.layers[0].mlp, []
    gating = layer.router.gating
    layer.router.gating = lambda hidden: types.append(gating(hidden).dtype) or gating(hidden)
    strategy.forward(my_rows(strategy), ("logprobs",))
    return type(layer.token_dispatcher).__name__, set(types), layer.router.weight.dtype


# (what is asked for, type of the model) -> type that the router computes in
ROUTERS = {
    (None, "fp32"): torch.float32, (None, "bf16"): torch.bfloat16,
    ("fp32", "bf16"): torch.float32, ("fp64", "fp32"): torch.float64,
}  # fmt: skip


def test_the_router_computes_in_the_type_asked_for(ranks, model_of):
    path = model_of("qwen3_moe")
    cases = [(path, {"moe_router_dtype": given}, {"model": {"dtype": model}}) for given, model in ROUTERS]
    assert [types for ((_, types, _),) in watch_each(ranks, 1, cases, routing)] == [{t} for t in ROUTERS.values()]


def test_tokens_travel_as_asked(ranks, model_of):
    kinds = ({}, {"moe_token_dispatcher_type": "alltoall"}, {"moe_token_dispatcher_type": "allgather"})
    cases = [(model_of("qwen3_moe"), {**EP2, **given}, {}) for given in kinds]
    found = [{dispatcher for dispatcher, _, _ in answers} for answers in watch_each(ranks, 2, cases, routing)]
    assert found == [{f"MoE{name}TokenDispatcher"} for name in ("AlltoAll", "AlltoAll", "AllGather")]


def zero_loss(outputs, batch, sizes):
    return LossTerms(outputs.logprobs.sum() * 0.0)


def same_rows(count):
    """A batch of one row, so many times: however it is cut, each part is a picture of the whole."""
    row = make_batch((9,))
    return type(row)(
        row_ids=tuple(f"row{i}" for i in range(count)),
        group_ids=("group",) * count,
        offsets=torch.arange(count + 1) * 9,
        token_ids=row.token_ids.repeat(count),
        action_mask=row.action_mask.repeat(count),
        loss_mask=row.loss_mask.repeat(count),
        advantages=row.advantages.repeat(count),
    )


def balance(strategy, rows):
    """Gradient norm of the auxiliary losses alone, from so many rows of four on each data-parallel rank."""
    step = strategy.train_step(same_rows(rows), LossFn(compute=zero_loss, needs=("logprobs",)))
    return step.result().get("actor/grad_norm")


def balance_by_hand(path, coefficient, z_coefficient):
    """The same with transformers: E sum_e f_e P_e per layer (arXiv:2101.03961), and the squared normaliser of the
    router's logits (arXiv:2202.08906)."""
    from transformers import AutoModelForCausalLM

    model, logits = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(
            lambda gate, inputs: logits.append(inputs[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T)
        )
    model(make_batch((9,)).token_ids[None])
    loss = torch.zeros(())
    for table in logits:
        probs = table.softmax(-1)
        chosen = torch.zeros_like(probs).scatter(-1, probs.topk(2).indices, 1.0)
        loss = loss + coefficient * 4 * (chosen.mean(0) / 2 * probs.mean(0)).sum()
        loss = loss + z_coefficient * table.logsumexp(-1).square().mean()
    loss.backward()
    return float(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm())


CUTS = {
    "one pass": (1, {}, 4, {"per_device_train_batch_size": 4}),
    "a pass for each row": (1, {}, 4, {"per_device_train_batch_size": 1}),
    "two data ranks": (2, {}, 2, {"per_device_train_batch_size": 1}),
    "two expert ranks": (2, EP2, 2, {"per_device_train_batch_size": 2}),
    "pipeline": (2, PP2, 4, {"per_device_train_batch_size": 2}),
    "tensor": (2, {**TP2, **SP}, 4, {"per_device_train_batch_size": 2}),
}


@pytest.mark.parametrize("cut", CUTS)
def test_the_losses_of_the_router_have_the_published_gradient_however_rows_are_cut(ranks, model_of, cut):
    world, options, rows, training = CUTS[cut]
    path, changes = model_of("qwen3_moe", initializer_range=0.3), {"worker": {"use_sequence_packing": True}}
    aux = {**options, "moe_aux_loss_coeff": 0.5}
    z = {**options, "moe_aux_loss_coeff": 0.0, "additional_configs": {"moe_z_loss_coeff": 0.25}}
    cases = [(path, given, {**changes, "training": training}) for given in (aux, z)]
    found = [answers[0] for answers in watch_each(ranks, world, cases, balance, rows)]
    expected = [balance_by_hand(path, 0.5, 0.0), balance_by_hand(path, 0.0, 0.25)]
    assert found == pytest.approx(expected, rel=1e-4)


# --- overlap, sharded states -----------------------------------------------------------------------------------------


def moments(strategy):
    """(numbers in the first moments on this rank, trained numbers on this rank)"""
    strategy.train_step(my_rows(strategy), LOSS)
    states = [s for o in strategy._optimizer.megatron.chained_optimizers for s in o.optimizer.state.values()]
    trained = [p for chunk in strategy._modules for p in chunk.parameters()]
    return sum(s["exp_avg"].numel() for s in states), sum(p.numel() for p in trained)


@pytest.mark.parametrize("options", [{}, CP2, EP2])
def test_each_moment_is_on_one_data_parallel_rank_or_on_all(ranks, model_of, options):
    both = (options, {**options, "use_distributed_optimizer": False})
    answers, whole = watch_each(ranks, 2, [(model_of("qwen3_moe"), given, {}) for given in both], moments)
    for (held, trained), (all_held, _) in zip(answers, whole, strict=True):
        assert all_held == trained
        assert held < trained
    experts = 2 * 2 * 3 * 32 * 32 if options == EP2 else 0  # of each rank, in 2 layers: what nobody shares with it
    assert sum(held for held, _ in answers) == answers[0][1] + experts


def exchanges(strategy):
    """Of the second step: groups of gradients under way when the backward pass ended, and groups of weights not yet
    gathered when the step ended."""
    config, under_way = strategy._modules[0].config, []
    finalize = config.finalize_model_grads_func
    groups = [g for chunk in strategy._chunks for g in chunk.bucket_groups + chunk.expert_parallel_bucket_groups]

    def watching(*args, **kwargs):
        under_way.append([group.grad_reduce_handle is not None for group in groups])
        return finalize(*args, **kwargs)

    config.finalize_model_grads_func = watching
    for _ in range(2):
        strategy.train_step(my_rows(strategy), LOSS)
    return under_way[1], [not group.param_gather_dispatched for group in groups]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sums_start_in_the_backward_pass_and_weights_are_gathered_in_the_forward_pass(ranks, model_of, family):
    reduce = {"overlap_grad_reduce": True}
    cases = [(model_of(family), given, {}) for given in ({}, reduce, {**reduce, "overlap_param_gather": True})]
    expected = [(False, False), (True, False), (True, True)]
    for answers, (sums, gathers) in zip(watch_each(ranks, 2, cases, exchanges), expected, strict=True):
        for started, waiting in answers:
            assert started == [sums] * len(started)
            assert waiting == [gathers] * len(waiting)


# --- what needs an accelerator ---------------------------------------------------------------------------------------


def test_options_for_accelerators_reach_megatrons_configuration():
    options = {"moe_grouped_gemm": True, "moe_shared_expert_overlap": True}
    config = config_for("qwen2_moe", **options, model={"shared_expert_intermediate_size": 48})
    assert (config.moe_grouped_gemm, config.moe_shared_expert_overlap) == (True, True)
    config = config_for("qwen2_moe", model={"shared_expert_intermediate_size": 48})
    assert (config.moe_grouped_gemm, config.moe_shared_expert_overlap) == (False, False)


@pytest.mark.parametrize("offload", [True, False])
def test_offload_reaches_megatrons_optimizer(offload):
    from roll.configs.schema.training_args import TrainingArgs
    from roll.strategies.megatron.optimizer import Optimizer

    made = SimpleNamespace(param_groups=[], chained_optimizers=[])
    options = MegatronConfig(optimizer_cpu_offload=offload)
    with mock.patch("megatron.core.optimizer.get_megatron_optimizer", return_value=made) as make:
        Optimizer([], TrainingArgs(), options, torch.float32, max_norm=1.0, l2=0.0)
    config = make.call_args.args[0]
    assert (config.optimizer_cpu_offload, config.optimizer_offload_fraction) == (offload, float(offload))


@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_the_kind_of_layers_is_asked_of_megatron(impl):
    from roll.strategies.megatron import megatron_model

    config = config_for("llama")
    with mock.patch.object(megatron_model, "get_gpt_decoder_block_spec") as get:
        get.return_value.layer_specs = []
        block = megatron_model.layer_specs(
            config, mock.Mock(), mock.Mock(), transformer_engine=impl != "local", stage=None
        )
    assert get.call_args.kwargs["use_transformer_engine"] == (impl == "transformer_engine")
    assert (block.layer_norm is megatron_model.RMSNorm) == (impl == "local")
