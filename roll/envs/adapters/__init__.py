"""Environments of other packages as `roll.envs.base.Env`: one adapter for each table entry of `ENV_HUBS`.

No module here imports its package before it is used: which arguments an adapter takes is known without it.
"""
