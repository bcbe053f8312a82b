"""A class of the user's plays a domain's episodes."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest
from toy import run_toy, write_toy

TWICE = """
import asyncio


class Twice:
    async def play(self, episode):
        first = await episode.generate(await episode.first_prompt(), max_new_tokens=3)
        assert len(first.token_ids) == 3
        await episode.generate(episode.encode("?"))
        result = await episode.step_env(episode.text(first))
        assert result.terminated


class Careless:
    async def play(self, episode):
        await episode.generate(await episode.first_prompt())


class Forks:
    async def play(self, episode):
        first = await episode.generate(await episode.first_prompt(), max_new_tokens=3)
        at = episode.number_of(first)
        texts = ("?", "!!")
        answers = await asyncio.gather(*(episode.generate(episode.encode(text), after=at) for text in texts))
        again = asyncio.ensure_future(episode.generate((), after=at))
        again.cancel()
        episode.count("agent/mismatch_edited", 0.5)
        episode.finish(float(sum(len(set(answer.token_ids)) for answer in answers)))


class Broken:
    async def play(self, episode):
        raise KeyError("hint")
"""


def settings(folder, name):
    (folder / "twice.py").write_text(TWICE)
    return (
        f"rewards.case.rollout='{folder}/twice.py:{name}'",
        "sequence_length=40",
        "max_steps=2",
        f"rollout_dump_dir={folder / 'dump'}",
    )


def test_it_generates_twice_and_trains_on_both_responses_but_not_on_what_stands_between(tiny_model, tmp_path):
    folder = write_toy(tmp_path, tiny_model)
    rows = run_toy(folder, *settings(folder, "Twice"))
    assert all(row["mismatch/kl"] < 1e-10 for row in rows)
    dumped = pq.read_table(next((folder / "dump").glob("rollouts-*.parquet"))).to_pylist()
    for row in dumped:
        chosen = "".join("x" if acting else "." for acting in row["action_mask"])
        assert chosen.lstrip(".") == "xxx.xx", chosen
    assert len({row["reward"] for row in dumped}) > 1


@pytest.mark.parametrize(("name", "words"), [("Careless", "ended without episode.step_env"), ("Broken", "hint")])
def test_a_bug_in_it_ends_the_run_with_its_name(tiny_model, tmp_path, name, words):
    folder = write_toy(tmp_path, tiny_model)
    with pytest.raises((AssertionError, KeyError), match=words):
        run_toy(folder, *settings(folder, name))


@pytest.mark.parametrize("estimator", ["grpo", "reinforce"])
def test_branches_are_trained_once_with_the_log_probs_that_the_trainer_finds(tiny_model, tmp_path, estimator):
    folder = write_toy(tmp_path, tiny_model)
    rows = run_toy(folder, *settings(folder, "Forks"), f"adv_estimator={estimator}")
    assert all(row["mismatch/kl"] < 1e-10 for row in rows)
    assert all(row["rollout/rows"] == 2 * row["rollout/responses"] for row in rows)
    assert all(row["agent/mismatch_edited"] == 0.5 * row["rollout/responses"] for row in rows)
    dumped = pq.read_table(next((folder / "dump").glob("rollouts-*.parquet"))).to_pylist()
    first, second = dumped[::2], dumped[1::2]
    for one, two in zip(first, second, strict=True):
        masks = ["".join("x" if acting else "." for acting in row["action_mask"]) for row in (one, two)]
        assert [mask.lstrip(".") for mask in masks] == ["xxx.xx", "xx"]
        shared = len(masks[0]) - len(".xx")
        assert two["token_ids"][:shared] == one["token_ids"][:shared] and one["reward"] == two["reward"]
        assert one["prompt"] != two["prompt"] and two["prompt"].endswith("!!")
