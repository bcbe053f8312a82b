"""What the adapters of all hubs share: the package, seeds that fit it, its random numbers, and who may step when."""

from __future__ import annotations

import importlib
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, ClassVar

from roll.configs.catalog.env_table import ENV_HUBS
from roll.configs.errors import did_you_mean
from roll.envs.adapters.own_random import OwnRandom, narrow_seed
from roll.envs.base import Env, Observation, ResetNeeded, StepResult

_LONGEST = 300  # Characters of a package's own message


class HubError(ValueError):
    """A package that isn't there, or an environment that it doesn't have or can't make. The message is for users."""


class HubEnv(Env):
    """An environment of another package.

    Its episode follows from the seed alone: global generators are seeded too, and no other code draws from them
    meanwhile. A subclass makes it (`make`), begins an episode (`begin`) and does an action (`act`).
    """

    one_episode = True  # The seed is handed on; some games have nothing that it decides

    scheme: ClassVar[str]
    hub_id: ClassVar[str] = ""
    """What stands behind the scheme; `env_registry.load_env` makes a class for each."""
    seed_bits: ClassVar[int] = 31
    """Bits of the largest seed that the package takes. Run seeds have 63; see `narrow_seed`."""

    def __init__(self) -> None:
        self._random = OwnRandom()
        self._under_way = False

    @classmethod
    def load(cls) -> ModuleType:
        """Import the package, or raise `HubError` saying how to install it."""
        hub = ENV_HUBS[cls.scheme]
        try:
            return importlib.import_module(hub.package)
        except ModuleNotFoundError as error:
            if error.name != hub.package:
                raise HubError(f"{hub.package} fails to import: {error}") from error
            raise HubError(
                f"needs the package {hub.package}, which {sys.executable} doesn't have: pip install {hub.install}, or "
                "name an interpreter that has it at env_workers.python (`roll envs test`: --python)"
            ) from None
        except Exception as error:
            raise HubError(f"{hub.package} fails to import: {_with_type(error)}") from error

    def made(self, *arguments: Any, known: Iterable[str] = (), **options: Any) -> Any:
        """Return what `make` gives, or `HubError` with the package's own message. `known`: the ids that there are."""
        known = list(known)
        if known and self.hub_id not in known:
            near = did_you_mean(self.hub_id, known)
            raise HubError(f"{self.scheme} has no environment {self.hub_id!r}; {near or f'it has {len(known)}'}")
        with self._random.lent():
            try:
                return self.make(*arguments, **options)
            except HubError:
                raise
            except (Exception, SystemExit) as error:
                fix = ". Install it, or put its folder on PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
                raise HubError(
                    f"{self.scheme} can't make {self.hub_id!r}: {_with_type(error).rstrip('.')}{fix}"
                ) from error

    def make(self, *arguments: Any, **options: Any) -> Any:
        """Make the package's environment."""
        raise NotImplementedError

    def reset(self, seed: int, options: Mapping[str, Any]) -> Observation:
        self._under_way = False
        small = narrow_seed(seed, self.seed_bits)
        self._random.seed(narrow_seed(seed, 32))
        with self._random.lent():
            observation = self.begin(small, options)
        self._under_way = True
        return observation

    def step(self, action: str) -> StepResult:
        if not self._under_way:
            raise ResetNeeded(f"{self.scheme}:{self.hub_id}: no episode under way; call reset first")
        with self._random.lent():
            result = self.act(action)
        self._under_way = not (result.terminated or result.truncated)
        return result

    @abstractmethod
    def begin(self, seed: int, options: Mapping[str, Any]) -> Observation:
        """Begin an episode with a seed of `seed_bits` bits."""

    @abstractmethod
    def act(self, action: str) -> StepResult:
        """Do an action; raises `InvalidAction` and changes nothing if it isn't one."""

    def no_options(self, options: Mapping[str, Any]) -> None:
        """Refuse the options of a reset, for packages that know none."""
        if options:
            names = ", ".join(sorted(options))
            raise ValueError(f"{self.scheme} has no options for reset, got {names}: leave them out")


def ended(reward: float, *, success: bool, terminated: bool = True, **more: Any) -> StepResult:
    """Return the last step of an episode."""
    metrics = {**more.pop("metrics", {}), "success": float(success)}
    return StepResult(reward=reward, terminated=terminated, truncated=not terminated, metrics=metrics, **more)


def _with_type(error: BaseException) -> str:
    text = " ".join(str(error).replace("*" * 10, "").split())
    return f"{type(error).__name__}: {text if len(text) <= _LONGEST else text[:_LONGEST] + '...'}"
