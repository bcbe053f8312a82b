"""Pictures in the trainers: the numbers of transformers row by row, in every layout, and never blind.

All in float32 (`dtype: fp32`, the default of `ModelArgs`).
"""

from __future__ import annotations

import dataclasses
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from layout_contract import differences, layout_spec, run_layout, shard_of
from picture_cases import (
    SIX,
    SMALL,
    WIDE,
    Reading,
    noise,
    picture_batch,
    picture_play,
    picture_reference,
    six,
    tokens_of,
)
from tiny_pictures import PICTURE_FAMILIES, build_tiny_picture_model
from train_contract import LOSS, build, make_batch, make_info, make_spec, trained, weights_of

from roll.strategies.hf.hf_build import hf_module
from roll.strategies.hf.picture_rows import mrope_positions
from roll.strategies.hf.streamed import StreamedWeights
from roll.strategies.merging import Merge, merge_states

PACKED = {"use_sequence_packing": True}
TOWER = "model.visual."


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def of(family: str = "qwen2_vl", **text: object) -> Path:
        key = f"{family} {text}"
        if key not in made:
            made[key] = build_tiny_picture_model(tmp_path_factory.mktemp(family), family, **text)
        return made[key]

    return of


def scored(folder, batch, **changes):
    """Log-probs of the trained tokens, [N]."""
    return build(make_spec(folder, **changes)).forward(batch, ("logprobs",)).require("logprobs")


# --- tokens and positions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_picture_has_as_many_tokens_as_the_processor_makes_features(folder_of, family):
    from PIL import Image

    tokens, random = tokens_of(folder_of(family)), np.random.default_rng(0)
    for width, height in random.integers(8, 400, (200, 2)).tolist():
        picture = dataclasses.replace(SMALL, width=width, height=height)
        made = tokens._processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        assert tokens.tokens(picture) == len(made["pixel_values"]) // 4, (width, height)


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_positions_are_those_of_transformers(folder_of, family):
    folder = folder_of(family)
    batch, tokens = six(folder), tokens_of(folder)
    model = Reading(folder, batch).model.model
    for i in (0, 1, 2):
        ids, pictures = batch.row("token_ids", i), batch.pictures[i]
        kinds = (ids == tokens.place).int()
        grid = tokens.pixels(pictures)[1] if pictures else None
        expected, _ = model.get_rope_index(ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grid)
        sizes = [tokens.features(picture) for picture in pictures]
        assert torch.equal(mrope_positions(ids, tokens.place, sizes), expected[:, 0])


def test_positions_by_hand():
    # a picture of 1 x 2 features behind one token, text after the larger side, then one of 2 x 1
    ids = torch.tensor([1, 9, 9, 2, 9, 9, 3])
    assert mrope_positions(ids, 9, [(1, 2), (2, 1)]).tolist() == [
        [0, 1, 1, 3, 4, 4, 6],
        [0, 1, 1, 3, 4, 5, 6],
        [0, 1, 2, 3, 4, 4, 6],
    ]
    with pytest.raises(ValueError, match="4 of its tokens stand for pictures, but its 1 have 2 features"):
        mrope_positions(ids, 9, [(1, 2)])
    with pytest.raises(ValueError, match="the 4 tokens of a picture, from token 1 on, have others between them"):
        mrope_positions(ids, 9, [(2, 2)])


# --- one process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_rows_alone_padded_and_packed_have_the_log_probs_of_transformers(folder_of, family):
    folder = folder_of(family)
    batch = six(folder)
    with torch.no_grad():
        expected = Reading(folder, batch).logprobs(batch)
    for worker in ({"infer_batch_size": 1}, {"infer_batch_size": 6}, {"infer_batch_size": 6, **PACKED}):
        assert float((scored(folder, batch, worker=worker) - expected).abs().max()) < 1e-5, worker


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_optimizer_steps_are_those_of_a_plain_loop(folder_of, family, packed):
    folder = folder_of(family)
    spec = layout_spec(folder, "fsdp2_train", {}, worker=PACKED if packed else {})
    check(run_layout(InOneProcess(), spec, 1, play=picture_play), folder)


