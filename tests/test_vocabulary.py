"""Identifiers and files have the field's words, so that whoever knows verl, ROLL, TRL or vLLM finds them by grep."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

STANDARD_WORDS = {
    "_HOLDERS_SHOWN": "a name that says what is counted, such as MAX_SHOWN",
    "_LAST_WORDS": "ABORT_GRACE_S",
    "_lives": "_restarts_left",
    "_Living": "in-flight request",
    "_LOOK": "POLL_SECONDS",
    "_mind_memory": "_recycle_if_over_memory",
    "_MOST_SKIPPED": "MAX_CONSECUTIVE_SKIPS",
    "_PATIENCE": "a timeout, such as RPC_TIMEOUT_FRACTION",
    "actor_waits": "critic_warmup_steps",
    "AheadPlan": "async",
    "AheadState": "async",
    "begin_anew": "reset_context",
    "begins_anew": "reset_context",
    "drives_in_lockstep": "uses_lockstep_driver",
    "EnvironmentPlay": "workload",
    "EverythingFails": "AllEpisodesFailed",
    "fillers": "padding rows",
    "further_folders": "extra_output_dirs",
    "group_words": "group_size_key",
    "hand_over": "hand_to_engine",
    "INSTEAD": "OTHER_PIPELINE_KEYS",
    "Judge": "GroupFilter; a judge is a language model that grades responses",
    "Keeper": "pool",
    "LATER_KEYS": "UNSUPPORTED_KEYS",
    "Meeting": "rendezvous",
    "opened_thought": "forced_think_prefix",
    "OTHER_WORDS": "FOREIGN_KEYS",
    "Places": "slots",
    "played_turns": "turn_inputs",
    "PolicyScorer": "PolicyModel",
    "PromptPlay": "workload",
    "pull_to_start": "l2_coef",
    "raise_if_hopeless": "check_failure_rate",
    "Receipt": "TransferSummary",
    "Residency": "offload, onload",
    "RolloutAhead": "async",
    "Scorers": "RewardRouter",
    "short_or_right": "mask_long_errors",
    "stretch": "context of a trajectory, shard, or pipeline stage",
    "stretches": "contexts of a trajectory, shards, or pipeline stages",
    "Tally": "TransferStats",
    "tell_deepspeed": "leave_deepspeed_out",
    "Waiter": "PendingCall",
    "with_fillers": "padding rows",
}
"""Names that were in this code once and that nobody outside knew -> what to say instead. Plain English words that have
an ordinary use in code aren't here."""

STANDARD_FILES = {
    "ahead": "async_scheduler",
    "keeper": "env_pool",
    "places": "episode_slots",
    "residency": "offload",
    "score_table": "eval_table",
}
"""The same for files."""

FOLDERS = ("roll", "tests", "benchmarks", "examples")


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What is named in a file, with the line."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for field in ("id", "attr", "arg", "name", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield from ((part, line) for part in name.split("."))
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((part, line) for part in node.module.split("."))


def test_no_identifier_and_no_file_has_a_coined_name():
    found = []
    coined = re.compile(rf"\b({'|'.join(STANDARD_WORDS)})\b")
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        where = path.relative_to(ROOT)
        if path.stem in STANDARD_FILES:
            found.append(f"{where}: name it {STANDARD_FILES[path.stem]}")
        text = path.read_text("utf-8")
        if not coined.search(text):
            continue
        for name, line in identifiers(ast.parse(text)):
            if name in STANDARD_WORDS:
                found.append(f"{where}:{line}: {name}: use {STANDARD_WORDS[name]}")
    assert not found, "\n".join(found)
