"""YAML -> Hydra composition -> overrides -> interpolation -> a typed, validated configuration.

    presets + file + key=value  --compose-->  tree  --resolve-->  plain values  --build-->  RunConfig

Every step reports all it finds as violations; the first step that finds any ends the load.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

from roll.configs.catalog import pipeline_table as catalog
from roll.configs.catalog.entries import OWN_PATH
from roll.configs.errors import NO_VALUE, ConfigError, Violation, nearest, problem
from roll.configs.parsing.adopted import adopted
from roll.configs.parsing.beside import with_files_beside
from roll.configs.parsing.build_config import UNRESOLVED, build_partly
from roll.configs.parsing.find import find_config
from roll.configs.parsing.key_hints import job_command, pipeline_hint
from roll.configs.parsing.roll_presets import preset_overrides
from roll.configs.parsing.yaml_files import KeyLines, path_problem, read_yaml, syntax_violation
from roll.configs.rules.validate import validate
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.utils.importing import load_object

PIPELINES: dict[str, type[RunConfig]] = {
    name: load_object(entry.config, key="pipeline") for name, entry in catalog.PIPELINES.items()
}
"""Configuration class by the value of `pipeline`."""

_NAMED: dict[str, bool] = {
    spec.name: spec.metadata.get("one_or_many", False)
    for cls in PIPELINES.values()
    for spec in fields(cls)
    if "args" in spec.metadata
}
"""Keys that are written as `{name: ..., option: ...}`, and whether they may hold several."""

_VARIABLE = re.compile(r"\$\{\s*([A-Za-z_]\w*)")

_REFERENCE = re.compile(r"\$\{\s*([A-Za-z_][\w.]*)\s*\}")

MISSING_VALUE = "a value in place of ???"
"""What is expected where a file leaves a value to whoever starts it."""


@dataclass(frozen=True)
class ConfigReading:
    """A configuration as far as it can be used, and what is wrong with it."""

    config: RunConfig | None
    """None where not even the sections are there."""
    sound: bool
    """Whether `config` has a usable value for every key, and no `STAND_IN`."""
    violations: list[Violation]
    """Of its keys and of the rules between them."""
    key_lines: KeyLines
    """Where its keys stand."""
    notes: tuple[str, ...] = ()
    """What was taken as it is meant, though it is written as another system has it."""


def load_config(
    config_path: str | Path, config_name: str, overrides: Sequence[str] = (), *, check: bool = True
) -> RunConfig:
    """Load `config_path/config_name.yaml` with Hydra's overrides, of which a declared key needs no `+`.

    `check` also applies the rules between keys. Raises `ConfigError` with every violation that could be found, and
    `ValueError` where there is no such file.
    """
    file = find_config(Path(config_path) / config_name)
    reading = read_config(file, overrides, check=check)
    if reading.violations or reading.config is None or not reading.sound:
        raise ConfigError(reading.key_lines.added_to(reading.violations), str(file))
    return reading.config


def read_config(file: Path, overrides: Sequence[str] = (), *, check: bool = True) -> ConfigReading:
    """Return what a file says, and all that is wrong with it; rules speak about the values that can be used.

    Raises `ConfigError` where it can't be composed at all.
    """
    return _read(_composed(file, overrides), check=check)


def read_tree(tree: Mapping[str, Any], source: str = "") -> ConfigReading:
    """Return the same of keys and values that need no composition: a file that is composed, or a dict of a program."""
    return _read(_Composed(dict(tree), _pipeline_of(tree, source), [], KeyLines(None)), check=True)


def _read(composed: _Composed, *, check: bool) -> ConfigReading:
    plain, notes = adopted(composed.plain, frozenset(composed.cls.__dataclass_fields__))
    holds_out = plain.get("validation_share") and issubclass(composed.cls, RLVRConfig)
    if holds_out and plain.get("validation") is None:
        plain = {**plain, "validation": {}}  # how what is held out is sampled: by its defaults
    config, violations, sound = build_partly(composed.cls, plain, pipelines=PIPELINES)
    reported = {violation.path for violation in composed.violations}
    violations = [*composed.violations, *(violation for violation in violations if violation.path not in reported)]
    if config is not None and check:
        reported = {violation.path for violation in violations}
        ruled = validate(config, sound=sound and not composed.violations)
        violations += [violation for violation in ruled if violation.path not in reported]
    sound = sound and config is not None and not composed.violations
    return ConfigReading(config, sound, violations, composed.key_lines, tuple(notes))


@dataclass(frozen=True)
class _Composed:
    plain: dict[str, Any]
    cls: type[RunConfig]
    violations: list[Violation]
    key_lines: KeyLines


def compose_file(file: Path, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], type[RunConfig]]:
    """Return what a file says once it is composed, without names of its own, and the class of its pipeline."""
    composed = _composed(file, overrides)
    if composed.violations:
        raise ConfigError(composed.key_lines.added_to(composed.violations), str(file))
    return composed.plain, composed.cls


def _composed(file: Path, overrides: Sequence[str]) -> _Composed:
    tree, presets = _compose(file, overrides)
    key_lines = KeyLines(file, overrides)
    try:
        plain, violations = _resolve(tree)
        plain = with_files_beside(plain, file)
        cls = _pipeline_of(plain, str(file))
        return _Composed(_drop_variables(plain, tree, presets, cls), cls, violations, key_lines)
    except ConfigError as error:
        raise ConfigError(key_lines.added_to(error.violations), str(file)) from error
    except RecursionError:
        raise ConfigError([problem(str(file), "its sections are nested too deeply", "write them flat")]) from None


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration as YAML, defaults included."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def _compose(file: Path, overrides: Sequence[str]) -> tuple[Any, set[str]]:
    """Return the composed, unresolved tree, and the names of the files in its defaults list."""
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    own = read_yaml(file)
    _check_head(file, own, overrides)
    try:
        with (
            warnings.catch_warnings(),
            preset_overrides(file, own) as presets,
            initialize_config_dir(config_dir=str(file.parent.resolve()), version_base=None),
        ):
            # What is meant by a list without it is what most write: the file itself comes last.
            warnings.filterwarnings("ignore", message=".*Defaults list is missing `_self_`")
            before = cache(lambda: _unresolved(compose(config_name=file.stem, overrides=presets)))
            adapted = _adapt(overrides, before)
            _check_sections(overrides, own)
            tree = compose(config_name=file.stem, overrides=[*presets, *adapted])
            _replace_renamed(tree, adapted, before)
            loader = GlobalHydra.instance().config_loader()
            names_files = "defaults" in own or any("@" in override or "/" in override for override in adapted)
            every = [*presets, *adapted]
            parts = loader.compute_defaults_list(file.stem, every, RunMode.RUN).defaults if names_files else []
    except yaml.YAMLError as error:
        raise ConfigError([syntax_violation(error, file)]) from None
    except (HydraException, OmegaConfBaseException) as error:
        expected = f"a file that composes; {_one_line(error)}"
        violation = Violation(str(file), expected, "paths in `defaults` are relative to it")
        raise ConfigError([violation], str(file)) from None
    except ConfigError:
        raise
    except Exception as error:  # of the code of others, at a text that it didn't expect
        reason = "its files refer to each other in a circle, or are nested too deeply"
        reason = reason if isinstance(error, RecursionError) else f"{type(error).__name__}: {_one_line(error)[:300]}"
        violation = Violation(str(file), f"a file that composes; {reason}", "look at `defaults` and at ${...} in it")
        raise ConfigError([violation], str(file)) from error
    # Hydra adds files of its own, below hydra/: a key that bears the name of one is unknown like any other.
    ours = [part.config_path for part in parts if part.config_path and not part.config_path.startswith("hydra/")]
    names = {PurePosixPath(path).name for path in ours}
    return tree, names - {file.stem}


def _check_head(file: Path, own: Mapping[Any, Any], overrides: Sequence[str]) -> None:
    """Refuse a `hydra` section, and a `defaults` that Hydra would misread."""
    violations = []
    asked = any(override.lstrip("+~").startswith(("hydra.", "hydra=")) for override in overrides)
    if asked or not _idle_hydra(own.get("hydra", {})):
        sentence = "Hydra composes the file here and runs nothing, so its own settings would do nothing"
        violations.append(problem("hydra", sentence, "remove it; output_dir says where a run writes"))
    defaults = own.get("defaults", [])
    if not isinstance(defaults, list):
        violations.append(
            Violation("defaults", "a list of files", "defaults: [../configs/fsdp2@_here_, _self_]", defaults)
        )
    for i, entry in enumerate(defaults if isinstance(defaults, list) else ()):
        names = list(entry.values()) if isinstance(entry, Mapping) and len(entry) == 1 else [entry]
        name = names[0] if isinstance(names[0], str) else None
        path = "" if name is None else name.partition("@")[0]
        if name is None and not (isinstance(entry, Mapping) and names[0] is None):
            violations.append(Violation(f"defaults[{i}]", "the name of a file, without .yaml", "", entry))
        elif path.removesuffix(".yaml") == file.stem:
            violations.append(
                problem(f"defaults[{i}]", "the file names itself", "write _self_, or another file", entry)
            )
        elif path.startswith("/") and not isinstance(entry, Mapping):
            fix = os.path.relpath(path, file.parent.resolve()) + name.removeprefix(path) if name else ""
            expected = "a path relative to the folder of this file: Hydra takes no other"
            violations.append(Violation(f"defaults[{i}]", expected, f"write {fix}", entry))
        elif path_problem("defaults_path", path):
            violations.append(Violation(f"defaults[{i}]", path_problem("defaults_path", path), "", entry))
    if violations:
        raise ConfigError(KeyLines(file, overrides).added_to(violations), str(file))


def _idle_hydra(section: Any) -> bool:
    """Return whether a `hydra` section only says that Hydra shall make no folder, as jobs of ROLL have it."""
    if not isinstance(section, Mapping) or not section.keys() <= {"run", "output_subdir"}:
        return False
    run = section.get("run", {})
    return run in ({}, {"dir": "."}) and section.get("output_subdir") is None


def _check_sections(overrides: Sequence[str], own: Mapping[Any, Any]) -> None:
    """Refuse `a.b=...` where the file has `a: ${c}`, for Hydra would replace the whole section by that one key, and
    where it has a list."""
    violations = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        at: Any = own
        names = key.split(".")
        for depth, name in enumerate(names[:-1], 1):
            at = at.get(name) if isinstance(at, Mapping) else None
            if isinstance(at, list) and not names[depth].isdigit():
                expected = f"an entry's number, because {'.'.join(names[:depth])} is a list"
                violations.append(Violation(key, expected, f"the whole list: {'.'.join(names[:depth])}=[...]", value))
            elif isinstance(at, str) and (reference := _REFERENCE.fullmatch(at.strip())):
                expected = f"keys of the section itself; {'.'.join(names[:depth])} is {at}, which this would replace"
                fix = ".".join([reference.group(1), *names[depth:]]) + f"={value}"
                violations.append(Violation(key, expected, fix, value))
    if violations:
        raise ConfigError(violations, "the command line")


def _adapt(overrides: Sequence[str], before: Callable[[], dict[Any, Any]]) -> list[str]:
    """Return the overrides as Hydra wants them; raises with every one that it doesn't understand. `before`: the file
    alone."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, adapted, violations = OverridesParser.create(), [], []
    for override in overrides:
        adapted.append(_without_plus(override, before))
        try:
            parser.parse_override(adapted[-1])
        except HydraException as error:
            key, equals, value = adapted[-1].partition("=")
            if equals and key.strip() and _is_text(value):  # `list(range(0,8))`, a sentence, an address
                quoted = value.replace("\\", "\\\\").replace("'", "\\'")
                with contextlib.suppress(HydraException):
                    adapted[-1] = f"{key}='{quoted}'"
                    parser.parse_override(adapted[-1])
                    continue
            sentence = f"this isn't key=value with a value as YAML has it: {_one_line(error)[:200]}"
            fix = "quote the argument for the shell, and a text with brackets or commas in it once more: 'key=\"a, b\"'"
            violations.append(problem(override, sentence, fix))
    if violations:
        raise ConfigError(violations, "the command line")
    return adapted


