"""What tables of broken configurations have in common."""

from __future__ import annotations

import pytest

from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config


def check_refused(job, overrides, path, fragments):
    """Exactly one violation, at `path`, whose message has all fragments."""
    with pytest.raises(ConfigError) as caught:
        load_config(job, "job", overrides)
    assert [violation.path for violation in caught.value.violations] == [path], str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)
