"""What the page's server answers, of runs whose numbers were worked by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from recorded_run import group, row, write_run

from roll.tracking.live import LiveFiles
from roll.tracking.rollouts import write_rollouts
from roll.workbench.view.api import Api
from roll.workbench.view.rows import BadQuery, histogram
from roll.workbench.view.runs import named_runs


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Api:
    """Two steps with two groups of two, a dropped one, a validation."""
    late = row("sums:9", 0, 0.0, -0.5, version_min=0, response=" is FIVE hundred", status="truncated")
    tool = {"id": "0", "name": "add", "arguments": "{}"}
    called = row("sums:9", 1, 1.0, 0.5, num_tool_calls=1, turns=[{"number": 0, "response": "x", "tool_calls": [tool]}])
    steps = {1: [*group("sums:1", 1.0, 0.0), *group("sums:2", 0.0, 0.0)], 3: [late, called, *group("sums:1", 1.0, 1.0)]}
    lost = row("sums:3", 0, 0.0, 0.0, status="env_error", dropped="the door was locked", error="the door was locked")
    others = {("dropped", 1): [lost], ("validation", 0): group("sums:1", 0.0)}
    metrics = {
        1: {"reward/mean": 0.25, "time/step": 2.0},
        2: {"time/step": 4.0, "time/save": 1.0},
        3: {"reward/mean": 0.75},
    }
    folder = write_run(
        tmp_path_factory.mktemp("runs") / "sums", steps, others=others, metrics=metrics, notes={"values": "no critic"}
    )
    return Api(named_runs([folder]))


def ask(api: Api, name: str, /, **given: object) -> dict:
    """An answer, through JSON."""
    parameters = {
        key: [str(one) for one in (value if isinstance(value, list) else [value])] for key, value in given.items()
    }
    return json.loads(json.dumps(api.answer(f"/api/runs/0/{name}", parameters), allow_nan=False))


def names(found: dict) -> list[str]:
    return [f"{row['step']} {row['row_id']}" for row in found["rows"]]


def test_runs_tell_their_metrics_steps_and_state(api):
    (run,) = api.answer("/api/runs", {})["runs"]
    assert run["recorded"] == {"train": [1, 3], "dropped": [1], "validation": [0]}
    assert run["metrics"] == ["reward/mean", "time/save", "time/step"]
    assert (run["name"], run["status"], run["step"]) == ("sums", "finished", 3)


def test_metrics_are_columns_with_null_where_a_step_has_none(api):
    found = ask(api, "metrics", name=["reward/mean", "time/save", "nobody's"])
    assert found == {"steps": [1, 2, 3], "values": {"reward/mean": [0.25, None, 0.75], "time/save": [None, 1.0, None]}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {},
            [
                "1 sums:1#0",
                "1 sums:1#1",
                "1 sums:2#0",
                "1 sums:2#1",
                "3 sums:9#0",
                "3 sums:9#1",
                "3 sums:1#0",
                "3 sums:1#1",
            ],
        ),
        ({"step": 3, "min_reward": 1}, ["3 sums:9#1", "3 sums:1#0", "3 sums:1#1"]),
        ({"max_advantage": -0.1}, ["1 sums:1#1", "3 sums:9#0"]),
        ({"status": "truncated"}, ["3 sums:9#0"]),
        ({"min_num_tool_calls": 1}, ["3 sums:9#1"]),
        ({"min_staleness": 1}, ["3 sums:9#0", "3 sums:9#1", "3 sums:1#0", "3 sums:1#1"]),  # step 3 trains version 2
        ({"min_mismatch_max": 0.1, "step": 1}, ["1 sums:1#1", "1 sums:2#1"]),
        ({"task_id": "sums:2"}, ["1 sums:2#0", "1 sums:2#1"]),
        ({"q": "five hundred"}, ["3 sums:9#0"]),  # lower case finds both
        ({"q": "FIVE"}, ["3 sums:9#0"]),
        ({"q": "Five"}, []),
        ({"q": "two plus", "status": "truncated"}, ["3 sums:9#0"]),  # in the prompt
        ({"kind": "dropped"}, ["1 sums:3#0"]),
        ({"kind": "validation", "step": 0}, ["0 sums:1#0"]),
        ({"sort": "mismatch_max", "order": "desc", "limit": 2}, ["1 sums:1#1", "1 sums:2#1"]),
        ({"sort": "advantage", "limit": 2}, ["1 sums:1#1", "3 sums:9#0"]),
        ({"offset": 6}, ["3 sums:1#0", "3 sums:1#1"]),
    ],
)
def test_rows_by_numbers_status_text_and_order(api, given, expected):
    assert names(ask(api, "rows", **given)) == expected


def test_rows_are_counted_whole_and_by_reward(api):
    found = ask(api, "rows", limit=1)
    assert found["total"] == 8
    assert found["histogram"] == {"values": [0.0, 1.0], "counts": [4, 4]}
    assert found["rows"][0]["seed"] == str(2**63 + 5)  # more than a browser's number holds
    assert found["rows"][0]["reward_parts"] == {"correct": 1.0}


def test_a_histogram_of_many_values_has_bins_with_both_ends():
    import pyarrow as pa

    found = histogram(pa.chunked_array([[float(i) for i in range(48)], [None, float("nan")]]))
    assert (found["low"], found["high"]) == (0.0, 47.0)
    assert len(found["counts"]) == 24 and sum(found["counts"]) == 48
    assert found["counts"][0] == found["counts"][-1] == 2


def test_a_group_is_whole_and_says_which_members_fit(api):
    found = ask(api, "groups", step=1, min_reward=1)
    (only,) = found["groups"]
    assert (only["task_id"], only["reward_mean"], only["reward_std"], only["distinct"]) == ("sums:1", 0.5, 0.5, 2)
    assert [member["match"] for member in only["members"]] == [True, False]
    assert (found["total"], found["rows"]) == (1, 1)
    assert found["values"]["status"] == ["ok"]


def test_groups_are_sorted(api):
    order = [one["task_id"] for one in ask(api, "groups", step=1, sort="reward_std", order="desc")["groups"]]
    assert order == ["sums:1", "sums:2"]
    assert [one["task_id"] for one in ask(api, "groups", step=1, sort="reward_std")["groups"]] == order[::-1]
    assert [one["task_id"] for one in ask(api, "groups", step=1, order="desc")["groups"]] == ["sums:2", "sums:1"]


def test_an_episode_has_its_tokens_its_group_and_why_columns_are_empty(api):
    found = ask(api, "episode", step=1, row=1)
    assert found["token_texts"] == ["Two", " plus", " two", " is", " five"]
    assert found["columns"]["old_logprobs"] == [0.0, 0.0, 0.0, -1.0, -0.625]
    assert found["columns"]["action_mask"] == [0, 0, 0, 1, 1]
    assert "values" not in found["columns"] and found["notes"] == {"values": "no critic"}
    assert [member["row"] for member in found["group"]] == [0, 1]
    assert (found["rows"], found["staleness"], found["ground_truth"]) == (4, 0, "four")
    assert found["turns"][0]["response"] == " is five"


def test_branches_of_an_episode_are_one_tree(tmp_path):
    def turn(number: int, after: int | None = None) -> dict:
        return {
            "number": number,
            "after": after,
            "role": "solver",
            "resets_context": False,
            "response": f"turn {number}",
        }

    rows = [
        row("t", 0, 1.0, 0.0, row_id="t#0/0", turns=[turn(0), turn(1)]),
        row("t", 0, 1.0, 0.0, row_id="t#0/1", turns=[turn(0), turn(2, after=0)]),
        row("t", 1, 1.0, 0.0),
    ]
    api = Api(named_runs([write_run(tmp_path / "run", {1: rows})]))
    found = ask(api, "episode", step=1, row=1)["branches"]
    assert [(node["number"], node["parent"], node["row"]) for node in found] == [(0, None, 0), (1, 0, 0), (2, 0, 1)]


def test_the_largest_differences_of_a_step_come_first_with_their_places(api):
    found = ask(api, "differences", step=1, limit=2)["tokens"]
    assert [(one["row"], one["position"], one["difference"], one["token"]) for one in found] == [
        (3, 4, 0.125, " five"),
        (1, 4, 0.125, " five"),
    ]


def test_without_trainer_log_probs_there_is_a_note_instead_of_differences(tmp_path):
    rows = [row("t", 0, 1.0, 0.0, old_logprobs=[])]
    api = Api(named_runs([write_run(tmp_path / "run", {1: rows}, notes={"old_logprobs": "one optimizer step"})]))
    assert ask(api, "differences", step=1) == {"tokens": [], "note": "one optimizer step"}


def test_a_task_is_found_over_all_steps_and_kinds(api):
    found = ask(api, "task", task="sums:1")["rows"]
    assert [(one["kind"], one["step"], one["reward"]) for one in found] == [
        ("train", 1, 1.0), ("train", 1, 0.0), ("train", 3, 1.0), ("train", 3, 1.0), ("validation", 0, 0.0),
    ]  # fmt: skip


def test_events_are_what_a_curve_marks(api):
    found = ask(api, "events")["events"]
    assert [(one["step"], one["kind"]) for one in found] == [(2, "checkpoint"), (3, "warning")]


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("rows", {"step": 2}, "no train rows of step 2"),
        ("rows", {"kind": "secret"}, "none of train, dropped, validation"),
        ("rows", {"min_token_ids": 1}, "no number 'token_ids'"),
        ("rows", {"min_reward": "nan"}, "no number"),
        ("rows", {"sort": "payload"}, "no column 'payload'"),
        ("rows", {"limit": -1}, "no whole number"),
        ("rows", {"bins": "status"}, "bins: there is no number 'status'"),
        ("rows", {"bins": "nothing"}, "bins: there is no number"),
        ("groups", {}, "give step="),
        ("groups", {"step": 1, "sort": "x"}, "aren't sorted by 'x'"),
        ("episode", {"step": 1}, "row: it is missing"),
        ("episode", {"step": 1, "row": 4}, "0 to 3"),
        ("episode", {"step": 1e300, "row": 0}, "no number"),
        ("differences", {"step": 9}, "no train rows of step 9"),
    ],
)
def test_a_bad_request_is_answered_with_what_is_wrong(api, name, given, says):
    with pytest.raises(BadQuery, match=says):
        ask(api, name, **given)


def test_a_run_under_way_is_read_again_where_it_has_grown(tmp_path):
    folder = write_run(tmp_path / "run", {1: group("t:1", 1.0, 0.0)}, ended=False)
    api = Api(named_runs([folder]))
    before = api.answer("/api/version", {})["versions"]
    assert ask(api, "state")["status"] == "running"
    assert ask(api, "rows")["total"] == 2
    assert ask(api, "state")["seconds_left"] == 9 * 2.0  # of 10 steps, two seconds each
    with (folder / "logs" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "reward/mean": 1.0}\n{"step": 3, "rew')  # the last line isn't finished
    write_rollouts(folder / "rollouts", 2, group("t:2", 0.0))
    assert api.answer("/api/version", {})["versions"] != before
    assert ask(api, "metrics", name="reward/mean") == {"steps": [1, 2], "values": {"reward/mean": [0.5, 1.0]}}
    assert ask(api, "rows")["total"] == 3
    write_rollouts(folder / "rollouts", 2, group("t:2", 0.0, 1.0))  # the step ran again after a resume
    assert ask(api, "rows")["total"] == 4


def test_a_run_that_was_killed_is_told_from_one_under_way(tmp_path):
    folder = write_run(tmp_path / "run", {1: group("t:1", 1.0)}, ended=False)
    live = folder / "logs" / "live.json"
    state = json.loads(live.read_text())
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    live.write_text(json.dumps(state | {"pid": gone}))
    assert ask(Api(named_runs([folder])), "state")["status"] == "stopped"


def test_metrics_that_start_anew_replace_the_old_ones(tmp_path):
    folder = write_run(tmp_path / "run", {1: group("t:1", 1.0)})
    api = Api(named_runs([folder]))
    assert ask(api, "metrics")["steps"] == [1]
    file = folder / "logs" / "metrics.jsonl"
    file.rename(file.with_name("metrics.1.jsonl"))
    file.write_text('{"step": 7}\nnot JSON\n[1]\n{"step": 8, "x": "nan", "y": "inf", "z": null}\n')
    assert ask(api, "metrics", name=["x", "y", "z"]) == {
        "steps": [7, 8],
        "values": {"x": [None, None], "y": [None, None]},
    }


def test_a_file_that_is_no_parquet_is_named(tmp_path):
    folder = write_run(tmp_path / "run", {1: group("t:1", 1.0)})
    (folder / "rollouts" / "rollouts-000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(BadQuery, match=r"rollouts-000002.parquet can't be read"):
        ask(Api(named_runs([folder])), "rows")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        named_runs([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=r"neither logs/metrics.jsonl nor rollouts"):
        named_runs([tmp_path])


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    folders = [write_run(tmp_path / name / "output", {1: group("t", 1.0)}) for name in "ab"]
    assert [run.name for run in named_runs(folders)] == ["a/output", "b/output"]


def test_files_of_the_first_version_are_shown_too(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from roll.tracking.rollouts import columns

    old = ["step", "task_id", "domain", "tag", "member", "status", "error", "prompt", "response", "token_ids"]
    old += ["action_mask", "sampling_logprobs", "old_logprobs", "ref_logprobs", "versions", "advantages", "reward"]
    schema = pa.schema([(name, columns()[name]) for name in [*old, "reward_parts"]])
    given = {**row("t:1", 0, 1.0, 0.5), "step": 1, "reward_parts": [("correct", 1.0)]}
    pq.write_table(
        pa.Table.from_pylist([{name: given.get(name) for name in schema.names}], schema=schema),
        tmp_path / "rollouts-000001.parquet",
    )
    api = Api(named_runs([tmp_path]))
    assert ask(api, "rows", min_reward=1)["total"] == 1
    assert ask(api, "groups", step=1)["groups"][0]["members"][0]["num_response_tokens"] is None
    found = ask(api, "episode", step=1, row=0)
    assert found["columns"]["advantages"][3] == 0.5 and found["token_texts"] == []


def test_live_files_say_what_a_run_does_and_end_once(tmp_path):
    live = LiveFiles(tmp_path, {"exp_name": "x"}, resume_step=4)
    live.step_done(5)
    live.phase(["step", "generate"])
    state = json.loads((tmp_path / "live.json").read_text())
    assert (state["doing"], state["step"], state["pid"]) == (["step", "generate"], 5, os.getpid())
    live.end("finished")
    live.end("failed")
    assert json.loads((tmp_path / "live.json").read_text())["outcome"] == "finished"
    assert not list(Path(tmp_path).glob("*.tmp"))
