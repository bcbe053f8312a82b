"""Five questions about a run, each answered by clicking alone: docs/questions.md tells them with pictures.

Each takes a page that shows the demo of agents (`roll view --demo agentic`) and a function that is called with a name
wherever there is something to see.
"""

from __future__ import annotations

from collections.abc import Callable

from browser_page import Page

Shot = Callable[[str], None]


def why_was_the_advantage_negative(page: Page, shot: Shot) -> None:
    page.click_on("nav a", "Search")
    page.click_on("thead button", "Advantage")
    first = page.texts("tbody tr")[0].split("\t")
    assert float(first[3]) == min(float(line.split("\t")[3]) for line in page.texts("tbody tr")) < 0
    shot("advantage_search")
    page.click_on("tbody a", first[1])
    words = page.text(".why")
    assert "below the mean of its group" in words and "the update makes this response less likely" in words
    assert len(page.all(".members a")) > 1, "the others of its group, for comparison"
    assert page.run("return document.querySelector('.tokens').ariaLabel") == "Tokens, coloured by advantages"
    shot("advantage_episode")


def which_tokens_differ_most(page: Page, shot: Shot) -> None:
    page.click_on("nav a", "Train/infer")
    sizes = [abs(float(line.split("\t")[1])) for line in page.texts("tbody tr")]
    assert len(sizes) > 10 and sizes == sorted(sizes, reverse=True)
    shot("mismatch_list")
    page.click_on("tbody a", shows="Token ")
    assert page.run("return document.querySelector('.tokens').ariaLabel") == "Tokens, coloured by difference"
    assert {"sampling_logprobs", "old_logprobs", "difference"} <= set(page.texts(".detail dt"))
    shot("mismatch_token")


def which_environment_failed(page: Page, shot: Shot) -> None:
    page.click_on(".run-card .causes summary", shows="the dial is jammed at 7")
    lines = [line.split("\t") for line in page.texts("[data-run='0'] .causes tbody tr")]
    assert lines[0][:2] == ["dial", "env_error"] and "RuntimeError: the dial is jammed at 7" in lines[0][2]
    shot("failure_causes")
    page.click_on(".causes tbody a", "the first one")
    assert "It failed (env_error), so it has no reward." in page.text(".why")
    assert "RuntimeError: the dial is jammed at 7 (docs/generate/jammed_dial.py:29, in step)" in page.text(".why")
    assert page.texts(".message.response .text")[-1].strip() == "7"
    members = page.texts(".members li")
    assert [sum(word in member for member in members) for word in ("env_error", "reward")] == [7, 1]
    shot("failure_episode")


def what_changed_on_this_task(page: Page, shot: Shot) -> None:
    page.click_on("nav a", "Compare")
    tasks = "[aria-label='Recorded tasks'] tbody"
    changes = [line.split("\t") for line in page.texts(f"{tasks} tr")]
    assert float(changes[0][5]) > 0
    shot("compare_tasks")
    page.click_on(f"{tasks} a", changes[0][0])
    steps = [line.split("\t")[0] for line in page.texts("tbody tr") if line.startswith("step ")]
    assert steps == ["step 5", "step 50"]
    assert page.texts(".pair select option:checked")[0].startswith("step 5 ")
    assert page.texts(".pair select option:checked")[1].startswith("step 50 ")
    reward = next(line.split("\t") for line in page.texts("tbody tr") if line.startswith("reward\t"))
    assert float(reward[3]) > 0
    shot("compare_steps")


def is_the_policy_collapsing(page: Page, shot: Shot) -> None:
    page.click_on(".sets button", "Collapse")
    assert page.texts(".panel .metric")[:2] == ["actor/entropy", "group/zero_signal_share"]
    left, gone = (float(said.split()[-4]) for said in page.text("[data-metric='actor/entropy'] .last").split(","))
    assert left > 1 and gone < 0.01, "nats a token at the last step of the two runs"
    assert "in no group do the rewards differ" in page.text(".happened tr:has(.mark-warning)")
    shot("collapse_curves")
    page.click_on(".happened tr:has(.mark-warning) a", "step 5")
    assert page.texts(".group h2") and all("1 distinct response" in head for head in page.texts(".group h2"))
    shot("collapse_groups")


QUESTIONS = {
    "advantage": why_was_the_advantage_negative,
    "mismatch": which_tokens_differ_most,
    "failure": which_environment_failed,
    "compare": what_changed_on_this_task,
    "collapse": is_the_policy_collapsing,
}
