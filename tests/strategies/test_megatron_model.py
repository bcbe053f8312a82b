"""Megatron models score tokens as transformers does, in every layout, and refuse what they can't express."""

from __future__ import annotations

import pytest
import torch
from megatron_cases import MODELS, build_case, expected_scores, joined, play_models

pytest.importorskip("megatron.core")

from roll.configs.megatron import MegatronConfig  # noqa: E402
from roll.strategies.megatron.build import transformer_config  # noqa: E402
from roll.strategies.megatron.families import architecture  # noqa: E402

SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe")
DENSE = tuple(name for name in MODELS if name not in SPARSE)
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "one rank": (1, {}, MODELS),
    "tp 2": (2, TP2, DENSE),
    "tp 2 with split activations": (2, {**TP2, "sequence_parallel": True}, MODELS),
    "tp 4, more than key-value heads": (4, {"tensor_model_parallel_size": 4}, ("llama", "qwen2", "qwen3")),
    "pp 2": (2, PP2, MODELS),
    "pp 2 interleaved": (2, {**PP2, "virtual_pipeline_model_parallel_size": 2}, MODELS),
    "tp 2, pp 2": (4, {**TP2, **PP2, "sequence_parallel": True}, ("llama", "qwen2", "qwen2_moe")),
    "cp 2": (2, {"context_parallel_size": 2}, MODELS),
    "cp 2, tp 2": (4, {"context_parallel_size": 2, **TP2, "sequence_parallel": True}, ("mistral", "mixtral")),
    "ep 2": (2, {"expert_model_parallel_size": 2}, SPARSE),
    "ep 2 by gathering": (2, {"expert_model_parallel_size": 2, "moe_token_dispatcher_type": "allgather"}, SPARSE),
    "ep 2, tp 2, whole experts": (
        2,
        {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "sequence_parallel": True},
        SPARSE,
    ),
    "ep 2, pp 2": (4, {"expert_model_parallel_size": 2, **PP2}, ("qwen2_moe",)),
}


@pytest.fixture(scope="session")
def case_of(tmp_path_factory):
    """Folder of a tiny model of `MODELS`, and what transformers says about it."""
    made = {}

    def get(name):
        if name not in made:
            path = build_case(tmp_path_factory.mktemp("cases") / "model", name)
            made[name] = (path, expected_scores(path))
        return made[name]

    return get


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_and_weights_are_those_of_transformers(ranks, case_of, layout):
    from transformers import AutoModelForCausalLM

    world, options, names = LAYOUTS[layout]
    cases = [case_of(name) for name in names]
    by_rank = ranks.run(play_models, world, [path for path, _ in cases], options)
    for name, (path, expected), results in zip(names, cases, zip(*by_rank, strict=True), strict=True):
        for packed in (False, True):
            for mine, theirs in zip(joined(results, packed), expected, strict=True):
                assert (mine - theirs).abs().max() <= 1e-5, f"{name}, packed={packed}"
        theirs = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
        for weights, _ in results:
            assert weights.keys() == theirs.keys(), name
            assert all(torch.equal(weights[key], theirs[key]) for key in theirs), name
