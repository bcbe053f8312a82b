"""The table of docs/models.md, written from roll/configs/catalog/family_ways.py."""

from __future__ import annotations

from roll.configs.catalog.family_ways import LANGUAGE_MODELS, WAYS, Way

_COLUMNS: dict[Way, str] = {
    "padded": "trained, rows padded", "packed": "`use_sequence_packing`", "shared": "shared beginnings",
    "sampled": "sampled by `hf_infer`",
}  # fmt: skip


def markdown_table() -> str:
    """Return the table of decoders, and how many of them train and sample without another engine."""
    right = [kind for kind in LANGUAGE_MODELS if not {"padded", "sampled"} & WAYS[kind].keys()]
    lines = [
        f"{len(right)} of {len(LANGUAGE_MODELS)} train and sample with `hf_infer`.",
        "",
        f"| `model_type` | {' | '.join(_COLUMNS.values())} |",
        f"|---|{'---|' * len(_COLUMNS)}",
    ]
    for kind in LANGUAGE_MODELS:
        cells = [WAYS[kind].get(way, "yes") for way in _COLUMNS]
        lines.append(f"| `{kind}` | {' | '.join(cells)} |")
    return "\n".join(lines)
