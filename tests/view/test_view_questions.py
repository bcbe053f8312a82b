"""Each question of docs/questions.md is answered by clicking on the page of the demo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser_page import MISSING, Page, served
from questions import QUESTIONS

from roll.view.demo import demo_runs

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
