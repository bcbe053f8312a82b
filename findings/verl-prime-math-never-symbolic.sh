#!/usr/bin/env bash
# verl 0.9.1 (with sympy 1.14.0): reward_score/prime_math, the scorer of the numina_* data sets.
#
# Most expect: an answer that is equal, but written otherwise, is right: math_equal ends in symbolic_equal, which parses both
# with sympy, simplifies the difference and then compares the values as numbers.
#
# What happens: none of that ever runs. The three steps stand in `with timeout_limit(seconds=...)`, but timeout_limit is a
# decorator factory and no context manager; the TypeError is swallowed by `except Exception`, so symbolic_equal is False for
# every input, even `2*x` against `x+x`. What is left is the comparison of texts and the first grader, which gives up on
# more than two letters: x+y+z+w isn't w+x+y+z.
#
# Why it matters: right answers get no reward, without an error or a log line.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q sympy==1.14.0 pylatexenc==2.11 numpy==2.3.5
"$work/venv/bin/pip" install -q --no-deps verl==0.9.1

cat > "$work/check.py" <<'PY'
import sys
import types
from importlib.metadata import distribution, version

# verl's own __init__ imports ray, torch and more; the scorer needs none of that. Metric is for metrics only.
root = distribution("verl").locate_file("")
for name in ("verl", "verl.utils"):
    package = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")))]
    sys.modules[name] = package
sys.modules["verl.utils.metric"] = types.SimpleNamespace(Metric=object)

from verl.utils.reward_score.prime_math import compute_score
from verl.utils.reward_score.prime_math.grader import symbolic_equal

print("verl", version("verl"), "sympy", version("sympy"))
equal = symbolic_equal("2*x", "x+x", 1e-4)
print("symbolic_equal('2*x', 'x+x'):", equal)
score = compute_score(r"\boxed{w+x+y+z}", "x+y+z+w")[0]
print("gold x+y+z+w, answer w+x+y+z:", score)
same = compute_score(r"\boxed{x+y+z+w}", "x+y+z+w")[0]
print("gold x+y+z+w, answer x+y+z+w:", same)
sys.exit(0 if (equal, score, same) == (False, False, True) else 1)
PY
"$work/venv/bin/python" -W ignore "$work/check.py"
