"""For modules that still import from here."""

from roll.workbench.migrate.report import as_yaml, write_whole

__all__ = ["as_yaml", "write_whole"]
