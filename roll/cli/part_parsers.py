"""Commands that try a part of a run by itself: environments, tools, rewards, data, a judge, the sandbox."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roll.cli.command_parser import add_overrides, command


def _add_envs(groups: Any) -> None:
    group = command(groups, "envs", "list environments, or test whether one keeps its promises")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    command(commands, "list", "list bundled environments and their arguments", "roll.cli.envs:list_envs")
    test = command(
        commands,
        "test",
        "check an environment, and play it at random and by its own solution",
        "roll.cli.envs:test_env",
    )
    test.add_argument("env", help="an id, package.module:Class, path/to/file.py:Class, or with --config a tag in it")
    test.add_argument(
        "arguments", nargs="*", default=[], metavar="key=value", help="arguments of the class, values as in YAML"
    )
    test.add_argument("--config", type=Path, help="a YAML file with `custom_envs`, or with the arguments alone")
    test.add_argument("--seeds", type=int, default=8, help="episodes that each check plays (default 8)")
    test.add_argument("--episodes", type=int, default=100, help="episodes of each agent (default 100)")
    test.add_argument("--steps", type=int, default=50, help="actions per episode (default 50)")
    test.add_argument(
        "--responses", type=Path, metavar="FILE", help="recorded responses to play too: an episode per line (.jsonl)"
    )
    test.add_argument("--python", help="an interpreter for the environment, as env_workers.python")
    test.add_argument("--timeout_s", type=float, default=60.0, help="seconds of one reset or step (default 60)")
    test.add_argument("--check_s", type=float, default=120.0, help="seconds that one check plays (default 120)")


def _add_tools(groups: Any) -> None:
    group = command(groups, "tools", "list built-in tools, or show and call those of a configuration")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    command(commands, "list", "list built-in tools and their options", "roll.cli.tools:list_tools")
    test = command(
        commands,
        "test",
        "show the tools of a configuration as a policy sees them, and call each",
        "roll.cli.tools:test_tools",
    )
    test.add_argument("file", help="the YAML file, with or without .yaml")
    test.add_argument(
        "--call",
        action="append",
        default=[],
        metavar="TOOL={...}",
        help="call it with these arguments, JSON; may be given several times (built-in tools have a call of their own)",
    )
    add_overrides(test)


def _add_demos(groups: Any) -> None:
    parser = command(
        groups, "demos", "write episodes that environments solve as rows for pipeline sft", "roll.cli.demos:write_demos"
    )
    parser.add_argument("file", help="a configuration of pipeline agentic")
    parser.add_argument("output", type=Path, help="the jsonl file to write")
    parser.add_argument("--episodes", type=int, default=1000, help="how many are tried (default 1000)")
    parser.add_argument("--response", help="text of a response, with {action} (default: what action_pattern looks for)")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the configuration")


def _add_sandbox(groups: Any) -> None:
    group = command(groups, "sandbox", "test what contains model output on this machine")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    test = command(commands, "test", "run some attacks in a sandbox and print a table", "roll.cli.sandbox:test_sandbox")
    test.add_argument(
        "name", nargs="?", default="auto", help="auto (default), sandlock, bwrap, unconfined, or a server's address"
    )


def _add_reward(groups: Any) -> None:
    group = command(groups, "reward", "test whether a reward scores the answers of a data set as it should")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    help_ = "score every row's reference answer, an empty one and a wrong one, and list what is scored otherwise"
    test = command(commands, "test", help_, "roll.cli.reward:test_reward")
    names = "a .yaml of pipeline rlvr, a built-in reward, or path/to/file.py:function"
    test.add_argument("reward", metavar="CONFIG|NAME", help=names)
    test.add_argument("data", help="the rows: a file, glob, folder or hub id, as in data_args.file_name")
    test.add_argument(
        "arguments", nargs="*", default=[], metavar="key=value", help="reward_kwargs of NAME, or keys of CONFIG"
    )
    for role in ("prompt", "messages", "ground_truth", "tag"):
        test.add_argument(f"--{role}", metavar="COLUMN", help=f"column of the {role} (default: as data_args finds it)")
    test.add_argument("--answer", metavar="COLUMN", help="column of the reference answer (default: the ground truth)")
    test.add_argument("--answer_template", help="the response around it, with {answer} (default: by the reward)")
    test.add_argument("--full_marks", type=float, default=1.0, help="score of a right answer (default 1.0)")
    test.add_argument("--limit", type=int, help="test the first N rows only")
    test.add_argument("--show", type=int, default=50, help="exceptions that are listed (default 50)")


def _add_data(groups: Any) -> None:
    group = command(groups, "data", "look at data files before a run does")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    check = command(
        commands, "check", "check data files, or those of a configuration with its rewards", "roll.cli.data:check_data"
    )
    check.add_argument("file", help="a configuration, or a data file, folder or hub id as in data_args.file_name")
    check.add_argument("--model", help="folder or hub id of the tokenizer (default: that of the configuration)")
    check.add_argument("--validation", help="without a configuration: held-out rows, to look for the same prompts")
    check.add_argument("--no_rewards", action="store_true", help="don't let rewards read the ground truths")
    check.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="keys of the configuration; for files those of data_args",
    )


def _add_judge(groups: Any) -> None:
    group = command(groups, "judge", "compare a judge with labels that people gave")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    parser = command(
        commands, "agree", "grade labelled responses and print accuracy, kappa and correlations", "roll.cli.judge:agree"
    )
    parser.add_argument("file", help="a configuration of pipeline rlvr with a section judge")
    parser.add_argument("data", help="a file with a prompt, a response and a label in each row")
    parser.add_argument("--prompt", default="prompt", help="column of the prompt (default: prompt)")
    parser.add_argument("--response", default="response", help="column of the response (default: response)")
    parser.add_argument("--label", default="label", help="column of the label, 0 and 1 or on the judge's scale")
    parser.add_argument("--domain", help="use this domain's reward_kwargs")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the configuration")


PART_COMMANDS = (_add_envs, _add_tools, _add_demos, _add_reward, _add_judge, _add_data, _add_sandbox)
"""What adds each of them to the parser of `roll`, in the order of its help."""
