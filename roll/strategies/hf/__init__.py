"""Hugging Face building blocks: model loading, scoring, and a deterministic generator."""
