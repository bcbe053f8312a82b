"""The commands of `roll` and their arguments. Only argparse is imported, so that `--help` takes no time.

A command names the function that runs it as `module:function`; `roll.cli.__main__` imports it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from roll import __version__

CODES = "Exit code: 0 done, 2 your mistake (arguments, configuration, data), 1 a failure, 130 interrupted."
KEYS = "Every key of a configuration: docs/configuration.md."


def roll_parser() -> argparse.ArgumentParser:
    """Return the parser of `roll`."""
    parser = argparse.ArgumentParser(
        prog="roll", description="Reinforcement learning for language models.", epilog=CODES
    )
    parser.add_argument("--version", action="version", version=f"roll-rl {__version__}")
    _add_debug(parser)
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
        _add_envs,
        _add_tools,
        _add_demos,
        _add_reward,
        _add_judge,
        _add_data,
        _add_sandbox,
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
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="e.g. rollout_batch_size=16")


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


def _add_migrate(groups: Any) -> None:
    parser = _command(
        groups,
        "migrate",
        "translate a configuration of ROLL, verl or TRL, with a report of every key",
        "roll.cli.migrate:migrate",
    )
    parser.add_argument(
        "old", type=Path, metavar="OLD", help="YAML, a list of key=value overrides, or a shell script that starts verl"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="NEW", help="file to write (default: standard output)")
    parser.add_argument(
        "--from", dest="system", choices=("roll", "verl", "trl"), help="whose file it is (default: by its keys)"
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write the report there, as JSON if its name ends in .json"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def _add_plan(groups: Any) -> None:
    parser = _command(
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
    _add_overrides(parser)


def _add_quickstart(groups: Any) -> None:
    parser = _command(
        groups, "quickstart", "train a small model on this machine, in minutes", "roll.cli.quickstart:quickstart"
    )
    parser.add_argument("--yes", action="store_true", help="install the model's package without asking")
    _add_overrides(parser)


def _add_examples(groups: Any) -> None:
    group = _command(groups, "examples", "list the examples that come with the package, or copy one")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "list", "list the examples", "roll.cli.quickstart:list_examples")
    copy = _command(commands, "copy", "copy an example, and say how to start it", "roll.cli.quickstart:copy")
    copy.add_argument("name", help="its name in the list")
    copy.add_argument("dir", nargs="?", type=Path, default=Path(), help="folder to copy it into (default: here)")


def _add_resume(groups: Any) -> None:
    parser = _command(groups, "resume", "go on with a run from its newest checkpoint", "roll.cli.runs:resume")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder (its output_dir)")
    _add_overrides(parser)


def _add_export(groups: Any) -> None:
    parser = _command(groups, "export", "write a checkpoint's model as a Hugging Face folder", "roll.cli.runs:export")
    parser.add_argument(
        "run_folder", metavar="RUN", help="the run's folder (its output_dir), or a checkpoint's folder or address"
    )
    parser.add_argument("--step", type=int, help="of the run's checkpoint (default: the newest)")
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
    parser = _command(
        groups, "view", "show runs in the browser: curves, groups, episodes, every token", "roll.cli.view:view"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="a run's folder (its output_dir)")
    parser.add_argument("--demo", action="store_true", help="show a small recorded run that comes with the package")
    parser.add_argument("--port", type=int, default=8767, help="port to listen on, 0 for any (default 8767)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1); any other one asks for a token"
    )
    parser.add_argument("--open", action="store_true", help="open the browser, too")
    parser.add_argument("--export", type=Path, metavar="FILE.html", help="write the page as one file instead")
    parser.add_argument(
        "--episodes", type=int, default=200, metavar="N", help="with --export: most episodes in the file (default 200)"
    )
    parser.add_argument(
        "--steps", type=int, nargs="+", metavar="STEP", help="with --export: of these steps (default: spread over all)"
    )


def _add_plot(groups: Any) -> None:
    parser = _command(groups, "plot", "draw the learning curves of runs", "roll.cli.plot:plot")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folders of runs; they share the axes")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=Path("curves.png"), help="png, svg or pdf")
    parser.add_argument(
        "--metric", action="append", metavar="NAME", help="draw this metric; may be given several times"
    )


def _add_profile(groups: Any) -> None:
    parser = _command(groups, "profile", "say where each second of a run's steps went", "roll.cli.profile:profile")
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder (its output_dir)")
    parser.add_argument("--step", type=int, help="show this profiled step alone (default: all, and the run's timings)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="operators that are listed (default 10)")


def _add_eval(groups: Any) -> None:
    group = _command(groups, "eval", "let a model answer a data file, or score answers")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    _add_generate(commands)
    score = _command(commands, "score", "score a file of responses, with a table by tag", "roll.cli.evaluate:score")
    score.add_argument("file", help="rows with a column `response`, and what the reward reads, e.g. `ground_truth`")
    score.add_argument("--reward", help="a built-in one, package.module:function, or path/to/file.py:function")
    score.add_argument("--config", help="a configuration of pipeline rlvr, whose rewards score the rows by their tags")
    score.add_argument("-o", "--output", "--output_path", type=Path, help="write rows and scores: .parquet or .jsonl")
    score.add_argument(
        "--response_key", "--response", default="response", metavar="COLUMN", help="text, or list of texts (response)"
    )
    score.add_argument("--prompt_key", metavar="COLUMN", help="what responses to one question share (default: `row`)")
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
    answers = _command(
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
    parser = _command(
        groups, "completion", "print a script that completes commands in a shell", "roll.cli.completion:completion"
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


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
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="further keys of pipeline agentic"
    )


def _add_serve(groups: Any) -> None:
    parser = _command(
        groups, "serve", "serve a model by the protocols of OpenAI and Anthropic, as agents meet it in training",
        "roll.cli.serve:serve",
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL_OR_RUN", help="Hugging Face folder or hub id, or the folder of a run")
    parser.add_argument("--step", type=int, help="of the run's checkpoint (default: its last model)")
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
        help="of requests, left out instead of refused; may be repeated",
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="further keys of pipeline rlvr")


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
    group = _command(groups, "tools", "list built-in tools, or show and call those of a configuration")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, "list", "list built-in tools and their options", "roll.cli.tools:list_tools")
    test = _command(
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
    _add_overrides(test)


def _add_demos(groups: Any) -> None:
    parser = _command(
        groups, "demos", "write episodes that environments solve as rows for pipeline sft", "roll.cli.demos:write_demos"
    )
    parser.add_argument("file", help="a configuration of pipeline agentic")
    parser.add_argument("output", type=Path, help="the jsonl file to write")
    parser.add_argument("--episodes", type=int, default=1000, help="how many are tried (default 1000)")
    parser.add_argument("--response", help="text of a response, with {action} (default: what action_pattern looks for)")
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the configuration")


def _add_sandbox(groups: Any) -> None:
    group = _command(groups, "sandbox", "test what contains model output on this machine")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    test = _command(
        commands, "test", "run some attacks in a sandbox and print a table", "roll.cli.sandbox:test_sandbox"
    )
    test.add_argument(
        "name", nargs="?", default="auto", help="auto (default), sandlock, bwrap, unconfined, or a server's address"
    )


def _add_doctor(groups: Any) -> None:
    parser = _command(
        groups, "doctor", "look at this machine: packages, devices, disks, network, Ray", "roll.cli.doctor:doctor"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("output"), help="folder that runs will write to (default: output)"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON; the table goes to stderr")


def _add_reward(groups: Any) -> None:
    group = _command(groups, "reward", "test whether a reward scores the answers of a data set as it should")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    help_ = "score every row's reference answer, an empty one and a wrong one, and list what is scored otherwise"
    test = _command(commands, "test", help_, "roll.cli.reward:test_reward")
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
    group = _command(groups, "data", "look at data files before a run does")
    commands = group.add_subparsers(required=True, metavar="COMMAND")
    check = _command(
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
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the configuration")
