"""An inference engine of the user's own: one file, named as `strategy_name`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roll.cli.__main__ import main

OWN = '''
import json
import threading
from pathlib import Path

from roll.strategies import hf_infer


class Diary:
    """Passes everything on to hf_infer, and writes down what it is asked and which weights it gets."""

    def __init__(self, inner, file):
        self._inner, self._file = inner, Path(file)
        self._busy = threading.Lock()

    def _note(self, what, count):
        with self._file.open("a") as file:
            file.write(json.dumps([what, count]) + "\\n")

    def _alone(self, method, *args):
        assert self._busy.acquire(blocking=False), "two threads call at once an engine that isn't made for it"
        try:
            return method(*args)
        finally:
            self._busy.release()

    def submit(self, requests):
        self._note("submit", len(requests))
        self._alone(self._inner.submit, requests)

    def poll(self, budget):
        return self._alone(self._inner.poll, 1)

    def update_weights(self, version, *args, **kwargs):
        self._note("weights", version)
        return self._inner.update_weights(version, *args, **kwargs)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def build(args, options, settings):
    return Diary(hf_infer.build(args, options, settings), options.options["diary"])
'''


def test_an_engine_of_ones_own_samples_for_two_steps(trained, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    engine = "actor_infer.strategy_args"
    rows = trained(f"{engine}.strategy_name=own.py:build", f"{engine}.strategy_config={{diary: notes.jsonl}}")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    notes = [json.loads(line) for line in Path("notes.jsonl").read_text().splitlines()]
    # 8 prompts x 8 responses in each step; two rows whenever engine and trainer are compared: twice.
    assert sum(count for what, count in notes if what == "submit") == 2 * 64 + 2 * 2
    assert [version for what, version in notes if what == "weights"][-2:] == [1, 2]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("own.py:bild", "did you mean 'build'"),
        ("gone.py:build", "a Python file that exists"),
        ("hf_inferr", "did you mean 'hf_infer'"),
    ],
)
def test_a_wrong_path_is_said_before_anything_is_loaded(trained, tmp_path, capsys, name, expected):
    (tmp_path / "own.py").write_text(OWN)
    assert main(["check", "toy", f"actor_infer.strategy_args.strategy_name={name}"]) == 2
    assert expected in capsys.readouterr().err
