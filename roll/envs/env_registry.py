"""Finding environments: by id, by `package.module:Class`, or by `path/to/file.py:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from typing import get_type_hints

from roll.configs.catalog.env_table import ENV_HUBS, ENVS, hub_of
from roll.configs.errors import Violation, did_you_mean, problem
from roll.configs.parsing.build_config import type_problem
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.agents_config import AGENT_ENV
from roll.configs.schema.env_config import CustomEnv, EnvManager
from roll.configs.schema.run_config import RunConfig
from roll.configs.stand_in import StandInUsed
from roll.envs.adapters.base import HubEnv, HubError
from roll.envs.base import Env
from roll.envs.players import ScriptedRoles, role_problems
from roll.envs.remote_env import RemoteEnv, RemoteEnvError
from roll.envs.wrappers import EnvSpec, ResponseEnv
from roll.isolation.processes.interpreter import resolve_interpreter
from roll.utils.importing import load_object, suggested_path


class EnvLoadError(ValueError):
    """An environment that can't be found, imported or made with its arguments."""


def env_spec(tag: str, env: CustomEnv, manager: EnvManager, python: str | None = None) -> EnvSpec:
    """Return the spec of one section of `custom_envs`; raises `ValueError` naming the key that is wrong.

    Imports the environment's class to compare its arguments with `env_config`, but makes none.

    Args:
        python: `env_workers.python`.
    """
    spec = EnvSpec(
        tag=tag,
        format_penalty=manager.format_penalty,
        invalid_action_penalty=manager.invalid_action_penalty,
        python=_interpreter(python),
        **vars(env),
    )
    check_spec(spec)
    return spec


def _interpreter(python: str | None) -> str | None:
    """Return its absolute path; raises `EnvLoadError` if there is no such program."""
    path = None if python is None else resolve_interpreter(python)
    if python is not None and path is None:
        raise EnvLoadError(f"env_workers.python: there is no program {python!r}; give the path of an interpreter")
    return path


def env_violations(config: RunConfig) -> Iterator[Violation]:
    """Check that every environment of a run can be made, with its arguments; nothing of other pipelines.

    With `prepare`, which may make what they read, they aren't made; their arguments are still compared.
    """
    if not isinstance(config, AgenticConfig) or config.replays:
        return
    managers = [] if config.val_only else [config.train_env_manager]
    managers += [] if config.val_env_manager is None else [config.val_env_manager]
    for tag, manager in [(tag, one) for one in managers for tag in config.tags_of(one)]:
        if tag not in config.custom_envs or config.custom_envs[tag].env_type == AGENT_ENV:
            continue  # of which the rules speak
        at = f"custom_envs.{tag}"
        try:
            spec = env_spec(tag, config.custom_envs[tag], manager, config.env_workers.python)
            if config.prepare is None:
                build_env(spec).close()
        except StandInUsed:
            continue
        except EnvLoadError as error:
            for line in str(error).split("\n    "):
                key, _, reason = line.partition(": ")
                yield problem(key, reason) if key.startswith((at, "env_workers.")) else problem(at, line)
        except Exception as error:  # noqa: BLE001 - of the environment's own code, perhaps; it is reported
            yield problem(at, f"{type(error).__name__}: {error}")


def check_envs(config: RunConfig) -> None:
    """Raise one `EnvLoadError` with all `env_violations`."""
    problems = list(dict.fromkeys(map(str, env_violations(config))))
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise EnvLoadError("\n".join([f"{count} with environments", *(f"  * {problem}" for problem in problems)]))


def check_spec(spec: EnvSpec) -> None:
    """Raise `EnvLoadError` unless there is such a class and it takes these arguments.

    A class of the user's own under another interpreter isn't looked at: what it imports may be there only.
    """
    if spec.python is not None and spec.env_type not in ENVS and not hub_of(spec.env_type):
        return
    _check_arguments(_class_of(spec), spec)


def load_package(spec: EnvSpec) -> None:
    """Import the package of a hub's environment, which may take many seconds; raises `EnvLoadError`."""
    env_class = _class_of(spec)
    if issubclass(env_class, HubEnv):
        try:
            env_class.load()
        except HubError as error:
            raise EnvLoadError(f"custom_envs.{spec.tag}.env_type: {spec.env_type}: {error}") from error


def build_env(spec: EnvSpec) -> ResponseEnv:
    """Build the environment of an episode: `step` gets a response, scripts play their roles, the time is limited."""
    try:
        env = bare_env(spec)
        check_roles(spec, env)
        return ResponseEnv(ScriptedRoles(env, spec) if env.roles else env, spec)
    except EnvLoadError:
        raise
    except ValueError as error:
        raise EnvLoadError(f"custom_envs.{spec.tag}.{error}") from None


def check_roles(spec: EnvSpec, env: Env) -> None:
    """Raise `EnvLoadError` for roles that the environment doesn't have, or players that can't be made."""
    problems = [
        f"custom_envs.{spec.tag}.{key}: {reason}" for key, reason in role_problems(spec, spec.env_type, env.roles)
    ]
    if problems:
        env.close()
        raise EnvLoadError("\n    ".join(problems))


