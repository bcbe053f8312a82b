"""Hugging Face building blocks: model loading, log-probs, and a deterministic generator."""
