"""`python -m roll.simulation`: see modes.py."""

from roll.simulation.modes import main

main()
