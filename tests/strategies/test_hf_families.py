"""Six families, one for each way in which they differ, and three that are refused; all: tests/evidence."""

from __future__ import annotations

import pytest
import torch
from family_contract import report_on
from tiny_families import tiny_family

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.training.pretrained import load_causal_lm

OPEN = dict.fromkeys(("padded", "packed", "shared", "sampled"), "right")


@pytest.mark.parametrize(
    ("kind", "closed"),
    [
        ("afmoe", ()),  # experts and windows; transformers' own masks leak where rows are packed
        ("gemma2", ("packed", "shared")),  # attention with a cap, which needs eager attention
        ("deepseek_v3", ()),  # compressed keys, experts in groups
        ("gpt_neox", ()),  # another head
        ("hyperclovax", ()),  # logits with a factor
        ("hrm_text", ()),  # a parameter that is never trained
    ],
)
def test_a_family_that_differs_is_right_in_every_way_that_check_accepts(tmp_path, kind, closed):
    ways = report_on(tiny_family(tmp_path / kind, kind)).ways
    assert {way: words.partition(":")[0] for way, words in ways.items()} == {**OPEN, **dict.fromkeys(closed, "refused")}


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("recurrent_gemma", "computes other log-probs for rows padded at the right"),  # a state over padding
        ("modernbert-decoder", "can't be told apart"),
        ("blt", "can't compute a few rows of tokens here"),
    ],
)
def test_a_family_that_cannot_be_run_is_refused_by_check_with_what_the_start_would_say(tmp_path, kind, words):
    report = report_on(tiny_family(tmp_path / kind, kind))
    assert report.verdict == "refused"
    assert words in " ".join(report.ways.values())


def test_a_cap_of_attention_is_computed_and_sdpa_which_leaves_it_out_is_refused(tmp_path):
    folder = str(tiny_family(tmp_path / "m", "gemma2", spread=1.0, attn_logit_softcapping=2.0))
    ids = torch.tensor([[3, 10, 17, 24]])
    with torch.no_grad():
        model = load_causal_lm(ModelArgs(model_name_or_path=folder), torch.float32)
        eager = load_causal_lm(ModelArgs(model_name_or_path=folder, attn_implementation="eager"), torch.float32)
        assert torch.equal(model(ids).logits, eager(ids).logits)
        model.set_attn_implementation("sdpa")
        assert not torch.allclose(model(ids).logits, eager(ids).logits, atol=1e-2)
    with pytest.raises(ValueError, match="attn_implementation: this model caps the logits"):
        load_causal_lm(ModelArgs(model_name_or_path=folder, attn_implementation="sdpa"), torch.float32)
