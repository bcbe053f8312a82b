"""The table of a mere validation: formulas worked by hand, failures named, files whole."""

from __future__ import annotations

import io
import json
import math

import pytest
from rich.console import Console

from roll.pipelines.rollouts.eval_table import results_by_tag, table, write_eval_files
from roll.pipelines.rollouts.rollout_metrics import episode_counts
from roll.pipelines.rollouts.validation import episode_success, successes, validation_samples
from roll.types.trajectory import Group, Task, Trajectory, Turn


class Letters:
    """A token is a letter's number."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(i) for i in ids if i != ord("d") or not skip_special_tokens)


def turn(response="ab", reward=0.0, prompt="?", **metrics):
    return Turn(
        prompt_ids=tuple(map(ord, prompt)),
        response_ids=tuple(map(ord, response)),
        logprobs=(0.0,) * len(response),
        versions=(0,) * len(response),
        finish_reason="stop",
        reward=reward,
        metrics={name: float(value) for name, value in metrics.items()},
    )


def group_of(name, *members, tag="lake", seed=3):
    """Members are (turns, status, error), or turns alone."""
    task = Task(id=name, source="test", payload={}, seed=seed, tag=tag, domain=tag)
    played = []
    for number, member in enumerate(members):
        turns, status, error = member if isinstance(member, tuple) else (member, "ok", "")
        reward = sum(one.reward for one in turns)
        played.append(
            Trajectory(task_id=name, member=number, turns=tuple(turns), reward=reward, status=status, error=error)
        )
    return Group(task=task, trajectories=tuple(played))


GROUPS = [
    group_of("lake-0", [turn("a", 1.0, pushes=1), turn("bcd", 2.0, pushes=2, success=1)]),
    group_of("dial-0", [turn(reward=0.25)], tag="dial"),
    group_of("lake-1", [turn("ab", 1.0, success=0)], ([turn("ab", -5.0)], "timeout", "Lake [/b] took over 1 s")),
    group_of("lake-2", ([turn("abcd", 0.5)], "truncated", "")),
]


def test_scores_are_means_over_the_episodes_that_have_a_reward():
    lake, dial = results_by_tag(GROUPS)
    # Rewards 3, 1, 0.5; successes 1, 0, and 0 for the one that was cut off.
    assert (lake.tag, lake.episodes, lake.failed) == ("lake", 4, 1)
    assert lake.reward == pytest.approx(1.5)
    # Deviations 1.5, -0.5, -1: variance 3.5 / 2, divided by 3.
    assert lake.reward_error == pytest.approx(math.sqrt(3.5 / 2 / 3))
    assert lake.success == pytest.approx(1 / 3)
    # Deviations 2/3, -1/3, -1/3: variance (6/9) / 2 = 1/3, divided by 3.
    assert lake.success_error == pytest.approx(1 / 3)
    assert lake.turns == pytest.approx(4 / 3)
    assert lake.tokens == pytest.approx((4 + 2 + 4) / 3)
    assert lake.counts == {"pushes": pytest.approx(1.0)}, "3, 0 and 0; success has a column of its own"
    assert lake.first_failure == "lake-1#1: timeout: Lake [/b] took over 1 s"
    assert (dial.tag, dial.success, dial.success_error, dial.reward_error) == ("dial", None, None, None)
    assert (dial.reward, dial.counts, dial.first_failure, dial.no_room) == (0.25, {}, "", 0)


def test_where_nothing_was_played_to_its_end_there_are_no_means():
    error = "turn 0 has 300 tokens of context and no room to respond"
    (score,) = results_by_tag([group_of("lake-0", ([], "truncated", error), ([turn()], "env_error", "KeyError"))])
    assert (score.episodes, score.failed, score.no_room) == (2, 2, 0)
    assert (score.success, score.reward, score.turns, score.tokens) == (None, None, None, None)
    assert score.counts == {}
    assert score.first_failure == f"lake-0#0: truncated: {error}"


def test_episodes_that_ran_out_of_room_count_and_are_named():
    error = "turn 1 has 300 tokens of context and no room to respond"
    (score,) = results_by_tag([group_of("lake-0", ([turn()], "truncated", error), [turn(success=1)])])
    assert (score.failed, score.no_room, score.first_no_room) == (0, 1, f"lake-0#0: {error}")
    assert score.success == 0.5


def printed(scores, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(table(scores))
    return console.file.getvalue()


def test_the_table_shows_what_went_wrong_whatever_signs_it_holds():
    shown = printed(results_by_tag([*GROUPS, group_of("x", [turn(reward=1.0)], tag="[red]odd[/]")]))
    assert "33.3% ± 33.3%" in shown
    assert "1.5 ± 0.76" in shown
    assert "[red]odd[/]" in shown
    assert "1 failed, e.g. lake-1#1: timeout: Lake [/b] took over 1 s" in shown
    assert "cut off" not in shown
    plain = printed(results_by_tag(GROUPS[1:2]))
    assert "failed," not in plain
    assert "–" in plain, "no success to show"


def test_a_long_message_keeps_its_beginning_and_its_end():
    error = "Traceback:\n" + "  in a file\n" * 200 + "KeyError: 'cell'"
    shown = printed(results_by_tag([group_of("lake-0", ([turn()], "env_error", error))]))
    assert "lake-0#0: env_error: Traceback:" in shown
    assert shown.rstrip().endswith("KeyError: 'cell'")
    assert shown.count("in a file") < 40


def test_cut_off_episodes_are_noted_below_the_table():
    error = "turn 1 has 300 tokens of context and no room to respond"
    shown = printed(results_by_tag([group_of("lake-0", ([turn()], "truncated", error))]))
    assert f"1 cut off, e.g. lake-0#0: {error}" in shown


def test_files_hold_the_table_and_every_episode(tmp_path):
    folder = tmp_path / "new" / "folder"
    scores = write_eval_files(folder, GROUPS, Letters(), {"model": "m", "step": 0, "seed": 42})
    content = json.loads((folder / "scores.json").read_text())
    assert (content["model"], content["step"], content["seed"]) == ("m", 0, 42)
    assert [score["reward"] for score in content["scores"]] == [score.reward for score in scores]
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert [(line["task"], line["member"]) for line in lines] == [
        ("lake-0", 0), ("dial-0", 0), ("lake-1", 0), ("lake-1", 1), ("lake-2", 0)
    ]  # fmt: skip
    assert lines[0]["turns"][1] == {
        "prompt": "?",
        "response": "bcd",
        "text": "bc",
        "finish_reason": "stop",
        "reward": 2.0,
        "metrics": {"pushes": 2.0, "success": 1.0},
    }
    assert (lines[0]["tag"], lines[0]["seed"], lines[0]["reward"], lines[0]["success"]) == ("lake", 3, 3.0, 1.0)
    failed = lines[3]
    assert (failed["status"], failed["error"]) == ("timeout", "Lake [/b] took over 1 s")
    assert (failed["reward"], failed["success"]) == (None, None), "a failure's reward says nothing"
    assert sorted(file.name for file in folder.iterdir()) == ["episodes.jsonl", "scores.json"]


def test_texts_that_no_file_can_hold_are_escaped(tmp_path):
    groups = [group_of("lake-0", ([turn("é\ud800")], "env_error", "no file 'a\udc80'"))]
    write_eval_files(tmp_path, groups, Letters(), {})
    raw = (tmp_path / "episodes.jsonl").read_text(encoding="utf-8")
    assert "é" in raw
    assert json.loads(raw)["error"] == "no file 'a\udc80'"
    assert json.loads(raw)["turns"][0]["response"] == "é\ud800"


def test_files_stay_as_they_were_when_writing_fails(tmp_path):
    write_eval_files(tmp_path, GROUPS, Letters(), {"model": "first"})
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}

    class Broken:
        def decode(self, ids):
            raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token"):
        write_eval_files(tmp_path, GROUPS[:1], Broken(), {"model": "second"})
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


# --- an episode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "status", "success"),
    [
        ([turn(success=1)], "ok", 1.0),
        ([turn(success=0)], "ok", 0.0),
        ([turn(success=1), turn()], "ok", None),
        ([turn()], "ok", None),
        ([turn()], "truncated", None),
        ([turn(success=1)], "truncated", 1.0),
        ([], "env_error", None),
    ],
)
def test_success_is_what_the_environment_says_last(turns, status, success):
    assert episode_success(group_of("lake-0", (turns, status, "")).trajectories[0]) == success


WON, LOST, SILENT = ([turn(success=1)], "ok", ""), ([turn(success=0)], "ok", ""), ([turn()], "ok", "")
CUT, GUESSED = ([turn()], "truncated", ""), ([turn(success=0)], "truncated", "")  # by the context; by the time limit
PLAYED_CUT = ([turn(actions=1)], "truncated", "")


@pytest.mark.parametrize(
    ("played", "rates"),
    [
        ([WON, LOST, CUT], [1, 0, 0]),
        ([WON, GUESSED], [1, 0]),
        ([WON, SILENT, SILENT], [1, 0, 0]),  # it says so of those that it takes as won
        ([SILENT, SILENT, CUT], []),
        ([SILENT, GUESSED], []),  # the time limit knows no better
        ([GUESSED, GUESSED], [0, 0]),
        ([PLAYED_CUT, PLAYED_CUT], [0, 0]),
        ([CUT], []),  # a reward's
        ([], []),
    ],
)
def test_success_counts_where_the_environment_says_what_it_is(played, rates):
    assert successes(group_of("lake-0", *played).trajectories if played else ()) == rates


def test_counts_are_summed_over_the_turns():
    turns = [turn(pushes=1, success=0), turn(pushes=2, errors=1), turn(success=1)]
    assert episode_counts(group_of("lake-0", turns).trajectories[0]) == {"pushes": 3.0, "errors": 1.0}
    assert episode_counts(group_of("dial-0", [turn()]).trajectories[0]) == {}


def test_samples_are_the_first_episodes_with_a_reward_as_one_text():
    groups = [
        group_of("lake-0", ([turn("no")], "env_error", "x"), [turn("ab", 1.0, "S?"), turn("cd", 1.0, "<!>")]),
        group_of("lake-1", ([turn("no")], "timeout", "x")),
        group_of("dial-0", [turn("ef")], tag="dial"),
        group_of("dial-1", [turn("gh")], tag="dial"),
    ]
    samples = validation_samples(groups, Letters(), 3)
    assert [(s.domain, s.prompt, s.response, s.reward) for s in samples] == [
        ("lake", "S?", "ab<!>cd", 2.0),
        ("dial", "?", "ef", 0.0),
    ]
    assert validation_samples(groups, Letters(), 0) == []
