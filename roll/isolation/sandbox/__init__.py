"""Run programs that a model wrote where they can do no harm.

`base.py` is the seam: a `Program` with `Limits` goes in, an `Outcome` comes out. A `Sandbox` is opened by name
(`open_sandbox.py`) and knows how to contain; nothing else in the code base executes model output.
"""
