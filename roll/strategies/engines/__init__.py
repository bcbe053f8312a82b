"""Inference engines: what they share, and one folder for each."""
