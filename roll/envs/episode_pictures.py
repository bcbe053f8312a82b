"""Pictures of an episode that has been played: the same seed and responses again, in a process of its own."""

from __future__ import annotations

import itertools
import pickle
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from roll.envs.base import Observation
from roll.envs.env_registry import build_env
from roll.envs.pixels import apng_bytes, png_bytes
from roll.envs.wrappers import EnvSpec
from roll.isolation.processes.child import ChildProcess


def save_replay(
    spec: EnvSpec,
    seed: int,
    options: Mapping[str, Any],
    responses: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    timeout_s: float,
) -> None:
    """Write `episode.txt`, and where the environment draws pictures `episode.png` (animated) and `first.png`.

    `responses` are those of each role, in their order; of a single agent's environment under the empty name.

    Nothing is written, not even the folder, unless the whole episode was drawn.

    Raises:
        RuntimeError: the environment failed, or took longer than `timeout_s`.
    """
    with tempfile.TemporaryFile() as request:
        by_role = {role: list(of_role) for role, of_role in responses.items()}
        request.write(pickle.dumps((spec, seed, dict(options), by_role, str(folder))))
        request.seek(0)
        start = f"from {__name__} import main; main({request.fileno()})"
        child = ChildProcess(start, (request.fileno(),))
    try:
        code = child.wait(timeout_s)
        if code is None:
            raise RuntimeError(f"{spec.env_type} took over {timeout_s:g} s to play the episode again")
        if code:
            raise RuntimeError(f"its process {child.how_it_ended('while it drew')}")
    finally:
        child.kill()


def main(fd: int) -> None:
    """Read the request, play, and draw, in the process."""
    with open(fd, "rb") as request:
        spec, seed, options, responses, folder = pickle.load(request)
    env = build_env(spec)
    observation: Observation | None = env.reset(seed, options)
    assert observation is not None
    text, frames = [observation.text], [env.render()]
    remaining = {role: iter(of_role) for role, of_role in responses.items()}
    for turn in itertools.count(1):
        role = observation.role
        response = next(remaining.get(role, iter(())), None)
        if response is None:
            break
        result = env.step(response)
        frames.append(env.render())
        outcome = f"reward {result.reward:g}" + "".join(f", {name} {r:g}" for name, r in result.role_rewards.items())
        outcome += ", terminated" if result.terminated else ", truncated" if result.truncated else ""
        text += [f"--- response {turn}{f' ({role})' if role else ''}: {response}", f"--- {outcome}"]
        if result.observation is None:
            break
        observation = result.observation
        text.append(observation.text)
    env.close()
    text += [frame for frame in frames[-1:] if isinstance(frame, str)]
    files = {"episode.txt": ("\n".join(text) + "\n").encode(errors="backslashreplace")}
    pictures = [frame for frame in frames if isinstance(frame, numpy.ndarray)]
    if pictures:
        files.update({"episode.png": apng_bytes(pictures), "first.png": png_bytes(pictures[0])})
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        temporary = Path(folder, f"{name}.tmp")
        temporary.write_bytes(content)
        temporary.replace(Path(folder, name))
