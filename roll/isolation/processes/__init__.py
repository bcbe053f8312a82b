"""Child processes that run code which may hang, crash or fork, and pools of them.

`child.py` starts and kills one, `serve.py` runs inside it, `worker_process.py` is its parent's view of it, and
`process_pool.py` keeps several running. `roll/rewards` and `roll/envs` say what is run in them.
"""