def _is_text(value: str) -> bool:
    """Return whether a value can only be meant as a text: no list, section, quoted text or reference."""
    return bool(value.strip()) and value.lstrip()[0] not in "[{'\"" and "${" not in value


def _replace_renamed(tree: Any, overrides: Sequence[str], before: Callable[[], dict[Any, Any]]) -> None:
    """Drop the options of the file's `key: {name: ...}` where overrides give another name: Hydra would keep them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    written: dict[str, set[str]] = {}
    for override in map(OverridesParser.create().parse_override, overrides):
        key, _, option = override.key_or_group.partition(".")
        if key in _NAMED and not override.is_delete():
            value = override.value()
            names = [option.split(".")[0]] if option else value if isinstance(value, dict) else []
            written.setdefault(key, set()).update(map(str, names))
    for key in (key for key, names in written.items() if "name" in names):
        old, new = before().get(key), _unresolved(tree).get(key)
        if isinstance(old, dict) and isinstance(new, dict) and old.get("name") != new.get("name"):
            retained = {name: value for name, value in new.items() if name not in old or name in written[key]}
            OmegaConf.update(tree, key, retained, merge=False)


def _unresolved(tree: Any) -> dict[Any, Any]:
    """Plain values with interpolations as they are written."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(tree)
    assert isinstance(plain, dict), tree
    return plain


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split("\nSee https://")[0].split())


