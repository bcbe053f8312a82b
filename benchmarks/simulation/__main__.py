"""`python -m benchmarks.simulation`: see modes.py."""

from benchmarks.simulation.modes import main

main()
