"""The door for agents that are written elsewhere: an OpenAI- and Anthropic-compatible endpoint of a run."""
