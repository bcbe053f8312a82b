"""Agent harnesses, as they are installed, play with a scripted policy and are trained on what it said.

Each has an environment of its own in `.venv-harnesses` (or `$ROLL_HARNESSES`), of `requirements-agents/NAME.txt` or
`NAME.npm`: their dependencies exclude each other. docs/agents.md has the table.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness_requests import Shortened, read_requests, write_requests
from rollout_files import read_rollouts
from scripted_policy import ANSWER, RESULT, SCRIPT, build_model, call
from toy import run_toy

from roll.gateway.agents import agent_episodes as rollout
from roll.gateway.base import RefusedCall
from roll.gateway.budget import Budget
from roll.gateway.protocols import wire_formats

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PINS = ROOT / "requirements-agents"
FOLDER = Path(os.environ.get("ROLL_HARNESSES") or ROOT / ".venv-harnesses")

QUESTION = "What is 12 + 7?"

YAML = """
pipeline: agentic
exp_name: harness
seed: 3
executor: inline
output_dir: {folder}/output
rollout_dump_dir: {folder}/dump
track_with: jsonl
pretrain: {model}
max_steps: 1
rollout_batch_size: 2
sequence_length: 32000
response_length: 128
custom_envs: {envs}
train_env_manager: {{num_env_groups: 1, group_size: 2}}
adv_estimator: reinforce
actor_train:
  model_args: {{disable_gradient_checkpointing: true}}
  training_args: {{learning_rate: 1.0e-3, per_device_train_batch_size: 1}}
actor_infer:
  strategy_args: {{strategy_name: "{here}/scripted_policy.py:ScriptedEngine"}}
"""


@dataclass(frozen=True)
class Harness:
    """One harness by one protocol."""

    name: str
    """Of `requirements-agents/NAME.txt` and of `harnesses/NAME_agent.py`."""
    protocol: str
    says: tuple[str, ...] = (call("add", a=12, b=7), ANSWER)
    """What the policy says, one response after the other."""
    after: tuple[str, ...] = (RESULT,)
    """What stands in the prompt of each response but the first."""
    asks: str = "<add>"
    """What stands in the prompt of the first one: harnesses have hidden calls, which say other things."""
    result: str = f"{RESULT}19"
    """How the result of the call comes back."""
    hidden: tuple[str, ...] = ()
    """Responses to other calls."""
    branches: int = 1
    """Rows of an episode."""
    ignore_fields: tuple[str, ...] = ()
    side_calls: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    @property
    def script(self) -> list[dict[str, Any]]:
        later = [{"when": [text], "say": said} for text, said in zip(self.after, self.says[1:], strict=True)]
        return [*reversed(later), {"when": [self.asks], "say": self.says[0]}]


def shell(tool: str, **arguments: Any) -> tuple[str, ...]:
    return (call(tool, **arguments), ANSWER)


FIELDS = "[[ ## {} ## ]]\n"
"""Where dspy's prompts and responses have a field."""


def fields(**values: str) -> str:
    return "\n\n".join(FIELDS.format(name) + value for name, value in {**values, "completed": ""}.items()).strip()


