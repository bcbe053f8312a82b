"""Take the pictures of docs/questions.md: Chromium clicks through the demo, by the paths that the tests click, too.

    python docs/generate/question_pictures.py docs/pictures

Needs selenium, chromium and chromedriver.
"""

from __future__ import annotations

import argparse
import io
import sys
from pathlib import Path

from PIL import Image

from roll.workbench.view.export import demo_runs

TESTS = Path(__file__).parents[2] / "tests" / "view"
WIDTH, TALLEST = 1180, 860
COLOURS = 96


def main() -> None:
    """Click, and save what there is to see."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of questions (default: all)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(TESTS))
    from browser_page import Page, served
    from questions import QUESTIONS

    page = Page(served(demo_runs("agentic")), width=WIDTH, height=TALLEST, prefers_color_scheme="light")

    def shot(name: str) -> None:
        page.run("return new Promise((done) => requestAnimationFrame(() => setTimeout(done, 300)))")
        tall = page.run("return Math.ceil(document.getElementById('main').getBoundingClientRect().bottom + scrollY)")
        at = page.run("return scrollY")
        page.size(WIDTH, min(tall, TALLEST))
        page.run("scrollTo(0, arguments[0])", at)
        picture = Image.open(io.BytesIO(page.driver.get_screenshot_as_png())).convert("RGB")
        picture.quantize(COLOURS, dither=Image.Dither.NONE).save(options.folder / f"question_{name}.png", optimize=True)
        page.size(WIDTH, TALLEST)

    try:
        for name in options.names or QUESTIONS:
            page.open("curves")
            QUESTIONS[name](page, shot)
    finally:
        page.driver.quit()


if __name__ == "__main__":
    main()
