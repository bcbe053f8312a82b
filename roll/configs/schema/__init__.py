"""The keys: dataclasses with types, bounds, defaults and docstrings, and what follows from their values."""
