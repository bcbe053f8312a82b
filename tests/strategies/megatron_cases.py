"""What a rank does in the tests of Megatron's models: build, load, stream, score; nothing of the strategy."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tiny_models import build_tiny_model
from train_contract import make_batch

from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.training.logits import HeadRequest
from roll.strategies.training.micro import lay_out, take_shard, widen

MODELS = {
    "llama": ("llama", {}),
    "llama untied": ("llama", {"tie_word_embeddings": False}),
    "llama 3 rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": False}),
    "mistral": ("mistral", {"sliding_window": 4, "tie_word_embeddings": False}),
    "mixtral": ("mixtral", {}),
    "qwen2_moe": ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": False}),
}
"""name -> (family, changes of the tiny model's configuration)"""


def build_case(folder, name):
    """A model with weights large enough that every part of it shows in its scores."""
    family, options = MODELS[name]
    return build_tiny_model(folder, family, layers=4, **{"initializer_range": 0.3, **options})


def build_part(info, path, options, **changes):
    """This rank's chunks of the model, loaded, after joining the groups of the layout. Inside `cpu_platform`."""
    from transformers import AutoConfig

    from roll.strategies.megatron.megatron_model import build_chunks
    from roll.strategies.megatron.megatron_weights import load_weights
    from roll.strategies.megatron.parallel import connect

    connect(info, options, backend="gloo", seed=1)
    settings = {"kind": "policy", "dtype": torch.float32, "trains": False, "temperature": 1.0, "recompute": False}
    chunks = build_chunks(AutoConfig.from_pretrained(path), options, **{**settings, **changes})
    interleaved = options.virtual_pipeline_model_parallel_size is not None
    chunks[0].config.variable_seq_lengths = True
    chunks[0].config.overlap_p2p_comm, chunks[0].config.batch_p2p_comm = interleaved, not interleaved
    load_weights(chunks, path)
    return [chunk.eval() for chunk in chunks]


@torch.no_grad()
def scores(chunks, options, *, packed):
    """(places, log-probs, entropies or values) of this rank's shard of the test batch, on the last stage."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batch = make_batch()
    context = parallel_state.get_context_parallel_group()
    splits = options.tensor_model_parallel_size if options.sequence_parallel else 1
    rank, ranks = dist.get_rank(context), dist.get_world_size(context)
    layout = widen(lay_out(batch, torch.device("cpu"), packed=packed), ranks * splits)
    shard, place = take_shard(layout, rank, ranks)

    def step(_, chunk):
        output = chunk(shard, layout.positions, HeadRequest(entropy=True))
        return output, lambda scored: (torch.zeros(()), torch.zeros((), dtype=torch.int), scored)

    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None for _ in chunks],
        model=chunks,
        num_microbatches=options.pipeline_model_parallel_size,
        seq_length=1,
        micro_batch_size=1,
        forward_only=True,
    )
    if not results:
        return None
    last = results[-1]
    return place, last.values if last.logprobs is None else last.logprobs, last.entropy


def play_models(info, paths, options, kind="policy"):
    """Of each model the whole weights, and the scores of the test batch, rows padded and packed."""
    from roll.strategies.megatron.megatron_weights import stream_weights
    from roll.strategies.megatron.platform import cpu_platform

    options, results = MegatronConfig(**options), []
    with cpu_platform():
        for path in paths:
            chunks = build_part(info, path, options, kind=kind)
            weights = {name: tensor.clone() for name, tensor in stream_weights(chunks)}
            results.append((weights, {packed: scores(chunks, options, packed=packed) for packed in (False, True)}))
    return results


def joined(results, packed):
    """(log-probs or values, entropies) of one model from the shards that the ranks scored."""
    parts = [scored[packed] for _, scored in results if scored[packed] is not None]
    size = max(int(place.max()) for place, _, _ in parts if len(place)) + 1
    columns = [torch.full((size,), torch.nan) for _ in range(2)]
    for place, *values in parts:
        for column, value in zip(columns, values, strict=True):
            if value is not None:
                column[place] = value
    return columns


def expected_scores(path, temperature=1.0):
    """(log-probs, entropies) of the test batch's actions from transformers, row by row."""
    from transformers import AutoModelForCausalLM

    model, batch = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), make_batch()
    logprobs, entropies = [], []
    for i in range(len(batch)):
        ids, acting = batch.row("token_ids", i), batch.row("action_mask", i)[1:]
        with torch.no_grad():
            table = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logprobs.append(table.gather(-1, ids[1:, None])[:, 0][acting])
        entropies.append(-(table.exp() * table).sum(-1)[acting])
    return torch.cat(logprobs), torch.cat(entropies)
