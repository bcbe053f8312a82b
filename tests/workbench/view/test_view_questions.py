"""Each question of docs/questions.md is answered by clicking on the page of the demo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser_page import MISSING, Page, served
from questions import QUESTIONS

from roll.workbench.view.export import demo_runs

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    shown = Page(served(demo_runs("agentic")))
    yield shown
    shown.driver.quit()


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_is_answered_by_clicking(page: Page, name: str) -> None:
    page.open("curves")
    QUESTIONS[name](page, lambda _: None)
    assert page.complaints() == []


def test_an_episode_that_was_traced_has_a_timeline_of_its_spans(page: Page) -> None:
    page.open("episode?step=50&row=0")
    names = page.texts(".spans .name")
    assert names[0] == "episode" and names.count("generate") == 3 and names[-1] == "update"
    boxes = page.run(
        "return [...document.querySelectorAll('.spans .during')].map((one) => one.getBoundingClientRect().toJSON())"
    )
    assert all(box["height"] > 5 and box["width"] > 1 for box in boxes), "a bar for each span"
    begins = [box["left"] for box in boxes]
    assert begins == sorted(begins) and begins[-1] > begins[0], "in the order of time"
    page.open("episode?step=5&row=0")
    assert not page.all(".timeline"), "the demo has spans of one step only"