def _without_plus(override: str, before: Callable[[], dict[Any, Any]]) -> str:
    """Rewrite `key=value` so that it sets a key whether or not the file names it; `+`, `~` and group choices stay."""
    key, _, value = override.partition("=")
    if _NAMED.get(key) and value.startswith("{") and not isinstance(before().get(key), dict):
        override = f"{key}=[{value}]"  # Hydra can't merge a mapping into the file's list
    plain = "=" in override and not key.startswith(("+", "~", "hydra.")) and "@" not in key and "/" not in key
    return f"++{override}" if plain else override


def _resolve(tree: Any) -> tuple[Any, list[Violation]]:
    """Plain values with interpolations filled in, and every interpolation that can't be."""
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    violations: list[Violation] = []

    def value_of(node: Any, key: Any, path: str) -> Any:
        raw: Any = node._get_node(key)
        try:
            return "???" if raw is not None and raw._is_missing() else walk(node[key], path)
        except InterpolationToMissingValueError:
            pass  # the missing value itself is reported below
        except (OmegaConfBaseException, RecursionError) as error:
            violations.append(_reference_violation(path, str(raw), error, [str(name) for name in tree]))
        return UNRESOLVED

    def walk(node: Any, path: str) -> Any:
        if isinstance(node, DictConfig):
            names = {key: str(key) for key in node}
            return {key: value_of(node, key, f"{path}.{name}" if path else name) for key, name in names.items()}
        if isinstance(node, ListConfig):
            return [value_of(node, i, f"{path}[{i}]") for i in range(len(node))]
        return node

    plain = walk(tree, "")
    declared = {name for cls in PIPELINES.values() for name in cls.__dataclass_fields__}
    for name in plain:
        if plain[name] == "???" and name not in declared:
            violations.append(Violation(name, MISSING_VALUE, f"{name}=... on the command line"))
    return plain, violations


