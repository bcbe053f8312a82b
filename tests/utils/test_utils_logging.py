from __future__ import annotations

import logging
from pathlib import Path

import pytest

from roll.utils.logging import setup_logging


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


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown log level 'LOUD'; expected one of"):
        setup_logging("LOUD")
