"""Training on finished rows: fine-tuning, preferences, reward models."""
