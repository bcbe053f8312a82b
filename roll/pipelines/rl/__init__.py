"""Reinforcement learning: the step, where its rollouts come from, and weight sync."""
