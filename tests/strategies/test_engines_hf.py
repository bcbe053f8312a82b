"""`hf_infer` keeps what every engine promises."""

from __future__ import annotations

import pytest
import torch
from engine_contract import CASES, EngineUnderTest, a_wrong_weight_update_is_refused_and_leaves_no_stale_engine, ids

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.engines.hf.hf_infer import HfInfer
from roll.strategies.training.pretrained import context_length, eos_token_ids, load_causal_lm, load_tokenizer


@pytest.fixture(scope="module")
def tested(model_of):
    path = model_of("qwen3", hidden=128)
    args = ModelArgs(model_name_or_path=str(path))
    model, tokenizer = load_causal_lm(args, torch.float32), load_tokenizer(args)
    engine = HfInfer(
        model,
        eos_token_ids=eos_token_ids(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        max_context=context_length(model),
        decode=tokenizer.decode,
    )
    return EngineUnderTest(engine, path, max_context=256)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_hf_infer(tested, case):
    case(tested)


@pytest.mark.parametrize("kind", ["foreign", "missing", "shape"])
def test_hf_infer_refuses_wrong_weights(tested, kind):
    a_wrong_weight_update_is_refused_and_leaves_no_stale_engine(tested, kind)
