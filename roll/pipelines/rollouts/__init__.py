"""From groups of episodes to rows: collecting, assembling, validating, recording."""
