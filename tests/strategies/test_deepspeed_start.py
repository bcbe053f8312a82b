"""DeepSpeed starts from slices of a model's files: the same numbers, and with ZeRO 3 no whole model on any rank."""

from __future__ import annotations

import functools
import re
import threading
from pathlib import Path
from unittest import mock

import pytest
from ranks import status_bytes
from start_contract import LARGE, LAYER, MIB, another, check_starts
from test_deepspeed_steps import STAGES, spec_of
from tiny_models import build_tiny_model, build_tiny_picture_model
from torch.utils.file_baton import FileBaton

from roll.strategies.deepspeed import build_lock, deepspeed_strategy
from roll.strategies.deepspeed.build_lock import reported_locks

HALF = {"dtype": "bf16"}


def test_weights_from_slices_are_those_of_a_model_that_was_loaded_whole(ranks, model_of):
    specs = {}
    for stage in STAGES:
        specs[f"{stage}, tied"] = spec_of(model_of(), stage)
        specs[f"{stage}, stored wider than computed"] = spec_of(model_of("qwen2"), stage, model=HALF)
    check_starts(ranks, specs)


def test_experts_critics_adapters_and_roles_that_do_not_train_start_from_slices_too(ranks, model_of, tmp_path):
    frozen = {"freeze_module_prefix": ("model.layers.0.", "model.embed_tokens")} | HALF
    specs = {
        "experts": spec_of(model_of("qwen3_moe"), "stage 3", model=HALF),
        "experts under other names": spec_of(model_of("mixtral"), "stage 3"),
        "a head of its own, frozen layers": spec_of(model_of(tie_word_embeddings=False), "stage 3", model=frozen),
        "critic": spec_of(model_of("qwen3"), "stage 3", kind="value", model=HALF),
        "adapters": spec_of(model_of(), "stage 3", model={"lora_rank": 4, "lora_alpha": 8.0} | HALF),
        "of a picture model": spec_of(build_tiny_picture_model(tmp_path / "pictures"), "stage 3"),
        "a reference": spec_of(model_of(), "stage 3", name="deepspeed_infer", model=HALF),
        "a reference on every rank": spec_of(model_of(), "stage 1", name="deepspeed_infer", model=HALF),
    }
    check_starts(ranks, specs)


def peaks_of_a_start(info, specs):
    """(peak until ZeRO makes its optimizer, peak of the whole start, bytes of this rank's share in float32)"""
    import deepspeed

    found, initialize = [], deepspeed.initialize

    def watched(**given):
        found.append(status_bytes("VmHWM"))
        return initialize(**given)

    first, spec = specs
    another(first, info)  # imports everything
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, deepspeed.initialize = status_bytes("VmRSS"), watched
    strategy = another(spec, info)
    share = 4 * sum(p.ds_tensor.numel() for p in strategy._model.parameters())
    return found[0] - before, status_bytes("VmHWM") - before, share


def test_a_rank_of_zero_3_starts_in_the_memory_of_its_share_and_one_layer(ranks, model_of, tmp_path):
    large = build_tiny_model(tmp_path / "large", **LARGE)
    stored = (large / "model.safetensors").stat().st_size
    limit = stored / 4 + LAYER + 100 * MIB
    assert stored > 1.5 * limit
    specs = [spec_of(path, "stage 3") for path in (model_of(), large)]
    for loaded, above, share in ranks.run(peaks_of_a_start, 4, specs):
        assert loaded <= limit, f"{loaded / MIB:.0f} MiB of a model of {stored / MIB:.0f} MiB"
        # Then it makes float32 weights beside those that compute, sums of gradients and two moments: each a share.
        assert above <= limit + 4 * share, f"{above / MIB:.0f} MiB of a model of {stored / MIB:.0f} MiB"


@pytest.mark.parametrize("method", ["_connect", "_wrap"])
def test_a_lock_that_a_killed_build_left_is_named_with_what_to_do(tmp_path, caplog, monkeypatch, method):
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()

    def building(*_):
        FileBaton(str(lock)).wait()

    monkeypatch.setattr(deepspeed_strategy, "reported_locks", functools.partial(reported_locks, after=0.2))
    monkeypatch.setattr(deepspeed_strategy, "connect", building)
    strategy = mock.Mock(_info=mock.Mock(role="actor_train"), _opened=building)
    threading.Timer(3, lock.unlink).start()
    getattr(deepspeed_strategy.DeepSpeedStrategy, method)(strategy, *[None] * (2 if method == "_wrap" else 0))
    (record,) = [one for one in caplog.records if one.name == build_lock.__name__]
    said = f"actor_train: waiting for [01] s for the lock file {re.escape(str(lock))}, under which torch builds"
    assert re.match(said, record.message)
    assert "delete it, and this start goes on" in record.message
