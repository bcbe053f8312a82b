"""Adapters on Megatron: the numbers of a plain peft loop on any layout, weights for engines, checkpoints, refusals."""

from __future__ import annotations

import pytest
import torch
from layout_contract import CP2, PLAIN, PP2, SP, TP2, VP2, differences, layout_spec, run_layout
from safetensors.torch import load_file
from test_hf_lora import LORA, parts, plain_peft_run
from test_megatron_checkpoint import advance, check_resumed, resume, write
from train_contract import build, make_batch, weights_of

from roll.strategies.merging import Merge, merge_states
from roll.strategies.merging.torch_states import torch_names

SPLIT = {**TP2, **SP}
LAYOUTS = {
    "one rank": (1, {}),
    "data 2": (2, {}),
    "tensor 2": (2, TP2),
    "tensor 2, split activations": (2, SPLIT),
    "pipeline 2": (2, PP2),
    "interleaved": (2, VP2),
    "context 2": (2, CP2),
    "tensor 2 x data 2, whole optimizer": (4, {**TP2, **PLAIN}),
}


def megatron_lora(path, options, **changes):
    changes["model"] = {**LORA, **changes.pop("model", {})}
    return layout_spec(path, "megatron_train", options, **changes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_numbers_of_a_plain_peft_loop(ranks, model_of, layout):
    world, options = LAYOUTS[layout]
    path = model_of("qwen2", layers=4)
    run = run_layout(ranks, megatron_lora(path, options), world)
    found = differences(run, plain_peft_run(path, "all-linear"))
    assert max(found.values()) < 1e-5, found


def test_some_layers_of_a_fused_one_get_adapters_alone(ranks, model_of):
    path, targets = model_of("llama", layers=4), ("q_proj", "v_proj", "up_proj")
    run = run_layout(ranks, megatron_lora(path, SPLIT, model={"lora_target": targets}), 2)
    found = differences(run, plain_peft_run(path, targets))
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(("world", "options"), [(1, {}), (4, {**TP2, **PP2})])
def test_base_and_adapters_are_sent_apart_as_fsdp2_sends_them(ranks, model_of, world, options):
    path = model_of("qwen2", layers=4)
    sent = ranks.run(parts, world, megatron_lora(path, options), make_batch())
    expected = ranks.run(parts, 1, layout_spec(path, "fsdp2_train", {}, model=LORA), make_batch())[0]
    for rank in sent if world == 4 else sent[:1]:
        for mine, theirs in zip(rank, expected, strict=True):
            assert mine.keys() == theirs.keys()
            for name, tensor in theirs.items():
                torch.testing.assert_close(mine[name], tensor, atol=2e-5, rtol=1e-4)
    assert all(torch.equal(sent[0][1][name], tensor) for name, tensor in expected[1].items())


def off_and_on(info, spec):
    """Log-probs before any step, with adapters off after two, and with them."""
    strategy, batch = build(spec, info), make_batch()
    before = strategy.forward(batch, ("logprobs",)).logprobs
    advance(strategy, spec, 2)
    return before, *(strategy.forward(batch, ("logprobs",), adapters=on).logprobs for on in (False, True))


def test_with_adapters_off_it_is_the_base_model(ranks, model_of):
    for before, off, on in ranks.run(off_and_on, 2, megatron_lora(model_of("llama", layers=4), TP2)):
        assert torch.equal(off, before)
        assert not torch.allclose(on, before)


def export(info, spec, folder):
    strategy = build(spec, info)
    strategy.load(folder)
    strategy.export(folder / "exported")
    return weights_of(strategy)


def test_a_checkpoint_goes_on_in_another_layout_and_becomes_a_folder_of_peft(ranks, model_of, tmp_path):
    path, folder = model_of("llama", layers=4), tmp_path / "saved"
    before = ranks.run(write, 4, megatron_lora(path, TP2), folder)[0]
    same = ranks.run(resume, 4, megatron_lora(path, TP2), folder)[0]
    for mine, theirs in zip((same[0], same[2]), (before[0], before[2]), strict=True):
        assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())
    check_resumed(before, ranks.run(resume, 2, megatron_lora(path, PP2), folder)[0])
    assert all(".lora_" in name for name in torch_names(folder / "state"))
    weights = ranks.run(export, 2, megatron_lora(path, PP2), folder)[0]
    merged = load_file(folder / "exported" / "model.safetensors")
    assert all(torch.equal(merged[name], weights[name]) for name in merged)
    merge_states(folder, tmp_path / "adapters", Merge(adapters_only=True))
    found, exported = (
        load_file(place / "adapter_model.safetensors") for place in (tmp_path / "adapters", folder / "exported/adapter")
    )
    assert found.keys() == exported.keys()
    assert all(torch.equal(found[name], exported[name]) for name in found)
    merge_states(folder, tmp_path / "merged", Merge())
    whole = load_file(tmp_path / "merged" / "model.safetensors")
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=1e-5)
    assert peft_weights(path, folder / "exported/adapter").keys() >= whole.keys()
    for name, tensor in peft_weights(path, folder / "exported/adapter").items():
        torch.testing.assert_close(tensor, weights[name], atol=1e-6, rtol=1e-5)


def peft_weights(path, folder):
    """The merged weights as peft and transformers alone make them."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return dict(PeftModel.from_pretrained(base, folder).merge_and_unload().named_parameters())


def test_a_critic_resumes_with_its_head_and_its_adapters(ranks, model_of, tmp_path):
    path = model_of("llama", layers=4)
    before = ranks.run(write, 2, megatron_lora(path, TP2, kind="value"), tmp_path / "saved")[0]
    after = ranks.run(resume, 2, megatron_lora(path, PP2, kind="value"), tmp_path / "saved")[0]
    check_resumed(before, after, role="critic")


def refusal(info, spec, folder):
    """What a rank says of a model, or of a checkpoint."""
    try:
        strategy = build(spec, info)
        if folder is not None:
            strategy.load(folder)
    except ValueError as error:
        return str(error)
    return None


def test_what_has_no_place_for_adapters_is_said_on_every_rank(ranks, model_of, tmp_path):
    answers = ranks.run(refusal, 1, megatron_lora(model_of("qwen2_moe"), {}), None)
    assert all("routers get no adapters" in answer and "choose among q_proj" in answer for answer in answers)
    target = {"lora_target": ("k_proj",)}
    answers = ranks.run(
        refusal, 4, megatron_lora(model_of("llama"), {"tensor_model_parallel_size": 4}, model=target), None
    )
    assert all("use at most 2, the key heads" in answer for answer in answers)


def test_a_checkpoint_of_other_adapters_or_of_none_is_refused(ranks, model_of, tmp_path):
    path = model_of("llama", layers=4)
    ranks.run(write, 1, megatron_lora(path, {}), tmp_path / "saved")
    other = megatron_lora(path, {}, model={"lora_rank": 2})
    assert "holds adapters with rank 4" in ranks.run(refusal, 1, other, tmp_path / "saved")[0]
    ranks.run(write, 1, layout_spec(path, "megatron_train", {}), tmp_path / "whole")
    assert "was saved without LoRA" in ranks.run(refusal, 1, megatron_lora(path, {}), tmp_path / "whole")[0]
