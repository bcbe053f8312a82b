"""Print the folder of SmolLM2-135M-Instruct, the model of the quickstart; the first call makes it."""

from __future__ import annotations

import sys

from roll.utils.models import ModelUnavailable, is_prepared, prepare_smollm2, smollm2_path


def main() -> int:
    """Prepare the model and print where it is."""
    folder = smollm2_path()
    if not is_prepared(folder):
        print(f"converting SmolLM2-135M-Instruct to {folder} (once, about 40 s)", file=sys.stderr, flush=True)
    try:
        print(prepare_smollm2())
    except ModelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
