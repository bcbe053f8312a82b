"""Devices to workers: placement, executors (`ray`, `inline`), declared dispatch, weight transport."""
