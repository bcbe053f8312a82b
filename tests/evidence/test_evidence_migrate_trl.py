"""A file of TRL's and what `roll migrate` makes of it train the same, or the report says what differs.

Both sides run: TRL's own trainers of the pinned wheel, and our pipelines on the migrated file. `ROLL_PEERS=folder`
names a folder that has TRL already; otherwise it is installed without its dependencies into a temporary one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from trl_first_steps import Case, in_reach, leaves, lines_of, migrated, our_step, their_step, write_case

RATE = 1e-3


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": [_user(f"{i}?")]} for i in range(count)]


def _completions(count: int) -> list[dict[str, Any]]:
    return [{**row, "completion": [_assistant("abcdefgh"[: 1 + i % 5])]} for i, row in enumerate(_prompts(count))]


def _labelled(count: int) -> list[dict[str, Any]]:
    return [{**row, "label": i % 3 > 0} for i, row in enumerate(_completions(count))]


def _pairs(count: int) -> list[dict[str, Any]]:
    return [
        {**row, "chosen": [_assistant("abcdefgh"[: 1 + i % 5])], "rejected": [_assistant("XYZWV"[: 1 + i % 4])]}
        for i, row in enumerate(_prompts(count))
    ]


def _conversations(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "system", "content": "s"}] * (i % 2)
         + [_user(f"{i}?"), _assistant("abcdefgh"[: 1 + i % 5]), _user("and?"), _assistant("xyz"[: 1 + i % 3])]}
        for i in range(count)
    ]  # fmt: skip


@dataclass(frozen=True)
class File:
    """A file as people write it, its rows, and what its author answers where the new file asks."""

    job: str
    rows: list[dict[str, Any]]
    keys: dict[str, Any]
    answers: tuple[str, ...] = ()
    loss_differs: str = ""
    """Words of the report that say why losses of equal gradients differ."""


PLAYED = {"learning_rate": RATE, "num_generations": 4, "max_completion_length": 8, "gradient_accumulation_steps": 2,
          "reward_funcs": ["lower_case.share"]}  # fmt: skip
PLAIN = {"learning_rate": RATE}
FILES = {
    "GRPO": File("grpo", _prompts(4), {**PLAYED, "beta": 0.04}),
    "RLOO": File("rloo", _prompts(4), {**PLAYED, "normalize_advantages": False}),
    "DPO": File("dpo", _pairs(8), {**PLAIN, "beta": 0.2, "loss_type": "sigmoid"}),
    "KTO": File("kto", _labelled(8), {**PLAIN, "desirable_weight": 1.0, "undesirable_weight": 1.33}),
    "SFT on messages": File("sft", _conversations(16), {**PLAIN, "gradient_accumulation_steps": 2,
                                                         "assistant_only_loss": True}),
    "SFT on completions": File("sft", _completions(16), {**PLAIN, "gradient_accumulation_steps": 2,
                                                          "completion_only_loss": True}),
    "reward model": File("reward", _pairs(8), {**PLAIN, "center_rewards_coefficient": 0.01}),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Tiny models, where TRL can be imported."""
    with in_reach(tmp_path_factory.mktemp("trl")) as built:
        yield built


@dataclass
class Moved:
    """A file that was moved."""

    case: Case
    report: Any
    ours: dict[str, Any]
    lines: list[str] = field(default_factory=list)

    def tells(self, *words: str) -> bool:
        """Whether a line of the report has all of these words."""
        return any(all(word in line for word in words) for line in self.lines)


def _move(folder: Path, model: Path, file: File, **more: Any) -> Moved:
    case = write_case(folder, file.job, model, file.rows, **{**file.keys, **more})
    report, ours = migrated(case)
    return Moved(case, report, ours, lines_of(report))


def _answered(moved: Moved, file: File) -> list[str]:
    """The answers, each to a question that the new file or the report asks."""
    asked = [place for place, value in leaves(moved.ours) if value == "???"]
    for answer in file.answers:
        place = answer.partition("=")[0].lstrip("+")
        assert place in asked or any(line.startswith(f"{place}:") for line in moved.report.missing), (place, asked)
    assert set(asked) <= {answer.partition("=")[0].lstrip("+") for answer in file.answers}, asked
    return list(file.answers)


@pytest.mark.parametrize("name", FILES)
def test_the_first_step_has_the_loss_and_the_gradient_of_trls_trainer(
    name: str, models: dict[str, Path], tmp_path: Path, evidence_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = FILES[name]
    moved = _move(tmp_path / "run", models["classifier" if file.job == "reward" else "policy"], file)
    monkeypatch.syspath_prepend(moved.case.folder)  # TRL looks for reward functions where it is started
    monkeypatch.setenv("PYTHONPATH", str(moved.case.folder), prepend=":")
    answers = _answered(moved, file)
    if "reference" in moved.ours:  # the policy isn't its own reference, so that no term is nothing
        answers.append(f"reference.model_args.model_name_or_path={models['other']}")
    theirs = their_step(moved.case, reference=models["other"] if "reference" in moved.ours else None)
    ours = our_step(moved.case, *answers)
    loss, gradient = theirs.differs(ours)
    line = f"| {name} | {theirs.loss:.6f} | {ours.loss:.6f} | {loss:.1e} | {gradient:.1e} |"
    (evidence_folder / f"migrate-trl-{file.job}.md").open("a").write(f"{line}\n")
    assert gradient <= 1e-6
    if name == "RLOO":
        # Theirs is the mean of -A over responses, 0 where A has that mean; ours of -A times the tokens of a response.
        assert moved.ours["loss_agg_mode"] == "seq-mean-token-sum"
    else:
        assert loss <= 1e-6 * max(1.0, abs(theirs.loss))
    assert ours.rate == pytest.approx(theirs.rate)
