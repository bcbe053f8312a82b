"""Replays: pictures and texts of an episode, and what becomes of those that can't be drawn."""

from __future__ import annotations

import logging
import os
import struct
import time
import zlib
from contextlib import suppress

import numpy
import pytest

from roll.envs.env_registry import build_env
from roll.envs.episode_pictures import save_replay
from roll.envs.wrappers import EnvSpec
from roll.pipelines.rl.agentic import draw_episodes
from roll.types.trajectory import Group, Task, Trajectory, Turn

LAKE = EnvSpec(
    tag="lake",
    env_type="frozen_lake-v1",
    env_config={"map": ["SFF", "HFF", "FFG"], "reward_goal": 2.5, "reward_step": -0.5},
    max_steps=4,
)
WAY = ["<answer>Right</answer>", "?", "<answer>Down</answer>", "so: <answer>Up</answer>"]

ODD = '''
import os, pathlib, subprocess, sys, time
from roll.envs.base import Env, Observation, StepResult
class Odd(Env):
    """Draws text, and does something odd on request."""
    def __init__(self, does=""):
        self.does = does
    def reset(self, seed, options):
        self.steps = []
        print("noise", flush=True)
        return Observation.of(f"seed {seed} of {options.get('of')} \\udc80")
    def step(self, action):
        self.steps.append(action)
        if self.does == "raise":
            raise KeyError("[/no] such cell")
        if self.does == "exit":
            print("going", file=sys.stderr)
            os._exit(3)
        if self.does == "kill":
            os.kill(os.getpid(), 9)
        if self.does.startswith("hang"):
            child = subprocess.Popen(["sleep", "30"])
            pathlib.Path(self.does.removeprefix("hang ")).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(30)
        return StepResult(reward=1.0, terminated=False, observation=Observation.of("still"))
    def render(self):
        if self.does == "grows":
            import numpy
            return numpy.zeros((len(self.steps) + 1, 2, 3), dtype=numpy.uint8)
        if self.does == "grey":
            import numpy
            return numpy.zeros((2, 2), dtype=numpy.uint8)
        return "board after " + ", ".join(self.steps)
'''


@pytest.fixture
def odd(tmp_path):
    """A spec of the environment above that does this."""
    (tmp_path / "odd.py").write_text(ODD)
    return lambda does="": EnvSpec(tag="odd", env_type=f"{tmp_path}/odd.py:Odd", env_config={"does": does})


