"""What this package takes from Megatron-core exists in the installed release; `make evidence` asks the other one."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from roll.strategies.megatron.megatron_releases import TRIED, check_readable, copy_storage, cpu_replacements

ROOT = Path(__file__).parents[2]
OURS = [
    *sorted((ROOT / "roll/strategies/megatron").glob("*.py")),
    *sorted((ROOT / "roll/strategies/merging").glob("*.py")),
]


def test_the_installed_release_is_one_of_those_that_are_tried():
    assert metadata.version("megatron-core") in TRIED


def test_everything_that_is_imported_from_megatron_is_there():
    nodes = [node for file in OURS for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    imports = [each for each in nodes if isinstance(each, ast.ImportFrom) and str(each.module).startswith("megatron.")]
    assert len(imports) >= 25
    for node in imports:
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            if not hasattr(module, alias.name):
                importlib.import_module(f"{node.module}.{alias.name}")


def test_what_is_called_with_names_takes_them():
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
    from megatron.core.packed_seq_params import PackedSeqParams

    def takes(function, *names: str) -> None:
        assert set(names) <= set(inspect.signature(function).parameters), function

    takes(DistributedDataParallel, "disable_bucketing")
    takes(GPTModel, "position_embedding_type", "vp_stage", "pre_process", "share_embeddings_and_output_weights")
    takes(get_gpt_decoder_block_spec, "use_transformer_engine", "normalization", "vp_stage")
    takes(get_megatron_optimizer, "use_gloo_process_groups")
    for owner, names in (
        (MegatronOptimizer, ("prepare_grads", "get_grad_norm", "step_with_ready_grads", "reload_model_params")),
        (ChainedOptimizer, ("prepare_grads", "get_grad_norm", "step_with_ready_grads", "reload_model_params")),
        (DistributedOptimizer, ("_get_model_param_range_map",)),
    ):
        assert all(hasattr(owner, name) for name in names), owner
    # Packed rows of our own carry no lengths: Megatron must have nothing to compute from them.
    assert all(value is None for value in vars(PackedSeqParams()).values())


def test_memory_that_is_shared_again_is_copied_and_views_see_it():
    target, source = torch.zeros(6), torch.arange(6.0)
    view = target.view(2, 3)[1]
    target.untyped_storage().resize_(0)
    copy_storage(target, source)
    assert torch.equal(target, source) and torch.equal(view, source[3:])
    owner = SimpleNamespace(_get_share_storage=None)
    ((_, name, replacement),) = cpu_replacements(owner)
    assert (name, replacement()) == ("_get_share_storage", copy_storage)
    assert cpu_replacements(SimpleNamespace()) == []


def test_a_checkpoint_of_a_later_release_is_refused_with_the_release_that_reads_it(tmp_path, monkeypatch):
    state = tmp_path / "state"
    state.mkdir()
    check_readable(state)  # nothing is there: whoever reads it says so
    (state / ".metadata").touch()
    monkeypatch.setattr(metadata, "version", lambda _: "0.16.1")
    with pytest.raises(
        ValueError, match=re.escape("than 0.16.1, without the file common.pt; resume with megatron-core==")
    ):
        check_readable(state)
    monkeypatch.setattr(metadata, "version", lambda _: "0.19.2")
    check_readable(state)
    (state / "common.pt").touch()
    monkeypatch.setattr(metadata, "version", lambda _: "0.16.1")
    check_readable(state)
    shutil.rmtree(state)
