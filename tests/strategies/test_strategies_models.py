"""Architectures other than Llama: what is sampled is what is scored, or the model is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from roll.strategies.base import Request, SamplingParams
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.hf.hf_model import PolicyModel
from roll.strategies.hf.recomputation import recompute_activations
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out
from roll.strategies.training.pretrained import context_length
from roll.types.batch import TokenBatch

COMMON = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
BART = {
    "vocab_size": 60, "d_model": 16, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 32, "max_position_embeddings": 64, "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "gpt2": GPT2,  # learned positions, names of its own
    "gpt_neox": {**COMMON, "rotary_pct": 0.5},
    "opt": {**COMMON, "ffn_dim": 32, "word_embed_proj_dim": 8},
    "phi3": {**COMMON, "sliding_window": 6},
    "mistral": {**COMMON, "sliding_window": 6, "head_dim": 8},
    "gemma2": {**COMMON, "sliding_window": 6, "head_dim": 8},  # soft-capped logits
    "gemma3_text": {**COMMON, "sliding_window": 6, "head_dim": 8, "num_hidden_layers": 6},
    "gpt_oss": {**COMMON, "sliding_window": 6, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**COMMON, **EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "granite": {**COMMON, "logits_scaling": 4.0},
    "cohere": {**COMMON, "logit_scale": 0.25},
}
PROMPTS = [tuple(range(5, 9)), tuple(range(20, 41)), (7,), tuple(range(50, 58)), tuple(range(30, 37))]


def make_model(kind, options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # far from uniform, so that a wrong temperature shows
    return model


def generated(model, **options):
    engine = HfInfer(
        model, eos_token_ids=[2], pad_token_id=0, max_context=context_length(model), max_running_requests=3, **options
    )
    engine.submit(
        [
            Request(
                id=str(i),
                prompt_ids=prompt,
                params=SamplingParams(max_new_tokens=10 + i, ignore_eos=True),
                seed=i,
                order=(i,),
            )
            for i, prompt in enumerate(PROMPTS)
        ]
    )
    done = []
    while len(done) < len(PROMPTS):
        done += engine.poll(8)
    return sorted(done, key=lambda completion: completion.id)


@torch.no_grad()
def scored(model, completions):
    """Log-probs of all responses by the trainer's way, one right-padded batch."""
    rows = [PROMPTS[int(c.id)] + c.token_ids for c in completions]
    acting = [
        [False] * (len(row) - len(c.token_ids)) + [True] * len(c.token_ids)
        for row, c in zip(rows, completions, strict=True)
    ]
    batch = TokenBatch(
        row_ids=tuple(c.id for c in completions),
        group_ids=tuple(c.id for c in completions),
        offsets=torch.tensor([0, *(len(row) for row in rows)]).cumsum(0),
        token_ids=torch.tensor([token for row in rows for token in row]),
        action_mask=torch.tensor([flag for row in acting for flag in row]),
    )
    policy = PolicyModel(model, temperature=1.0)
    policy.check()
    return policy(lay_out(batch, torch.device("cpu")), HeadRequest()).logprobs.tolist()


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_left_padded_sampling_and_right_padded_scoring_agree_with_the_model(kind):
    model = make_model(kind, ARCHITECTURES[kind])
    completions = generated(model)
    sampled = [logprob for c in completions for logprob in c.logprobs]
    assert scored(model, completions) == pytest.approx(sampled, abs=1e-5)
    longest = PROMPTS[1] + completions[1].token_ids
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([longest]), use_cache=False).logits[0]
    own = logits.log_softmax(-1)[range(20, len(longest) - 1), longest[21:]]
    assert list(completions[1].logprobs) == pytest.approx(own.tolist(), abs=1e-5)


def test_logits_that_are_more_than_the_head_gives_are_refused():
    model = make_model("cohere", ARCHITECTURES["cohere"])
    policy = PolicyModel(model, temperature=1.0)
    model.logit_scale = 0.5  # not what the configuration says
    with pytest.raises(ValueError, match="CohereForCausalLM computes its logits in a way that isn't supported"):
        policy.check()


def test_layers_whose_cache_is_another_one_are_refused_by_name():
    model = make_model("llama4_text", {**COMMON, "head_dim": 8, "layer_types": ["chunked_attention"] * 2})
    with pytest.raises(ValueError, match="can't run Llama4ForCausalLM, which has layers of type chunked_attention"):
        generated(model)


def test_logits_that_are_not_a_number_stop_the_engine():
    model = make_model("gpt2", GPT2)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="under weights of version 0 are infinite or not a number"):
        generated(model)


def test_a_model_that_states_no_context_length_is_refused():
    model = make_model("bloom", {"vocab_size": 60, "hidden_size": 16, "n_layer": 1, "n_head": 4})
    with pytest.raises(ValueError, match="BloomForCausalLM has no max_position_embeddings"):
        context_length(model)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gpt2", {**GPT2, "attn_pdrop": 0.5, "resid_pdrop": 0.5, "embd_pdrop": 0.5}),
        ("opt", {**ARCHITECTURES["opt"], "dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}),
        ("starcoder2", {**COMMON, "residual_dropout": 0.5, "embedding_dropout": 0.5}),
        ("mixtral", {**ARCHITECTURES["mixtral"], "router_jitter_noise": 0.5}),
        ("bloom", {"vocab_size": 60, "hidden_size": 16, "n_layer": 1, "n_head": 4, "attention_dropout": 0.5}),
        # Acts in eval mode, too, and in train mode experts are drawn.
        ("phimoe", {**COMMON, "num_local_experts": 4, "router_jitter_noise": 0.2, "input_jitter_noise": 0.5}),
        ("bart", {**BART, "dropout": 0.5, "attention_dropout": 0.5, "decoder_layerdrop": 0.5}),
    ],
)
def test_a_model_whose_activations_are_computed_again_computes_what_it_does_in_eval_mode(kind, options):
    model = make_model(kind, options)
    ids = torch.arange(5, 25)[None]

    def computed():
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.logsumexp(-1).sum().backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, gradients = computed()
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    passes = []
    # Inside the layer: since transformers 5.24 its own hooks stay outside of what is computed again.
    inside = next(layers[0].children())
    inside.register_forward_pre_hook(lambda *_: passes.append(layers[0].training))
    recompute_activations(model, selective=False)
    found, again = computed()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(again, gradients)
    assert passes == [False, False], "the layer wasn't computed again, or not as in eval mode"
