"""The table of model families in docs/backends.md, written from roll/configs/catalog/family_table.py."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.catalog.family_table import FAMILIES, Family


def markdown_table() -> str:
    """Return the table as `docs/backends.md` shows it."""
    lines = [
        "| `model_type` | planned | Megatron | `hf_infer` decodes without modules | `use_liger` | tested | more |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, family in FAMILIES.items():
        claims = (family.decoder, family.megatron, family.decode_step)
        cells = ["yes" if claim else "" for claim in claims]
        cells += [family.liger or "", "yes" if family.tested else "", "; ".join(_notes(family))]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _notes(family: Family) -> Iterator[str]:
    if not family.sglang_ties_head:
        yield "SGLang refuses tied embeddings"
    if family.vllm_copying_loader:
        yield "a weight sync to vLLM takes memory for one more copy"
    if family.pictures is not None:
        yield "FSDP2, DeepSpeed and `hf_infer` give it pictures"
    if family.trained_as_text:
        yield "has a tower for pictures or sound; trains on text"
