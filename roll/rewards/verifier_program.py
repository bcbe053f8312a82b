"""What runs in the sandbox to score with a verifier of reasoning-gym. Not imported: it is sent as text.

Writes two lines: the score of the gold answer, then that of the response's.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
from typing import Any


def main() -> None:
    """Read what to score, and write the scores."""
    import reasoning_gym

    asked = json.loads(sys.stdin.buffer.read())
    # Unpickled here, where nothing can be reached: entries hold what JSON doesn't know, and objects of generators.
    entry = pickle.loads(base64.b64decode(asked["entry"]))
    config = pickle.loads(base64.b64decode(asked["config"]))
    scorer: Any = reasoning_gym.create_dataset(asked["dataset"], **{**config, "size": 1, "seed": 0})
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for answer in (entry["answer"], asked["answer"]):
        try:
            reply = {"score": None if answer is None else float(scorer.score_answer(answer, entry)), "error": ""}
        except Exception as error:  # noqa: BLE001 - verifiers raise anything on odd text
            reply = {"score": None, "error": f"{type(error).__name__}: {error}"[:500]}
        ours.write(json.dumps(reply) + "\n")
        ours.flush()


if __name__ == "__main__":
    main()
