"""What a run writes down: metrics, rollouts, dropped items, and the closing summary.

Import the submodules directly.
"""
