"""Playing episodes: agent, engines and environments, coordinated by the scheduler."""
