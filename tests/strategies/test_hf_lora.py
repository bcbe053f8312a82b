"""Low-rank adapters: a plain peft loop's numbers on any layout, merged weights, folders, checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import json

import pytest
import torch
from layout_contract import Run, by_hand, differences, each, layout_spec, play, put_together
from torch.distributed.checkpoint import FileSystemReader
from train_contract import LOSS, VALUE_LOSS, build, make_batch, make_spec, trained, weights_of

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.hf.adapter_config import adapter_config
from roll.strategies.hf.lora import largest_rank
from roll.utils.seeding import stable_hash

LAYOUTS = {
    "one rank": ("fsdp2_train", 1, {}),
    "FSDP2 sharded": ("fsdp2_train", 2, {}),
    "FSDP2 replicated": ("fsdp2_train", 2, {"fsdp_size": 1}),
    "ZeRO 0": ("deepspeed_train", 2, {}),
    "ZeRO 1": ("deepspeed_train", 2, {"zero_optimization": {"stage": 1}}),
    "ZeRO 2": ("deepspeed_train", 2, {"zero_optimization": {"stage": 2}}),
    "ZeRO 3 alone": ("deepspeed_train", 1, {"zero_optimization": {"stage": 3}}),
    "ZeRO 3": ("deepspeed_train", 2, {"zero_optimization": {"stage": 3}}),
}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}


def lora_spec(path, **changes):
    changes["model"] = {**LORA, **changes.get("model", {})}
    return make_spec(path, **changes)


def logprobs(strategy, **options):
    return strategy.forward(make_batch(), ("logprobs",), **options).logprobs


def adapters_of(strategy):
    named = strategy._model.named_parameters()
    return {name: p.detach().clone() for name, p in named if p.requires_grad}


# --- the numbers ------------------------------------------------------------------------------------------------------


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


@functools.cache
def plain_peft_run(path, targets) -> Run:
    """peft, torch and transformers alone, but for the seed of the adapters; `targets`: a word of peft's, or names."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    names = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=names, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(stable_hash(1, "lora", "actor_train", bits=56))
        model = get_peft_model(model, config)
    run = by_hand(model)
    merged = model.merge_and_unload()
    return dataclasses.replace(run, weights={name: p.detach().clone() for name, p in merged.named_parameters()})


# What peft calls all-linear adapts fused experts too, whose product has three dimensions.
TARGETS = {"llama": "all-linear", "qwen2": "all-linear", "qwen3_moe": ATTENTION}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("strategy", ["fsdp2_train", "deepspeed_train"])
def test_every_layout_gives_the_numbers_of_a_plain_peft_loop(ranks, model_of, strategy, world):
    layouts = {name: options for name, (*place, options) in LAYOUTS.items() if place == [strategy, world]}
    cases = [(name, family) for name in layouts for family in TARGETS]
    specs = [layout_spec(model_of(family), strategy, layouts[name], model=LORA) for name, family in cases]
    for (name, family), *answers in zip(cases, *ranks.run(each, world, play, specs), strict=True):
        found = differences(put_together(answers), plain_peft_run(model_of(family), TARGETS[family]))
        assert max(found.values()) < 1e-4, (name, family, found)


