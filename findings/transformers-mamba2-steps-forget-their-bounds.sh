#!/usr/bin/env bash
# transformers 5.19.0 with torch 2.13.0: a state-space model (Nemotron-H, Zamba2, Mamba-2, Granite 4, Falcon-H1) whose
# configuration bounds the time steps (time_step_limit; Nemotron-H and Zamba2: time_step_min, 0.001 unless set).
# Expected by most: generating with a cache gives the log-probs that one pass over the same tokens gives.
# What happens: passes over several tokens clamp the time steps, steps of one token with a cache don't. So the first
# token of a response is drawn from one model and all others from another one. No message.
# Why it matters: responses that were sampled by generate() have other log-probs than training computes for them, where
# time steps pass the bounds: an importance ratio of 1 isn't one. Sample with an engine that clamps, or without a cache.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 transformers==5.19.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import torch
import transformers

print("transformers", transformers.__version__, "torch", torch.__version__)
transformers.logging.set_verbosity_error()
IDS = torch.tensor([[3, 10, 17, 24, 31, 38, 45, 52, 59]])


@torch.no_grad()
def difference(limit):
    """The largest, between logits of one pass and of a prompt of 4 tokens with steps of one token behind it."""
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_heads=8, head_dim=8, state_size=8, n_groups=1,
        chunk_size=8, time_step_limit=limit,
    )
    model = transformers.Mamba2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3)
    whole = model(input_ids=IDS, use_cache=False).logits
    output = model(input_ids=IDS[:, :4], use_cache=True)
    parts = [output.logits]
    for i in range(4, IDS.shape[1]):
        output = model(input_ids=IDS[:, i : i + 1], cache_params=output.cache_params, use_cache=True)
        parts.append(output.logits)
    return (torch.cat(parts, 1) - whole).abs().amax((0, 2))


free, bound = difference((0.0, float("inf"))), difference((0.001, 0.1))
print("largest difference of logits by position, without bounds", [round(float(one), 6) for one in free])
print("with time_step_limit (0.001, 0.1)                       ", [round(float(one), 6) for one in bound])
assert free.max() < 1e-4
assert bound[:4].max() < 1e-4 and bound[4:].max() > 1e-2
PY
