"""Configuration files by path or by name; a wrong one is answered with the nearest."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_LONGEST = 4096
EXAMPLES = Path("examples")
"""Where `find_config` also looks for names to suggest, from the working directory."""


def find_config(location: str | Path) -> Path:
    """Return the configuration file at a path, which may lack its `.yaml`; raise `ValueError` if there is none."""
    _check_folder()
    if len(str(location)) > _LONGEST or "\0" in str(location):
        raise ValueError(
            f"{str(location)[:80]!r}... can't be the path of a file: it has {len(str(location))} characters"
        )
    path = Path(location).expanduser()
    file = path if path.suffix == ".yaml" else path.with_name(f"{path.name}.yaml")
    if file.is_file():
        return file
    if path.is_dir():
        names = ", ".join(sorted(yaml.stem for yaml in path.glob("*.yaml")))
        raise ValueError(f"{path} is a folder, not a configuration file; it has {names or 'no YAML files'}")
    if path.is_file():
        raise ValueError(f"{path} isn't a configuration file: its name must end in .yaml")
    there = sorted(file.parent.glob("*.yaml"))
    near = nearest(file.stem, [*there, *EXAMPLES.rglob("*.yaml")])
    hint = f"did you mean {' or '.join(map(str, near))}?" if near else f"seen from {Path.cwd()}"
    if there and not near:
        hint = f"its folder has {', '.join(other.stem for other in there)}"
    raise ValueError(f"there is no configuration file {file}; {hint}")


def _check_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ValueError("the working directory has been deleted; cd into one that is there") from None


def find_by_name(name: str, folder: Path) -> Path:
    """Return the one configuration file of that name in `folder` or below; raise `ValueError` if none or several."""
    wanted = Path(name.removesuffix(".yaml")).parts
    files = sorted(folder.rglob("*.yaml"))
    matches = [file for file in files if file.with_suffix("").parts[-len(wanted) :] == wanted]
    if len(matches) == 1:
        return matches[0]
    if matches:
        lines = "".join(f"\n  --config_path {file.parent} --config_name {file.stem}" for file in matches)
        raise ValueError(f"--config_name: {len(matches)} files below {folder} are named {name!r}; choose one:{lines}")
    near = nearest(wanted[-1] if wanted else "", files)
    hint = f"there are {', '.join(file.stem for file in files) or 'none'}"
    if near:
        hint = f"did you mean {' or '.join(file.stem for file in near)}?"
    raise ValueError(f"--config_name: no file below {folder} is named {name!r}; {hint}")


def nearest(stem: str, files: Iterable[Path], count: int = 3) -> list[Path]:
    """Return up to `count` of the files, those named most like `stem` first."""
    by_stem: dict[str, list[Path]] = {}
    for file in files:
        by_stem.setdefault(file.stem, []).append(file)
    close = difflib.get_close_matches(stem, by_stem, n=count, cutoff=0.6)
    return list(dict.fromkeys(file for name in close for file in by_stem[name]))[:count]
