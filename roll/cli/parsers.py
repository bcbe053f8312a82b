"""The commands of `roll` and their arguments. Only argparse is imported, so that `--help` takes no time.

A command names the function that runs it as `module:function`; `roll.cli.__main__` imports it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

CODES = "Exit code: 0 done, 2 your mistake (arguments, configuration, data), 1 a failure, 130 interrupted."
KEYS = "Every key of a configuration: docs/configuration.md."


def roll_parser() -> argparse.ArgumentParser:
    """Return the parser of `roll`."""
    parser = argparse.ArgumentParser(
        prog="roll", description="Reinforcement learning for language models.", epilog=CODES
    )
    _add_debug(parser)
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (_add_train, _add_check, _add_rollout, _add_envs, _add_demos, _add_judge):
        add(groups)
    return parser


def start_pipeline_parser() -> argparse.ArgumentParser:
    """Return the parser of `examples/start_pipeline.py`."""
    parser = argparse.ArgumentParser(description="Start a pipeline from a YAML file.", epilog=f"{KEYS} {CODES}")
    parser.add_argument(
        "--config_path", help="folder of the file, from here or from examples/ (default: looked up below examples/)"
    )
    parser.add_argument("--config_name", required=True, help="name of the file, without .yaml")
    parser.add_argument("--print_config", action="store_true", help="print all keys with their values, and end")
    parser.add_argument("--check", action="store_true", help="check everything, print the plan, and end")
    _add_debug(parser)
    _add_overrides(parser)
    return parser


def _add_debug(parser: argparse.ArgumentParser, default: object = False) -> None:
    parser.add_argument(
        "--debug", action="store_true", default=default, help="show the traceback of an error, as ROLL_DEBUG=1 does"
    )


def _command(groups: Any, name: str, help_: str, run: str | None = None) -> argparse.ArgumentParser:
    described = f"{help_[0].upper()}{help_[1:]}."
    parser: argparse.ArgumentParser = groups.add_parser(name, help=help_, description=described, epilog=CODES)
    if run is not None:
        parser.set_defaults(run=run)
        _add_debug(parser, argparse.SUPPRESS)  # a default would replace what stands before the command
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. rollout_batch_size=16")


def _add_train(groups: Any) -> None:
    parser = _command(groups, "train", "run the pipeline of a configuration file", "roll.cli.train:train")
    parser.add_argument("file", help="the YAML file, with or without .yaml")
    _add_overrides(parser)


def _add_check(groups: Any) -> None:
    parser = _command(
        groups, "check", "check a configuration file and print its plan, without a model", "roll.cli.train:check"
    )
    parser.add_argument("file", help="the YAML file, with or without .yaml")
    parser.add_argument("--print_config", action="store_true", help="print all keys with their values instead")
    _add_overrides(parser)


def _add_rollout(groups: Any) -> None:
    parser = _command(
        groups, "rollout", "let a model play environments: episodes and a table of scores", "roll.cli.rollout:rollout"
    )
    parser.add_argument("--model", required=True, help="Hugging Face folder or hub id")
    parser.add_argument(
        "--env", action="append", required=True, help="an id, or a class; may be given several times (roll envs list)"
    )
    parser.add_argument("--episodes", type=int, default=64, help="per environment (default 64)")
    parser.add_argument("--max_steps", type=int, default=10, help="responses per episode (default 10)")
    parser.add_argument("--engine", default="hf_infer", help="hf_infer (default), vllm or sglang")
    parser.add_argument("--output_dir", type=Path, default=Path("output/rollout"), help="default: output/rollout")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further keys of pipeline agentic")


def _add_envs(groups: Any) -> None:
    group = _command(groups, "envs", "list environments, or test whether one keeps its promises")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "list", "list bundled environments and their arguments", "roll.cli.envs:list_envs")
    test = _command(
        commands,
        "test",
        "check an environment, and play it at random and by its own solution",
        "roll.cli.envs:test_env",
    )
    test.add_argument("env", help="an id, package.module:Class, path/to/file.py:Class, or with --config a tag in it")
    test.add_argument("arguments", nargs="*", metavar="key=value", help="arguments of the class, values as in YAML")
    test.add_argument("--config", type=Path, help="a YAML file with `custom_envs`, or with the arguments alone")
    test.add_argument("--seeds", type=int, default=8, help="episodes that each check plays (default 8)")
    test.add_argument("--episodes", type=int, default=100, help="episodes of each agent (default 100)")
    test.add_argument("--steps", type=int, default=50, help="actions per episode (default 50)")


def _add_demos(groups: Any) -> None:
    parser = _command(
        groups, "demos", "write episodes that environments solve as rows for pipeline sft", "roll.cli.demos:write_demos"
    )
    parser.add_argument("file", help="a configuration of pipeline agentic")
    parser.add_argument("output", type=Path, help="the jsonl file to write")
    parser.add_argument("--episodes", type=int, default=1000, help="how many are tried (default 1000)")
    parser.add_argument("--response", help="text of a response, with {action} (default: what action_pattern looks for)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the configuration")


def _add_judge(groups: Any) -> None:
    group = _command(groups, "judge", "compare a judge with labels that people gave")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    parser = _command(
        commands, "agree", "grade labelled responses and print accuracy, kappa and correlations", "roll.cli.judge:agree"
    )
    parser.add_argument("file", help="a configuration of pipeline rlvr with a section judge")
    parser.add_argument("data", help="a file with a prompt, a response and a label in each row")
    parser.add_argument("--prompt", default="prompt", help="column of the prompt (default: prompt)")
    parser.add_argument("--response", default="response", help="column of the response (default: response)")
    parser.add_argument("--label", default="label", help="column of the label, 0 and 1 or on the judge's scale")
    parser.add_argument("--domain", help="use this domain's reward_kwargs")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the configuration")