def test_the_merged_weight_by_hand(model_of):
    strategy = build(lora_spec(model_of()))
    before = weights_of(strategy)
    name = "model.layers.1.self_attn.q_proj"
    layer = strategy._model.lm.get_submodule(name)
    with torch.no_grad():
        layer.lora_A["default"].weight.zero_()[0, 1] = 3.0
        layer.lora_B["default"].weight[2, 0] = 5.0
    # alpha / rank = 8 / 4 = 2, and (B A)[2, 1] = 5 * 3: one entry grows by 30, nothing else moves.
    expected = before[f"{name}.weight"].clone()
    expected[2, 1] += 30.0
    after = weights_of(strategy)
    assert torch.equal(after[f"{name}.weight"], expected)
    assert [key for key in after if not torch.equal(after[key], before[key])] == [f"{name}.weight"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_it_starts_as_the_base_model_and_sends_its_names(model_of, family):
    plain, strategy = build(make_spec(model_of(family))), build(lora_spec(model_of(family)))
    expected, weights = weights_of(plain), weights_of(strategy)
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert torch.equal(logprobs(strategy), logprobs(plain))


def parts(info, spec, batch):
    """What a rank sends of each part after two steps."""
    strategy = build(spec, info)
    for _ in range(2):
        strategy.train_step(batch, LOSS)
    return [{n: t.detach().clone() for n, t in strategy.named_weights(part)} for part in ("merged", "base", "adapters")]


@pytest.mark.parametrize("layout", ["one rank", "FSDP2 sharded", "ZeRO 2", "ZeRO 3"])
def test_base_and_adapters_are_sent_apart_under_the_names_of_transformers_and_peft(ranks, model_of, layout):
    strategy, world, options = LAYOUTS[layout]
    spec = layout_spec(model_of("qwen2"), strategy, options, model=LORA)
    start = weights_of(build(make_spec(model_of("qwen2"))))
    merged, base, adapters = ranks.run(parts, world, spec, make_batch())[0]
    assert all(torch.equal(base[name], start[name]) for name in start) and base.keys() == start.keys()
    layers = [name.removesuffix(".weight") for name in start if name.endswith("_proj.weight")]
    prefix = "base_model.model."
    assert list(adapters) == [f"{prefix}{layer}.lora_{half}.weight" for layer in layers for half in "AB"]
    moved = 0.0
    for layer in layers:
        change = merged[f"{layer}.weight"] - base[f"{layer}.weight"]
        product = adapters[f"{prefix}{layer}.lora_B.weight"] @ adapters[f"{prefix}{layer}.lora_A.weight"]
        torch.testing.assert_close(change, product, atol=1e-6, rtol=1e-4)
        moved = max(moved, product.abs().max().item())
    assert moved > 1e-4


def test_the_largest_rank_of_saved_adapters_is_read_from_their_folder(tmp_path):
    config = {"r": 4, "rank_pattern": {"q_proj": 16}}
    for patterns, largest in (({"q_proj": 16}, 16), ({"q_proj": 2}, 4), (None, 4)):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "rank_pattern": patterns}))
        assert largest_rank(ModelArgs(adapter_name_or_path=str(tmp_path))) == largest
    assert largest_rank(ModelArgs(lora_rank=8)) == 8
    assert largest_rank(ModelArgs()) == 0


def test_only_adapters_train_and_only_adapted_layers_change(model_of):
    spec = lora_spec(model_of("qwen2"), model={"lora_target": ("q_proj", "layers.1.mlp.up_proj")})
    start = weights_of(build(spec))
    end = trained(spec, make_batch())[1]
    changed = {name.removeprefix("model.").removesuffix(".weight") for name in end if not start[name].equal(end[name])}
    assert changed == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.mlp.up_proj"}


# --- the start --------------------------------------------------------------------------------------------------------


def test_new_adapters_come_from_the_seed_and_leave_the_global_generator_alone(model_of):
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    one = adapters_of(build(lora_spec(model_of())))
    assert torch.rand(1) == expected
    again = adapters_of(build(lora_spec(model_of())))
    other = adapters_of(build(dataclasses.replace(lora_spec(model_of()), seed=2)))
    drawn = [name for name in one if ".lora_A." in name]
    assert len(drawn) == 14
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)


@pytest.mark.parametrize("target", ["qproj", "lm_head", "embed_tokens", "mlp"])
def test_a_target_that_is_no_linear_layer_is_refused_with_the_names_there_are(model_of, target):
    with pytest.raises(ValueError, match=f"no linear layer '{target}'.* all-linear or some of q_proj, k_proj, v_proj"):
        build(lora_spec(model_of(), model={"lora_target": (target,)}))


