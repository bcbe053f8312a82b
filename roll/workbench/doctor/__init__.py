"""`roll doctor`: what this machine has, what is wrong with it, and what to do about each."""
