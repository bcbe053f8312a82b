"""Start a pipeline from a YAML file: `roll train` with the file as a folder and a name.

    python examples/start_pipeline.py --config_path examples/quickstart --config_name rlvr_smollm2 max_steps=10
    python examples/start_pipeline.py --config_name rlvr_smollm2 --check

All of it is in `roll/cli/train.py`.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":

    def _end(*_: object) -> None:
        os.write(2, b"interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, _end)  # before anything that takes time to import; `install` replaces it

from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    # `python examples/start_pipeline.py` puts examples/ on the path; a checkout that isn't installed needs its root.
    sys.path.insert(0, str(HERE.parent))


def main(arguments: Sequence[str]) -> int:
    """Run, and return the exit code: 0 done, 2 your mistake, 1 a failure, 130 interrupted."""
    from roll.cli.train import start_pipeline

    return start_pipeline(arguments, HERE)


if __name__ == "__main__":
    from roll.utils.signals import install

    install()  # before anything that takes time to import

    from roll.utils.importing import keep_imports

    keep_imports()
    sys.exit(main(sys.argv[1:]))
