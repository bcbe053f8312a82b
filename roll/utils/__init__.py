"""Small tools that know nothing of reinforcement learning: seeding, logging, timing, partitioning."""
