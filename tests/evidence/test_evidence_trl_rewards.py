"""TRL's own reward functions, from the pinned wheel: what the loader gives for them is what they give by themselves.

The wheel is fetched from the package index and unpacked, without its dependencies: `trl/rewards` is plain Python.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from roll.pipelines.rollouts.reward_router import in_run
from roll.rewards.base import Reward, RewardRequest, RewardSpec
from roll.rewards.reward_registry import load_reward
from roll.types.trajectory import Task

VERSION = "1.16.0"
MODULES = ("accuracy_rewards", "format_rewards", "other_rewards")
TEXTS = [
    "<think>\n6 x 7\n</think>\nIt is \\boxed{42}",
    "It is \\boxed{41}",
    "no answer",
    "<think>never closed \\boxed{42}",
    "a b a b a b a b a b",
]
OWN = """
from trl_own import {module}

{name} = {module}.{call}
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder from which `trl_own.accuracy_rewards` and its neighbours can be imported."""
    folder = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "pip", "download", f"trl=={VERSION}", "--no-deps", "-q", "-d", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip(f"the wheel of trl {VERSION} can't be fetched")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "wheel")
    (folder / "trl_own").mkdir()
    (folder / "trl_own" / "__init__.py").write_text("")
    for module in MODULES:
        text = (folder / "wheel" / "trl" / "rewards" / f"{module}.py").read_text("utf-8")
        (folder / "trl_own" / f"{module}.py").write_text(
            text.replace(
                "from ..import_utils import is_math_verify_available", "is_math_verify_available = lambda: True"
            )
        )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl_own"]:
        del sys.modules[name]


FUNCTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "accuracy": ("accuracy_rewards", "accuracy_reward", {}),
    "reasoning": ("accuracy_rewards", "reasoning_accuracy_reward", {"reasoning_delimiters": ["</think>"]}),
    "cosine": ("accuracy_rewards", "get_cosine_scaled_reward(max_len=10)", {}),
    "form": ("format_rewards", "think_format_reward", {}),
    "repetition": ("other_rewards", "get_repetition_penalty_reward(ngram_size=2)", {}),
    "overlong": ("other_rewards", "get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=5)", {}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_trls_gives_the_same_through_the_loader(name: str, rewards: Path) -> None:
    module, call, kwargs = FUNCTIONS[name]
    file = rewards / f"own_{name}.py"
    file.write_text(OWN.format(module=module, name=name, call=call))
    spec = in_run(RewardSpec(name=f"{file}:{name}", kwargs=kwargs), 10)
    golds = ["\\boxed{42}", "$42$", "", "42", "7"]  # the third isn't readable: None
    ids = [[ord(c) % 5 for c in text[:12]] for text in TEXTS]
    requests = [
        RewardRequest(
            id=str(i),
            domain="d",
            response=text,
            task=Task(
                id=f"t:{i}",
                source="t",
                payload={"prompt": None, "messages": [{"role": "user", "content": "?"}], "solution": gold},
                seed=0,
                tag="t",
                domain="d",
            ),
            completion_ids=own,
            step=3,
        )
        for i, (text, gold, own) in enumerate(zip(TEXTS, golds, ids, strict=True))
    ]
    outcomes = load_reward(spec).score_all(requests)
    function = eval(f"module.{call}", {"module": import_module(f"trl_own.{module}")})
    completions = [[{"role": "assistant", "content": text}] for text in TEXTS]
    prompts = [[{"role": "user", "content": "?"}]] * len(TEXTS)
    expected = function(prompts=prompts, completions=completions, completion_ids=ids, solution=golds, **kwargs)
    assert [o.value if isinstance(o, Reward) else o for o in outcomes] == expected
    assert len(set(map(str, expected))) > 1
    if name == "accuracy":
        assert None in expected
        assert isinstance(outcomes[0], Reward)
        assert "gold_parsed: " in outcomes[0].explanation  # what it gave log_extra
