"""Reinforcement learning for language models. Importing this package loads neither torch nor Ray."""

__version__ = "0.1.0"
