#!/usr/bin/env bash
# Builds the wheel, installs it into an empty environment, and uses it from an empty folder, as a stranger would:
#   bash tests/support/test_wheel.sh PYTHON [pip's arguments for torch]
# Versions are those of requirements.txt, so that pip finds what it has fetched before.
set -euo pipefail
python=$1
shift
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=PASSIVE

# A copy: building leaves folders beside the sources.
mkdir "$work/source"
cp -r "$root"/{roll,configs,examples,setup.py,pyproject.toml,README.md,LICENSE} "$work/source"
"$python" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" wheel -q --no-deps -w "$work" "$work/source"
rm -rf "$work/source"

# Without compiling: only what is imported is compiled, when it is.
"${pip[@]}" install -q --no-compile "$@" "$(grep '^torch==' "$root/requirements.txt")"
"${pip[@]}" install -q --no-compile -c "$root/requirements.txt" "$(echo "$work"/roll_rl-*.whl)[quickstart]"
echo "installed: $(du -sh "$work/venv" | cut -f1), after $SECONDS s"

mkdir "$work/empty"
cd "$work/empty"
roll="$work/venv/bin/roll"
"$roll" --version
"$roll" examples list >/dev/null
"$roll" view --demo --export demo.html
test -s demo.html
"$roll" examples copy custom_env >/dev/null
"$roll" check examples/custom_env/agentic_dial >/dev/null
"$roll" train examples/custom_env/agentic_dial max_steps=2 eval_steps=0 val_before_train=false \
    train_env_manager.num_env_groups=4 rollout_batch_size=32 track_with=jsonl >train.log 2>&1 || { cat train.log; exit 1; }
test -f output/agentic_dial/hf_model/config.json
test "$(wc -l <output/agentic_dial/logs/metrics.jsonl)" = 2
echo "the wheel trains: 2 steps from an empty folder, after $SECONDS s"
