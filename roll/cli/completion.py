"""`roll completion`: scripts that complete commands and options, made from the parsers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from roll.cli.exits import Exit
from roll.cli.parsers import roll_parser

_BASH = """\
# roll completion bash > ~/.local/share/bash-completion/completions/roll
_roll() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" path="" word words
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $word" in
{steps}
        esac
    done
    case "$path" in
{choices}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [[ "$current" == -* ]] || COMPREPLY+=($(compgen -f -- "$current"))
}}
complete -o filenames -F _roll roll
"""


def completion(options: argparse.Namespace) -> int:
    """Print the script for a shell."""
    sys.stdout.write(script(options.shell))
    return Exit.DONE


def script(shell: str) -> str:
    """Return what a shell has to read."""
    tree = dict(_walk(roll_parser(), ""))
    if shell == "fish":
        return _fish(tree)
    steps = "\n".join(
        f'            "{path.rpartition(" ")[0]} {path.split()[-1]}") path="{path}" ;;' for path in tree if path
    )
    choices = "\n".join(f'        "{path}") words="{" ".join(words)}" ;;' for path, words in tree.items())
    text = _BASH.format(steps=steps, choices=choices)
    if shell == "zsh":
        return f"# source <(roll completion zsh), in ~/.zshrc\nautoload -U +X bashcompinit && bashcompinit\n{text}"
    return text


def _walk(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield every command as ` group name` with the words that may follow it."""
    commands = {}
    words = []
    for action in parser._actions:
        words += [name for name in action.option_strings if name.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            commands = dict(action.choices)
        elif not action.option_strings and action.choices:
            words += [str(choice) for choice in action.choices]
    yield path, [*commands, *words]
    for name, command in commands.items():
        yield from _walk(command, f"{path} {name}")


def _fish(tree: dict[str, list[str]]) -> str:
    lines = ["# roll completion fish > ~/.config/fish/completions/roll.fish"]
    for path, words in tree.items():
        names = path.split()
        chosen = "".join(f"; and __fish_seen_subcommand_from {name}" for name in names)
        below = [other.split()[-1] for other in tree if other.rpartition(" ")[0] == path and other]
        unseen = f"; and not __fish_seen_subcommand_from {' '.join(below)}" if below else ""
        condition = f"true{chosen}{unseen}"
        plain = [word for word in words if not word.startswith("--")]
        if plain:
            lines.append(f"complete -c roll -n '{condition}' -a '{' '.join(plain)}'")
        lines += [f"complete -c roll -n '{condition}' -l {word[2:]}" for word in words if word.startswith("--")]
    return "\n".join(lines) + "\n"
