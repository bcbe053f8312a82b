"""Every text family of transformers in every way, on tiny models: as the table of families says, and none wrong."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from family_contract import WAYS as TRIED
from family_contract import report_on
from tiny_families import DECODERS, OTHERS, tiny_family

from roll.configs.catalog.family_ways import LANGUAGE_MODELS, WAYS

VERDICTS = ("right", "refused", "wrong")
AT_LEAST = 60
"""Decoders that train and sample without another engine."""


def test_every_family_is_right_or_refused_by_check_and_the_table_says_which(tmp_path, evidence_folder, capsys):
    torch.set_num_threads(1)
    reports = {kind: report_on(tiny_family(tmp_path / kind, kind)) for kind in (*DECODERS, *OTHERS)}
    verdicts = {kind: one.verdict for kind, one in reports.items()}
    words = [f"{sum(verdicts[kind] == verdict for kind in DECODERS)} {verdict}" for verdict in VERDICTS]
    wrong = [kind for kind, verdict in verdicts.items() if verdict == "wrong"]
    counts = f"{len(DECODERS)} decoders: {', '.join(words)}; with {len(OTHERS)} others: {len(wrong)} wrong"
    told = {kind: {**one.ways, "needs": one.needs} for kind, one in reports.items()}
    (evidence_folder / "families.json").write_text(json.dumps({"counts": counts, **told}, indent=1))
    with capsys.disabled():
        sys.stdout.write(f"\n{counts}\n")
    assert wrong == []
    assert sum(verdicts[kind] == "right" for kind in DECODERS) >= AT_LEAST
    closed = {kind: {way for way in TRIED if one.ways[way] != "right"} for kind, one in reports.items()}
    assert {kind: ways for kind, ways in closed.items() if ways != WAYS[kind].keys()} == {}


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
def test_the_table_names_decoders_that_the_contract_builds(kind):
    assert kind in DECODERS
