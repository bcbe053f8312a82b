"""The processor that a process runs on, as Linux describes it; reading that takes no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
AMD = "AuthenticAMD"


@dataclass(frozen=True)
class Processor:
    """An x86 processor. Empty: one of another kind, or nobody knows."""

    maker: str = ""
    """`AuthenticAMD`, `GenuineIntel`, ..."""
    features: frozenset[str] = frozenset()
    """Instruction sets, as the kernel spells them."""

    def multiplies_in_bf16(self) -> str | None:
        """Return the instruction set with which products in bf16 are faster than in fp32, or None.

        Intel's avx512_bf16 alone isn't: products take 1.3 to 1.8 times as long as in fp32 (docs/benchmarks.md).
        """
        if "amx_bf16" in self.features:
            return "amx_bf16"
        return "avx512_bf16" if self.maker == AMD and "avx512_bf16" in self.features else None

    def why_not_bf16(self) -> str:
        """Return the reason, as the end of a sentence about this processor."""
        if "avx512_bf16" in self.features:
            return "has avx512_bf16 without amx_bf16, which is slower than fp32 unless AMD made it"
        return "has neither avx512_bf16 nor amx_bf16"


def this_processor(file: Path = CPUINFO) -> Processor:
    """Return the first core's description."""
    try:
        core = file.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return Processor()
    named = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in core.splitlines())}
    return Processor(named.get("vendor_id", ""), frozenset(named.get("flags", "").split()))
