#!/usr/bin/env bash
# An environment with SGLang on a CPU, see requirements-sglang.txt: install_sglang_cpu.sh FOLDER PYTHON
# TORCH_INDEX may hold the address of an index with torch in it.
set -euo pipefail

if [ $# -ne 2 ]; then
    echo "usage: $0 FOLDER PYTHON" >&2
    exit 2
fi
folder="$(realpath -m "$1")"
python=$2
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' || {
    echo "the pinned packages of requirements-sglang.txt need Python 3.11 or 3.12, $python is another" >&2
    exit 1
}
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"

pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
cd "$root"
pip install -q ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' requirements.txt)"
pip install -q -r requirements.txt -r requirements-sglang.txt
# shellcheck disable=SC2046 # several words on purpose
pip install -q --no-deps $(sed -n 's/^# --no-deps //p' requirements-sglang.txt)
pip install -q -c requirements.txt -e '.[quickstart,test]'

# The stand-ins come last on the path: real packages win, where they are installed.
"$folder/bin/python" - "$root/tests/support/sglang_stubs" <<'CODE'
import pathlib, sys, sysconfig

pathlib.Path(sysconfig.get_path("purelib"), "sglang_stubs.pth").write_text(sys.argv[1] + "\n")
CODE
