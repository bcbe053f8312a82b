"""Environments: what an episode is played against. They see text, never token ids."""
