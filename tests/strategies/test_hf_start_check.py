"""What the start finds: models that compute other rows when they are padded, trained or sampled, in a sentence."""

from __future__ import annotations

import pytest
import torch
from tiny_models import build_tiny_model

from roll.configs.schema.worker_config import ModelArgs, TrainConfig
from roll.strategies.base import EngineSettings, Request, SamplingParams, TrainSpec
from roll.strategies.engines.hf import hf_infer
from roll.strategies.hf import hf_build, start_check
from roll.strategies.hf.hf_build import build_module
from roll.strategies.hf.recomputation import recompute_activations
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out
from roll.types.batch import TokenBatch

BART = {
    "d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64,
    "is_decoder": True, "is_encoder_decoder": False, "decoder_start_token_id": 1,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
PHI3 = {"original_max_position_embeddings": 12, "rope_parameters": LONGROPE, "sliding_window": None}
PHIMOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.2}


def folder_of(tmp_path, kind, *, wide=True, **options):
    folder = build_tiny_model(tmp_path / kind, kind, **options)
    if wide:  # far from uniform, so that differences show
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(6)
        model.save_pretrained(folder)
    return str(folder)


def trainer(folder, *, kind="policy", longest=64, trains=True, **worker):
    worker = TrainConfig(model_args=ModelArgs(model_name_or_path=folder), **worker)
    spec = TrainSpec(
        role="actor_train", kind=kind, worker=worker, seed=0, trains=trains, max_sequence_length=longest
    )  # fmt: skip
    return build_module(spec, torch.float32, torch.float32, torch.device("cpu"))[0]


def engine(folder, longest=64):
    settings = EngineSettings(max_running_requests=8, max_sequence_length=longest, seed=0)
    return hf_infer.build(ModelArgs(model_name_or_path=folder), None, settings)


def batch_of(rows):
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    acting = torch.ones(int(offsets[-1]), dtype=torch.bool)
    acting[offsets[:-1]] = False
    names = tuple(map(str, range(len(rows))))
    ids = torch.tensor([token for row in rows for token in row])
    return TokenBatch(row_ids=names, group_ids=names, offsets=offsets, token_ids=ids, action_mask=acting)


@torch.no_grad()
def scored(module, rows):
    """Log-probs of each row's tokens but the first, all rows in one micro-batch."""
    logprobs = module(lay_out(batch_of(rows), torch.device("cpu")), HeadRequest()).logprobs
    return list(logprobs.split([len(row) - 1 for row in rows]))


def sampled(engine, prompts, tokens):
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    engine.submit([Request(id=str(i), prompt_ids=p, params=params, seed=i, order=(i,)) for i, p in enumerate(prompts)])
    done = {}
    while len(done) < len(prompts):
        done.update({completion.id: completion for completion in engine.poll(100)})
    return [done[str(i)] for i in range(len(prompts))]


@pytest.mark.parametrize("kind", ["mbart", "marian", "bigbird_pegasus"])
def test_hf_infer_refuses_decoders_that_count_padding_and_names_other_engines(tmp_path, kind):
    folder = folder_of(tmp_path, kind, wide=False, **BART)
    trainer(folder)  # pads at the right, where nothing is counted
    with pytest.raises(ValueError, match="gives other log-probs for rows padded at the left than for each row alone"):
        engine(folder)


def test_a_planted_wrong_position_is_found(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, "gpt2", wide=False, n_embd=32, n_layer=2, n_head=4)
    engine(folder)

    def counts_padding(model, ids, cache):
        mask = cache.mask(extra=ids.shape[1])
        positions = torch.arange(mask.shape[1])[None, -ids.shape[1] :].expand(len(ids), -1)
        return model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache.cache).logits[:, -1]

    monkeypatch.setattr(start_check, "forward", counts_padding)
    with pytest.raises(ValueError, match="hf_infer can't run GPT2LMHeadModel, which gives other log-probs"):
        engine(folder)


def _scales_attention(model):
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling *= 1.1


def _jitters_nothing(model):
    for module in model.modules():
        if hasattr(module, "router_jitter_noise"):
            module.router_jitter_noise = 0.0


def _moves_positions(model):
    rotary = next(module for module in model.modules() if hasattr(module, "inv_freq"))
    rotary.inv_freq = rotary.inv_freq * 1.5


