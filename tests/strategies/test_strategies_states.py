"""What a checkpoint's states are good for on every backend: held in memory, in part, and merged without the backend."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from layout_contract import layout_spec, my_rows
from safetensors.torch import load_file
from start_contract import another
from train_contract import LOSSES, build, weights_of

from roll.checkpoint.files import files_below
from roll.strategies.merging import Merge, merge_foreign, merge_states
from roll.strategies.state_files import HeldFiles, StateFiles, WrittenFiles
from roll.utils.pickles import UnsafeCheckpoint

BACKENDS = {
    "fsdp2": ("fsdp2_train", {}, 1),
    "fsdp2 x 2": ("fsdp2_train", {}, 2),
    "deepspeed": ("deepspeed_train", {"zero_optimization": {"stage": 2}}, 1),
    "deepspeed x 2": (
        "deepspeed_train",
        {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
        2,
    ),
    "megatron": ("megatron_train", {}, 1),
    "megatron x 2": ("megatron_train", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
}
CASES = [
    (backend, family) for backend in ("fsdp2", "deepspeed", "megatron") for family in ("llama", "qwen2", "qwen3_moe")
]
CASES += [("fsdp2 x 2", "llama"), ("deepspeed x 2", "llama"), ("megatron x 2", "qwen2"), ("megatron x 2", "qwen3_moe")]


SCHEDULE = {"lr_scheduler_type": "linear", "learning_rate": 1e-2}


def spec_of(path: Path, backend: str, **changes):
    name, options, _ = BACKENDS[backend]
    return layout_spec(path, name, options, training=SCHEDULE, **changes)


def steps(strategy, spec, count):
    mine = my_rows(strategy)
    return [strategy.train_step(mine, LOSSES[spec.kind]).result() for _ in range(count)]


def written_by(info, spec, folder):
    """Files that a rank says it has written, relative to the folder."""
    strategy, files = build(spec, info), WrittenFiles()
    strategy.save(folder / "role", files=files)
    if spec.kind == "policy":
        strategy.export(folder / "hf_model", files)
    return [path.relative_to(folder).as_posix() for path in files.paths]


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp2 x 2", "deepspeed x 2", "megatron x 2"])
def test_every_file_of_a_checkpoint_is_told_by_the_rank_that_wrote_it(ranks, model_of, tmp_path, backend):
    spec = spec_of(model_of("qwen2"), backend)
    told = ranks.run(written_by, BACKENDS[backend][2], spec, tmp_path)
    found = sorted(name for names in told for name in names)
    # Megatron writes two small files by itself: what nobody tells of, the controller hashes.
    untold = ["role/state/common.pt", "role/state/metadata.json"] if "megatron" in backend else []
    assert sorted([*found, *untold]) == files_below(tmp_path)


def save_in_every_way(info, spec, folder):
    """A step; states at once, states from memory after another step, and the export of the weights of both."""
    strategy, files = build(spec, info), HeldFiles()
    steps(strategy, spec, 1)
    strategy.save(folder / "now")
    if spec.kind == "policy":
        strategy.export(folder / "exported")
        strategy.export(folder / "held_export", files)
    strategy.save(folder / "held", files=files)
    before = weights_of(strategy)
    steps(strategy, spec, 1)
    list(files.write())
    return before


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def check_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert one
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("backend", "family"), CASES)
def test_states_are_the_same_from_memory_and_merge_to_what_the_backend_exports(
    written, model_of, tmp_path, backend, family
):
    folder, _ = written(save_in_every_way, BACKENDS[backend][2], spec_of(model_of(family), backend))
    expected = tensors_in(folder / "exported")
    check_same(tensors_in(folder / "held_export"), expected)
    for states in ("now", "held"):
        merge_states(folder / states, tmp_path / states, Merge())
        check_same(tensors_in(tmp_path / states), expected)
    names = {path.name for path in (folder / "exported").iterdir()}
    assert {path.name for path in (tmp_path / "now").iterdir()} == names


def test_type_and_size_of_files_can_be_chosen(written, model_of, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = written(save_in_every_way, 1, spec_of(model_of("llama"), "fsdp2"))
    merge_states(folder / "now", tmp_path / "half", Merge(dtype="bf16", max_shard_size="20KB"))
    whole, half = tensors_in(folder / "exported"), tensors_in(tmp_path / "half")
    check_same(half, {name: tensor.bfloat16() for name, tensor in whole.items()})
    assert len(list((tmp_path / "half").glob("*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "half").decode([10]) != ""


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
def test_a_critic_is_merged_to_a_token_classifier_with_its_values(ranks, model_of, tmp_path, backend):
    from transformers import AutoModelForTokenClassification

    spec = spec_of(model_of("llama"), backend, kind="value")
    weights = ranks.run(save_in_every_way, 1, spec, tmp_path)[0]
    merge_states(tmp_path / "held", tmp_path / "critic", Merge())
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic")
    assert model.score.weight.shape == (1, 32)
    assert model.score.weight.any()
    assert not model.score.bias.any()
    named = dict(model.model.named_parameters())
    assert all(torch.equal(named[name], tensor) for name, tensor in weights.items() if name in named)
    assert named.keys() <= weights.keys()


def go_on(info, spec, folder, contents):
    """(weights as loaded, results of two steps, weights after them)."""
    strategy = another(spec, info)
    if contents is not None:
        strategy.load(folder, contents)
    return weights_of(strategy), steps(strategy, spec, 2), weights_of(strategy)


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
def test_a_load_takes_what_it_is_asked_for_and_leaves_the_rest_as_new(ranks, written, model_of, tmp_path, backend):
    spec = spec_of(model_of("llama"), backend)
    folder, saved = written(save_in_every_way, 1, spec)
    # Linear decay over 10 steps from 0.01: the second step has 0.9 of it, the first all.
    cases = {
        ("model",): (1.0, "fresh"),
        ("model", "optimizer"): (1.0, "kept"),
        ("model", "extra"): (0.9, "fresh"),
        ("model", "optimizer", "extra"): (0.9, "kept"),
    }
    moved, found = {}, ranks.run(loaded_in_part, 1, spec, folder / "now", tmp_path, list(cases))[0]
    for (contents, (share, moments)), (before, results, after) in zip(cases.items(), found, strict=True):
        check_same(before, saved)
        assert results[0]["actor/lr"] == pytest.approx(0.01 * share), contents
        # The first update of fresh moments is lr * sign(gradient), whatever the gradient's size.
        name = "model.layers.0.mlp.up_proj.weight"
        moved[share, moments] = (after[name] - before[name]).abs()
    assert not torch.equal(moved[1.0, "fresh"], moved[1.0, "kept"])
    assert not torch.equal(moved[0.9, "fresh"], moved[0.9, "kept"])


def loaded_in_part(info, spec, source, target, parts):
    """`go_on` from each of these contents, which is saved again and goes on from there as from the first."""
    found = []
    for contents in parts:
        found.append(go_on(info, spec, source, contents))
        save_and_compare(info, spec, source, target / "-".join(contents), contents)
    return found


def save_and_compare(info, spec, source, target, contents):
    strategy = another(spec, info)
    strategy.load(source, contents)
    strategy.save(target)
    other = another(spec, info) if spec.worker.strategy_args.strategy_name == "fsdp2_train" else strategy
    other.load(target)
    first = steps(other, spec, 1)
    if other is not strategy:
        assert first == steps(strategy, spec, 1)


@pytest.mark.parametrize("backend", ["fsdp2", "deepspeed", "megatron"])
def test_states_without_the_optimizer_are_small_and_load_without_it(ranks, model_of, tmp_path, backend):
    spec = spec_of(model_of("llama"), backend)
    sizes = ranks.run(save_without_optimizer, 1, spec, tmp_path)[0]
    assert sizes["part"] < 0.5 * sizes["whole"]
    before, results, _ = ranks.run(go_on, 1, spec, tmp_path / "part", ("model", "extra"))[0]
    assert results[0]["actor/lr"] == pytest.approx(0.009)
    assert before


def save_without_optimizer(info, spec, folder):
    strategy = build(spec, info)
    steps(strategy, spec, 1)
    strategy.save(folder / "whole")
    strategy.save(folder / "part", ("model", "extra"))

    def size(path):
        kinds = (".distcp", ".safetensors")
        return sum(file.stat().st_size for file in path.rglob("*") if file.suffix in kinds)

    return {name: size(folder / name) for name in ("whole", "part")}


# --- checkpoints of other programs ------------------------------------------------------------------------------------


def theirs_of(path, stage):
    return layout_spec(path, "deepspeed_train", {"zero_optimization": {"stage": stage}}, training=SCHEDULE)


def save_with_deepspeed(info, spec, folder):
    """What DeepSpeed's own `save_checkpoint` writes, and the export of the same weights."""
    strategy = build(spec, info)
    steps(strategy, spec, 1)
    strategy._engine.save_checkpoint(str(folder / "theirs"))
    strategy.export(folder / "exported")


