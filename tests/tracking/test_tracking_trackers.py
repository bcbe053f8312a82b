"""The registry, the stdout and tensorboard trackers, and failures that are attributed."""

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from roll.tracking.base import Destination, Sample, Tracker, TrackingError
from roll.tracking.stdout import StdoutTracker
from roll.tracking.steplines import read_steps
from roll.tracking.tracker_registry import MultiTracker, build_trackers
from roll.utils.logging import setup_logging

ROOT = Path(__file__).parents[2]
STEP = {
    "reward/mean": 0.5,
    "val/accuracy": 0.625,
    "response/length_mean": 12.25,
    "mismatch/kl": 1.5e-7,
    "actor/loss": -0.0123,
    "actor/grad_norm": 0.87,
    "throughput/tokens_per_second": 1234.5,
    "time/step": 3.21,
    "actor/entropy": 2.0,
}


class Recorder(Tracker):
    """Keeps what it is told; fails when told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("log")

    def log_samples(self, step: int, samples) -> None:
        self._call("samples")

    def finish(self, summary: Mapping[str, float]) -> None:
        self._call("finish")

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_run_goes_to_every_tracker_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trackers = build_trackers(["jsonl", "stdout"], {"stdout": {"rows": 5}}, tmp_path / "logs", None)
    trackers.log(1, STEP)
    trackers.finish({})
    assert read_steps(tmp_path / "logs" / "metrics.jsonl") == [{"step": 1, **STEP}]
    assert "step 1" in capsys.readouterr().out


def test_no_tracker_at_all_is_fine(tmp_path: Path):
    trackers = build_trackers([], {}, tmp_path, None)
    trackers.log(1, {"reward/mean": 1.0})
    trackers.finish({})
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path: Path):
    with pytest.raises(ValueError, match=r"track_with: unknown name 'tensorbord'; did you mean 'tensorboard'"):
        build_trackers(["tensorbord"], {}, tmp_path, None)


def test_a_negative_resume_step_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="resume_step must be a finished step"):
        build_trackers(["jsonl"], {}, tmp_path, -1)


def test_an_undocumented_metric_is_refused_before_any_tracker_sees_it():
    recorder = Recorder()
    with pytest.raises(AssertionError, match="undocumented metric names"):
        MultiTracker({"one": recorder}).log(1, {"reward/mean": 1.0, "rewards/mean": 1.0})
    assert recorder.calls == []


@pytest.mark.parametrize("second", [2, 1])
def test_a_step_logged_twice_or_out_of_order_is_refused(second: int):
    tracker = MultiTracker({"one": Recorder()})
    tracker.log(2, {})
    with pytest.raises(AssertionError, match=f"step {second} logged after step 2"):
        tracker.log(second, {})


def essential(fails: str = "") -> Recorder:
    """A tracker without which a run isn't on record."""
    recorder = Recorder(fails)
    recorder.essential = True
    return recorder


def test_an_essential_tracker_that_fails_is_named_with_the_step_and_the_reason():
    other = Recorder()
    tracker = MultiTracker({"bad": essential("log"), "good": other})
    with pytest.raises(TrackingError, match=r"tracker 'bad' failed while logging step 7: OSError: .*No space left"):
        tracker.log(7, {})
    assert other.calls == ["log"]
    with pytest.raises(TrackingError, match=r"tracker 'bad' failed while logging the samples of step 7"):
        MultiTracker({"bad": essential("samples")}).log_samples(7, [])


def test_any_other_tracker_that_fails_is_left_out_with_one_warning(caplog, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "left on device")
    good, bad = Recorder(), Recorder("log")
    tracker = MultiTracker({"bad": bad, "good": good})
    tracker.log(7, {})
    tracker.log(8, {})
    tracker.finish({"steps": 8})
    assert (bad.calls, good.calls) == (["log"], ["log", "log", "finish"])
    (warning,) = caplog.messages
    assert "tracker 'bad' failed while logging step 7" in warning
    assert "[Errno 28] No space [WANDB_API_KEY]" in warning
    assert list(tracker.failed) == ["bad"]


def test_a_tracker_that_cannot_be_opened_is_named(tmp_path: Path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrackingError, match="tracker 'jsonl' failed while opening"):
        build_trackers(["jsonl"], {}, tmp_path, 3)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_shows_at_the_step_where_it_happens(tmp_path: Path):
    (tmp_path / "metrics.jsonl").touch()
    tracker = build_trackers(["jsonl"], {}, tmp_path, 0)
    tracker._trackers["jsonl"]._metrics._file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(TrackingError, match=r"tracker 'jsonl' failed while logging step 1: .*No space left"):
        tracker.log(1, {"reward/mean": 1.0})


def test_finish_closes_the_others_and_then_raises_the_first_failure():
    first, second = essential("finish"), Recorder()
    with pytest.raises(TrackingError, match="tracker 'first' failed while closing"):
        MultiTracker({"first": first, "second": second}).finish({})
    assert second.calls == ["finish"]


