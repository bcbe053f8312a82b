"""Jobs of verl that are commands here: `roll eval generate`, `roll eval score`."""

from __future__ import annotations

import shlex

from roll.workbench.migrate.draft import leaves_of
from roll.workbench.migrate.report import Report, Use
from roll.workbench.migrate.sources import Source, unexpanded_in
from roll.workbench.migrate.table import patterns

_NAMES = {"verl_generation": "generate", "verl_evaluation": "score"}


def command_of(system: str, source: Source, report: Report) -> None:
    """Put the command that does the job into the report, and what became of every key."""
    table = patterns(system)
    positional, options, overrides, reward = [], [], [], {}
    for path, value in leaves_of(source.tree):
        row = table.find(path.split("."))
        use = Use(key=path, value=value, fate="dead" if row is None else row.fate, note="" if row is None else row.note)
        report.uses.append(use)
        if stopped := unexpanded_in(value):
            use.fate, use.note, use.value = "unexpanded", ", ".join(stopped.parts), str(stopped)
            continue
        if row is None or row.fate in ("dead", "absent") or value in (None, {}):
            use.fate = "dead" if value in (None, {}) else use.fate
            use.note = use.note or "it asks for nothing"
            continue
        to = row.to[0]
        if row.how == "prompt_column":
            known = value in ("prompt", "messages")
            use.fate = "dead" if known else "decided"
            use.note = "the column is found by itself" if known else f"rename the column {value} to prompt"
            continue
        use.ours = (to,)
        value = row.values.get(value, value)
        if to == "--reward":
            reward[path.rpartition(".")[2]] = str(value)
        elif to.isupper():
            positional.append(str(value))
        elif to.startswith("-"):
            options += [to, str(value)]
        else:
            overrides.append(f"{to}={str(value).lower() if isinstance(value, bool) else value}")
    if reward.get("path"):
        options += ["--reward", f"{reward['path']}:{reward.get('name', 'compute_score')}"]
    words = ["roll", "eval", _NAMES[system], *(positional or ["FILE"]), *options, *overrides]
    report.command = " ".join(shlex.quote(word) for word in words)
    for needed, words_ in (("--model", options), ("FILE", [])):
        if needed == "--model" and system == "verl_generation" and "--model" not in words_:
            report.missing.append("--model: the model that answers")
        if needed == "FILE" and not positional:
            report.missing.append("FILE: the data file")
