#!/usr/bin/env bash
# verl 0.9.1: `actor_rollout_ref.actor.clip_ratio` and `actor_rollout_ref.actor.grad_clip`.
# Expected: `clip_ratio` is PPO's epsilon, as its comment in actor.yaml says, and bounds that nobody writes follow it; the code
#   says so too: "clip_ratio_low if it isn't None, else clip_ratio". `grad_clip` limits the norm of the actor's gradient.
# Happens: actor.yaml gives both bounds itself, 0.2, so they are never None: clip_ratio=0.05 alone leaves the ratio between 0.8
#   and 1.2. And nothing reads the actor's `grad_clip`, 1.0 in dp_actor.yaml: the engines clip at `optim.clip_grad`.
# Matters: with these two keys people make an unstable run more careful. Both are accepted, stand in the logged configuration
#   with their new values, and change nothing. Write clip_ratio_low, clip_ratio_high and optim.clip_grad instead.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q omegaconf==2.3.1
"$work/venv/bin/pip" install -q --no-deps verl==0.9.1

cat > "$work/check.py" <<'PY'
import ast
import sys
from importlib.metadata import distribution, version
from pathlib import Path

from omegaconf import OmegaConf

root = Path(distribution("verl").locate_file("verl"))
print("verl", version("verl"), "omegaconf", version("omegaconf"))

# The loss needs torch; the three statements with which it takes its bounds from the configuration don't.
tree = ast.parse((root / "trainer/ppo/core_algos.py").read_text())
loss = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "compute_policy_loss_vanilla")
names = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
taken = [n for n in loss.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") in names]
actor = OmegaConf.load(root / "trainer/config/actor/actor.yaml")


def bounds(**written):
    space = {"config": OmegaConf.merge(actor, written)}
    exec(compile(ast.Module(taken, []), "core_algos.py", "exec"), space)
    print("written", written, "-> low", space["clip_ratio_low"], "high", space["clip_ratio_high"])
    return space["clip_ratio_low"], space["clip_ratio_high"]


results = bounds(), bounds(clip_ratio=0.05), bounds(clip_ratio_low=0.05, clip_ratio_high=0.05)
readers = {name: set() for name in ("grad_clip", "clip_grad")}
for file in root.rglob("*.py"):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in readers and isinstance(node.ctx, ast.Load):
            readers[node.attr].add(file.relative_to(root).as_posix())
    text = file.read_text()
    for name in readers:
        if f'get("{name}"' in text or f'["{name}"]' in text:
            readers[name].add(file.relative_to(root).as_posix())
print("files that read", {name: len(files) for name, files in readers.items()}, sorted(readers["grad_clip"]))
as_described = results == ((0.2, 0.2), (0.2, 0.2), (0.05, 0.05)) and readers["grad_clip"] == {"workers/config/optimizer.py"}
sys.exit(0 if as_described and len(readers["clip_grad"]) > 3 else 1)
PY
"$work/venv/bin/python" "$work/check.py"