class InOneProcess:
    """A pool of one rank: this process."""

    def run(self, function, world, *args):
        assert world == 1
        return [function(make_info(), *args)]


def check(run, folder, tolerance=1e-5):
    """Raise unless a layout gives the numbers of the plain loop."""
    limits = {"weights": 1e-4}  # AdamW's first steps divide by tiny moments
    found = differences(run, picture_reference(folder))
    wrong = {name: value for name, value in found.items() if not value <= limits.get(name, tolerance)}
    assert not wrong, wrong


def test_a_picture_is_computed_once_for_all_rows_of_a_micro_batch_that_show_it(folder_of):
    folder = folder_of()
    rows = [([20, None, 21, 22, 23, 24 + i], [WIDE]) for i in range(4)] + [([30, None, 31, 32, 33, 34], [SMALL])]
    strategy = build(make_spec(folder, worker={"infer_batch_size": 5}))
    patches: list[int] = []
    tower = hf_module(strategy._model).model.visual
    tower.register_forward_pre_hook(lambda _, inputs: patches.append(len(inputs[0])))
    strategy.forward(picture_batch(tokens_of(folder), rows), ("logprobs",))
    assert patches == [tokens_of(folder).patches(WIDE) + tokens_of(folder).patches(SMALL)]


def test_token_budgets_count_what_the_tower_computes(folder_of):
    folder = folder_of()
    batch, tokens = six(folder), tokens_of(folder)
    budget = {"use_dynamic_batching_in_infer": True, "max_tokens_per_microbatch_in_infer": 60, **PACKED}
    strategy = build(make_spec(folder, worker=budget))
    model = hf_module(strategy._model)
    tower = sum(p.numel() for p in model.model.visual.parameters())
    others = sum(p.numel() for p in model.parameters()) - tower
    costs = strategy._micros.beside.costs(batch)
    for cost, length, pictures in zip(costs, batch.lengths.tolist(), batch.pictures, strict=True):
        assert cost == length + np.ceil(sum(map(tokens.patches, pictures)) * tower / others)
    parts, _ = strategy._micros.parts(batch, training=False)
    assert all(sum(costs[row] for row in part) <= 60 or len(part) == 1 for part in parts)
    with torch.no_grad():
        expected = Reading(folder, batch).logprobs(batch)
    assert float((strategy.forward(batch, ("logprobs",)).require("logprobs") - expected).abs().max()) < 1e-5


def test_rows_of_text_alone_are_those_of_the_language_model(folder_of):
    folder, batch = folder_of(), make_batch()
    with torch.no_grad():
        expected = Reading(folder, batch).logprobs(batch)
    strategy = build(make_spec(folder))
    assert float((strategy.forward(batch, ("logprobs",)).require("logprobs") - expected).abs().max()) < 1e-5
    history, _ = trained(make_spec(folder), batch)
    assert all(np.isfinite(each.result()["actor/grad_norm"]) for each in history)


# --- never blind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [{}, PACKED], ids=["padded", "packed"])
@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_another_picture_changes_what_is_trained(folder_of, family, worker):
    folder = folder_of(family)
    tokens = tokens_of(folder)
    other = noise(84, 56, seed=7)
    assert tokens.tokens(other) == tokens.tokens(WIDE)
    pairs = {
        "as it is": [WIDE, SMALL],
        "exchanged": [other, SMALL],
        "repeated": [WIDE, noise(56, 56, seed=8)],
        "in another order": [SMALL, WIDE],
    }
    ids = [20, None, 21, None, 22, 23, 24, 25]
    strategy = build(make_spec(folder, worker=worker))
    logprobs = {
        name: strategy.forward(picture_batch(tokens, [(ids, shown)]), ("logprobs",)).require("logprobs")[-4:]
        for name, shown in pairs.items()
    }
    plain = logprobs.pop("as it is")
    for name, changed in logprobs.items():
        assert float((changed - plain).abs().max()) > 1e-4, name


