"""`roll envs test` in its processes: no environment ends it or holds it up, and what each did is said."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from roll.envs import env_probe as probing
from roll.envs.conformance import CHECKS
from roll.envs.env_probe import EnvProbes, Probe, ProbeEnded, Refused, findings_of, findings_of_responses, taken
from roll.envs.probe_worker import ProbeRequest
from roll.envs.recorded_env import Recorded, read_responses
from roll.envs.wrappers import EnvSpec

HOSTILE = f"{Path(__file__).with_name('envs_hostile.py')}:Hostile"


@pytest.fixture(scope="module")
def probes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probing, "_GRACE_S", 1.0)
        patch.setattr(probing, "_MEMORY_MB", 1000.0)
        with EnvProbes(os.environ, timeout_s=0.5) as opened:
            yield opened


def order(how: str = "", when: str = "step", env_type: str = HOSTILE, **arguments) -> ProbeRequest:
    config = {"how": how, "when": when} if env_type == HOSTILE else {}
    spec = EnvSpec(tag="x", env_type=env_type, env_config={**config, **arguments})
    return ProbeRequest(spec, num_seeds=2, max_steps=6, timeout_s=0.5, budget_s=30.0)


def problems(probes: EnvProbes, asked: ProbeRequest) -> dict[str, str]:
    return {f.check: f.message for f in findings_of(probes, asked) if f.level in ("warning", "error")}


def test_the_harmless_one_keeps_every_promise(probes):
    found = list(findings_of(probes, order()))
    assert {f.check for f in found if f.level in ("warning", "error")} == set()
    assert {f.check for f in found} == set(CHECKS)


@pytest.mark.parametrize(
    ("how", "check", "said"),
    [
        ("os_exit", "is played", "ended with exit code 3"),
        ("sys_exit", "is played", "SystemExit: 4"),
        ("kill", "is played", "signal 9 (SIGKILL)"),
        ("fork", "is played", "os.fork"),
        ("bomb", "is played", "MemoryError"),
        ("sleep", "is played", "is not done after 0.5 s; here it was"),
        ("careless", "is played", "is not done after 0.5 s; here it was"),
        ("stubborn", "is played", "took over 0.5 s and can't be interrupted"),
        ("deaf", "is played", "took over 0.5 s and can't be interrupted"),
        ("close_files", "is played", "its process"),
        ("unprintable", "is played", "Unprintable"),
        ("interrupt", "is played", "KeyboardInterrupt"),
        ("no_exception", "is played", "GeneratorExit"),
        ("nan", "is played", "reward = nan (float), expected a finite float"),
        ("infinite", "is played", "reward = inf"),
        ("text_reward", "is played", "reward = 'much' (str)"),
        ("text_flag", "is played", "terminated = 'yes' (str)"),
        ("surrogate", "is played", "isn't valid Unicode"),
        ("giant", "is played", "3,000,004 characters, expected at most 1,000,000"),
        ("long", "is played", "30,000 characters"),
        ("flood", "output", "characters in 6 steps"),
        ("thread", "close", "a thread goes on"),
    ],
)
def test_what_a_step_does_is_found_and_the_test_goes_on(probes, how, check, said):
    began = time.monotonic()
    found = problems(probes, order(how, "close" if how == "thread" else "step"))
    assert said in found.get(check, ""), found
    assert time.monotonic() - began < 30
    assert problems(probes, order()) == {}  # as if nothing had been


def test_the_call_that_ended_the_process_is_named(probes):
    seed = taken(probes, order()).seeds[0]
    said = problems(probes, order("os_exit"))["is played"]
    assert said.startswith(f"step 1 of seed {seed}, '"), said
    assert problems(probes, order("os_exit", "reset"))["63-bit seeds"].startswith(f"reset(seed={seed}): its process")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("os_exit", "__init__: its process ended with exit code 3"),
        ("stubborn", "__init__: took over 0.5 s and can't be interrupted"),
    ],
)
def test_a_constructor_that_ends_its_process_is_told(probes, how, said):
    with pytest.raises(ProbeEnded, match="^" + said.replace("(", "\\(")):
        probes.get().ask("made", order(how, "init"))


def test_a_constructor_that_raises_is_refused_with_its_line(probes):
    with pytest.raises(Refused) as caught:
        probes.get().ask("made", order("unprintable", "init"))
    assert "Unprintable" in str(caught.value)
    assert "envs_hostile.py" in caught.value.where


@pytest.mark.parametrize("how", ["os._exit(5)", "time.sleep(1000.0)"])
def test_a_file_that_ends_or_holds_up_its_process_when_imported(probes, tmp_path, how):
    file = tmp_path / "imported.py"
    file.write_text(f"import os, time\n{how}\n")
    with pytest.raises((ProbeEnded, Refused), match="exit code 5|__init__ is not done after 0.5 s"):
        probes.get().ask("made", order(env_type=f"{file}:Nothing"))


def test_a_test_that_takes_long_stops_and_says_so():
    with Probe(os.environ, timeout_s=5.0) as probe:
        short = ProbeRequest(order("slow").spec, num_seeds=2, max_steps=50, timeout_s=5.0, budget_s=0.3)
        (found,) = probe.ask("check", short, "is played")
    assert found[0] == "info"
    assert found[2] == "stopped after 0.3 s: not all was played"


def test_recorded_responses_are_played_twice_and_counted(probes, tmp_path):
    file = tmp_path / "recorded.jsonl"
    file.write_text(
        '["<answer>a</answer>", "nothing", "<answer>b</answer>", "<answer>b</answer>"]\n'
        '{"seed": 5, "messages": [{"role": "user", "content": "?"}, '
        '{"role": "assistant", "content": "<answer>q</answer>"}]}\n'
    )
    episodes = read_responses(file)
    assert episodes == [
        Recorded(1, ("<answer>a</answer>", "nothing", "<answer>b</answer>", "<answer>b</answer>")),
        Recorded(2, ("<answer>q</answer>",), 5),
    ]
    (found,) = findings_of_responses(probes, order(), episodes)
    assert found.level == "ok"
    assert found.message == (
        "4 responses in 2 episodes, of which 1 ended; 1 responses without an action, 1 invalid actions, "
        "1 responses after an end"
    )
    (found,) = findings_of_responses(probes, order("os_exit"), episodes)
    assert found.level == "error"
    assert found.message.startswith("the episode in line 1 (seed ")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "recorded.jsonl:1 is no JSON"),
        ("[1]", "recorded.jsonl:1: expected a list of texts"),
        ('{"responses": ["a"], "seed": -1}', "seed is -1"),
        ("[]", "has no response"),
        ("[" * 100_000, "recorded.jsonl:1 is no JSON"),
    ],
)
def test_a_file_without_responses_is_refused(tmp_path, text, said):
    file = tmp_path / "recorded.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match="--responses: ") as caught:
        read_responses(file)
    assert said in str(caught.value)
