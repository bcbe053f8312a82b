"""Megatron models score tokens as transformers does, in every layout, and refuse what they can't express."""

from __future__ import annotations

import pytest
import torch
from megatron_cases import MODELS, build_case, expected_scores, play_model

pytest.importorskip("megatron.core")

LAYOUTS = {
    "one rank": (1, {}),
    "tp 2": (2, {"tensor_model_parallel_size": 2}),
    "tp 2 with split activations": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp 2": (2, {"pipeline_model_parallel_size": 2}),
    "pp 2 interleaved": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "cp 2": (2, {"context_parallel_size": 2}),
    "ep 2": (2, {"expert_model_parallel_size": 2}),
}
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe")


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


def fits(name, layout):
    sparse = name in SPARSE
    return sparse if layout == "ep 2" else not (sparse and layout == "tp 2")


def joined(results, packed):
    """(log-probs, entropies) from the stretches that the ranks scored."""
    parts = [scored[packed] for _, scored in results if scored[packed] is not None]
    size = max(int(place.max()) for place, _, _ in parts if len(place)) + 1
    columns = [torch.full((size,), torch.nan) for _ in range(2)]
    for place, *values in parts:
        for column, value in zip(columns, values, strict=True):
            column[place] = value
    return columns


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for layout in LAYOUTS for name in MODELS if fits(name, layout)]
)
def test_scores_and_weights_are_those_of_transformers(ranks, case_of, name, layout):
    from transformers import AutoModelForCausalLM

    path, expected = case_of(name)
    world, options = LAYOUTS[layout]
    results = ranks.run(play_model, world, path, options)
    for packed in (False, True):
        for mine, theirs in zip(joined(results, packed), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.0, atol=1e-5)
    theirs = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    for weights, _ in results:
        assert weights.keys() == theirs.keys()
        assert all(torch.equal(weights[key], theirs[key]) for key in theirs)
