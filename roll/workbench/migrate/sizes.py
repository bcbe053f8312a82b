"""For modules that still import from here."""

from roll.workbench.migrate.draft import data_parallel, slots_of

__all__ = ["data_parallel", "slots_of"]
