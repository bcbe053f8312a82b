"""Agents of `env_type: endpoint`: their processes, their scores, and the episodes that they play.

`supervisor.py` and `worker.py` run beside or inside the agent and import the standard library alone; `process.py` is
the run's view of them, `pool.py` keeps functions loaded, `score.py` says what an episode was worth, and
`rollout.py` plays it.
"""
