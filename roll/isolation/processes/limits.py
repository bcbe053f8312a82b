"""What a child process gets from its parent: which environment variables, how much memory."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from collections.abc import Collection, Mapping

from roll.utils.secrets import SOUNDS_SECRET

_PASSED = re.compile(
    r"""PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|PYTHON\w*|VIRTUAL_ENV|CONDA_PREFIX
    |LD_LIBRARY_PATH|XDG_(?:CACHE|CONFIG|DATA)_HOME|OMP_\w+|MKL_\w+|OPENBLAS_\w+|NUMEXPR_\w+|HF_\w+|TRANSFORMERS_\w+
    |TOKENIZERS_PARALLELISM|NLTK_DATA|CUDA_\w+|SSL_CERT_FILE|SSL_CERT_DIR|REQUESTS_CA_BUNDLE""",
    re.VERBOSE,
)


def passed_environment(environment: Mapping[str, str], names: Collection[str] = ()) -> dict[str, str]:
    """Return what a process that handles model output may see: where programs and caches are, languages, threads; and
    `names`. Nothing whose name sounds like a secret, unless it is one of `names`."""
    return {
        name: value
        for name, value in environment.items()
        if name in names or (_PASSED.fullmatch(name) and not SOUNDS_SECRET.search(name))
    }


def limit_memory(memory_mb: float) -> None:
    """Limit what this process, and each that it starts, may allocate; beyond, there is a `MemoryError`."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(memory_mb * 2**20)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))


def memory_in_use_mb() -> float:
    """Return the address space of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") / 2**20
