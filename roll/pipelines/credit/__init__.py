"""From rewards to advantages, masks and weights."""
