from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from roll.utils.logging import setup_logging
from roll.utils.terminal import Console


def test_a_line_says_which_process_and_module_wrote_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "logs" / "run.log"
    setup_logging("WARNING", name="actor_train-1", file=file)
    logging.getLogger("roll.some").warning("careful")
    logging.getLogger("roll.some").info("not this")
    assert "WARNING [actor_train-1] roll.some: careful" in file.read_text()
    assert "not this" not in file.read_text()
    assert "careful" in capfd.readouterr().err


def test_a_second_call_replaces_the_first(capfd: pytest.CaptureFixture[str]) -> None:
    setup_logging(name="a")
    setup_logging(name="b")
    logging.getLogger("x").info("once")
    assert capfd.readouterr().err.count("once") == 1


def test_control_characters_of_what_is_logged_are_escapes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.log"
    setup_logging(file=file)
    logging.getLogger("x").warning("row %s: %s", 3, "\x1b]0;title\x07 \x9b2J\r\tlast\nline")
    for text in (file.read_text(), capfd.readouterr().err):
        assert text.endswith("row 3: \\x1b]0;title\\x07 \\x9b2J\\x0d\tlast\nline\n")


def test_control_characters_in_tables_are_escapes_and_colours_stay() -> None:
    out = io.StringIO()
    table = Table("column", title=Text("\x1b[2J"))
    table.add_row(Text("red\x1b[31m", style="bold"))
    table.add_row("bell\x9b1m")
    Console(file=out, force_terminal=True, width=60).print(table)
    shown = out.getvalue()
    assert "\\x1b[2J" in shown and "red\\x1b" in shown and "bell\\x9b1m" in shown
    assert "\x1b[31m" not in shown and "\x1b[2J" not in shown and "\x1b[1m" in shown  # bold is rich's


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown log level 'LOUD'; expected one of"):
        setup_logging("LOUD")