def test_fused_experts_are_left_alone_and_asking_for_them_says_why(model_of):
    strategy = build(lora_spec(model_of("qwen3_moe")))
    assert {name.split(".")[-4] for name in adapters_of(strategy)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    with pytest.raises(ValueError, match="fused experts are one 3-D parameter"):
        build(lora_spec(model_of("qwen3_moe"), model={"lora_target": ("gate_up_proj",)}))


def test_the_frozen_base_is_kept_in_the_type_of_the_forward_pass_and_adapters_in_float32(ranks, model_of):
    spec = lora_spec(model_of(), model={"dtype": "bf16"}, training={"learning_rate": 1e-3, "weight_decay": 0.1})
    types = {(p.requires_grad, p.dtype) for p in build(spec)._model.parameters()}
    assert types == {(True, torch.float32), (False, torch.bfloat16)}
    norms, weights = ranks.run(_train_some, 1, spec)[0]
    for layout in ("FSDP2 sharded", "ZeRO 1", "ZeRO 3"):
        strategy, world, options = LAYOUTS[layout]
        spec = layout_spec(model_of(), strategy, options, model={**LORA, "dtype": "bf16"})
        spec = dataclasses.replace(spec, max_grad_norm=1.0)
        norms_there, weights_there = ranks.run(_train_some, world, spec)[0]
        assert norms == pytest.approx(norms_there, rel=0.02), layout
        for name, weight in weights.items():
            assert torch.allclose(weight.float(), weights_there[name].float(), atol=4e-3), (layout, name)


def _train_some(info, spec):
    strategy, batch = build(spec, info), make_batch()
    mine = batch.select(list(range(len(batch)))[info.rank :: info.world_size])
    strategy.forward(mine, ("logprobs",), adapters=False)
    norms = [strategy.train_step(mine, LOSS).result().get("actor/grad_norm") for _ in range(2)]
    return norms, weights_of(strategy)


# --- the base model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_adapters_off_it_is_the_base_model(ranks, model_of, layout):
    strategy, world, options = LAYOUTS[layout]
    expected = logprobs(build(make_spec(model_of())))
    spec = layout_spec(model_of(), strategy, options, model=LORA, training={"learning_rate": 1e-2})
    for off, on, again in ranks.run(_off_and_on, world, spec):
        assert torch.allclose(off, expected, atol=1e-6)
        assert (on - expected).abs().max() > 0.01
        assert torch.equal(again, off)


def _off_and_on(info, spec):
    strategy = build(spec, info)
    off = logprobs(strategy, adapters=False)  # first of all: what a backend notes then must not be that they are frozen
    strategy.train_step(make_batch(), LOSS)
    return off, logprobs(strategy), logprobs(strategy, adapters=False)


def test_leaving_out_adapters_that_are_not_there_is_a_mistake(model_of):
    with pytest.raises(AssertionError, match="no adapters"):
        logprobs(build(make_spec(model_of())), adapters=False)


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False])
def test_dropout_acts_in_the_update_alone_and_repeats_itself(model_of, recompute):
    def after(rate, **changes):
        model = {"lora_dropout": rate, "disable_gradient_checkpointing": not recompute}
        return trained(lora_spec(model_of(), model=model, **changes), make_batch(), steps=2)[1]

    name = "model.layers.0.self_attn.v_proj.weight"
    torch.manual_seed(1)
    once = after(0.5)[name]
    torch.manual_seed(2)
    assert torch.equal(once, after(0.5)[name])
    assert not torch.equal(once, after(0.0)[name])
    strategy = build(lora_spec(model_of(), model={"lora_dropout": 0.5}))
    strategy.train_step(make_batch(), LOSS)
    assert torch.equal(logprobs(strategy), logprobs(strategy))


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(model_of, tmp_path_factory):
    """(trained strategy, its exported folder)."""
    strategy = build(lora_spec(model_of()))
    for _ in range(3):
        strategy.train_step(make_batch(), LOSS)
    folder = tmp_path_factory.mktemp("exported") / "hf"
    strategy.export(folder)
    return strategy, folder


def test_an_export_is_a_plain_model_with_the_merged_weights(exported):
    strategy, folder = exported
    assert torch.allclose(logprobs(build(make_spec(folder))), logprobs(strategy), atol=1e-5)
    assert "peft" not in (folder / "config.json").read_text()