@pytest.mark.parametrize(
    ("family", "options", "change"),
    [("llama", {}, _scales_attention), ("llama", {}, _moves_positions), ("phimoe", PHIMOE, _jitters_nothing)],
)
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_planted_change_of_what_a_role_computes_is_found(tmp_path, monkeypatch, family, options, change, kind):
    folder = folder_of(tmp_path, family, **options)
    trainer(folder, kind=kind)

    def recompute_and_change(model, *, selective):
        recompute_activations(model, selective=selective)
        change(model)

    monkeypatch.setattr(hf_build, "recompute_activations", recompute_and_change)
    with pytest.raises(ValueError, match="actor_train: Phimoe|actor_train: Llama"):
        trainer(folder, kind=kind)


def test_a_model_with_jitter_that_acts_in_eval_mode_too_is_trained_as_it_is(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = folder_of(tmp_path, "phimoe", **PHIMOE)
    rows = [list(range(5, 35)), list(range(40, 50))]
    module = trainer(folder)
    own = AutoModelForCausalLM.from_pretrained(folder).eval()
    for row, found in zip(rows, scored(module, rows), strict=True):
        with torch.no_grad():
            table = own(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
        torch.testing.assert_close(found, table.gather(1, torch.tensor(row)[1:, None])[:, 0], atol=1e-5, rtol=0)
    completion = sampled(engine(folder), [tuple(rows[0])], 10)[0]
    again = scored(module, [[*rows[0], *completion.token_ids]])[0][len(rows[0]) - 1 :]
    assert again.tolist() == pytest.approx(list(completion.logprobs), abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "options", "builder", "message"),
    [
        ("modernbert-decoder", {}, trainer, r"can't compute a few rows of tokens here \(TypeError"),
        ("llama4_text", {"intermediate_size_mlp": 32, "num_local_experts": 2}, trainer, r"\(AttributeError"),
        ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 4}, engine, "layers 0, 1 of 2 have no keys and values"),
        ("jetmoe", {}, trainer, "write model_args.disable_gradient_checkpointing: true"),
    ],
)  # fmt: skip
def test_models_that_lack_what_a_role_needs_are_refused_in_a_sentence(tmp_path, kind, options, builder, message):
    with pytest.raises(ValueError, match=message):
        builder(folder_of(tmp_path, kind, wide=False, **options))


# Rows of these pass 12 tokens, where the factors change.
LONG_ROWS = [list(range(5, 27)), list(range(40, 48)), list(range(60, 75))]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("phi3", PHI3),
        ("llama", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 12}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}),
    ],
)
def test_rows_beyond_the_original_length_are_sampled_and_trained_alike_whatever_is_beside_them(tmp_path, kind, options):
    folder = folder_of(tmp_path, kind, **options)
    module = trainer(folder)
    together = scored(module, LONG_ROWS)
    for row, beside in zip(LONG_ROWS, together, strict=True):
        torch.testing.assert_close(beside, scored(module, [row])[0], atol=1e-5, rtol=0)
    # Of prompts of 6 and 3 tokens, responses that pass the original length.
    prompts = [tuple(range(5, 11)), (7, 8, 9)]
    completions = sampled(engine(folder), prompts, 20)
    for prompt, completion in zip(prompts, completions, strict=True):
        again = scored(module, [[*prompt, *completion.token_ids]])[0][len(prompt) - 1 :]
        assert again.tolist() == pytest.approx(list(completion.logprobs), abs=1e-5)


@pytest.mark.parametrize("longest", [12, 64])
def test_the_factors_are_those_of_the_longest_row_that_the_run_may_have(tmp_path, longest):
    from transformers import AutoModelForCausalLM

    folder = folder_of(tmp_path, "phi3", **PHI3)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    row = list(range(5, 17))
    long = [*row, *range(20, 20 + longest - 12)]
    with torch.no_grad():  # the whole call is computed with the factors of its longest row
        table = model(torch.tensor([long])).logits[0, :11].log_softmax(-1)
    expected = table.gather(1, torch.tensor(row)[1:, None])[:, 0]
    torch.testing.assert_close(scored(trainer(folder, longest=longest), [row])[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("scale", [1.3, 1.1])  # rows differ by their scale only, or by nothing at all
def test_a_rotation_that_cannot_be_fixed_is_refused_with_the_length_that_can_be_trained(tmp_path, scale):
    rope = {**LONGROPE, "original_max_position_embeddings": 12, "short_mscale": 1.1, "long_mscale": scale}
    folder = folder_of(tmp_path, "phimoe", **PHIMOE, rope_parameters=rope, original_max_position_embeddings=12)
    trainer(folder, longest=12)
    for build in (trainer, engine):
        with pytest.raises(ValueError, match=r"rope type longrope\).* write sequence_length: 12"):
            build(folder, longest=13)
