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
    again = 0 < len(failed) <= MOST
    sys.stdout.write(f"\n{len(failed)} failed beside other tests{', once more alone' if again else ''}:\n")
    sys.stdout.writelines(f"{test}\n" for test in failed)
    sys.stdout.flush()
    return 0 if again else 1


if __name__ == "__main__":
    sys.exit(main())
