"""For modules that still import from here."""

from roll.workbench.migrate.draft import UNKNOWN, coerced, is_section

__all__ = ["UNKNOWN", "coerced", "is_section"]
