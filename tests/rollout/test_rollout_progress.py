"""How far the playing is, as another thread sees it."""

from __future__ import annotations

from fakes import ScriptedRanks, Source, make_plan, make_scheduler, make_tasks

from roll.rollout.progress import RolloutProgress


def test_progress_counts_groups_and_episodes_of_the_step():
    ranks = ScriptedRanks(length=lambda request: 3 + 40 * (request.prompt_ids[-1] == 12))
    scheduler = make_scheduler(ranks)
    seen = []
    poll = ranks.poll

    async def watched(rank, budget):
        seen.append((scheduler.progress.shown(), scheduler.engines.load()))
        return await poll(rank, budget)

    ranks.poll = watched
    scheduler.collect(Source(make_tasks(6)), make_plan(groups=4, group_size=2))
    first, last = seen[0], seen[-1]
    assert (first[0]["groups_wanted"], first[0]["groups_done"], first[0]["groups_open"]) == (4, 0, 4)
    assert first[0]["episodes_running"] == 8 and sum(first[1].running) == 8
    assert last[0]["groups_done"] == 3 and last[0]["groups_open"] == 1, "the long one is left"
    assert last[0]["episodes_running"] == 2 and last[0]["episodes_ended"] == 6
    assert sum(last[1].running) == 2 and last[1].waiting == 0
    assert scheduler.progress.shown() == {}, "nothing is played any more"


def test_the_latest_failure_is_told_while_the_step_goes_on():
    progress = RolloutProgress()
    progress.begin(3, wanted=2)

    class Failed:
        trainable, status, id, error = False, "env_error", "t#1", "RuntimeError: locked\nTraceback ..."

    class Filtered:
        trainable, status, id, error = False, "filtered", "t#2", "too long"

    class Well:
        trainable, status, id, error = True, "ok", "t#3", ""

    for trajectory in (Failed, Filtered, Well):
        progress.ended(trajectory)
    shown = progress.shown()
    assert (shown["episodes_ended"], shown["episodes_failed"]) == (3, 1)
    assert shown["last_failure"] == "t#1, env_error: RuntimeError: locked"
    progress.begin(4, wanted=2)
    assert progress.shown()["last_failure"] == "" and progress.shown()["episodes_ended"] == 0
