#!/bin/sh
# datasets 5.2.0 with pyarrow 26.0.1: load_dataset("json") on a column in which one row's value isn't a text.
# Expected by most: a JSON text stays a text, as it does in a column of texts alone ("4" stays "4", "007" stays "007").
# What happens: the column becomes a Json feature, and every text in it that can be read as JSON is read once more:
# "4" is the number 4, "007" is 7, "1.0" is 1.0, "1e3" is 1000.0, "true" is True, "[1]" is a list, and "null" and "NaN"
# are None. No message; which rows change depends on one row elsewhere in the file.
# Why it matters: reference answers of verifiable tasks ("007", "1.0", "true", "null") are such texts, and one row whose
# answer is a list or a number turns all of them into other values, or into nothing.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet datasets==5.2.0 pyarrow==26.0.1
cd "$folder"
HF_HOME="$folder/home" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import json

import datasets
import pyarrow

datasets.disable_progress_bars()
print("datasets", datasets.__version__, "pyarrow", pyarrow.__version__)
texts = ["4", "007", "1.0", "1e3", "true", "[1]", "null", "NaN", "four"]


def loaded(values, name):
    with open(name, "w") as file:
        file.writelines(json.dumps({"answer": value}) + "\n" for value in values)
    return list(datasets.load_dataset("json", data_files=name, split="train")["answer"])


alone, mixed = loaded(texts, "alone.jsonl"), loaded([*texts, 5], "mixed.jsonl")
for text, one, other in zip(texts, alone, mixed):
    print(f"written {text!r:8} alone {one!r:8} beside a number {other!r}")
assert alone == texts
assert mixed == [4, 7, 1.0, 1000.0, True, [1], None, None, "four", 5], mixed
assert [type(value) for value in mixed[:5]] == [int, int, float, float, bool]
PY
