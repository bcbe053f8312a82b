"""Ranks of FSDP2 on several machines: what is said of a copy of the weights in each of them."""

from __future__ import annotations

import pytest
from planned import config_of, model_folder, sft_job, write_job
from published_cases import LLAMA_2_70B, LLAMA_7B

from roll.cli.__main__ import main
from roll.configs.schema.replicas import copies_within_machines

KEY = "actor_train.strategy_args.strategy_config.fsdp_size"


def job_on_machines(model, nodes, each, ranks, options=None, strategy="fsdp2_train", slots=None):
    tree = sft_job(model, ranks=ranks, length=512, strategy=strategy, options=options or {})
    tree |= {"num_nodes": nodes, "num_gpus_per_node": each}
    tree["actor_train"]["device_mapping"] = slots or list(range(ranks))
    return tree


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ({"nodes": 2, "each": 8, "ranks": 16}, 8),
        ({"nodes": 4, "each": 2, "ranks": 8}, 2),
        ({"nodes": 2, "each": 8, "ranks": 8, "slots": [4, 5, 6, 7, 8, 9, 10, 11]}, 4),
        ({"nodes": 1, "each": 8, "ranks": 8}, None),
        ({"nodes": 2, "each": 1, "ranks": 2}, None),  # a copy on each rank isn't sharded at all
        ({"nodes": 2, "each": 8, "ranks": 12}, None),  # 8 and 4
        ({"nodes": 2, "each": 8, "ranks": 8, "slots": [0, 8, 1, 9, 2, 10, 3, 11]}, None),  # neighbours are elsewhere
        ({"nodes": 2, "each": 8, "ranks": 16, "options": {"fsdp_size": 16}}, None),  # somebody has chosen
        ({"nodes": 2, "each": 8, "ranks": 16, "strategy": "deepspeed_train"}, None),
    ],
)
def test_machines_with_as_many_ranks_one_after_the_other_could_have_a_copy_each(tmp_path, layout, size):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    config = config_of(tmp_path, job_on_machines(model, **layout))
    assert list(copies_within_machines(config)) == ([] if size is None else [(KEY, size)])


@pytest.mark.parametrize(("tree", "fits"), [(LLAMA_7B, True), (LLAMA_2_70B, False)])
def test_the_plan_says_so_where_a_copy_fits(tmp_path, capsys, tree, fits):
    model = model_folder(tmp_path / "model", tree)
    # 70 billion parameters take 16 bytes each: 65 GiB on 16 devices, 130 GiB on 8.
    file = str(write_job(tmp_path, job_on_machines(model, 2, 8, 16)))
    main(["plan", file, "--devices", "h100:8"])
    said = capsys.readouterr().out
    note = f"note: actor_train: {KEY}=8 would fit, too, and weights would be gathered within machines only"
    assert (note in said) == fits
