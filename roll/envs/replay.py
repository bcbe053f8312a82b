"""Pictures of an episode that has been played: the same seed and responses again, in a process of its own."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from roll.envs.pixels import apng_bytes, png_bytes
from roll.envs.registry import EnvSpec, build_env


def save_replay(
    spec: EnvSpec,
    seed: int,
    options: Mapping[str, Any],
    responses: Sequence[str],
    folder: Path,
    *,
    timeout_s: float,
) -> None:
    """Write `episode.txt`, and where the environment draws pictures `episode.png` (animated) and `first.png`.

    Raises:
        RuntimeError: the environment failed, or took longer than `timeout_s`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    request = pickle.dumps((spec, seed, dict(options), list(responses), str(folder)))
    command = [sys.executable, "-c", "from roll.envs.replay import main; main()"]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"drawing took over {timeout_s:g} s") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit code {done.returncode}")


def main() -> None:
    """In the process: read the request from standard input, play, draw."""
    spec, seed, options, responses, folder = pickle.loads(sys.stdin.buffer.read())
    env = build_env(spec)
    frames, text = [], [env.reset(seed, options).text]
    frames.append(env.render())
    for turn, response in enumerate(responses, start=1):
        result = env.step(response)
        frames.append(env.render())
        outcome = f"reward {result.reward:g}"
        outcome += ", terminated" if result.terminated else ", truncated" if result.truncated else ""
        text += [f"--- response {turn}: {response}", f"--- {outcome}"]
        if result.observation is None:
            break
        text.append(result.observation.text)
    env.close()
    text += [frame for frame in frames[-1:] if isinstance(frame, str)]
    Path(folder, "episode.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    pictures = [frame for frame in frames if isinstance(frame, numpy.ndarray)]
    if pictures:
        Path(folder, "episode.png").write_bytes(apng_bytes(pictures))
        Path(folder, "first.png").write_bytes(png_bytes(pictures[0]))
