"""Reward functions and the processes that run them. One file per reward.

`roll/configs/catalog/reward_table.py` lists their names.

Importing this package loads neither torch nor a verifier: each reward imports what it needs when it is called.
"""