def test_peft_loads_the_adapter_folder_onto_the_base_model(exported, model_of):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    strategy, folder = exported
    base = AutoModelForCausalLM.from_pretrained(model_of(), dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder / "adapter"))
    run = by_hand_logprobs(model)
    assert torch.allclose(run, logprobs(strategy), atol=1e-5)


def by_hand_logprobs(model):
    batch, found = make_batch(), []
    for i in range(len(batch)):
        ids = batch.row("token_ids", i)
        with torch.no_grad():
            table = model(ids[None]).logits[0].log_softmax(-1)[:-1]
        scored = torch.cat([torch.zeros(1), table.gather(-1, ids[1:, None])[:, 0]])
        found.append(scored * batch.row("action_mask", i))
    return torch.cat(found)


def test_a_sharded_export_is_the_same_as_that_of_one_rank(ranks, exported, model_of, tmp_path):
    from safetensors.torch import load_file

    for layout in ("FSDP2 sharded", "ZeRO 3"):
        strategy, world, options = LAYOUTS[layout]
        spec = layout_spec(model_of(), strategy, options, model={"adapter_name_or_path": str(exported[1] / "adapter")})
        ranks.run(_export, world, spec, tmp_path / layout)
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            mine, theirs = load_file(tmp_path / layout / file), load_file(exported[1] / file)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        config = "adapter/adapter_config.json"
        assert json.loads((tmp_path / layout / config).read_text()) == json.loads((exported[1] / config).read_text())


def _export(info, spec, folder):
    build(spec, info).export(folder)


def test_training_goes_on_from_an_adapter_folder_whose_own_sizes_count(exported, model_of):
    strategy, folder = exported
    again = build(make_spec(model_of(), model={"adapter_name_or_path": str(folder / "adapter")}))
    mine, theirs = adapters_of(again), adapters_of(strategy)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert torch.equal(logprobs(again), logprobs(strategy))
    again.train_step(make_batch(), LOSS)
    assert not torch.equal(logprobs(again), logprobs(strategy))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lora_rank": 8}, "lora_rank: 8, but the adapters in .* have 4"),
        ({"lora_alpha": 16.0}, "lora_alpha: 16, but the adapters in .* have 8"),
        ({"lora_target": ("q_proj",)}, "lora_target: .* adapts other layers, q_proj, k_proj"),
    ],
)
def test_keys_that_contradict_the_adapter_folder_are_refused(exported, model_of, keys, message):
    model = {"adapter_name_or_path": str(exported[1] / "adapter"), **keys}
    with pytest.raises(ValueError, match=message):
        build(make_spec(model_of(), model=model))


@pytest.mark.parametrize("other", [{"seed": 5}, {"hidden": 48}, {"layers": 1}, {"family": "qwen3_moe"}])
def test_adapters_of_another_base_model_are_refused(exported, model_of, other):
    folder = exported[1] / "adapter"
    with pytest.raises(ValueError, match="another base model|doesn't fit"):
        build(make_spec(model_of(**other), model={"adapter_name_or_path": str(folder)}))


