"""Say whether few enough tests of the last run failed to run them once more, alone (see the Makefile)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

MOST = 12
"""More is no accident of a loaded machine."""
LAST_FAILED = Path(__file__).parents[1] / ".pytest_cache/v/cache/lastfailed"


def main() -> int:
    """Return 0 if they may run again."""
    failed = json.loads(LAST_FAILED.read_text()) if LAST_FAILED.is_file() else {}
    print(f"\n{len(failed)} failed beside other tests" + (", once more alone:" if 0 < len(failed) <= MOST else "."))
    print(*failed, sep="\n", flush=True)
    return 0 if 0 < len(failed) <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
