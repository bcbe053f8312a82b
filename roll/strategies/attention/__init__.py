"""Attention over packed rows, shared prefixes and sequences divided over ranks."""