def test_off_a_terminal_a_step_is_one_plain_line(tmp_path: Path):
    out = io.StringIO()
    tracker = StdoutTracker(Destination(tmp_path, 4), file=out)
    tracker.log(5, STEP)
    tracker.log(6, {"reward/mean": 0.25})
    tracker.log(6, {"val/accuracy": 0.0, "val/reward": 0.3125})  # dense rewards: nothing is wholly right yet
    tracker.log_samples(6, [Sample(domain="math", prompt="p" * 500, response="[red]2\n", reward=1.0)])
    tracker.finish({})
    resumed, fifth, sixth, validated, sample = out.getvalue().splitlines()
    assert resumed == "resumed after step 4"
    assert fifth == (
        "step 5  reward 0.500  accuracy 62.5%  length 12.2  mismatch 1.5e-07  loss -0.0123  "
        "grad norm 0.870  tokens/s 1,234  time 3.2s"
    )
    assert sixth == "step 6  reward 0.250"
    assert validated == "step 6  accuracy 0.0%  val reward 0.312"
    assert sample == f"sample  step 6  math  reward 1  '{'p' * 160}' -> '[red]2\\n'"
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_a_step_is_a_row_and_old_rows_leave(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    tracker = StdoutTracker(Destination(tmp_path, None), live=True, rows=2, file=out)
    for step in (1, 2, 3):
        tracker.log(step, {**STEP, "reward/mean": float(step)})
    tracker.finish({})
    last_frame = out.getvalue().rsplit("grad norm", 1)[-1]
    assert "\x1b" in out.getvalue()
    assert ("2.000" in last_frame, "3.000" in last_frame, "1.000" in last_frame) == (True, True, False)


@pytest.mark.parametrize(("terminal", "term", "redraws"), [(True, "xterm", 1), (True, "dumb", 0), (False, "xterm", 0)])
def test_the_table_is_for_terminals_that_can_redraw(tmp_path: Path, monkeypatch, terminal, term, redraws):
    out = io.StringIO()
    out.isatty = lambda: terminal
    monkeypatch.setenv("TERM", term)
    tracker = StdoutTracker(Destination(tmp_path, None), file=out)
    tracker.log(1, STEP)
    tracker.finish({})
    assert ("\x1b" in out.getvalue()) == bool(redraws)
    assert "0.500" in out.getvalue()


def test_failed_episodes_are_told(tmp_path):
    for live, words in ((False, "failed 24"), (True, "step 2: 24 episodes failed")):
        out = io.StringIO()
        tracker = StdoutTracker(Destination(tmp_path, None), live=live, file=out)
        tracker.log(1, {**STEP, "rollout/failed_episodes": 0.0})
        assert "failed" not in out.getvalue()
        tracker.log(2, {**STEP, "rollout/failed_episodes": 24.0})
        tracker.finish({})
        assert words in out.getvalue()


def test_the_table_fits_eighty_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = io.StringIO()
    tracker = StdoutTracker(Destination(tmp_path, None), live=True, file=out)
    tracker.log(12344, {"val/accuracy": 0.0, "val/reward": -10.5})
    assert "step 12344: held-out reward -10.500" in out.getvalue()
    tracker.log(12345, {**STEP, "throughput/tokens_per_second": 123456.0, "time/step": 1234.5})
    tracker.finish({})
    assert "12345" in out.getvalue()
    assert all(word in out.getvalue() for word in ("mismatch", "grad norm", "123,456", "1234.5s", "-0.0123"))


def test_log_lines_appear_above_the_table_and_none_is_overwritten(tmp_path: Path):
    out = io.StringIO()
    setup_logging()
    tracker = StdoutTracker(Destination(tmp_path, None), live=True, file=out)
    for step in (1, 2):
        tracker.log(step, STEP)
        logging.getLogger("roll.test").info("line of step %d", step)
    tracker.finish({})
    assert out.getvalue().count("line of step 1") == 1
    assert out.getvalue().count("line of step 2") == 1


def test_an_output_that_knows_only_ascii_gets_escapes_instead_of_an_error(tmp_path: Path):
    raw = io.BytesIO()
    tracker = StdoutTracker(Destination(tmp_path, None), file=io.TextIOWrapper(raw, encoding="ascii"))
    tracker.log_samples(1, [Sample(domain="☃", prompt="", response="", reward=0.0)])
    assert b"\\u2603" in raw.getvalue()


def test_training_goes_on_when_the_reader_of_the_pipe_leaves(tmp_path: Path):
    code = (
        "import sys; from pathlib import Path; from roll.tracking.tracker_registry import build_trackers\n"
        f"t = build_trackers(['jsonl', 'stdout'], {{}}, Path({str(tmp_path)!r}), None)\n"
        "for step in range(1, 2001): t.log(step, {'reward/mean': 1.0})\n"
        "t.finish({}); print('still here'); sys.stderr.write('done')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("done")
    assert done.stderr.count("closed by its reader") == 1
    assert len(read_steps(tmp_path / "metrics.jsonl")) == 2000


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path):
    for resume_step, steps in ((None, (1, 2, 3)), (1, (2, 3, 4))):
        tracker = build_trackers(["tensorboard"], {}, tmp_path, resume_step)
        for step in steps:
            tracker.log(step, {"reward/mean": step / 4})
        tracker.log_samples(4, [Sample(domain="math", prompt="a", response="<b>b</b>", reward=0.0)])
        tracker.finish({"steps": 4.0})
    assert scalars(tmp_path) == {"reward/mean": [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]}


def test_tensorboard_forgets_an_older_run_in_the_same_folder(tmp_path: Path):
    for value in (0.25, 0.5):
        tracker = build_trackers(["tensorboard"], {}, tmp_path, None)
        tracker.log(1, {"reward/mean": value})
        tracker.finish({})
    assert scalars(tmp_path) == {"reward/mean": [(1, 0.5)]}


def test_finishing_twice_closes_once(tmp_path: Path):
    recorder = Recorder()
    tracker = MultiTracker({"one": recorder})
    tracker.finish({"steps": 1.0})
    tracker.finish({})
    assert recorder.calls == ["finish"]
