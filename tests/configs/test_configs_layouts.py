"""Parallel layouts, backends and what they need of a machine: each contradiction is one clear error, at check time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from refused import check_refused_here

from roll.configs.checks.machine_checks import MISSING, Machine, check_worker_machines, this_machine
from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.model_shape import ModelShape, read_shape
from roll.configs.schema.reward_config import RewardConfig
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.strategy_config import Fsdp2Config, StrategyArgs
from roll.configs.schema.training_args import TrainingArgs
from roll.configs.schema.worker_config import ActorTrainConfig, ModelArgs

ACTOR = "actor_train.strategy_args"
OPTIONS = f"{ACTOR}.strategy_config"
REFERENCE = "reference.strategy_args"
ULYSSES = "actor_train.model_args.ulysses_size"
RING = "actor_train.model_args.ring_attention_size"
H200 = Machine(accelerators=("NVIDIA H200",) * 8)
NO_GPU = Machine()


def dense(**sizes: object) -> dict[str, object]:
    return {
        "model_type": "llama",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 6,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        **sizes,
    }


MODELS = {
    "dense": dense(),
    "experts": dense(model_type="qwen3_moe", num_experts=6, moe_intermediate_size=36),
    "gemma": dense(model_type="gemma2"),
    "hybrid": dense(model_type="qwen3_5_text"),
}


@pytest.fixture
def jobs(job: Path) -> Path:
    for name, tree in MODELS.items():
        (job / name).mkdir()
        (job / name / "config.json").write_text(json.dumps(tree))
    return job


def megatron(ranks: int = 1, model: str = "dense", **options: object) -> list[str]:
    """Overrides: Megatron on so many ranks, with these options."""
    sets = ", ".join(f"{key}: {json.dumps(value).replace(chr(34), '')}" for key, value in options.items())
    return [*ray(ranks), f"pretrain={model}", f"{ACTOR}={{strategy_name: megatron_train, strategy_config: {{{sets}}}}}"]


def ray(ranks: int) -> list[str]:
    """Overrides: the actor on so many ranks, and a batch that fits one to eight data-parallel ones."""
    return [
        "executor=ray",
        f"num_gpus_per_node={ranks}",
        f"actor_train.world_size={ranks}",
        "rollout_batch_size=6",
        "num_return_sequences_in_group=4",
        "actor_train.training_args={per_device_train_batch_size: 1, gradient_accumulation_steps: 1}",
    ]


BROKEN = [
    # id, overrides, machine, path of the one violation, fragments of its text
    ("training on a backend that only looks", [f"{ACTOR}.strategy_name=megatron_infer"], NO_GPU,
     f"{ACTOR}.strategy_name", ["do the work of actor_train", f"fix: {ACTOR}.strategy_name=megatron_train"]),
    ("a reference that trains", ["reference={strategy_args: {strategy_name: deepspeed_train}}"], NO_GPU,
     f"{REFERENCE}.strategy_name", [f"fix: {REFERENCE}.strategy_name=deepspeed_infer"]),
    ("a backend misspelt", [f"{ACTOR}.strategy_name=megatrn_train"], NO_GPU, f"{ACTOR}.strategy_name",
     ["did you mean 'megatron_train'"]),
    ("an option of another backend", [f"{ACTOR}={{strategy_name: megatron_train, strategy_config: {{fsdp_size: 1}}}}"],
     NO_GPU, f"{OPTIONS}.fsdp_size", ["a key of actor_train.strategy_args.strategy_config"]),
    ("an option misspelt", megatron(tensor_parallel=2), NO_GPU, f"{OPTIONS}.tensor_parallel", ["did you mean"]),
    ("experts spread by FSDP2", [f"{ACTOR}={{strategy_name: fsdp2_train, strategy_config: {{ep_size: 2}}}}"], NO_GPU,
     f"{OPTIONS}.ep_size", ["every rank holds all experts", "expert_model_parallel_size"]),
    # ranks. 2 x 2 x 1 = 4 don't divide 6 ranks; the next number that does is 8.
    ("ranks that tp x pp don't divide", megatron(6, tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
     NO_GPU, OPTIONS, ["tp 2 x pp 2 x cp 1 = 4", "6 rank(s)", "8 ranks for actor_train"]),
    ("fewer ranks than one copy needs", megatron(1, tensor_model_parallel_size=2), NO_GPU, OPTIONS,
     ["tp 2 x pp 1 x cp 1 = 2", "1 rank(s)"]),
    ("ranks that Ulysses doesn't divide", [*ray(3), f"{ULYSSES}=2"], NO_GPU, ULYSSES,
     ["ulysses 2 = 2", "3 rank(s)", "4 ranks for actor_train"]),
    ("Ulysses in Megatron", [*megatron(2), f"{ULYSSES}=2"], NO_GPU, ULYSSES,
     ["not with megatron_train", "its own context_parallel_size"]),
    ("ranks that a ring doesn't divide", [*ray(3), f"{RING}=2"], NO_GPU, RING,
     ["ring 2 = 2", "3 rank(s)", "4 ranks for actor_train"]),
    ("ranks that rings of Ulysses groups don't divide", [*ray(6), f"{ULYSSES}=2", f"{RING}=2"], NO_GPU, ULYSSES,
     ["ulysses 2 x ring 2 = 4", "6 rank(s)"]),
    ("a ring in Megatron", [*megatron(2), f"{RING}=2"], NO_GPU, RING,
     ["not with megatron_train", "its own context_parallel_size"]),
    ("a ring and a tree of rows", [*ray(2), f"{RING}=2", "actor_train.use_prefix_sharing=true"], NO_GPU,
     "actor_train.use_prefix_sharing", ["ring_attention_size", "a tree of rows isn't cut that way"]),
    ("Ulysses for generation",
     ["executor=ray", "num_gpus_per_node=2", "actor_infer.world_size=2", "actor_infer.model_args.ulysses_size=2"],
     NO_GPU, "actor_infer.model_args.ulysses_size", ["not with hf_infer", "remove it"]),
    ("experts on ranks that aren't there", megatron(2, "experts", expert_model_parallel_size=3), NO_GPU,
     f"{OPTIONS}.expert_model_parallel_size", ["ep 3 x expert tp 1 x pp 1 = 3", "2 rank(s)"]),
    # a mini-batch counts data-parallel ranks: 1 x 1 x (4 / 2) = 2 doesn't divide 1 prompt x 3 responses
    ("a batch that data-parallel ranks don't divide",
     [*megatron(4, tensor_model_parallel_size=2), "rollout_batch_size=1", "num_return_sequences_in_group=3"],
     NO_GPU, "actor_train.training_args", ["x 2 data-parallel rank(s) = 2 doesn't divide 1 prompts x 3 responses"]),
    # Megatron's options among themselves
    ("virtual stages without stages", megatron(virtual_pipeline_model_parallel_size=2), NO_GPU,
     f"{OPTIONS}.virtual_pipeline_model_parallel_size", ["there is no pipeline", "pipeline_model_parallel_size=2"]),
    ("sequence parallelism without peers", megatron(sequence_parallel=True), NO_GPU, f"{OPTIONS}.sequence_parallel",
     ["tensor_model_parallel_size is 1"]),
    ("parameters gathered without the distributed optimizer",
     megatron(overlap_param_gather=True, overlap_grad_reduce=True, use_distributed_optimizer=False), NO_GPU,
     f"{OPTIONS}.overlap_param_gather", ["use_distributed_optimizer is false", "use_distributed_optimizer=true"]),
    ("parameters gathered without reduced gradients", megatron(overlap_param_gather=True), NO_GPU,
     f"{OPTIONS}.overlap_param_gather", ["overlap_grad_reduce is false"]),
    ("a recompute method for selected modules", megatron(recompute_granularity="selective", recompute_method="block"),
     NO_GPU, f"{OPTIONS}.recompute_method", ["recompute_granularity is selective"]),
    ("recomputed layers counted where none are",
     [*megatron(recompute_num_layers=2), "actor_train.model_args.disable_gradient_checkpointing=true"], NO_GPU,
     f"{OPTIONS}.recompute_num_layers", ["recompute_granularity is off"]),
    ("recomputation on and off",
     [*megatron(recompute_granularity="full"), "actor_train.model_args.disable_gradient_checkpointing=true"], NO_GPU,
     f"{OPTIONS}.recompute_granularity", ["disable_gradient_checkpointing is true"]),
    ("modules to recompute within whole layers", megatron(recompute_modules=["mlp"]), NO_GPU,
     f"{OPTIONS}.recompute_modules", ["recompute_granularity is full", "recompute_granularity=selective"]),
    ("a module nobody knows", megatron(recompute_granularity="selective", recompute_modules=["attention"]), NO_GPU,
     f"{OPTIONS}.recompute_modules", ["got 'attention'", "core_attn"]),
    ("an activation that isn't grouped",
     megatron(1, "experts", recompute_granularity="selective", recompute_modules=["moe_act"]), NO_GPU,
     f"{OPTIONS}.recompute_modules", ["moe_grouped_gemm is off"]),
    ("experts recomputed twice", megatron(1, "experts", moe_layer_recompute=True), NO_GPU,
     f"{OPTIONS}.moe_layer_recompute", ["whole layers are recomputed anyway"]),
    ("a backward pass where there is none",
     ["use_kl_loss=true", "pretrain=dense",
      "reference={strategy_args: {strategy_name: megatron_infer, strategy_config: {overlap_grad_reduce: true}}}"],
     NO_GPU, f"{REFERENCE}.strategy_config.overlap_grad_reduce", ["not for reference: it doesn't train"]),
    ("an attention kernel in Megatron", [*megatron(), "actor_train.model_args.attn_implementation=sdpa"], NO_GPU,
     "actor_train.model_args.attn_implementation", ["transformer_impl"]),
    ("an overlap with the wrong dispatcher",
     megatron(1, "experts", moe_shared_expert_overlap=True, moe_token_dispatcher_type="allgather"), H200,
     f"{OPTIONS}.moe_shared_expert_overlap", ["allgather", "moe_token_dispatcher_type=alltoall"]),
    # against the model
    ("heads that tp doesn't divide", megatron(3, tensor_model_parallel_size=3), NO_GPU,
     f"{OPTIONS}.tensor_model_parallel_size", ["the 8 attention heads of dense", "one of 1, 2, 4, 8"]),
    # 6 heads over 2 ranks would be fine, but 3 key-value heads neither divide nor are divided by 2
    ("key-value heads that tp doesn't divide",
     [*megatron(2, tensor_model_parallel_size=2),
      "actor_train.model_args.model_config_kwargs={num_attention_heads: 6, num_key_value_heads: 3}"], NO_GPU,
     f"{OPTIONS}.tensor_model_parallel_size", ["the 3 key-value heads of dense"]),
    ("heads that Ulysses doesn't divide", [*ray(3), "pretrain=dense", f"{ULYSSES}=3"], NO_GPU, ULYSSES,
     ["the 8 attention heads of dense"]),
    # 8 heads over tp 2 leave 4 a rank, which 3 context-parallel ranks can't share
    ("heads that cp doesn't divide", megatron(6, tensor_model_parallel_size=2, context_parallel_size=3), NO_GPU,
     f"{OPTIONS}.context_parallel_size", ["the 4 attention heads of dense on each of 2"]),
    ("layers that pp doesn't divide", megatron(4, pipeline_model_parallel_size=4), NO_GPU,
     f"{OPTIONS}.pipeline_model_parallel_size", ["the 6 layers of dense", "pp 4", "1, 2, 3, 6"]),
    # 6 layers over 2 stages are 3 each, which 2 virtual stages can't share
    ("layers that virtual stages don't divide",
     megatron(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), NO_GPU,
     f"{OPTIONS}.virtual_pipeline_model_parallel_size", ["pp 2 x 2 virtual stages = 4"]),
    # 6 layers in one stage can't be recomputed 4 at a time
    ("layers that recomputed chunks don't divide", megatron(recompute_num_layers=4), NO_GPU,
     f"{OPTIONS}.recompute_num_layers", ["the 6 layers of dense in each stage", "1, 2, 3, 6"]),
    ("recomputed experts of a dense model", megatron(recompute_granularity="selective", recompute_modules=["moe"]),
     NO_GPU, f"{OPTIONS}.recompute_modules", ["dense has no experts"]),
    ("a recomputed shared expert that isn't there",
     megatron(1, "experts", recompute_granularity="selective", recompute_modules=["shared_experts"]), NO_GPU,
     f"{OPTIONS}.recompute_modules", ["no shared expert to recompute"]),
    ("ranks that shards don't divide",
     [*ray(3), f"{ACTOR}={{strategy_name: fsdp2_train, strategy_config: {{fsdp_size: 2}}}}"], NO_GPU,
     f"{OPTIONS}.fsdp_size", ["2"]),
    ("experts that ep doesn't divide", megatron(4, "experts", expert_model_parallel_size=4), NO_GPU,
     f"{OPTIONS}.expert_model_parallel_size", ["the 6 experts of experts", "1, 2, 3, 6"]),
    ("experts of a dense model", megatron(1, moe_router_dtype="fp32"), NO_GPU, f"{OPTIONS}.moe_router_dtype",
     ["dense has no experts"]),
    ("tensor parallelism of experts without sequence parallelism", megatron(2, "experts", tensor_model_parallel_size=2),
     NO_GPU, f"{OPTIONS}.sequence_parallel", ["experts has experts", "sequence_parallel=true"]),
    ("an overlap with a shared expert that isn't there", megatron(1, "experts", moe_shared_expert_overlap=True), H200,
     f"{OPTIONS}.moe_shared_expert_overlap", ["no effect, because experts has no shared expert"]),
    ("a family that Megatron's weights can't be mapped for", megatron(1, "gemma"), NO_GPU, f"{ACTOR}.strategy_name",
     ["type 'gemma2'", "megatron_* knows llama, qwen2", "fsdp2_*"]),
    ("a hybrid on Megatron, accelerators or not", megatron(1, "hybrid"), H200, f"{ACTOR}.strategy_name",
     ["type 'qwen3_5_text'", "only with the kernels of flash-linear-attention", "no map of their weights", "fsdp2_*"]),
    # the machine
    ("DeepSpeed that isn't installed", [f"{ACTOR}.strategy_name=deepspeed_train"],
     Machine(packages=frozenset(MISSING) - {"deepspeed"}), f"{ACTOR}.strategy_name",
     ["deepspeed is not installed: pip install --no-build-isolation -e '.[deepspeed]'"]),
    ("DeepSpeed's kernels without a compiler", [f"{ACTOR}.strategy_name=deepspeed_train"],
     replace(H200, compiler=False), f"{ACTOR}.strategy_name", ["a C++ compiler", "g++"]),
    ("compiled layers without a compiler", ["actor_train.model_args.torch_compile=true"], Machine(compiler=False),
     "actor_train.model_args.torch_compile", ["a C++ compiler"]),
    ("Megatron that isn't installed", megatron(), Machine(packages=frozenset()), f"{ACTOR}.strategy_name",
     ["megatron-core is not installed: pip install -e '.[megatron]'"]),
    ("fused layers that aren't installed", megatron(transformer_impl="transformer_engine"),
     replace(H200, packages=frozenset({"megatron.core"})), f"{OPTIONS}.transformer_impl",
     ["transformer-engine is not installed"]),
    ("fused layers on a CPU", megatron(transformer_impl="transformer_engine"), NO_GPU, f"{OPTIONS}.transformer_impl",
     ["this machine has none"]),
    ("grouped kernels on a CPU", megatron(1, "experts", moe_grouped_gemm=True), NO_GPU, f"{OPTIONS}.moe_grouped_gemm",
     ["this machine has none"]),
    ("quantised exchange on a CPU",
     [f"{ACTOR}={{strategy_name: deepspeed_train, strategy_config: "
      "{zero_optimization: {stage: 3, zero_quantized_gradients: true}}}"], NO_GPU,
     f"{OPTIONS}.zero_optimization.zero_quantized_gradients", ["this machine has none"]),
    ("optimizer states off a device that isn't there", megatron(optimizer_cpu_offload=True), NO_GPU,
     f"{OPTIONS}.optimizer_cpu_offload", ["this machine has none"]),
    ("fused loss kernels that aren't installed", ["actor_train.model_args.use_liger=true"],
     replace(H200, packages=frozenset()), "actor_train.model_args.use_liger", ["pip install -e '.[liger]'"]),
    ("flash attention on a CPU",
     ["actor_train.model_args.attn_implementation=fa2", "actor_train.model_args.dtype=bf16"], NO_GPU,
     "actor_train.model_args.attn_implementation", ["this machine has none"]),
    ("bf16 on an accelerator without it", ["actor_train.model_args.dtype=bf16"],
     Machine(accelerators=("Tesla V100-SXM2-16GB",)), "actor_train.model_args.dtype",
     ["Tesla V100-SXM2-16GB computes in", "dtype=fp32"]),
    ("more slots than accelerators", ["executor=ray", "num_gpus_per_node=9"], H200, "num_gpus_per_node", ["at most 8"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "machine", "path", "fragments"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN]
)
def test_a_layout_that_cannot_be_gives_one_clear_error(jobs, overrides, machine, path, fragments):
    check_refused_here(jobs, overrides, path, fragments, machine)


SOUND = {
    "the first so many layers recomputed": megatron(
        recompute_granularity="full", recompute_method="block", recompute_num_layers=4),
    "all of Megatron's sizes": megatron(8, "dense", tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
                                        context_parallel_size=2, sequence_parallel=True),
    "ranks beyond the key-value heads": megatron(8, tensor_model_parallel_size=8),
    "stages of different lengths": megatron(4, pipeline_model_parallel_size=4,
     additional_configs={"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    "virtual stages": megatron(2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3),
    "experts": megatron(4, "experts", tensor_model_parallel_size=2, sequence_parallel=True,
                        expert_model_parallel_size=2, expert_tensor_parallel_size=1),
    "experts recomputed alone": [*megatron(1, "experts", moe_layer_recompute=True),
     "actor_train.model_args.disable_gradient_checkpointing=true"],
    "Ulysses beyond the key-value heads": [*ray(8), "pretrain=dense", f"{ULYSSES}=8"],
    "a ring of more ranks than heads": [*ray(16), "pretrain=dense", f"{RING}=16"],
    "Ulysses in DeepSpeed": [*ray(4), "pretrain=dense", f"{ACTOR}.strategy_name=deepspeed_train", f"{ULYSSES}=2"],
    "a backend for each role": [*megatron(2), "adv_estimator=gae", "use_kl_loss=true",
     "critic={strategy_args: {strategy_name: deepspeed_train}}", "reference={}"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", SOUND.values(), ids=SOUND)
def test_a_layout_that_can_be_passes(jobs, overrides):
    check_prerequisites(load_config(jobs, "job", overrides), NO_GPU)


def actor_with(options: MegatronConfig | Fsdp2Config, ranks: int, ulysses: int = 1) -> RLVRConfig:
    name = "megatron_train" if isinstance(options, MegatronConfig) else "fsdp2_train"
    actor = ActorTrainConfig(
        world_size=ranks,
        model_args=ModelArgs(ulysses_size=ulysses),
        strategy_args=StrategyArgs(strategy_name=name, strategy_config=options),
        training_args=TrainingArgs(per_device_train_batch_size=4, gradient_accumulation_steps=3),
    )
    rewards = {"math": RewardConfig(name="math_rule")}
    return RLVRConfig(
        pipeline="rlvr", pretrain="p", rewards=rewards, actor_train=actor, rollout_batch_size=12,
        num_return_sequences_in_group=4,
    )  # fmt: skip


DIVISIONS = [
    # per device 4 x accumulation 3 = 12 responses a data-parallel rank
    (actor_with(MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 8), 24,
     "8 ranks / (tp 2 x pp 2 x cp 1) = 2 data-parallel"),
    (actor_with(MegatronConfig(context_parallel_size=2), 8), 48, "8 ranks / (tp 1 x pp 1 x cp 2) = 4 data-parallel"),
    (actor_with(Fsdp2Config(), 4, ulysses=2), 24, "4 ranks / (ulysses 2) = 2 data-parallel"),
    (actor_with(Fsdp2Config(), 4), 48, ""),
]  # fmt: skip


@pytest.mark.parametrize(("config", "mini_batch", "division"), DIVISIONS)
def test_the_plan_divides_ranks_by_those_that_share_a_model(config, mini_batch, division):
    batch = config.batch.of("actor_train")
    assert (batch.mini_batch, batch.division) == (mini_batch, division)
    shown = config.batch.explain()
    assert f"x {mini_batch // 12} data-parallel rank(s) = {mini_batch} responses" in shown
    assert (" ranks / (" in shown) == bool(division)


def test_a_models_shape_is_read_from_its_folder(jobs):
    assert read_shape("dense", {}) == ModelShape(
        model_type="llama", heads=8, kv_heads=4, layers=6, hidden=64, intermediate=96, vocab=100, positions=64
    )
    moe = read_shape("experts", {"num_attention_heads": 2, "num_key_value_heads": None})
    assert moe is not None
    assert (moe.experts, moe.intermediate, moe.heads, moe.kv_heads) == (6, 36, 2, 2)
    (jobs / "dense" / "config.json").write_text(json.dumps({"text_config": dense(num_hidden_layers=9), "x": 1}))
    nested = read_shape("dense", {})
    assert nested is not None
    assert nested.layers == 9
    (jobs / "dense" / "config.json").write_text("{")
    assert read_shape("dense", {}) is None
    assert read_shape("nowhere/at/all", {}) is None


def test_a_models_shape_is_read_from_the_hubs_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_shape("org/name", {}) is None
    folder = tmp_path / "models--org--name"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(MODELS["dense"]))
    shape = read_shape("org/name", {})
    assert shape is not None
    assert shape.heads == 8


@pytest.mark.parametrize(
    ("name", "has_bf16"),
    [("Tesla T4", False), ("NVIDIA GeForce RTX 2080 Ti", False), ("Quadro RTX 6000", False), ("NVIDIA H200", True),
     ("NVIDIA A100-SXM4-40GB", True), ("NVIDIA RTX 6000 Ada Generation", True), ("NVIDIA GeForce RTX 4090", True),
     ("NVIDIA L40S", True), ("NVIDIA RTX A6000", True), ("NVIDIA L4", True), ("", True)],
)  # fmt: skip
def test_accelerators_without_bf16_are_known_by_name(jobs, name, has_bf16):
    config = load_config(jobs, "job", ["actor_train.model_args.dtype=bf16"])
    if has_bf16:
        check_prerequisites(config, Machine(accelerators=(name,)))
    else:
        with pytest.raises(ConfigError, match="which bf16 isn't"):
            check_prerequisites(config, Machine(accelerators=(name,)))


def test_with_several_nodes_the_workers_may_have_what_this_machine_lacks(jobs):
    overrides = [*megatron(transformer_impl="transformer_engine"), "num_nodes=2"]
    check_prerequisites(load_config(jobs, "job", overrides), NO_GPU)


def test_the_machines_of_the_workers_are_checked_by_what_they_have(jobs):
    config = load_config(jobs, "job", [*megatron(transformer_impl="transformer_engine"), "num_nodes=2"])
    good, bare = Machine(accelerators=("NVIDIA H100",) * 8), replace(NO_GPU, packages=frozenset())
    check_worker_machines(config, {"10.0.0.1": good})
    with pytest.raises(ConfigError) as caught:
        check_worker_machines(config, {"10.0.0.1": good, "10.0.0.2": bare, "10.0.0.3": bare})
    said = {violation.path.rpartition(".")[2]: str(violation) for violation in caught.value.violations}
    assert "megatron-core is not installed" in said["strategy_name"]
    assert "; on 10.0.0.2, 10.0.0.3" in said["strategy_name"]
    assert "an accelerator for it" in said["transformer_impl"]


def test_this_machine_has_what_the_suite_runs_on():
    found = this_machine()
    assert {"deepspeed", "megatron.core"} <= found.packages
    assert found.compiler


def test_fields_of_megatron_that_would_not_be_right_are_refused_before_a_model_is_loaded(job):
    key = f"{ACTOR}.strategy_config.additional_configs"
    fields = {"moe_input_jitter_eps": 0.1, "attention_output_gate": True, "barrier_with_L1_time": False}
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", megatron(1, additional_configs=fields))
    assert {v.path.removeprefix(f"{key}.") for v in caught.value.violations} == set(fields)
