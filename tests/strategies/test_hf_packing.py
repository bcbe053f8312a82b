"""Rows laid end to end: the numbers of padded rows and of rows by themselves, and no way from one row to another."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from layout_contract import FAMILIES, check_layout
from test_strategies_models import ARCHITECTURES, COMMON, make_model
from tiny_models import build_tiny_model
from torch import nn
from train_contract import LOSS, build, make_batch, make_spec, with_worker

from roll.strategies.attention.varlen_kernel import RowPlan
from roll.strategies.hf import hf_packing
from roll.strategies.hf.hf_model import PolicyModel
from roll.strategies.hf.hf_packing import PackedRows, pack, packed_attention
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out, plan_micro_batches

PACKED = {"use_sequence_packing": True}
DEVICE = torch.device("cpu")


# --- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_train_as_rows_by_themselves(ranks, model_of, family, recompute):
    model = {"disable_gradient_checkpointing": not recompute}
    check_layout(ranks, model_of(family, **FAMILIES[family]), "fsdp2_train", {}, 1, worker=PACKED, model=model)


def test_packed_rows_on_two_ranks_and_with_a_token_budget(ranks, model_of):
    budget = {
        "use_dynamic_batching_in_train": True,
        "max_tokens_per_microbatch_in_train": 24,
        "use_dynamic_batching_in_infer": True,
        "max_tokens_per_microbatch_in_infer": 24,
    }
    check_layout(ranks, model_of("qwen2"), "fsdp2_train", {}, 2, worker={**PACKED, **budget})


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_forward_passes_and_critics_give_the_numbers_of_padded_rows(model_of, family):
    batch = make_batch()
    for changes in ({"strategy": "fsdp2_infer", "trains": False}, {"kind": "value"}):
        spec = make_spec(model_of(family, **FAMILIES[family]), **changes)
        name = "values" if spec.kind == "value" else "logprobs"
        columns = []
        for worker in ({}, PACKED):
            strategy = build(with_worker(spec, infer_batch_size=4, **worker))
            if name == "values":
                nn.init.normal_(strategy._model.value_head.weight, generator=torch.Generator().manual_seed(1))
            columns.append(getattr(strategy.forward(batch, (name,)), name))
        torch.testing.assert_close(columns[1], columns[0], rtol=0, atol=1e-5)
        assert columns[0].abs().max() > 0.1


# --- nothing crosses -------------------------------------------------------------------------------------------------


def row_scores(strategy, batch, row):
    """(log-probs of one row, gradient of their sum for each parameter, for the embeddings of all tokens)."""
    embedded = []
    module = strategy._model.lm.get_input_embeddings()
    hook = module.register_forward_hook(lambda _m, _i, out: embedded.append(out) or out.retain_grad())
    strategy._zero_grad()
    outputs = strategy._score(batch, ("logprobs",), 1)
    hook.remove()
    mine = outputs.logprobs[batch.offsets[row] : batch.offsets[row + 1]]
    mine.sum().backward()
    gradients = {name: p.grad.clone() for name, p in strategy._model.named_parameters()}
    return mine.detach(), gradients, embedded[0].grad[0]


@pytest.mark.parametrize("recompute", [True, False], ids=["recomputed", "kept"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_row_neither_sees_nor_moves_the_rows_beside_it(model_of, family, recompute):
    path = model_of(family, **FAMILIES[family])
    spec = make_spec(path, worker=PACKED, model={"disable_gradient_checkpointing": not recompute})
    strategy, batch, row = build(spec), make_batch(), 2
    mine = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
    others = torch.ones(batch.num_tokens, dtype=torch.bool)
    others[mine] = False
    changed = batch.with_columns(token_ids=torch.where(others, batch.token_ids % 80 + 9, batch.token_ids))
    assert (changed.token_ids != batch.token_ids).equal(others)
    scores, gradients, reached = row_scores(strategy, batch, row)
    scores_beside, gradients_beside, _ = row_scores(strategy, changed, row)
    assert torch.equal(scores, scores_beside)
    assert not reached[others].any()
    assert reached[mine][:-1].abs().sum(-1).min() > 0
    for name, gradient in gradients.items():
        # Gradients of weights are sums over all tokens of the line; the others add zeros.
        torch.testing.assert_close(gradients_beside[name], gradient, rtol=0, atol=1e-6)


# --- budgets and widths ----------------------------------------------------------------------------------------------


def sizes_of_passes(strategy, run):
    """Shapes of the ids of every forward pass of `run`."""
    shapes = []
    hook = strategy._model.register_forward_pre_hook(lambda _m, args: shapes.append(tuple(args[0].ids.shape)))
    run()
    hook.remove()
    return shapes


def test_a_budget_counts_the_tokens_of_packed_rows_without_padding(model_of):
    batch = make_batch((3, 20, 4, 5, 3, 4))
    budget = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 20}
    passes = {}
    for packed in (False, True):
        strategy = build(make_spec(model_of("llama"), worker={**budget, "use_sequence_packing": packed}))
        passes[packed] = sizes_of_passes(strategy, lambda s=strategy: s.train_step(batch, LOSS))
    assert passes[True] == [(1, 20), (1, 19)]
    assert passes[False] == [(1, 20), (4, 5), (1, 3)]
    lengths, units = batch.lengths.tolist(), batch.units()
    assert len(plan_micro_batches(lengths, units, max_rows=None, max_tokens=20, packed=True)) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_widths_are_rounded_up_and_numbers_stay(model_of, packed):
    batch, results, shapes = make_batch(), [], []
    for train, infer in ((1, 1), (16, 10)):
        rounded = {"sequence_length_round_in_train": train, "sequence_length_round_in_infer": infer}
        strategy = build(make_spec(model_of("llama"), worker={**rounded, "use_sequence_packing": packed}))
        before = strategy.forward(batch, ("logprobs",)).logprobs
        shapes.append(sizes_of_passes(strategy, lambda s=strategy: s.forward(batch, ("logprobs",))))
        shapes.append(sizes_of_passes(strategy, lambda s=strategy: s.train_step(batch, LOSS)))
        results.append((before, strategy.forward(batch, ("logprobs",)).logprobs))
    as_they_are, rounded = [[width for _, width in part] for part in shapes[:2]], shapes[2:]
    for widths, multiple, found in zip(as_they_are, (10, 16), rounded, strict=True):
        assert [width for _, width in found] == [-(-width // multiple) * multiple for width in widths]
    for plain, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_rounding_past_the_learned_positions_of_a_model_is_harmless(packed):
    model = make_model("gpt2", {**ARCHITECTURES["gpt2"], "n_positions": 12})
    batch = make_batch((12, 7)).with_columns(token_ids=torch.arange(19) % 50)
    if packed:
        pack(model.get_decoder(), flash=False, sequence=None, half=False)
    policy, logprobs = PolicyModel(model, temperature=1.0), []
    for multiple in (1, 64):
        layout = lay_out(batch, DEVICE, packed=packed, multiple=multiple)
        assert layout.ids.shape[1] % multiple == 0
        with torch.no_grad():
            logprobs.append(policy(layout, HeadRequest()).logprobs)
    torch.testing.assert_close(logprobs[1], logprobs[0], rtol=0, atol=1e-5)


# --- models that can't -----------------------------------------------------------------------------------------------

REFUSED = {
    "gemma2": (ARCHITECTURES["gemma2"], r"Gemma2Model can't run .*Gemma2Attention uses softcap=50.0"),
    "gpt_oss": (ARCHITECTURES["gpt_oss"], r"GptOssModel can't run .*GptOssAttention uses s_aux="),
    "mamba": ({"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2}, "mixes tokens by other means"),
    "minimax": (
        {**COMMON, "layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4},
        "mixes tokens by other means",
    ),
    "bloom": ({"vocab_size": 60, "hidden_size": 16, "n_layer": 2, "n_head": 4}, "isn't taken from transformers'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_keep_rows_apart_are_refused_with_what_to_do(kind):
    options, message = REFUSED[kind]
    with pytest.raises(ValueError, match=f"({message}).* Write use_sequence_packing: false"):
        pack(make_model(kind, options).get_decoder(), flash=False, sequence=None, half=False)


def test_a_leak_smaller_than_rounding_in_half_precision_is_found(monkeypatch):
    monkeypatch.setattr(hf_packing, "cut_rows", lambda decoder: None)
    model = make_model("lfm2", {**COMMON, "layer_types": ["conv", "full_attention"]}).to(torch.bfloat16)
    with pytest.raises(ValueError, match="a row depends on those beside it"):
        pack(model.get_decoder(), flash=False, sequence=None, half=True)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["gpt2", "phi3", "mistral", "gemma3_text", "mixtral", "granite", "cohere"])
def test_models_of_attention_alone_are_packed(kind, half):
    model = make_model(kind, ARCHITECTURES[kind]).to(torch.bfloat16 if half else torch.float32)
    pack(model.get_decoder(), flash=False, sequence=None, half=half)


def test_a_role_on_a_model_that_cannot_be_packed_says_so_when_it_is_built(tmp_path):
    path = build_tiny_model(tmp_path, "gemma2", sliding_window=4)
    build(make_spec(path))
    with pytest.raises(ValueError, match="softcap=50.0. Write use_sequence_packing: false"):
        build(make_spec(path, worker=PACKED))


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("chunked_attention", {}, "layer_types='chunked_attention'"),
        ("sliding_attention", {}, "layer_types='sliding_attention'"),
        ("full_attention", {"is_causal": False}, "is_causal=False"),
        ("full_attention", {"dropout": 0.5}, "dropout=0.5"),
        ("full_attention", {"position_bias": torch.zeros(1)}, "position_bias=a Tensor"),
        ("full_attention", {"packed_rows": None}, "isn't told where rows end"),
    ],
)
def test_an_attention_layer_that_wants_more_is_refused(kind, options, message):
    states = torch.zeros(1, 2, 4, 3)
    layer = SimpleNamespace(config=SimpleNamespace(layer_types=[kind]), layer_idx=0)
    arguments = {"packed_rows": PackedRows(RowPlan((4,)), None), "position_ids": torch.arange(4), **options}
    with pytest.raises(ValueError, match=message):
        packed_attention(layer, states, states, states, None, **arguments)


def test_an_exported_model_knows_nothing_of_packing(model_of, tmp_path):
    from transformers import AutoModelForCausalLM

    strategy = build(make_spec(model_of("llama"), worker=PACKED))
    strategy.train_step(make_batch(), LOSS)
    strategy.export(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "roll" not in (tmp_path / "config.json").read_text()
    assert again.config._attn_implementation == "sdpa"
