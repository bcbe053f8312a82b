"""The page in Chromium: every view, keys, two runs, a run under way, the exported file without a network.

Skipped without selenium, chromium and chromedriver (Debian: chromium, chromium-driver). With AXE_JS=<axe.min.js of the
npm package axe-core> the views are also checked for accessibility.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser_page import MISSING, PATIENCE, Page, served
from recorded_run import group, row, write_run

from roll.tracking.live import LiveFiles
from roll.tracking.rollouts import write_rollouts
from roll.workbench.view.api import Api
from roll.workbench.view.export import export_page
from roll.workbench.view.runs import named_runs

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\x1b[31m\u202eevil"
THINKING = "<think>two and two</think>It is four."
CALL = 'Let me see.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'


def turn(number: int, response: str, reward: float, **more: Any) -> dict[str, Any]:
    about = {"number": number, "start": 0, "prompt_tokens": 3, "response_tokens": 2, "prompt": f"question {number}"}
    return {**about, "response": response, "reward": reward, "finish_reason": "stop", "resets_context": False, **more}


def first_run(folder: Path) -> Path:
    """Three steps: plain groups, hostile text, an agent with tools, branches; a failure, a validation."""
    hostile = row("sums:5", 0, 0.0, -0.5, response=HOSTILE, prompt=HOSTILE, ground_truth=HOSTILE, explanation=HOSTILE,
                  payload=HOSTILE, turns=[turn(0, HOSTILE, 0.0, prompt=HOSTILE)])  # fmt: skip
    long = row("sums:5", 1, 1.0, 0.5, response="x" * 1_000_000, turns=[turn(0, "x" * 1_000_000, 1.0)])
    agent = row("room:1", 0, 1.0, 0.5, tag="room", num_tool_calls=1, num_turns=2, explanation="the judge is pleased",
                turns=[turn(0, CALL, 0.25), turn(1, THINKING, 0.75, observation="4")])  # fmt: skip
    trunk = {"tag": "room", "num_turns": 2}
    left = row("room:2", 0, 0.0, -0.5, row_id="room:2#0/0", turns=[turn(0, "a", 0.0), turn(1, "b", 0.0)], **trunk)
    right = row(
        "room:2",
        0,
        0.0,
        -0.5,
        row_id="room:2#0/1",
        turns=[turn(0, "a", 0.0), turn(2, "c", 0.0, after=0, role="critic")],
        **trunk,
    )
    steps = {
        1: [*group("sums:1", 1.0, 0.0, 0.0), *group("sums:2", 0.0, 0.0)],
        2: [hostile, long, agent, left, right],
        3: [*group("sums:1", 1.0, 1.0, 0.0), *group("sums:3", 0.0, 1.0)],
    }
    lost = row("sums:7", 0, 0.0, 0.0, status="env_error", error="the door was locked", dropped="the door was locked")
    others: Any = {("dropped", 2): [lost], ("validation", 0): group("sums:1", 0.0)}
    metrics = {
        step: {"reward/mean": 0.25 * step, "actor/entropy": 2.0 - step / 2, "time/step": 3.0, "time/generate": 2.0,
               "time/train_actor": 0.75, "memory/host_gib": 1.5, **({"time/save": 1.0} if step == 2 else {})}
        for step in (1, 2, 3)
    }  # fmt: skip
    return write_run(
        folder, steps, others=others, metrics=metrics, notes={"values": "adv_estimator grpo has no critic"}
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    other = {step: group("sums:1", 0.0, 1.0, 1.0) for step in (1, 2, 3, 4)}
    metrics = {step: {"reward/mean": 0.1 * step} for step in other}
    found = [first_run(place / "grpo"), write_run(place / "gspo", other, metrics=metrics)]
    for run, rate, seed in zip(found, (1e-6, 2e-6), (1, 1), strict=True):
        config = {"output_dir": str(run), "seed": seed, "actor_train": {"training_args": {"learning_rate": rate}}}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    return found


@pytest.fixture(scope="module")
def page(folders) -> Iterator[Page]:
    shown = Page(served(folders))
    yield shown
    shown.driver.quit()


def test_curves_of_two_runs_with_what_happened(page):
    page.open("curves")
    assert "grpo 0.750 at step 3, gspo 0.400 at step 4" in page.text("[data-metric='reward/mean']")
    assert page.run("return document.querySelectorAll('.panel canvas').length") == len(page.all(".panel"))
    assert "Step 3 of 10: finished" in page.text("[data-run='0']")
    assert "generate 67 %, train_actor 25 %" in page.text("[data-run='0']")
    events = page.texts(".happened tr")
    assert any("step 2\tcheckpoint" in line for line in events)
    assert any("warning\tthe KL runs away" in line for line in events)


def test_curves_are_smoothed_logarithmic_and_chosen(page):
    page.open("curves?metric=actor/entropy&smooth=0.5&log=1")
    assert page.texts(".panel .metric") == ["actor/entropy"]
    assert page.run("return document.querySelector('input[type=range]').value") == "0.5"
    page.run("document.querySelector('input[list=metric-names]').value = 'memory/host_gib'")
    page.click("button", "Add")
    assert page.texts(".panel .metric") == ["memory/host_gib", "actor/entropy"]
    page.click("label.run input", "")
    assert "grpo" not in page.text(".panel .last")


def test_a_click_on_a_curve_opens_the_groups_of_the_step(page):
    page.open("curves?metric=reward/mean&hide=1")
    over = page.wait(lambda: page.all(".u-over"), "the plot")[0]
    before = page.ready
    # uPlot follows the pointer, so that the click falls on the last step.
    from selenium.webdriver import ActionChains

    ActionChains(page.driver).move_to_element_with_offset(over, over.size["width"] // 2 - 2, 0).click().perform()
    page.wait(lambda: page.ready > before, "the groups")
    assert page.run("return location.hash") == "#/groups?step=3"


def test_groups_stand_side_by_side_with_filters_and_order(page):
    page.open("groups?step=1")
    assert page.texts(".group h2")[0].startswith("sums:1")
    assert "mean 0.333, spread 0.471, 3 episodes, 2 distinct responses" in page.text(".group h2")
    cells = page.texts(".group:first-of-type tbody tr:first-child td")
    assert cells[:4] == ["#0", "1", "1", "+0.667"]
    assert page.texts(".group .truth")[0] == "Gold answer four"
    page.choose("Reward from", "1")
    assert len(page.all(".group")) == 1 and len(page.all("tr.dim")) == 2
    assert "1 episodes fit" in page.text(".pages")
    page.click("button", "Clear")
    page.choose("Sorted by", "reward_std")
    assert page.texts(".group h2")[0].startswith("sums:2")
    assert page.run("return document.querySelectorAll('.histogram rect').length") == 2


def test_dropped_episodes_say_why(page):
    page.open("groups?kind=dropped")
    assert "the door was locked" in page.text(".group tbody") and "env_error" in page.text(".group tbody")
    page.click(".group a", "#0")
    assert "It wasn't trained on: the door was locked" in page.text(".why")


def test_an_episode_says_why_it_got_its_advantage(page):
    page.open("episode?step=1&row=1")
    words = page.text(".why")
    assert "Its reward is 0, 0.333 below the mean of its group (0.333 over 3 rows, spread 0.471)." in words
    assert "-0.333: the update makes this response less likely" in words
    assert page.texts(".members a") == ["#0", "#1", "#2"]
    assert page.text(".gold") == "Gold answer\nfour"
    page.open("episode?step=1&row=3")
    assert "All rewards of the group are equal, so it carries no signal." in page.text(".why")


def test_a_conversation_has_turns_tools_and_folded_thinking(page):
    page.open("episode?step=2&row=2")
    assert page.text(".talk-title") == "Conversation, 2 turns"
    assert "Tool call: add" in page.text(".call") and '"a": 2' in page.text(".call")
    assert page.text(".thought summary") == "Thinking, 11 characters" and "two and two" not in page.text(
        ".conversation"
    )
    assert page.text(".message.observation").endswith("4")
    assert "turn 0\n+0.250\nturn 1\n+0.750" in page.text(".why")
    assert "the judge is pleased" in page.text(".explanation")


def test_branches_are_a_tree(page):
    page.open("episode?step=2&row=4")
    assert page.texts(".tree > ul > li > a") == ["turn 0"]
    assert page.texts(".tree > ul > li > ul > li > a") == ["turn 1", "turn 2"]
    assert "critic" in page.text(".tree")


def test_tokens_are_coloured_by_a_column_and_say_all_of_them(page):
    page.open("episode?step=1&row=1&by=advantages")
    assert page.texts(".token") == ["Two", " plus", " two", " is", " five"]
    colours = page.run("return [...document.querySelectorAll('.token')].map((one) => one.style.backgroundColor)")
    assert colours[:3] == ["", "", ""] and colours[3] == colours[4] != ""
    flow = page.all(".tokens")[0]
    page.run("arguments[0].focus()", flow)
    for _ in range(5):
        page.press("\ue014")  # arrow to the right
    assert 'Token 4: " five" id 6' in page.text(".detail")
    facts = page.text(".detail .facts")
    assert "old_logprobs\n-0.6250" in facts and "difference\n-0.1250" in facts and "ratio\n0.8825" in facts
    page.choose("Coloured by", "versions")
    assert page.texts(".legend .key") == ["-1", "0"]
    page.run("document.querySelector('.notes').open = true")
    assert "adv_estimator grpo has no critic" in page.text(".notes")


def test_the_largest_differences_lead_to_their_tokens(page):
    page.open("differences?step=3")
    rows = page.texts("tbody tr")
    assert len(rows) == 10 and rows[0].split("\t")[1:3] == ["-0.250", "0.7788"]
    page.click("tbody a", "five")
    page.wait(lambda: "Token 4" in page.text(".detail"), "the token")
    assert page.run("return document.querySelector('.token.current').dataset.at") == "4"
    assert "by=difference" in page.run("return location.hash")


def test_search_goes_over_all_steps(page):
    page.open("rows?q=five")
    assert "1 to 8 of 8 episodes" in page.text(".pages")
    page.click("thead button", "Reward")
    assert page.run("return document.querySelector('th[aria-sort=ascending]').innerText").startswith("Reward")
    page.open("rows?min_num_tool_calls=1")
    assert "1 to 1 of 1 episodes" in page.text(".pages") and "room:1 #0" in page.text("tbody")
    page.open("rows?kind=dropped&status=env_error")
    assert "of 1 episodes" in page.text(".pages")


def test_a_task_is_compared_over_steps_and_runs(page):
    page.open("compare?task=sums:1")
    assert "step 0 validation #0: reward 0" in page.text(".pair select option:checked")
    assert page.texts(".marked mark") == ["ive", "our"] and "first 5 characters" in page.text("main")
    assert "reward\t0\t1\t+1" in page.texts("tbody tr")[0]
    assert any(line.startswith("step 3\ttrain\t3\t0.667") for line in page.texts("tbody tr"))
    page.open("compare?task=sums:1&run_b=1")
    assert len(page.all(".pair section.side-by-side")) == 2
    assert "step 4 #0: reward 0" in page.texts(".pair select")[1]


def test_two_runs_are_compared_as_wholes_where_no_task_is_chosen(page):
    page.open("compare")
    chosen = page.run(
        "return [...document.querySelectorAll('.bar select')].slice(0, 2).map((one) => one.selectedOptions[0].text)"
    )
    assert chosen == ["grpo", "gspo"]
    assert page.texts(".differing tbody tr") == ["actor_train.training_args.learning_rate\t1e-06\t2e-06"]
    assert "reward/mean\t0.750\t0.400\t-0.350" in page.texts(".ended tbody tr")
    # No validation is in both; of the training's tasks sums:1 ended at 2/3 in both.
    assert "Of 1 tasks of both runs 0 ended better on the right, 0 worse, 1 the same." in page.text("main")
    rows = page.texts("table:not([class]) tbody tr")
    assert any(line.startswith("sums:1") for line in rows) and not any(line.endswith("\t0") for line in rows)


def test_a_runs_card_has_its_advice_and_its_configuration(page):
    page.open("curves")
    assert "step 3: the KL runs away" in page.text("[data-run='0'] .advice")
    page.run("document.querySelector('[data-run=\\'0\\'] .configuration').open = true")
    assert "seed\t1" in page.texts("[data-run='0'] .configuration tr")
    assert "time/step 3" in page.text(".unmoved") and not page.all("[data-metric='time/step']")
    page.open("curves?metric=time/step")
    assert page.all("[data-metric='time/step']"), "who asks for it sees it"


PROMPTS = [
    "<|im_start|>system\nBrief.<|im_end|>\n<|im_start|>user\nTwo plus two?<|im_end|>\n<|im_start|>assistant\n<think>\n",
    "<bos><start_of_turn>user\nTwo plus two?<end_of_turn>\n<start_of_turn>model\n",
    "[INST] Two plus two? [/INST]",
    "<\uff5cUser\uff5c>Two plus two?<\uff5cAssistant\uff5c>",
    "user\nTwo plus two?",
    "Two plus two?",
]


def test_a_groups_task_is_shown_without_its_templates_marks(page):
    page.open("groups?step=2")
    code = "return import('/groups.js').then(({ questionOf }) => %s.map((one) => questionOf(one).trim()))"
    assert page.run(code % json.dumps(PROMPTS)) == ["Two plus two?"] * len(PROMPTS)
    assert page.run(code % '["<|im_start|>"]') == ["<|im_start|>"]


def test_hostile_text_is_shown_and_never_run(page):
    page.complaints()
    for view in ("episode?step=2&row=0", "groups?step=2", "rows?step=2", "compare?task=sums:5&kind=train&step=2&row=0"):
        page.open(view)
        assert "onerror=" in page.text("main"), view
        assert page.run("return document.title").endswith("roll view")
        assert not page.all("main img") and not page.all("main script")
    page.open("episode?step=2&row=0")
    assert "\u241b[31m" in page.text(".conversation") and "\u27e8U+202E\u27e9evil" in page.text(".conversation")
    assert not [line for line in page.complaints() if "favicon" not in line]


def test_a_text_of_a_million_characters_is_cut_until_it_is_asked_for(page):
    page.open("episode?step=2&row=1")
    assert page.run("return document.querySelector('.conversation').textContent.length") < 50_000
    page.run("document.querySelector('.conversation .more').click()")
    assert page.run("return document.querySelector('.conversation').textContent.length") > 1_000_000
    assert page.run("return document.documentElement.scrollWidth") <= 1280


def test_keys_move_between_views_steps_and_episodes(page):
    page.open("episode?step=1&row=0")
    body = page.all("body")[0]

    def press(key: str) -> str:
        before = page.ready
        body.send_keys(key)
        page.wait(lambda: page.ready > before, f"the view after {key}")
        return page.run("return location.hash")

    assert "row=1" in press("j") and "row=0" in press("k")
    assert "step=2" in press("]") and "step=1" in press("[")
    assert press("2").startswith("#/groups?step=1")
    body.send_keys("/")
    assert page.run("return document.activeElement.type") == "search"
    page.open("curves")
    page.all("body")[0].send_keys("?")
    assert "next and previous episode" in page.text("dialog[open]")
    page.run("document.querySelector('dialog').close()")
    page.all("body")[0].send_keys("d")
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    page.all("body")[0].send_keys("d")


@pytest.mark.parametrize(
    "view", ["curves", "groups?step=1", "rows", "episode?step=2&row=2", "differences?step=3", "compare?task=sums:1"]
)
def test_every_view_fits_a_telephone_and_has_names_for_its_controls(page, view):
    page.size(390, 844)
    page.open(view)
    try:
        assert page.run("return document.documentElement.scrollWidth") <= 390
        nameless = """const controls = document.querySelectorAll('main select, main input, main a, button');
            const named = (one) => one.textContent || one.ariaLabel || one.labels?.length || one.closest('label');
            return [...controls].filter((one) => !named(one)).map((one) => one.outerHTML);"""
        assert page.run(nameless) == []
        assert page.run("return document.querySelectorAll('main, header, nav').length") == 3
        assert page.run("return document.documentElement.lang") == "en"
        if axe := os.environ.get("AXE_JS"):
            findings = axe_findings(page, Path(axe).read_text(encoding="utf-8"))
            assert not findings, json.dumps(findings, indent=1)
    finally:
        page.size(1280)


def axe_findings(page: Page, axe: str) -> list[Any]:
    """Serious findings of axe-core, which goes past the page's policy as an extension of the browser does."""
    page.run(axe)
    page.driver.set_script_timeout(PATIENCE)
    found = page.driver.execute_async_script("axe.run(document).then((found) => arguments[0](found.violations))")
    return [
        {"id": one["id"], "impact": one["impact"], "where": [node["html"][:200] for node in one["nodes"][:3]]}
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_a_run_under_way_is_followed(tmp_path):
    folder = write_run(tmp_path / "live", {1: group("t:1", 1.0, 0.0)}, ended=False)
    shown = Page(served([folder]))
    try:
        shown.open("curves")
        assert "running" in shown.text("header") and "Step 1 of 10" in shown.text(".run-card")
        live = LiveFiles(
            folder / "logs", {"exp_name": "live", "total_steps": 10, "rollouts": "../rollouts"}, resume_step=1
        )
        with (folder / "logs" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "reward/mean": 0.875, "time/step": 2.0}\n')
        write_rollouts(folder / "rollouts", 2, group("t:2", 1.0))
        live.step_done(2)
        live.phase(["step", "generate"])
        begun = time.monotonic()
        shown.wait(lambda: "0.875 at step 2" in shown.text(".panel .last"), "the new step")
        shown.wait(lambda: "Step 2 of 10: generate" in shown.text(".run-card"), "what the run does")
        delay = time.monotonic() - begun
        assert delay < 10, "two seconds, on a machine with nothing else to do"
        shown.open("groups")
        assert "t:2" in shown.text(".group")
        live.event(3, "failure", "an engine is gone")
        live.end("failed")
        shown.wait(lambda: "live: failed" in shown.text("header"), "the end")
    finally:
        shown.driver.quit()


def test_what_happens_within_a_step_is_shown_while_it_lasts(tmp_path):
    folder = write_run(tmp_path / "live", {1: group("t:1", 1.0, 0.0)}, ended=False)
    about = {"exp_name": "live", "total_steps": 10, "rollouts": "../rollouts"}
    live = LiveFiles(folder / "logs", about, resume_step=1)
    playing = {
        "step": 2, "groups_wanted": 8, "groups_done": 3, "groups_open": 5, "groups_dropped": 1,
        "episodes_running": 20, "episodes_ended": 12, "episodes_failed": 2, "last_failure": HOSTILE,
    }  # fmt: skip
    load = {"running": [12, 4], "waiting": 7, "down": [1], "busy": {"in its environment": 4}}
    usage = {"actor_train": {"processes": 2, "memory_gib": 3.5, "cores": 1.25, "elsewhere": 6, "devices": [
        {"index": 0, "memory_gib": 12.0, "total_gib": 80.0, "utilisation": 0.75}]}}  # fmt: skip
    shown = Page(served([folder]))
    try:
        shown.open("curves")
        live.watch(lambda: {"rollout": {"train": playing}, "engines": load, "usage": usage})
        live.phase(["step", "generate"])
        begun = time.monotonic()
        words = shown.wait(lambda: shown.text(".playing"), "the groups")
        assert time.monotonic() - begun < 10, "two seconds, on a machine with nothing else to do"
        assert (
            "Generating for step 2: 3 of 8 groups, 5 open, 1 dropped, 20 episodes under way, 12 ended, 2 failed"
            in words
        )
        assert "onerror=" in words and shown.run("return document.title").endswith("roll view")
        assert shown.text(".engines") == (
            "16 requests in engines (engine 0: 12, engine 1: 4); 7 waiting; being replaced: engine 1; "
            "episodes elsewhere: 4 in its environment"
        )
        assert shown.texts(".usage tbody tr") == [
            "actor_train\t2 here, 6 elsewhere\t3.50 GiB\t1.25\t0: 12 of 80 GiB, 75 % busy"
        ]
        shown.run("document.querySelector('.usage').open = false")
        plot = shown.all(".panel canvas")[0]
        playing["groups_done"] = 7
        shown.wait(lambda: "7 of 8 groups" in shown.text(".playing"), "the next groups")
        assert shown.run("return document.querySelector('.usage').open") is False, "it stays closed"
        assert plot.is_displayed(), "curves aren't drawn again for what changes within a step"
        live.end("finished")
        shown.wait(lambda: "live: finished" in shown.text("header"), "the end")
        shown.wait(lambda: not shown.all(".playing") and not shown.all(".usage"), "the card of a finished run")
    finally:
        live.end("finished")
        shown.driver.quit()


def test_the_exported_file_works_from_disk_without_a_network(folders, tmp_path):
    out = tmp_path / "run.html"
    export_page(Api(named_runs(folders)), out, episodes=100)
    shown = Page(out.as_uri(), prefers_color_scheme="dark")
    shown.driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    shown.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        shown.open("curves")
        assert "exported" in shown.text("header")
        assert "grpo 0.750 at step 3" in shown.text("[data-metric='reward/mean']")
        assert shown.run("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        shown.open("groups?step=1&min_reward=1")
        assert len(shown.all(".group")) == 1 and len(shown.all("tr.dim")) == 2
        shown.click(".group a", "#1")
        assert "less likely" in shown.text(".why") and len(shown.all(".token")) == 5
        shown.open("episode?step=2&row=0")
        assert "onerror=" in shown.text(".conversation") and shown.run("return document.title").endswith("roll view")
        shown.open("differences?step=3")
        assert len(shown.all("tbody tr")) == 10
        shown.open("compare?task=sums:1")
        assert len(shown.all(".pair section.side-by-side")) == 2
        assert shown.complaints() == []
    finally:
        shown.driver.quit()