def _reference_violation(path: str, text: str, error: Exception, names: Sequence[str]) -> Violation:
    reason = (str(error).splitlines() or ["it refers to itself"])[0]
    word = _VARIABLE.search(text)
    near = nearest(word.group(1), names) if word and word.group(1) not in names else ""
    fix = near or "define that key, or write the value itself"
    return Violation(path, f"a reference that resolves; {reason}", fix, text)


def _pipeline_of(plain: Mapping[str, Any], source: str) -> type[RunConfig]:
    name = plain.get("pipeline", NO_VALUE)
    name = NO_VALUE if name is UNRESOLVED else name
    if isinstance(name, str) and (name in PIPELINES or OWN_PATH.match(name)):
        try:
            own: type[RunConfig] = load_object(catalog.pipeline_of(name).config, key="pipeline")
        except ValueError as error:
            raise ConfigError([problem("pipeline", str(error).removeprefix("pipeline: "), "", name)], source) from error
        return own
    known = ", ".join(PIPELINES)
    likely = max(PIPELINES, key=lambda known: len(plain.keys() & PIPELINES[known].__dataclass_fields__.keys()))
    fix = pipeline_hint(name) if isinstance(name, str) else f"add pipeline: {likely}"
    if name is NO_VALUE and (command := job_command(plain)) is not None:
        fix = f"this is a job of a command, not a pipeline: {command} (docs/cli.md)"
    raise ConfigError([Violation("pipeline", f"which pipeline the file is for: {known}", fix, name)], source)


def _drop_variables(plain: dict[str, Any], tree: Any, presets: set[str], cls: type[RunConfig]) -> dict[str, Any]:
    """Without the user's own top-level variables: names that some `${name}` refers to, or of presets.

    An unknown name that nothing refers to stays, and is refused as unknown.
    """
    from omegaconf import OmegaConf

    used = set(_VARIABLE.findall(OmegaConf.to_yaml(tree, resolve=False))) | presets
    declared = set(cls.__dataclass_fields__)
    return {key: value for key, value in plain.items() if key in declared or key not in used}
