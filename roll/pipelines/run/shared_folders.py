"""Folders that several machines must share, and models that all of them need: looked at before anything is loaded.

Each machine with a role that writes looks for a file that the controller has just made in each folder, and leaves one
that the controller looks for. A machine that has a folder of that name on a disk of its own is found by that.
"""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from roll.configs.checks.machine_folder_checks import MAX_VISIBILITY_DELAY_S, Sight, files_of, look, versions
from roll.configs.errors import ConfigError, Violation
from roll.configs.schema.checkpoint_config import is_address
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig
from roll.distributed.cluster import Executor

logger = logging.getLogger(__name__)
_MARKER = ".roll-marker-"


def check_shared_folders(config: RunConfig, executor: Executor) -> None:
    """Raise `ConfigError` for folders that the machines of the roles don't share, and models that they don't have."""
    writers = [role for role in config.trained_roles if role in config.roles]
    violations = list(_version_violations(executor.on_each_machine(versions)))
    violations += list(_folder_violations(written_folders(config), writers, executor))
    if isinstance(config, RLConfig) and config.weight_transport == "file" and not config.replays:
        folders = {"weight_transport": (config.output_path / "weights").absolute()}
        violations += _folder_violations(folders, ["actor_train", "actor_infer"], executor)
    violations += _model_violations(config, executor)
    if violations:
        raise ConfigError(violations, "what the machines share")


def _version_violations(of_machines: Mapping[str, Mapping[str, str]]) -> Iterator[Violation]:
    """Yield another version of roll; other versions of what it needs are warned of."""
    mine = versions()
    for machine, theirs in of_machines.items():
        other = [
            f"{name} {theirs.get(name, 'missing')} (here {mine[name]})"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
        if theirs.get("roll") != mine["roll"]:
            expected = f"the same version of roll on all machines; {machine} has {', '.join(other)}"
            yield Violation("num_nodes", expected, "install the same environment there; see docs/cluster.md")
        elif other:
            logger.warning("%s has %s: the same seed may give another run", machine, ", ".join(other))


def written_folders(config: RunConfig) -> dict[str, Path]:
    """Return the folders that the roles which train write into or resume from, by the key that names each."""
    folders: dict[str, Path] = {}
    resumes = config.resume_from_checkpoint
    if config.save_steps or config.save_best or resumes in (True, "auto", "best"):
        own = config.checkpoint_path != config.output_path / "checkpoints"
        folders["checkpoint_config.output_dir" if own else "output_dir"] = config.checkpoint_path.absolute()
    if config.exports:
        folders.setdefault("export_dir" if config.export_dir else "output_dir", config.export_path.absolute())
    if isinstance(resumes, str) and resumes not in ("auto", "best") and not is_address(resumes):
        folders["resume_from_checkpoint"] = Path(resumes).expanduser().absolute()
    return folders


def _folder_violations(folders: Mapping[str, Path], roles: list[str], executor: Executor) -> Iterator[Violation]:
    if not folders or not roles:
        return
    with _markers(folders.values()) as markers:
        sights: dict[str, Sight] = executor.on_each_machine(look, markers, (), roles=roles)
        writable = {
            folder: sum(folder not in (*s.missing, *s.read_only) for s in sights.values()) for folder in markers
        }
        answers = {folder: _answers(Path(folder), markers[folder], count) for folder, count in writable.items()}
    for key, folder in folders.items():
        name = str(folder)
        blind = [machine for machine, sight in sights.items() if name in sight.missing]
        refused = {machine: sight.read_only[name] for machine, sight in sights.items() if name in sight.read_only}
        if blind:
            expected = (
                f"a folder that all machines share: {', '.join(blind)}, where {' and '.join(roles)} run, would write "
                f"to a disk of its own, for it doesn't see what this machine has put into {folder}"
            )
        elif refused:
            expected = f"a folder that {', '.join(refused)} can write to ({next(iter(refused.values()))})"
        elif answers[name] < writable[name]:
            expected = f"a folder that all machines share: this one doesn't see what the others have put into {folder}"
        else:
            continue
        fix = "name a folder that all machines mount, e.g. output_dir=/shared/run; see docs/cluster.md"
        yield Violation(key, expected, fix, name)


@contextlib.contextmanager
def _markers(folders: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Put a file into each folder; yield its name by folder. Folders that were made for it go again."""
    name = f"{_MARKER}{uuid.uuid4().hex[:12]}"
    made: set[Path] = set()
    markers: dict[str, str] = {}
    try:
        for folder in dict.fromkeys(folders):
            made.update(path for path in (folder, *folder.parents) if not path.exists())
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
            markers[str(folder)] = name
        yield markers
    finally:
        for marked in markers:
            for path in Path(marked).glob(f"{name}*"):
                path.unlink(missing_ok=True)
        for path in sorted(made, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                path.rmdir()


def _answers(folder: Path, name: str, expected: int) -> int:
    """Return how many machines' files are here, after waiting for all of them."""
    deadline = time.monotonic() + MAX_VISIBILITY_DELAY_S
    while (count := len(list(folder.glob(f"{name}.*")))) < expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return count


def _model_violations(config: RunConfig, executor: Executor) -> Iterator[Violation]:
    """Yield what differs between a model's folder here and on the machines of its roles."""
    readers: dict[str, dict[str, str]] = {}
    for role in config.roles:
        for key, path in _models(config, role):
            readers.setdefault(path, {})[role] = key
    for path, keys in readers.items():
        mine = files_of(Path(path))
        sights: dict[str, Sight] = executor.on_each_machine(look, {}, (path,), roles=list(keys))
        wrong = {machine: text for machine, s in sights.items() if (text := _difference(mine, s.models[path], path))}
        for machine, text in list(wrong.items())[:1]:
            expected = f"the same folder on all machines: {machine} {text}, which {', '.join(keys)} need there"
            fix = "copy the folder there, or name one that all machines mount"
            yield Violation(next(iter(keys.values())), expected, fix, path)


def _difference(mine: Mapping[str, str], theirs: Mapping[str, str], folder: str) -> str:
    if not theirs:
        return f"has no {folder}"
    lacking = [name for name in mine if name not in theirs]
    other = [name for name in mine if name in theirs and mine[name] != theirs[name]]
    if lacking or other:
        return f"has {f'no {lacking[0]}' if lacking else f'another {other[0]}'} in {folder}"
    return ""


def _models(config: RunConfig, role: str) -> Iterator[tuple[str, str]]:
    """Yield the key and the absolute path of each folder that a role's processes read."""
    args = config.roles[role].model_args
    own = f"{role}.model_args"
    named = {
        f"{own}.model_name_or_path" if args.model_name_or_path else "pretrain": config.model_path(role),
        f"{own}.tokenizer_name_or_path": config.tokenizer_path(role),
        f"{own}.adapter_name_or_path": args.adapter_name_or_path,
    }
    for key, name in named.items():
        if name and (folder := Path(name).expanduser()).is_dir():
            yield key, str(folder.absolute())
