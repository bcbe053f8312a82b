"""For modules that still import from here."""

from roll.workbench.migrate.finish import settle

__all__ = ["settle"]