def chunks(content):
    """(kind, content) of a PNG's chunks; their checksums hold."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = [], 8
    while at < len(content):
        (length,) = struct.unpack(">I", content[at : at + 4])
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", content[at + 8 + length : at + 12 + length])
        assert zlib.crc32(kind + body) == checksum
        found.append((kind, body))
        at += 12 + length
    return found


def pixels_of(header, packed):
    width, height = struct.unpack(">II", header[:8])
    rows = numpy.frombuffer(zlib.decompress(packed), dtype=numpy.uint8).reshape(height, 1 + 3 * width)
    return rows[:, 1:].reshape(height, width, 3)


def frames_of(content):
    """The pictures of an animated PNG."""
    found = chunks(content)
    header = found[0][1]
    packed = [body if kind == b"IDAT" else body[4:] for kind, body in found if kind in (b"IDAT", b"fdAT")]
    return [pixels_of(header, one) for one in packed]


def test_an_episode_is_drawn_step_by_step(tmp_path):
    save_replay(LAKE, 5, {}, {"": WAY}, tmp_path / "new" / "folder", timeout_s=60)
    folder = tmp_path / "new" / "folder"
    assert sorted(file.name for file in folder.iterdir()) == ["episode.png", "episode.txt", "first.png"]
    env = build_env(LAKE)
    env.reset(5, {})
    expected = [env.render()]
    for response in WAY:
        env.step(response)
        expected.append(env.render())
    frames = frames_of((folder / "episode.png").read_bytes())
    assert len(frames) == 5
    for frame, picture in zip(frames, expected, strict=True):
        numpy.testing.assert_array_equal(frame, picture)
    assert not numpy.array_equal(frames[0], frames[1])
    numpy.testing.assert_array_equal(frames_of((folder / "first.png").read_bytes())[0], expected[0])
    text = (folder / "episode.txt").read_text().splitlines()
    assert text[:3] == ["P _ _", "O _ _", "_ _ G"]
    assert text[3:5] == ["--- response 1: <answer>Right</answer>", "--- reward -0.5"]
    assert text[8:10] == ["--- response 2: ?", "--- reward 0"]
    assert text[10].startswith("No action was found")
    assert text[-2:] == ["--- response 4: so: <answer>Up</answer>", "--- reward -0.5, truncated"]


def test_an_episode_ends_where_the_environment_ends_it(tmp_path):
    answers = [f"<answer>{action}</answer>" for action in ("Down", "Right", "Right")]
    save_replay(LAKE, 5, {}, {"": answers}, tmp_path, timeout_s=60)
    text = (tmp_path / "episode.txt").read_text()
    assert text.rstrip().endswith("--- reward 0, terminated"), text
    assert "response 2" not in text
    assert len(frames_of((tmp_path / "episode.png").read_bytes())) == 2


def test_an_environment_that_draws_text_has_a_text_alone(tmp_path, odd):
    save_replay(
        odd(), 7, {"of": "nine"}, {"": ["<answer>a</answer>", "<answer>b</answer>"]}, tmp_path / "out", timeout_s=60
    )
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["episode.txt"]
    text = (tmp_path / "out" / "episode.txt").read_text().splitlines()
    assert text[0] == "seed 7 of nine \\udc80"
    assert text[-2:] == ["still", "board after a, b"]


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise", r"ended with exit code 1 while it drew; it wrote: (.|\n)*KeyError: '\[/no\] such cell'"),
        ("exit", "ended with exit code 3 while it drew; it wrote: going"),
        ("kill", "ended with signal 9"),
        ("grows", "expected all of one size"),
        ("grey", r"expected uint8 \[height, width, 3\]"),
    ],
)
def test_what_went_wrong_is_said_and_nothing_is_left(tmp_path, odd, does, said):
    with pytest.raises(RuntimeError, match=said):
        save_replay(odd(does), 1, {}, {"": ["<answer>a</answer>"]}, tmp_path / "out", timeout_s=60)
    assert not (tmp_path / "out").exists()


def test_one_that_takes_too_long_is_ended_with_all_that_it_started(tmp_path, odd):
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"odd\.py:Odd took over 3 s"):
        save_replay(odd(f"hang {tmp_path / 'ids'}"), 1, {}, {"": ["<answer>a</answer>"]}, tmp_path / "out", timeout_s=3)
    assert time.monotonic() - begun < 10
    assert not (tmp_path / "out").exists()
    for process in map(int, (tmp_path / "ids").read_text().split()):
        for _ in range(100):
            with suppress(ProcessLookupError):
                os.kill(process, 0)
                if _state(process) != "Z":
                    time.sleep(0.05)
                    continue
            break
        else:
            pytest.fail(f"process {process} is still there")


def _state(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"


def test_an_environment_that_cant_be_made_is_said(tmp_path):
    with pytest.raises(RuntimeError, match="custom_envs.lake.env_type: there is no file"):
        save_replay(EnvSpec(tag="lake", env_type="gone.py:Gone"), 1, {}, {"": []}, tmp_path / "out", timeout_s=60)


# --- of a run's groups ------------------------------------------------------------------------------------------------


def episode_of(task, member, *texts, status="ok"):
    turns = tuple(
        Turn(
            prompt_ids=(1,),
            response_ids=tuple(map(ord, text)),
            logprobs=(0.0,) * len(text),
            versions=(0,) * len(text),
            finish_reason="stop",
        )
        for text in texts
    )
    return Trajectory(task_id=task.id, member=member, turns=turns, reward=0.0, status=status)


def said(token_ids):
    return "".join(map(chr, token_ids))


def task_of(tag, number):
    return Task(id=f"{tag}-val-{number}", source="test", payload={}, seed=number, tag=tag, domain=tag)


def test_the_first_episode_with_a_reward_is_drawn_and_what_cant_be_is_logged(tmp_path, odd, caplog):
    tasks = [task_of("lake", 0), task_of("odd", 1), task_of("lake", 2)]
    groups = [
        Group(
            task=tasks[0],
            trajectories=(
                episode_of(tasks[0], 0, "<answer>Up</answer>", status="env_error"),
                episode_of(tasks[0], 1, "<answer>Down</answer>"),
            ),
        ),
        Group(task=tasks[1], trajectories=(episode_of(tasks[1], 0, "<answer>Down</answer>"),)),
        Group(task=tasks[2], trajectories=(episode_of(tasks[2], 0, status="timeout"),)),
    ]
    specs = {"lake": LAKE, "odd": odd("exit")}
    with caplog.at_level(logging.WARNING):
        draw_episodes(tmp_path / "pictures", specs, groups, lambda _task, ids: said(ids), timeout_s=60)
    assert [folder.name for folder in (tmp_path / "pictures").iterdir()] == ["lake-val-0"]
    text = (tmp_path / "pictures" / "lake-val-0" / "episode.txt").read_text()
    assert "--- response 1: <answer>Down</answer>\n--- reward 0, terminated" in text
    (record,) = caplog.records
    assert "no picture of odd-val-1: its process ended with exit code 3" in record.getMessage()


def test_a_folder_that_cant_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "pictures").write_text("a file")
    task = task_of("lake", 0)
    groups = [Group(task=task, trajectories=(episode_of(task, 0, "a"),))]
    draw_episodes(tmp_path / "pictures", {"lake": LAKE}, groups, lambda _task, ids: said(ids), timeout_s=60)
    assert "NotADirectoryError" in caplog.text


def test_roles_take_their_responses_as_it_is_their_turn(tmp_path):
    spec = EnvSpec(tag="nim", env_type="nim-v1", env_config={"min_heap": 6, "max_heap": 6}, action_pattern=None)
    save_replay(spec, 5, {}, {"second": ["2", "1"], "first": ["1", "2"]}, tmp_path, timeout_s=60)
    text = (tmp_path / "episode.txt").read_text().splitlines()
    assert text[:6] == [
        "Stones: 6", "--- response 1 (first): 1", "--- reward 0, first 0",
        "Stones: 5", "--- response 2 (second): 2", "--- reward 0, second 0",
    ]  # fmt: skip
    assert text[-3:] == ["--- response 4 (second): 1", "--- reward 0, first -1, second 1, terminated", "Stones: 0"]