def test_a_trainer_that_drops_pictures_is_refused(folder_of):
    folder = folder_of()
    batch = six(folder)
    strategy = build(make_spec(folder))
    blind = dataclasses.replace(batch, pictures=())
    with pytest.raises(ValueError, match=r"actor_train: row 'row\d' doesn't fit its pictures: \d+ of its tokens stand"):
        strategy.forward(blind, ("logprobs",))
    one_less = dataclasses.replace(batch, pictures=(batch.pictures[0][:1], *batch.pictures[1:]))
    with pytest.raises(ValueError, match="row 'row0' doesn't fit its pictures"):
        strategy.train_step(one_less, LOSS)


def test_a_planted_trainer_that_computes_without_features_is_found(folder_of, monkeypatch):
    from roll.strategies.hf import picture_model

    folder = folder_of()
    batch = six(folder)
    with torch.no_grad():
        expected = Reading(folder, batch).logprobs(batch)
    monkeypatch.setattr(picture_model, "read_pictures", lambda lm, ids, pictures: {"input_ids": ids})
    assert float((scored(folder, batch) - expected).abs().max()) > 1e-3


def test_a_model_without_a_tower_refuses_rows_with_pictures(folder_of, tiny_model):
    batch = dataclasses.replace(make_batch(), pictures=((SMALL,), (), (), (), (), ()))
    with pytest.raises(ValueError, match="actor_train: the rows have pictures, and its model isn't given any"):
        build(make_spec(tiny_model)).forward(batch, ("logprobs",))


def test_an_answer_never_says_a_place(folder_of):
    folder = folder_of()
    batch, tokens = six(folder), tokens_of(folder)
    ids = batch.token_ids.clone()
    ids[-1] = tokens.place
    with pytest.raises(ValueError, match=f"what row 'row5' is to say holds the token {tokens.place}"):
        scored(folder, dataclasses.replace(batch, token_ids=ids))
    strategy = build(make_spec(folder))
    top = strategy.forward(batch, ("logprobs",)).require("logprobs")
    head = hf_module(strategy._model).get_output_embeddings()
    said = head(torch.randn(3, head.in_features)).softmax(-1)
    assert float(said[:, list(tokens.forbidden)].detach().max()) == 0.0
    assert top.isfinite().all()


# --- frozen parts and adapters ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "still"),
    [
        (("freeze_vision_tower",), lambda name: name.startswith(TOWER) and "merger" not in name),
        (("freeze_projector",), lambda name: name.startswith(TOWER) and "merger" in name),
        (("freeze_vision_tower", "freeze_projector"), lambda name: name.startswith(TOWER)),
    ],
)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_frozen_parts_stay_bit_equal_and_out_of_the_optimizer(folder_of, family, keys, still):
    folder = folder_of(family)
    spec = make_spec(folder, model=dict.fromkeys(keys, True))
    strategy = build(spec)
    before = weights_of(strategy)
    for _ in range(3):
        strategy.train_step(six(folder), LOSS)
    after = weights_of(strategy)
    frozen = {name for name in before if still(name)}
    assert frozen
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen
    stepped = {id(p) for group in strategy._groups() for p in group["params"]}
    names = {name for name, p in hf_module(strategy._model).named_parameters() if id(p) not in stepped}
    assert names == frozen


def test_a_model_without_a_tower_has_none_to_freeze(tiny_model):
    with pytest.raises(ValueError, match="freeze_vision_tower: LlamaForCausalLM isn't given pictures"):
        build(make_spec(tiny_model, model={"freeze_vision_tower": True}))


