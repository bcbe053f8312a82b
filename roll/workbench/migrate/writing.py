"""A migrated configuration as YAML, in the order of the reference page; written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import yaml

from roll.configs.parsing.loader import PIPELINES
from roll.utils.terminal import printable
from roll.workbench.migrate.report import Report


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - every value is written out
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Several lines as a block."""
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _Dumper.represent_text)


def as_yaml(report: Report, tree: Mapping[str, Any]) -> str:
    """Return the file's text, with what is still to do in its head."""
    head = [f"# {Path(report.source).name} of {report.system}, translated by roll migrate."]
    head += [f"# missing: {line}" for line in report.missing]
    head = [printable(" ".join(line.split())) for line in head]
    body = yaml.dump(
        ordered(PIPELINES[report.pipeline], tree), Dumper=_Dumper, sort_keys=False, width=116, allow_unicode=True,
        default_flow_style=None,
    )  # fmt: skip
    return "\n".join(head) + "\n" + body


def ordered(hint: Any, tree: Any) -> Any:
    """Return the tree with keys in the order of the fields: first those with a value, then sections."""
    if not isinstance(tree, Mapping):
        return tree
    members = get_args(hint) if get_origin(hint) in (Union, type(int | str)) else (hint,)
    section = next((member for member in members if is_dataclass(member) and isinstance(member, type)), None)
    if section is None:
        inner = next((get_args(member)[1] for member in members if get_origin(member) is dict), None)
        return {key: ordered(inner, value) for key, value in tree.items()}
    hints = get_type_hints(section)
    names = [spec.name for spec in fields(section)]
    place = {name: i for i, name in enumerate(names)}
    keys = sorted(tree, key=lambda key: (key != "pipeline", isinstance(tree[key], Mapping), place.get(key, len(names))))
    return {key: ordered(hints.get(key), tree[key]) for key in keys}


def write_whole(file: Path, text: str, *, force: bool) -> None:
    """Write a file whole or not at all; raise `ValueError` if it is there and not `force`, or can't be written."""
    if file.exists() and not force:
        raise ValueError(f"{file} is there already: choose another name, or --force to replace it")
    try:
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            umask = os.umask(0)
            os.umask(umask)
            Path(name).chmod(0o666 & ~umask)
            Path(name).replace(file)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ValueError(f"{file} can't be written: {error.strerror}") from None