@pytest.mark.parametrize(("stage", "ranks_of_it"), [(0, 1), (2, 1), (2, 2), (3, 2)])
def test_a_folder_of_deepspeeds_own_becomes_a_hugging_face_folder(written, model_of, tmp_path, stage, ranks_of_it):
    path = model_of("qwen2")
    saved, _ = written(save_with_deepspeed, ranks_of_it, theirs_of(path, stage))
    for i, folder in enumerate((saved / "theirs", saved / "theirs" / "global_step1")):
        merge_foreign(folder, tmp_path / f"merged{i}", Merge(base=str(path)))
        check_same(tensors_in(tmp_path / f"merged{i}"), tensors_in(saved / "exported"))
        assert (tmp_path / f"merged{i}" / "tokenizer_config.json").is_file()


FROZEN = ("model.layers.0.", "model.embed_tokens")


def save_frozen(info, spec, folder, options):
    """What DeepSpeed's own `save_checkpoint` writes of a model with frozen weights, and the export of the same."""
    strategy = build(spec, info)
    steps(strategy, spec, 1)
    strategy._engine.save_checkpoint(str(folder / "theirs"), **options)
    strategy.export(folder / "exported")


@pytest.mark.parametrize(
    ("stage", "excluded", "adapters"),
    [(0, True, False), (1, False, False), (1, False, True), (1, True, True), (3, True, True)],
)
def test_frozen_weights_are_found_where_a_stage_puts_them_or_in_the_base_model(
    ranks, model_of, tmp_path, stage, excluded, adapters
):
    path = model_of("qwen2")
    model = {"lora_rank": 4, "lora_alpha": 8.0} if adapters else {"freeze_module_prefix": FROZEN}
    options = {"exclude_frozen_parameters": True} if excluded else {}
    zero = {"zero_optimization": {"stage": stage}}
    spec = layout_spec(path, "deepspeed_train", zero, training=SCHEDULE, model=model)
    ranks.run(save_frozen, 1, spec, tmp_path, options)
    if adapters:
        with pytest.raises(ValueError, match=r"don't say their scaling: put the adapter_config\.json of the run into"):
            merge_foreign(tmp_path / "theirs", tmp_path / "none", Merge(base=str(path)))
        shutil.copy2(tmp_path / "exported" / "adapter" / "adapter_config.json", tmp_path / "theirs")
    merge_foreign(tmp_path / "theirs", tmp_path / "merged", Merge(base=str(path)))
    check_same(tensors_in(tmp_path / "merged"), tensors_in(tmp_path / "exported"))
    if excluded:
        with pytest.raises(ValueError, match="another model|other adapters"):
            merge_foreign(tmp_path / "theirs", tmp_path / "other", Merge(base=str(model_of("qwen2", layers=1))))