def test_adapters_are_those_of_the_language_model_unless_a_layer_of_the_tower_is_named(folder_of):
    folder = folder_of("qwen2_5_vl")
    strategy = build(make_spec(folder, model={"lora_rank": 2}))
    assert strategy._adapters is not None
    assert all(name.startswith("model.language_model.") for name in strategy._adapters.layers)
    assert len(strategy._adapters.layers) == 2 * 7
    named = build(make_spec(folder, model={"lora_rank": 2, "lora_target": ("gate_proj",)}))
    assert len(named._adapters.layers) == 2  # the tower has layers of that name, too
    tower = build(make_spec(folder, model={"lora_rank": 2, "lora_target": ("qkv",)}))
    assert all(name.startswith(TOWER) for name in tower._adapters.layers)
    before = weights_of(strategy)
    strategy.train_step(six(folder), LOSS)
    strategy.train_step(six(folder), LOSS)
    changed = {name for name, tensor in weights_of(strategy).items() if not torch.equal(before[name], tensor)}
    assert changed
    assert all(name.startswith("model.language_model.") for name in changed)


# --- exports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_an_export_is_a_folder_of_transformers_that_reads_pictures(folder_of, family, tmp_path):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    folder = folder_of(family)
    strategy = build(make_spec(folder))
    strategy.train_step(six(folder), LOSS)
    strategy.export(tmp_path)
    loaded, info = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    mine = weights_of(strategy)
    assert all(torch.equal(mine[name], parameter) for name, parameter in loaded.named_parameters())
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert processor.to_dict() == tokens_of(folder)._processor.to_dict()


@pytest.mark.parametrize("lora", [0, 2])
def test_a_checkpoint_is_exported_as_a_model_that_reads_pictures_and_goes_on(folder_of, tmp_path, lora):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    folder = folder_of()
    batch, spec = six(folder), make_spec(folder, model={"lora_rank": lora})
    strategy = build(spec)
    strategy.train_step(batch, LOSS)
    strategy.save(tmp_path / "states")
    merge_states(tmp_path / "states", tmp_path / "merged", Merge())
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    mine = weights_of(strategy)
    assert all(torch.equal(mine[name], parameter) for name, parameter in loaded.named_parameters())
    assert AutoImageProcessor.from_pretrained(tmp_path / "merged", backend="pil").patch_size == 14
    resumed = build(spec)
    resumed.load(tmp_path / "states")
    assert resumed.train_step(batch, LOSS).result() == strategy.train_step(batch, LOSS).result()


# --- several ranks ----------------------------------------------------------------------------------------------------

LAYOUTS = {
    "two shards": ("fsdp2_train", {}, {}),
    "two shards, packed": ("fsdp2_train", {}, {"worker": PACKED}),
    "stage 3": ("deepspeed_train", {"zero_optimization": {"stage": 3}}, {}),
    "stage 2": ("deepspeed_train", {"zero_optimization": {"stage": 2}}, {}),
}


OFTEN = [
    ("qwen2_vl", "stage 3"),
    ("qwen2_5_vl", "two shards"),
    ("qwen3_vl", "stage 2"),
    ("qwen3_vl_moe", "two shards, packed"),
]
OTHERS = [cell for cell in product(PICTURE_FAMILIES, LAYOUTS) if cell not in OFTEN]


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_every_rank_reads_its_part_of_the_files_alone(folder_of, family):
    weights = StreamedWeights.open(make_spec(folder_of(family)), torch.float32)
    assert weights is not None
    assert {name.partition(".")[2].partition(".")[0] for name, _ in weights.waiting(weights.module)} >= {
        "visual", "language_model",
    }  # fmt: skip


def check_cell(ranks, folder, layout):
    strategy, options, changes = LAYOUTS[layout]
    check(run_layout(ranks, layout_spec(folder, strategy, options, **changes), 2, play=picture_play), folder)


@pytest.mark.parametrize(("family", "layout"), OFTEN)
def test_two_ranks_one_without_pictures_give_the_numbers_of_a_plain_loop(ranks, folder_of, family, layout):
    check_cell(ranks, folder_of(family), layout)


@pytest.mark.parametrize(("family", "layout"), OTHERS)
def test_the_other_families_and_layouts_on_two_ranks(ranks, folder_of, family, layout):
    check_cell(ranks, folder_of(family), layout)


def test_the_second_rank_has_no_pictures():
    assert [bool(SIX[row][1]) for row in shard_of(1, 2)] == [False]
