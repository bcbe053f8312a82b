"""Every data set of reasoning-gym through the reward `reasoning_gym` with its default options."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")
sys.path.insert(0, str(Path(__file__).parents[1] / "rewards"))

from generated_sets import FORMS, NONSENSE, OPTIONS, right_answer
from reasoning_gym.factory import DATASETS

from roll.configs.schema.worker_config import ProceduralTask
from roll.data.procedural import procedural_tasks
from roll.isolation.sandbox.base import Sandbox, SandboxUnavailable
from roll.isolation.sandbox.open_sandbox import open_sandbox
from roll.rewards.reasoning_gym import PAYLOAD_KEY, reasoning_gym
from roll.utils.rows import DataError

REFUSED = {"game_of_life_halting"}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        opened = open_sandbox("auto")
    except SandboxUnavailable as error:
        pytest.skip(f"no sandbox works here: {error}")
    with opened:
        yield opened


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # `codeio` writes files


@pytest.mark.parametrize("name", sorted(DATASETS))
def test_a_right_answer_gets_full_marks_and_a_text_that_is_none_does_not(name: str, sandbox: Sandbox) -> None:
    spec = ProceduralTask(tag=name, dataset=name, size=3, config=OPTIONS.get(name, {}))
    if name in REFUSED:
        with pytest.raises(DataError, match=f"the verifier of '{name}' gives full marks to"):
            procedural_tasks(spec, seed=1)
        return
    for task in procedural_tasks(spec, seed=1):
        answer = right_answer(task.payload[PAYLOAD_KEY]["entry"])
        for form in FORMS:
            assert reasoning_gym(form.format(answer), task, sandbox=sandbox).value == 1.0, form
        response = f"Let me see: 1 + 1 = 2.\nAnswer: {answer}\n\nI hope that helps."
        assert reasoning_gym(response, task, extract="after_answer", sandbox=sandbox).value == 1.0
        for text in NONSENSE:
            assert reasoning_gym(text, task, sandbox=sandbox).value == 0.0, text
