"""200 mutated launch scripts and YAML files of four projects: a report with every key, or one sentence."""

from __future__ import annotations

from pathlib import Path

from migrated_mutations import mutated, problems


def test_every_key_of_200_mutated_files_is_in_the_report(tmp_path: Path):
    found: list[str] = []
    count = 0
    for seed in range(1000, 1200):
        file, keys = mutated(seed, tmp_path)
        found += problems(file, keys)
        count += len(keys)
    assert count > 3000 and not found, "\n".join(found)