def test_what_deepspeed_would_run_while_it_reads_is_refused(written, model_of, tmp_path):
    path = model_of("qwen2")
    saved, _ = written(save_with_deepspeed, 1, theirs_of(path, 2))
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (file,) = (tmp_path / "theirs").rglob("*_optim_states.pt")
    states = torch.load(file, weights_only=False)
    states["more"] = Touch(str(tmp_path / "touched"))
    torch.save(states, file)
    with pytest.raises(UnsafeCheckpoint, match="could run code"):
        merge_foreign(tmp_path / "theirs", tmp_path / "merged", Merge(base=str(path)))
    assert not (tmp_path / "touched").exists()


class Touch:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self):
        return Path.touch, (Path(self._path),)


def save_with_megatron(info, spec, folder, stacked):
    """What Megatron-LM writes: one name per layer, or all layers stacked under one name."""
    from megatron.core import dist_checkpointing, parallel_state

    from roll.strategies.megatron.platform import cpu_platform

    strategy = build(spec, info)
    steps(strategy, spec, 1)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group, "non_homogeneous_layers": not stacked}
    place = folder / "theirs" / "iter_0000001"
    if info.rank == 0:
        place.mkdir(parents=True)
        (folder / "theirs" / "latest_checkpointed_iteration.txt").write_text("1")
    torch.distributed.barrier()
    with cpu_platform():
        from roll.strategies.megatron.megatron_releases import checkpoint_writer

        state = {
            f"model{i}": module.sharded_state_dict(metadata=metadata) for i, module in enumerate(strategy._modules)
        }
        dist_checkpointing.save(state, str(place), sharded_strategy=checkpoint_writer(StateFiles()))
    strategy.export(folder / "exported")


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("family", "world"), [("llama", 1), ("qwen3_moe", 2)])
def test_a_folder_of_megatrons_own_becomes_a_hugging_face_folder(ranks, model_of, tmp_path, family, world, stacked):
    path = model_of(family)
    spec = spec_of(path, "megatron" if world == 1 else "megatron x 2")
    ranks.run(save_with_megatron, world, spec, tmp_path, stacked)
    merge_foreign(tmp_path / "theirs", tmp_path / "merged", Merge(base=str(path)))
    check_same(tensors_in(tmp_path / "merged"), tensors_in(tmp_path / "exported"))
    other = model_of("llama", hidden=64)
    with pytest.raises(ValueError, match=r"lacks|another model"):
        merge_foreign(tmp_path / "theirs", tmp_path / "other", Merge(base=str(other)))


def test_an_export_takes_further_chat_templates_along(tmp_path):
    from roll.strategies.merging.write_model import _copy_description
    from roll.strategies.training.model_folder import ABOUT

    (tmp_path / "from" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "from" / "additional_chat_templates" / "rag.jinja").write_text("x")
    (tmp_path / "from" / ABOUT).write_text("{}")
    (tmp_path / "to").mkdir()
    _copy_description(tmp_path / "from", tmp_path / "to")
    assert (tmp_path / "to" / "additional_chat_templates" / "rag.jinja").read_text() == "x"
