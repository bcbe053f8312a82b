"""The page on rewards: its configuration of `code` is one that `roll check` takes."""

from __future__ import annotations

import re
from pathlib import Path

from roll.configs.checks.sandbox_checks import sandboxed_domains
from roll.configs.parsing.loader import load_config
from roll.configs.schema.rlvr_config import RLVRConfig

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"


def test_the_configuration_on_the_page_can_be_copied(tmp_path: Path) -> None:
    text = re.search(r"```yaml\n(pipeline: rlvr\n.*?name: code.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert text is not None
    (tmp_path / "code.yaml").write_text(text[1], encoding="utf-8")
    config = load_config(tmp_path, "code", [])
    assert isinstance(config, RLVRConfig)
    assert sandboxed_domains(config) == ("code",)
