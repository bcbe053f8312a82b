"""Carriers between components. Import the submodules directly; only `batch` and `ragged` need torch."""