def bare_env(spec: EnvSpec) -> Env:
    """Build the environment itself: `step` gets one of its own actions. Under `spec.python`, if that is set."""
    if spec.python is not None:
        try:
            return RemoteEnv(spec)
        except RemoteEnvError as error:
            raise EnvLoadError(str(error)) from None
    env_class = _class_of(spec)
    try:
        return env_class(**spec.env_config)
    except HubError as error:
        raise EnvLoadError(f"custom_envs.{spec.tag}.env_type: {spec.env_type}: {error}") from error
    except (TypeError, ValueError) as error:
        _check_arguments(env_class, spec)  # only now: it takes longer than many an environment's __init__
        arguments = ", ".join(f"{name}={value!r}" for name, value in spec.env_config.items())
        refuses = f"refuses ({arguments})" if arguments else "can't be made without arguments"
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "  # whose message is for users
        raise EnvLoadError(
            f"custom_envs.{spec.tag}.env_config: {spec.env_type} {refuses}: {kind}{error or type(error).__name__}"
        ) from error


def load_env(env_type: str) -> type[Env]:
    """Return the class of an environment; raises `EnvLoadError`. For one of a hub its package needn't be there."""
    if hub_of(env_type):
        return _hub_class(env_type)
    if env_type == AGENT_ENV:
        raise EnvLoadError(
            f"{AGENT_ENV} stands for an agent, which has no environment here: `roll check` tests whether it can be "
            "started, and `roll train FILE val_only=true` has it play without training"
        )
    if env_type not in ENVS and ":" not in env_type:
        raise EnvLoadError(
            f"no environment {env_type!r}; {did_you_mean(env_type, [*ENVS, AGENT_ENV])} (`roll envs list` shows all; "
            f"for a class of your own write {suggested_path(env_type)}; for one of a package SCHEME:ID with "
            f"{', '.join(ENV_HUBS)})"
        )
    try:
        env_class = load_object(ENVS[env_type].path if env_type in ENVS else env_type, kind="class")
    except ValueError as error:
        raise EnvLoadError(str(error)) from error.__cause__
    name = env_type.rpartition(":")[2]
    if not isinstance(env_class, type) or not issubclass(env_class, Env):
        raise EnvLoadError(f"{env_type}: {name} is not an environment; derive its class from roll.envs.base.Env")
    if env_class.__abstractmethods__:
        missing = ", ".join(sorted(env_class.__abstractmethods__))
        raise EnvLoadError(f"{env_type}: {name} lacks {missing}, which every environment has (roll/envs/base.py)")
    return env_class


@cache
def _hub_class(env_type: str) -> type[Env]:
    """Return the adapter of a hub, for one of its ids."""
    scheme, _, hub_id = env_type.partition(":")
    hub = ENV_HUBS[scheme]
    if not hub_id:
        raise EnvLoadError(f"{env_type} names no environment of {scheme}; write one, e.g. {hub.example}")
    adapter = load_object(hub.path)
    made: type[Env] = type(
        adapter.__name__, (adapter,), {"hub_id": hub_id, "__module__": adapter.__module__, "__doc__": adapter.__doc__}
    )
    return made


def _class_of(spec: EnvSpec) -> type[Env]:
    try:
        return load_env(spec.env_type)
    except EnvLoadError as error:
        raise EnvLoadError(f"custom_envs.{spec.tag}.env_type: {error}") from error.__cause__


def _check_arguments(env_class: type[Env], spec: EnvSpec) -> None:
    parameters = inspect.signature(env_class).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {name: parameter for name, parameter in parameters.items() if parameter.kind in plain}
    path = f"custom_envs.{spec.tag}.env_config"
    problems = []
    if spec.env_type in ENVS or hub_of(spec.env_type):  # whose annotations are true
        hints = get_type_hints(env_class.__init__)
        for key in spec.env_config.keys() & known.keys():
            if reason := type_problem(hints.get(key), spec.env_config[key]):
                problems.append(f"{path}.{key}: {reason}")
    for key in spec.env_config:
        if key not in known and not takes_any:
            near = did_you_mean(key, known)
            hint = _home_of(key, spec.tag) or (near if near.startswith("did") else "")
            refused = f"{path}.{key}: {spec.env_type} has no such argument; it has {', '.join(known) or 'none'}"
            problems.append(f"{refused}. {hint}" if hint else refused)
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in spec.env_config:
            problems.append(f"{path}.{name}: missing; {spec.env_type} needs it")
    if problems:
        raise EnvLoadError("\n    ".join(problems))


def _home_of(key: str, tag: str) -> str:
    """Return where this key of the framework's own belongs; empty for none of them."""
    if key in CustomEnv.__dataclass_fields__:
        return f"It belongs at custom_envs.{tag}.{key}"
    return f"It belongs at train_env_manager.{key}" if key in EnvManager.__dataclass_fields__ else ""
