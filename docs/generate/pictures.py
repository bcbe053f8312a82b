"""Draws pictures of the README: the live table of a run that took place, and a Sokoban episode that the solver plays.

python docs/generate/pictures.py RUN/logs/metrics.jsonl docs/pictures
"""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

from rich.console import Console

from roll.envs.pixels import apng_bytes
from roll.envs.sokoban import Sokoban
from roll.tracking.base import Destination
from roll.tracking.stdout import StdoutTracker


def live_table(metrics: Path, *, rows: int = 12) -> str:
    """Draw what a terminal shows at the end of the run whose metrics are in the file, as an SVG."""
    tracker = StdoutTracker(Destination(metrics.parent, resume_step=None), live=True, rows=rows, file=io.StringIO())
    for line in metrics.read_text("utf-8").splitlines():
        values = json.loads(line)
        tracker.log(values.pop("step"), values)
    console = Console(record=True, width=80, file=io.StringIO())
    console.print(tracker._table())
    tracker.finish({})
    # rich's own style names a font on another server, which pages that show the picture as an image never load.
    svg = console.export_svg(title="roll train examples/custom_env/agentic_dial seed=1", unique_id="live-table")
    start, end = svg.index("    @font-face"), svg.index("    .live-table-matrix")
    return "\n".join(line.rstrip() for line in (svg[:start] + svg[end:]).splitlines()) + "\n"


def episode(seed: int) -> bytes:
    """Draw a room that the solver plays, as an animated PNG."""
    env = Sokoban(dim_room=[6, 6], num_boxes=2, min_solution=12)
    env.reset(seed, {})
    frames = [env.render()]
    for action in env.solution(30) or ():
        env.step(action)
        frames.append(env.render())
    return apng_bytes([*frames, frames[-1], frames[-1]], seconds_per_frame=0.4)


def main() -> None:
    """Write both pictures into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", type=Path, help="the metrics.jsonl of a run")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    (options.folder / "live_table.svg").write_text(live_table(options.metrics), "utf-8")
    (options.folder / "sokoban_episode.png").write_bytes(episode(seed=3))


if __name__ == "__main__":
    main()
