"""Keys of other systems and what becomes of each here: one file per system, `tables.py` to look them up.

`roll migrate`, the hints of `roll check` and docs/coming_from.md read the same rows.
"""
