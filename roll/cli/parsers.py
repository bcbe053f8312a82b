"""The commands of `roll` and their arguments. Only argparse is imported, so that `--help` takes no time.

A command names the function that runs it as `module:function`; `roll.cli.__main__` imports it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from roll import __version__
from roll.cli.command_parser import CODES, KEYS, CommandParser, add_debug, add_overrides, command
from roll.cli.part_parsers import PART_COMMANDS


def roll_parser() -> argparse.ArgumentParser:
    """Return the parser of `roll`."""
    parser = CommandParser(prog="roll", description="Reinforcement learning for language models.", epilog=CODES)
    parser.add_argument("--version", action="version", version=f"roll-rl {__version__}")
    add_debug(parser)
    groups = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (
        _add_quickstart,
        _add_train,
        _add_check,
        _add_migrate,
        _add_plan,
        _add_resume,
        _add_export,
        _add_plot,
        _add_view,
        _add_profile,
        _add_eval,
        _add_rollout,
        _add_serve,
        *PART_COMMANDS,
        _add_doctor,
        _add_examples,
        _add_completion,
    ):
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
    add_debug(parser)
    add_overrides(parser)
    return parser


def _add_train(groups: Any) -> None:
    parser = command(groups, "train", "run the pipeline of a configuration file", "roll.cli.train:train")
    parser.add_argument("file", help="the YAML file, with or without .yaml")
    add_overrides(parser)


def _add_check(groups: Any) -> None:
    parser = command(
        groups, "check", "check a configuration file and print its plan, without a model", "roll.cli.train:check"
    )
    parser.add_argument("file", help="the YAML file, with or without .yaml")
    parser.add_argument("--print_config", action="store_true", help="print all keys with their values instead")
    add_overrides(parser)


def _add_migrate(groups: Any) -> None:
    parser = command(
        groups,
        "migrate",
        "translate a configuration of ROLL, verl, TRL or OpenRLHF with a report of every key, or explain one key",
        "roll.cli.migrate:migrate",
    )
    parser.add_argument(
        "old", type=Path, nargs="?", metavar="OLD", help="YAML, a list of key=value overrides, or a launch script"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="NEW", help="file to write (default: standard output)")
    parser.add_argument(
        "--from",
        dest="system",
        choices=("roll", "verl", "trl", "openrlhf"),
        help="whose file or key it is (default: by its keys; any)",
    )
    parser.add_argument(
        "--explain", metavar="KEY", help="say what this key or flag is here instead; of ours: what others call it"
    )
    parser.dashed = "--explain"
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the report there, as JSON if its name ends in .json"
    )
    parser.add_argument("--json", action="store_true", help="the report or the explanation as JSON")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def _add_plan(groups: Any) -> None:
    parser = command(
        groups, "plan", "say whether a configuration's memory fits, by role, device and phase", "roll.cli.plan:plan"
    )
    parser.add_argument("file", help="the YAML file, with or without .yaml")
    parser.add_argument(
        "--devices",
        metavar="NAME:COUNT[,cpu:GIB]",
        help="of every machine, e.g. h100:8 or h100:8,cpu:1024 or cpu:64 (default: those of this machine)",
    )
    parser.add_argument("--suggest", action="store_true", help="look for sizes that fit, and check them")
    parser.add_argument(
        "--measure", action="store_true", help="run two steps on this machine, and print the second one's seconds"
    )
    parser.add_argument(
        "--measure_timeout", type=float, default=600, metavar="S", help="seconds for that run (default 600)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, in bytes")
    add_overrides(parser)


def _add_quickstart(groups: Any) -> None:
    parser = command(
        groups, "quickstart", "train a small model on this machine, in minutes", "roll.cli.quickstart:quickstart"
    )
    parser.add_argument("--yes", action="store_true", help="install the model's package without asking")
    add_overrides(parser)


def _add_examples(groups: Any) -> None:
    group = command(groups, "examples", "list the examples that come with the package, or copy one")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    command(commands, "list", "list the examples", "roll.cli.quickstart:list_examples")
    copy = command(commands, "copy", "copy an example, and say how to start it", "roll.cli.quickstart:copy")
    copy.add_argument("name", help="its name in the list")
    copy.add_argument("dir", nargs="?", type=Path, default=Path(), help="folder to copy it into (default: here)")


def _add_resume(groups: Any) -> None:
    parser = command(groups, "resume", "go on with a run from its newest checkpoint", "roll.cli.runs:resume")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder (its output_dir)")
    add_overrides(parser)


def _add_export(groups: Any) -> None:
    parser = command(groups, "export", "write a checkpoint's model as a Hugging Face folder", "roll.cli.runs:export")
    parser.add_argument(
        "run_folder", metavar="RUN", help="the run's folder (its output_dir), or a checkpoint's folder or address"
    )
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N|best",
        help="of the run's checkpoint (default: the newest); best: see save_best",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="folder to write (default: RUN/exported/step-<N>, for a checkpoint's folder ./<its name>-hf)",
    )
    parser.add_argument(
        "--role",
        default="actor_train",
        choices=("actor_train", "critic"),
        help="whose model; a critic becomes a token classifier with one output (default: actor_train)",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="type of the weights (default: as trained)")
    parser.add_argument("--max_shard_size", metavar="SIZE", help="largest file of weights, such as 5GB")
    parser.add_argument(
        "--adapters", action="store_true", help="of a run with LoRA: the adapters alone, as peft has them"
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="the model that training started from, where its folder was moved"
    )


def _add_view(groups: Any) -> None:
    parser = command(
        groups, "view", "show runs in the browser: curves, groups, episodes, every token", "roll.cli.view:view"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a run's folder (its output_dir)")
    parser.add_argument(
        "--demo",
        nargs="?",
        const="quickstart",
        choices=("quickstart", "agentic"),
        help="show small recorded runs that come with the package (default quickstart)",
    )
    parser.add_argument("--port", type=int, default=8767, help="port to listen on, 0 for any (default 8767)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1); any other one asks for a token"
    )
    parser.add_argument("--open", action="store_true", help="open the browser, too")
    parser.add_argument(
        "--trace_url",
        default="",
        metavar="URL",
        help="where traces of `tracing.endpoint` are shown, with {trace} for the id: http://localhost:16686/trace/{trace}",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="FILE",
        help="write a file instead: .html the page, .eval or .json a log of Inspect with one run's episodes",
    )
    parser.add_argument("--trackio", metavar="PROJECT", help="add a run's episodes to a project of trackio, as traces")
    parser.add_argument(
        "--episodes", type=int, default=200, metavar="N", help="with these: most episodes written (default 200)"
    )
    parser.add_argument(
        "--steps",
        type=int,
        nargs="+",
        metavar="STEP",
        help="with these: of which steps (default: spread over all for .html, else the last one)",
    )
    parser.add_argument(
        "--kind",
        choices=("train", "dropped", "validation"),
        default="train",
        help="with .eval, .json and --trackio: which episodes (default train)",
    )


def _add_plot(groups: Any) -> None:
    parser = command(groups, "plot", "draw the learning curves of runs", "roll.cli.plot:plot")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs; they share the axes")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path("curves.png"), help="png, svg or pdf")
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="draw this metric; may be given several times"
    )


def _add_profile(groups: Any) -> None:
    parser = command(groups, "profile", "say where each second of a run's steps went", "roll.cli.profile:profile")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder (its output_dir)")
    parser.add_argument("--step", type=int, help="show this profiled step alone (default: all, and the run's timings)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="operators that are listed (default 10)")


def _step(text: str) -> int | str:
    """Return the number of a step, or `best`."""
    if text == "best":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected the number of a step, or best") from None


def _add_eval(groups: Any) -> None:
    group = command(groups, "eval", "let a model answer a data file, or score answers")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    score = command(commands, "score", "score a file of responses, with a table by tag", "roll.cli.evaluate:score")
    score.add_argument("file", help="rows with a column `response`, and what the reward reads, e.g. `ground_truth`")
    score.add_argument("--reward", help="a built-in one, package.module:function, or path/to/file.py:function")
    score.add_argument("--config", help="a configuration of pipeline rlvr, whose rewards score the rows by their tags")
    score.add_argument("-o", "--output", "--output_path", type=Path, help="write rows and scores: .parquet or .jsonl")
    score.add_argument(
        "--response_key", "--response", default="response", metavar="COLUMN", help="text, or list of texts (response)"
    )
    score.add_argument(
        "--prompt_key", metavar="COLUMN", help="what responses to one question share (default: the row without them)"
    )
    score.add_argument("--data_source_key", metavar="COLUMN", help="kind of task (default: `tag`, else `data_source`)")
    score.add_argument(
        "--reward_model_key", metavar="COLUMN", help="ground truth, or what has one (default: `ground_truth`, ...)"
    )
    score.add_argument("--pass_at_k", type=int, action="append", metavar="K", help="may be given several times")
    score.add_argument("--maj_at_k", type=int, action="append", metavar="K", help="majority vote; likewise")
    score.add_argument("--threshold", type=float, default=1.0, help="a response is right from this score (default 1)")
    score.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="arguments of the reward, or keys of --config"
    )


def _add_generate(commands: Any) -> None:
    answers = command(
        commands, "generate", "write a model's responses to the rows of a data file", "roll.cli.generate:generate"
    )
    answers.add_argument("data", help="jsonl, json, csv, tsv, parquet, a folder of them, or a hub id")
    answers.add_argument("--model", required=True, help="Hugging Face folder or hub id")
    answers.add_argument(
        "-o",
        "--output",
        "--output_path",
        type=Path,
        default=Path("responses.parquet"),
        help=".parquet or .jsonl (default: responses.parquet)",
    )
    answers.add_argument("--samples", "--n_samples", type=int, default=1, help="responses per row (default 1)")
    answers.add_argument(
        "--prompt_key", metavar="COLUMN", help="text or messages (default: `messages`, `prompt` or `question`)"
    )
    answers.add_argument("--response_key", default="response", metavar="COLUMN", help="to write (default: response)")
    answers.add_argument(
        "--grouped", action="store_true", help="one row per question, with lists of responses, as verl writes them"
    )
    answers.add_argument("--temperature", type=float, help="default: 0 for one sample, else 1")
    answers.add_argument("--max_new_tokens", type=int, default=512, help="default 512")
    answers.add_argument(
        "--prompt_length", type=int, help="longest prompt in tokens (default 1024, or what the model has room for)"
    )
    answers.add_argument("--template", default="native", help="as data_args.template: native (default), plain, ...")
    answers.add_argument("--engine", default="hf_infer", help="hf_infer (default), vllm or sglang")
    answers.add_argument("--engines", type=int, default=1, metavar="N", help="that share the rows (default 1)")
    answers.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="further keys of pipeline rlvr")


def _add_completion(groups: Any) -> None:
    parser = command(
        groups, "completion", "print a script that completes commands in a shell", "roll.cli.completion:completion"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def _add_rollout(groups: Any) -> None:
    parser = command(
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
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="further keys of pipeline agentic"
    )


def _add_serve(groups: Any) -> None:
    parser = command(
        groups, "serve", "serve a model by the protocols of OpenAI and Anthropic, as agents meet it in training",
        "roll.cli.serve:serve",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="Hugging Face folder or hub id, or the folder of a run")
    parser.add_argument(
        "--step",
        type=_step,
        metavar="N|best",
        help="of the run's checkpoint (default: its last model); best: see save_best",
    )
    parser.add_argument("--engine", default="hf_infer", help="hf_infer (default), vllm or sglang")
    parser.add_argument("--engines", type=int, default=1, help="so many, each with the whole model (default 1)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, this machine)")
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0: a free one")
    parser.add_argument(
        "--api_key_env", metavar="NAME", help="environment variable with the key of clients (default: a new key)"
    )
    parser.add_argument("--name", help="of the model, for clients (default: that of its folder)")
    parser.add_argument("--tool_parser", default="auto", help="how calls are found (default: as the template says)")
    parser.add_argument("--thinking", action="store_true", help="keep <think>...</think> apart from the content")
    parser.add_argument("--max_length", type=int, help="tokens of prompt and response (default: what the model holds)")
    parser.add_argument("--max_new_tokens", type=int, default=1024, help="where a request doesn't say (default 1024)")
    parser.add_argument(
        "--ignore_fields",
        action="append",
        metavar="FIELD",
        help="of requests, left out instead of refused; or a harness, e.g. codex; may be repeated",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="further keys of pipeline rlvr")


def _add_doctor(groups: Any) -> None:
    parser = command(
        groups, "doctor", "look at this machine: packages, devices, disks, network, Ray", "roll.cli.doctor:doctor"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("output"), help="folder that runs will write to (default: output)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON; the table goes to stderr")
