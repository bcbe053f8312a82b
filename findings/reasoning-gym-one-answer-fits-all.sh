#!/usr/bin/env bash
# reasoning-gym 0.1.25: one fixed answer to all questions of coin_flip, puzzle24 or complex_arithmetic.
# Expected: a verifier compares an answer with its own question, so no single text is right for all of them.
# Happens: coin_flip divides the length of the common beginning of two numbers by that of the shorter text: "0" gets 1.0 for
#   0.109375, 0.3125 and every other probability that begins with 0. puzzle24 asks for any four numbers of its range that
#   make 24, not for those of the question: "10 + 3 + 4 + 7" gets 1.0 always. complex_arithmetic takes
#   min(1.0, exp(-distance)), which is 1.0 for a distance of nan: "nan" is right everywhere.
# Matters: as rewards they teach nothing. A policy finds the one text within some steps (partial credit leads it there) and
#   gets full marks from then on. Compare such an answer with the question before the verifier does.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q reasoning-gym==0.1.25
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import reasoning_gym

print("reasoning-gym", version("reasoning-gym"))
ANSWERS = {"coin_flip": "0", "puzzle24": "10 + 3 + 4 + 7", "complex_arithmetic": "nan"}
for name, answer in ANSWERS.items():
    data = reasoning_gym.create_dataset(name, size=20, seed=5)
    # Questions to which the text happens to be a right answer are left out.
    if name == "puzzle24":
        entries = [entry for entry in data if sorted(entry["metadata"]["numbers"]) != [3, 4, 7, 10]]
    else:
        entries = [entry for entry in data if entry["answer"].strip() not in (answer, "0.0")]
    scores = [data.score_answer(answer, entry) for entry in entries]
    share = sum(score == 1.0 for score in scores) / len(scores)
    print(f"{name}: {answer!r} is paid in full for {share:.0%} of {len(entries)} questions with other answers,")
    print(f"    such as {[entry['answer'] for entry in entries[:3]]}")
    assert share > 0.9, f"{name} pays {answer!r} less often now"
print("as described")
PYTHON