def test_a_folder_that_peft_itself_wrote_is_loaded_and_checked_by_shapes(model_of, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_of(), dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    strategy = build(make_spec(model_of(), model={"adapter_name_or_path": str(tmp_path)}))
    assert torch.allclose(logprobs(strategy), by_hand_logprobs(model), atol=1e-5)
    with pytest.raises(ValueError, match="belong to another base model"):
        build(make_spec(model_of(hidden=48), model={"adapter_name_or_path": str(tmp_path)}))


FORMS = {
    "an expression": {"target_modules": r".*\.(q_proj|v_proj)"},
    "a list": {"target_modules": ["v_proj", "layers.1.mlp.up_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "peft's own choice": {"target_modules": None},
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
    "one layer, its list by name": {"target_modules": ["q_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
    "one layer, lists by name": {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": ["layers"]},
    "all but an expression": {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"},
    "all but a list": {"target_modules": r".*_proj", "exclude_modules": ["o_proj", "layers.0.mlp.up_proj"]},
    "ranks and alphas": {
        "target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 3},
        "alpha_pattern": {r"layers\.1\.self_attn\..*": 5, "^model.layers.0.self_attn.q_proj": 7},
    },
    "rank-stabilised": {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {"q_proj": 4}},
    "parameters": {
        "target_modules": [], "target_parameters": ["q_proj.weight", "model.layers.0.mlp.up_proj.weight"],
        "rank_pattern": {"up_proj.weight": 1},
    },
    "modules and parameters": {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "names of classes": {"target_modules": ["q_proj"], "auto_mapping": {"base_model_class": "X"}},
    "dropout": {"target_modules": ["q_proj"], "lora_dropout": 0.3},
}  # fmt: skip
"""Whatever a peft configuration may hold that is plain LoRA of linear layers: text, list, number, table or null."""


@pytest.mark.parametrize("form", FORMS)
def test_a_configuration_of_peft_comes_out_as_it_went_in_and_goes_on(model_of, tmp_path, form):
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    def base():
        return AutoModelForCausalLM.from_pretrained(model_of(), dtype=torch.float32)

    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    options = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM", **FORMS[form]}
    model = get_peft_model(base(), LoraConfig(**options)).eval()
    with torch.no_grad():
        for i, parameter in enumerate(p for n, p in model.named_parameters() if "lora_" in n):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    model.save_pretrained(theirs)
    LoraConfig(**options).save_pretrained(str(theirs))  # before peft has changed anything of it
    strategy = build(make_spec(model_of(), model={"adapter_name_or_path": str(theirs)}))
    assert torch.allclose(logprobs(strategy), by_hand_logprobs(model), atol=1e-5)
    strategy.train_step(make_batch(), LOSS)
    strategy.export(ours)
    before, after = (json.loads((f / "adapter_config.json").read_text()) for f in (theirs, ours / "adapter"))
    own = {"base_model_name_or_path": str(model_of()), "inference_mode": True, "lora_dropout": 0.0}
    assert after == {**before, **own}
    loaded = PeftModel.from_pretrained(base(), str(ours / "adapter"))
    assert torch.allclose(by_hand_logprobs(loaded), logprobs(strategy), atol=1e-5)
    again = build(make_spec(model_of(), model={"adapter_name_or_path": str(ours / "adapter")}))
    assert torch.equal(logprobs(again), logprobs(strategy))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("targets", [(), ("q_b_proj", "q_proj", "gate_proj"), ("layers.0.mlp.down_proj",)])
def test_dense_layers_and_shared_experts_get_adapters_that_peft_loads(model_of, tmp_path, family, targets):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    names = [name for name in targets if name != ("q_proj" if family == "deepseek_v3" else "q_b_proj")]
    strategy = build(lora_spec(model_of(family), model={"lora_target": tuple(names)}))
    adapted = {name.split(".lora_")[0].removeprefix("lm.model.") for name in adapters_of(strategy)}
    dense, shared = "layers.0.mlp.{}_proj", "layers.1.mlp.shared_experts.{}_proj"
    if not targets:
        assert {form.format(part) for form in (dense, shared) for part in ("gate", "up", "down")} < adapted
        assert not any(".experts." in name for name in adapted)
    elif len(targets) == 3:
        assert {name for name in adapted if "mlp" in name} == {dense.format("gate"), shared.format("gate")}
    else:
        assert adapted == {dense.format("down")}
    strategy.train_step(make_batch(), LOSS)
    strategy.export(tmp_path)
    assert torch.allclose(logprobs(build(make_spec(tmp_path))), logprobs(strategy), atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(model_of(family), dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    assert torch.allclose(by_hand_logprobs(loaded), logprobs(strategy), atol=1e-5)
    again = build(make_spec(model_of(family), model={"adapter_name_or_path": str(tmp_path / "adapter")}))
    assert torch.equal(logprobs(again), logprobs(strategy))


def test_a_model_without_linear_layers_is_refused_under_the_key_that_was_written(tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=128)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=r"lora_rank: GPT2LMHeadModel has no linear layers .*Conv1D.* without lora_ra"):
        adapter_config(model, ModelArgs(lora_rank=4))


MERGE = "merge it into its base model with peft .merge_and_unload"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": "all"}, f"uses bias: all; only plain LoRA.*{MERGE}"),
        ({"modules_to_save": ["lm_head"]}, f"uses modules_to_save .whole modules.*{MERGE}"),
        ({"use_dora": True}, f"uses use_dora .DoRA, whose magnitudes.*{MERGE}"),
        ({"lora_bias": True}, "uses lora_bias .biases beside matrix B.* else peft can't merge it either"),
        ({"trainable_token_indices": [1]}, f"uses trainable_token_indices.*{MERGE}"),
        ({"alora_invocation_tokens": [1]}, "after certain tokens only.*: peft can't merge it either"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "copies of layers"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: pissa.*path_initial_model_for_weight_conversion"),
        ({"target_modules": ["embed_tokens"]}, "adapts model.embed_tokens .Embedding., which is no linear layer"),
        ({"target_modules": ["lm_head"]}, "adapts lm_head .Linear., which is no linear layer below the head"),
        ({"target_modules": ".*self_attn"}, "adapts model.layers.0.self_attn .LlamaAttention."),
        ({"target_modules": "*.q_proj"}, "has a pattern that is no regular expression: nothing to repeat"),
        ({"target_modules": ["c_attn"]}, "none of its layers is what target_modules means, {'c_attn'}"),
    ],
)
def test_adapters_that_are_more_than_lora_of_linear_layers_are_refused_with_a_way_on(
    model_of, tmp_path, options, message
):
    from peft import LoraConfig

    options = {"r": 2, "target_modules": ["v_proj"], "task_type": "CAUSAL_LM", **options}
    LoraConfig(**options).save_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match=f"adapter_name_or_path: .*{message}"):
        build(make_spec(model_of(), model={"adapter_name_or_path": str(tmp_path)}))


def test_embeddings_saved_beside_adapters_are_refused_with_a_way_on_that_works(model_of, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_of(), dtype=torch.float32),
        LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False),
    ).eval()
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    with pytest.raises(ValueError, match=r"holds \d tensors besides the factors.*lm_head.weight.*merge_and_unload"):
        build(make_spec(model_of(), model={"adapter_name_or_path": str(tmp_path / "adapter")}))
    expected = by_hand_logprobs(model)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(model_of()).save_pretrained(tmp_path / "merged")
    assert torch.allclose(logprobs(build(lora_spec(tmp_path / "merged"))), expected, atol=1e-5)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_goes_on_bit_for_bit(ranks, model_of, tmp_path, layout):
    strategy, world, options = LAYOUTS[layout]
    model, training = {**LORA, "lora_dropout": 0.1}, {"lr_scheduler_type": "cosine"}
    spec = layout_spec(model_of("qwen2"), strategy, options, model=model, training=training)
    whole = ranks.run(_save_and_go_on, world, spec, tmp_path / "state")
    resumed = ranks.run(_load_and_go_on, world, spec, tmp_path / "state")
    for (metrics, weights), (metrics_again, weights_again) in zip(whole, resumed, strict=True):
        assert metrics == metrics_again
        assert all(torch.equal(weights[name], weights_again[name]) for name in weights)


def test_a_checkpoint_holds_adapters_alone(saved):
    written = FileSystemReader(saved[1] / "state").read_metadata().state_dict_metadata
    names = {name for name in written if name.startswith("model.")}
    assert len(names) == 28 and all(".lora_" in name for name in names)


def _go_on(strategy, info):
    batch = make_batch()
    mine = batch.select(list(range(len(batch)))[info.rank :: info.world_size])
    return [strategy.train_step(mine, LOSS).result() for _ in range(2)], weights_of(strategy)


def _save_and_go_on(info, spec, folder):
    strategy = build(spec, info)
    _go_on(strategy, info)
    strategy.save(folder)
    return _go_on(strategy, info)


def _load_and_go_on(info, spec, folder):
    strategy = build(spec, info)
    strategy.load(folder)
    return _go_on(strategy, info)


@pytest.fixture(scope="module")
def saved(model_of, tmp_path_factory):
    """(strategy after a step, its checkpoint)."""
    strategy = build(lora_spec(model_of()))
    strategy.train_step(make_batch(), LOSS)
    folder = tmp_path_factory.mktemp("saved") / "state"
    strategy.save(folder)
    return strategy, folder


def test_the_form_that_does_not_train_reads_the_adapters(saved, model_of):
    strategy, folder = saved
    frozen = build(lora_spec(model_of(), trains=False))
    frozen.load(folder)
    logprobs(frozen, adapters=False)  # peft thaws adapters when it switches them on again
    assert not any(parameter.requires_grad for parameter in frozen._model.lm.parameters())
    assert torch.equal(logprobs(frozen), logprobs(strategy))


@pytest.mark.parametrize(
    ("base", "model", "message"),
    [
        ({"seed": 5}, {}, "holds adapters of another base model"),
        ({}, {"lora_alpha": 4.0}, "rank 4 and alpha 8 on 14 layers .*; the configuration asks for rank 4 and alpha 4"),
        ({}, {"lora_rank": 2}, "rank 4 and alpha 8.* asks for rank 2 and alpha 8"),
        ({}, {"lora_target": ("q_proj",)}, r"on 14 layers.* asks for .* on 2 layers \(q_proj\)"),
        ({}, {"lora_rank": 0, "lora_alpha": None}, "doesn't fit the model of actor_train"),
    ],
)
def test_a_checkpoint_of_other_adapters_or_another_base_is_refused(saved, model_of, base, model, message):
    with pytest.raises(ValueError, match=message):
        build(lora_spec(model_of(**base), model=model)).load(saved[1])


def test_a_checkpoint_without_lora_is_refused(model_of, tmp_path):
    build(make_spec(model_of())).save(tmp_path)
    with pytest.raises(ValueError, match="saved without LoRA"):
        build(lora_spec(model_of())).load(tmp_path)


def test_the_same_base_in_another_folder_and_type_is_the_same_base(saved, model_of, tmp_path):
    import shutil

    moved = shutil.copytree(model_of(), tmp_path / "moved")
    build(lora_spec(moved, model={"dtype": "bf16"})).load(saved[1])
    assert json.loads((saved[1] / "adapters.json").read_text())["base_model"] == str(model_of())


# --- the critic, and l2 -----------------------------------------------------------------------------------------------


def test_a_critic_trains_its_head_and_its_adapters(ranks, model_of, tmp_path):
    spec = lora_spec(model_of(), kind="value")
    strategy = build(spec)
    start = dict(strategy._model.named_parameters())
    start = {name: p.detach().clone() for name, p in start.items()}
    for _ in range(3):  # the head is zero at first: adapters get a gradient from the second step on
        strategy.train_step(make_batch(), VALUE_LOSS)
    moved = {name for name, p in strategy._model.named_parameters() if not torch.equal(p, start[name])}
    assert "value_head.weight" in moved
    assert all(".lora_" in name for name in moved - {"value_head.weight"})
    assert sum(".lora_A." in name for name in moved) == 14
    strategy.save(tmp_path)
    again = build(spec)
    again.load(tmp_path)
    batch = make_batch()
    mine, theirs = (s.forward(batch, ("values",)).values for s in (again, strategy))
    assert torch.equal(mine, theirs)
    assert mine.abs().max() > 0.01


def test_l2_pulls_towards_the_adapters_of_the_start(model_of):
    def run(l2):
        strategy = build(lora_spec(model_of(), l2=l2))
        start = adapters_of(strategy)
        for _ in range(3):
            strategy.train_step(make_batch(), LOSS)
        return sum(float((p - start[name]).square().sum()) for name, p in adapters_of(strategy).items())

    assert run(l2=10.0) < 0.5 * run(l2=0.0)