# litellm asks the network for prices at its import, unless it is told not to.
OFFLINE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
CREWAI = {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}
MINI_SWE = {"MSWEA_CONFIGURED": "true", "MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}
DSPY = (
    fields(next_thought="add", next_tool_name="add", next_tool_args='{"a": 12, "b": 7}'),
    fields(next_thought="done", next_tool_name="finish", next_tool_args="{}"),
    fields(reasoning="It was added.", answer=ANSWER),
)
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 19"
HARNESSES = [
    *(Harness("pydantic-ai", protocol) for protocol in ("chat", "responses", "messages")),
    *(Harness("openai-agents", protocol) for protocol in ("chat", "responses")),
    *(Harness("litellm", protocol, env=OFFLINE) for protocol in ("chat", "messages")),
    *(Harness("strands", protocol) for protocol in ("chat", "responses", "messages")),
    *(Harness("langgraph", protocol) for protocol in ("chat", "responses", "messages")),
    *(Harness("inspect-ai", protocol) for protocol in ("chat", "responses", "messages")),
    Harness("crewai", "chat", env=CREWAI),
    Harness("google-adk", "chat", result=RESULT + '{"result": 19}', env=OFFLINE),
    # Its last question comes without tools.
    Harness("autogen", "chat", branches=2),
    Harness("llama-index", "chat", ignore_fields=("llama-index",)),
    # Messages in forms of their own: what was said comes back as something else.
    Harness(
        "smolagents",
        "chat",
        (call("add", a=12, b=7), call("final_answer", answer="19")),
        after=("Observation:\n19",),
        result="Observation:\n19",
        branches=2,
        ignore_fields=("smolagents",),
    ),
    Harness(
        "dspy",
        "chat",
        DSPY,
        after=(FIELDS.format("observation_0"), FIELDS.format("reasoning")),
        asks="",
        result=FIELDS.format("observation_0") + "19",
        branches=3,
        env=OFFLINE,
    ),
    Harness(
        "mini-swe-agent",
        "chat",
        (call("bash", command="expr 12 + 7"), call("bash", command=SUBMIT)),
        asks="<bash>",
        result=RESULT + "<returncode>0</returncode>\n<output>\n19\n",
        env=OFFLINE | MINI_SWE,
    ),
    Harness("openhands", "chat", shell("terminal", command="expr 12 + 7"), asks="<terminal>", env=OFFLINE),
    Harness(
        "aider",
        "chat",
        ("answer.txt\n```\n12 + 7 = 19\n```\n",),
        after=(),
        asks="answer.txt",
        result="12 + 7 = ?",
        ignore_fields=("aider",),
        side_calls=("aider",),
    ),
    Harness(
        "claude-code",
        "messages",
        shell("Bash", command="expr 12 + 7", description="add"),
        asks="<Bash>",
        ignore_fields=("claude-code",),
    ),
    Harness(
        "codex",
        "responses",
        shell("exec_command", cmd="expr 12 + 7"),
        asks="<exec_command>",
        result="Output:\n19",
        ignore_fields=("codex",),
    ),
    Harness(
        "opencode",
        "chat",
        shell("bash", command="expr 12 + 7", description="add"),
        asks="<bash>",
        ignore_fields=("opencode",),
        side_calls=("opencode",),
    ),
    Harness(
        "qwen-code",
        "chat",
        shell("run_shell_command", command="expr 12 + 7", description="add", is_background=False),
        asks="<run_shell_command>",
        result="Output: 19",
        ignore_fields=("qwen-code",),
    ),
]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return build_model(tmp_path_factory.mktemp("model"), [*sorted((ROOT / "docs").glob("*.md")), Path(__file__)])


def interpreter(least: str) -> str:
    """Return a Python of at least a version."""
    names = [sys.executable, *(f"python3.{minor}" for minor in (11, 12, 13))]
    code = f"import sys; sys.exit(sys.version_info < {tuple(map(int, least.split('.')))})"
    for path in filter(None, map(shutil.which, names)):
        if not subprocess.run([path, "-c", code], capture_output=True, check=False).returncode:
            return path
    pytest.skip(f"there is no Python {least}")


def installed(name: str) -> Path:
    """Install a harness where it isn't; the folder of its programs."""
    folder, npm = FOLDER / name, PINS / f"{name}.npm"
    pins = npm if npm.exists() else PINS / f"{name}.txt"
    programs = folder / ("node_modules/.bin" if npm.exists() else "bin")
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == pins.read_text():
        return programs
    folder.mkdir(parents=True, exist_ok=True)
    if npm.exists():
        if shutil.which("npm") is None:
            pytest.skip("there is no npm")
        words = ["npm", "install", "--no-fund", "--no-audit", "--silent", "--prefix", str(folder)]
        words += [line for line in npm.read_text().splitlines() if not line.startswith("#")]
    else:
        first = pins.read_text().splitlines()[0]
        python = interpreter(first.rpartition(" ")[2] if "Python >= " in first else "3.11")
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        words = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-compile"]
        words += ["-r", str(pins)]
    subprocess.run(words, check=True, timeout=1800)
    shutil.copyfile(pins, stamp)
    return programs


def write_run(folder: Path, model: Path, harness: Harness, **options: Any) -> Path:
    programs = installed(harness.name)
    agent = f"{HERE}/harnesses/{harness.name.replace('-', '_')}_agent.py:play"
    tasks = folder / "tasks.jsonl"
    task = {"question": QUESTION, "answer": "19", "protocol": harness.protocol}
    tasks.write_text(json.dumps(task) + "\n")
    config = {"agent": agent, "tasks": str(tasks), "timeout_s": 300, "max_agents": 1, **options}
    config["env"] = {"PATH": os.pathsep.join([str(programs), os.environ["PATH"]]), **harness.env}
    if (programs / "python").exists():
        config["python"] = str(programs / "python")
    if harness.ignore_fields:
        config["ignore_fields"] = list(harness.ignore_fields)
    if harness.side_calls:
        config["side_calls"] = list(harness.side_calls)
    envs = json.dumps({"game": {"env_type": "endpoint", "env_config": config}})
    (folder / "toy.yaml").write_text(YAML.format(folder=folder, model=model, envs=envs, here=HERE))
    return folder


class Line:
    """Listens to what harnesses send and are told."""

    def __init__(self, monkeypatch, decode) -> None:
        self._bodies: dict[str, dict[str, Any]] = {}
        self._order: list[str] = []
        self._decode = decode
        self._said: dict[str, str] = {}
        for route, wire in wire_formats().items():
            kind = type(wire)
            if "count" not in route:
                monkeypatch.setattr(kind, "read", self._reading(route, kind.read))
                for name in ("answer", "events"):
                    monkeypatch.setattr(kind, name, self._answering(getattr(kind, name)))

    def _reading(self, route, read):
        def reads(wire, body, ignored):
            sent = json.loads(json.dumps(body))
            asked = read(wire, body, ignored)
            self._bodies[asked.id] = {"route": route, "body": sent}
            self._order.append(asked.id)
            return asked

        return reads

    def _answering(self, tell):
        def tells(wire, asked, answer):
            self._said.setdefault(asked.id, self._decode(answer.choices[0].token_ids))
            return tell(wire, asked, answer)

        return tells

    def requests(self, kept: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return what was sent in the first of two episodes, shortened, and what was answered."""
        shortened = Shortened(kept)
        asked = self._order[: len(self._order) // 2]
        return [
            {"route": self._bodies[one]["route"], "says": self._said[one].removesuffix("<|im_end|>"),
             "body": shortened.body(self._bodies[one]["body"])}
            for one in asked
        ]  # fmt: skip


@pytest.mark.parametrize("harness", HARNESSES, ids=lambda harness: f"{harness.name} {harness.protocol}")
def test_a_harness_plays_what_the_policy_says_and_is_trained_on_it(harness, model, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    monkeypatch.setenv(SCRIPT, json.dumps(harness.script))
    tokenizer = AutoTokenizer.from_pretrained(model)
    line = Line(monkeypatch, tokenizer.decode)
    folder = write_run(tmp_path, model, harness)
    (metrics,) = run_toy(folder)
    assert metrics["reward/mean"] == 1.0
    assert metrics["rollout/responses"] == 2
    assert metrics["agent/calls"] == 2 * len((*harness.says, *harness.hidden))
    assert metrics["rollout/rows"] == 2 * harness.branches
    rows = [row for file in sorted((folder / "dump").glob("rollouts-*.parquet")) for row in read_rollouts(file)]
    sampled = []
    for row in rows:
        mine = [token for token, acts in zip(row.token_ids, row.action_mask, strict=True) if acts]
        sampled += tokenizer.decode(mine).split("<|im_end|>")[:-1]
    assert sorted(sampled) == sorted(2 * [*harness.says, *harness.hidden]), "every response is trained once"
    assert any(harness.result in tokenizer.decode(row.token_ids) for row in rows), "the tool's result came back"
    compare(harness, line.requests((QUESTION, *harness.says, harness.result.removeprefix(RESULT))))


def compare(harness: Harness, requests: list[dict[str, Any]]) -> None:
    """Compare what a harness sends with the recording that continuous integration replays."""
    names = {"harness": harness.name, "protocol": harness.protocol}
    fresh = {**names, "ignore_fields": list(harness.ignore_fields), "side_calls": list(harness.side_calls)}
    fresh |= {"branches": harness.branches, "requests": requests}
    recorded = read_requests()
    known = [one for one in recorded if (one["harness"], one["protocol"]) == (harness.name, harness.protocol)]
    if os.environ.get("RECORD_HARNESSES"):
        write_requests([*(one for one in recorded if one not in known), fresh])
    else:
        assert known == [fresh], "with RECORD_HARNESSES=1 what is sent now is recorded"


@pytest.mark.parametrize("name", ["litellm", "mini-swe-agent", "strands", "opencode"])
def test_a_harness_whose_calls_are_spent_is_ended_in_ten_seconds(name, model, tmp_path, monkeypatch, evidence_folder):
    (harness,) = (one for one in HARNESSES if (one.name, one.protocol) == (name, "chat"))
    refused: dict[int, float] = {}
    took: list[float] = []
    left, run = Budget.left, rollout._Play._run

    def leaves(budget, *arguments):
        try:
            return left(budget, *arguments)
        except RefusedCall:
            refused.setdefault(id(budget), time.monotonic())
            raise

    async def runs(play, agent):
        """Ends when the agent is gone."""
        try:
            return await run(play, agent)
        finally:
            took.append(time.monotonic() - refused[id(play._session._budget)])

    monkeypatch.setattr(Budget, "left", leaves)
    monkeypatch.setattr(rollout._Play, "_run", runs)
    monkeypatch.setenv(SCRIPT, json.dumps(harness.script))
    (metrics,) = run_toy(write_run(tmp_path, model, harness, max_calls=1, truncated_reward=0.25))
    assert metrics["agent/spent"] == metrics["agent/calls"] == 2
    assert metrics["reward/mean"] == 0.25
    with (evidence_folder / "harness_budgets.txt").open("a") as log:
        log.write(f"{name}: ended {max(took):.1f} s after the first refusal\n")
    assert len(took) == 2 and max(took) < 10, took
