"""A teacher behind a service: the same numbers as with its weights here, and what a service does wrong."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Run
from teacher_service import TeacherService, serving
from test_pipelines_distill import SFT, distil, distil_config
from tiny_models import build_tiny_model
from toy import metrics_of

from roll.configs.checks.endpoint_checks import endpoint_notes
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.schema.distill_args import TeacherConfig
from roll.configs.schema.engine_config import EndpointConfig
from roll.configs.schema.strategy_config import StrategyArgs
from roll.distributed.worker import WorkerInfo
from roll.pipelines import run_pipeline
from roll.strategies.base import TrainSpec
from roll.strategies.engines.endpoint_engine import EndpointTeacher
from roll.types.batch import TokenBatch
from roll.utils.json_service import EndpointFailed

KEY = "sk-very-secret"
TOP = ("distill.use_as=loss", "distill.top_k=5")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("teacher") / "model", seed=7)


@pytest.fixture
def service(teacher: Path) -> Iterator[TeacherService]:
    with serving(teacher) as found:
        yield found


def advantages(run: Run) -> torch.Tensor:
    return torch.tensor([value for row in run.rollouts() for value in row.advantages])


@pytest.mark.parametrize("api", ["prompt_logprobs", "sglang", "echo", "echo of texts"])
def test_advantages_are_those_of_the_same_weights_here(
    tiny_model: Path, teacher: Path, service: TeacherService, tmp_path: Path, api: str
) -> None:
    service.writes_ids = api != "echo of texts"
    here = distil(tmp_path / "here", tiny_model, teacher, dump=True)
    there = distil(tmp_path / "there", tiny_model, teacher, *service.keys(api=api.split()[0]), dump=True)
    torch.testing.assert_close(advantages(there), advantages(here), rtol=1e-5, atol=1e-5)
    assert there.last["distill/reverse_kl"] == pytest.approx(here.last["distill/reverse_kl"], rel=1e-5)
    bodies = [body for body, _ in service.seen]
    assert len(bodies) == len(here.rollouts())
    asked = {tuple(body["input_ids"] if api == "sglang" else body["prompt"]) for body in bodies}
    assert asked == {tuple(row.token_ids) for row in here.rollouts()}
    assert api == "sglang" or all((body["model"], body["max_tokens"]) == ("m", 1) for body in bodies)


@pytest.mark.parametrize(
    ("api", "divergence"), [("prompt_logprobs", "reverse_kl"), ("echo", "forward_kl"), ("sglang", "jensen_shannon")]
)
def test_the_likeliest_tokens_are_those_of_the_same_weights_here(
    tiny_model: Path, teacher: Path, service: TeacherService, tmp_path: Path, api: str, divergence: str
) -> None:
    keys = (*TOP, f"distill.divergence={divergence}")
    here = distil(tmp_path / "here", tiny_model, teacher, *keys).last
    there = distil(tmp_path / "there", tiny_model, teacher, *keys, *service.keys(api=api)).last
    for metric in ("distill/divergence", "actor/grad_norm", "actor/loss"):
        assert there[metric] == pytest.approx(here[metric], rel=1e-5, abs=1e-6), metric


def test_a_service_teaches_on_rows_and_one_of_several_domains(
    tiny_model: Path, teacher: Path, service: TeacherService, tmp_path: Path
) -> None:
    rows = [{"prompt": f"{i}?", "response": "abc"[: 1 + i % 3]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(SFT.format(folder=tmp_path, model=tiny_model, teacher=teacher))
    found = {}
    for name, keys in {"here": (), "there": service.keys()}.items():
        config = load_config(tmp_path, "job", [*keys, "distill.top_k=5", f"output_dir={tmp_path}/{name}"])
        run_pipeline(config)
        found[name] = metrics_of(config.logging_path)
    for row, other in zip(found["here"], found["there"], strict=True):
        assert other["distill/divergence"] == pytest.approx(row["distill/divergence"], rel=1e-5)


def strategy_of(service: TeacherService, environ: dict[str, str] | None = None, **options: Any) -> EndpointTeacher:
    config = EndpointConfig(**{"endpoint": service.address, "model": "m", "retry_delay_s": 0.0, **options})
    worker = TeacherConfig(strategy_args=StrategyArgs(strategy_name="endpoint", strategy_config=config))
    info = WorkerInfo("teacher", 0, 1, "", 0, (), 0)
    return EndpointTeacher(
        TrainSpec(role="teacher", kind="policy", worker=worker, seed=0, trains=False), info, environ or {}
    )


def told(service: TeacherService, environ: dict[str, str] | None = None, **options: Any) -> torch.Tensor:
    """Log-probs of one row."""
    mask = torch.tensor([False, True, True])
    batch = TokenBatch(
        row_ids=("r",), group_ids=("r",), offsets=torch.tensor([0, 3]), token_ids=torch.tensor([5, 6, 7]),
        action_mask=mask,
    )  # fmt: skip
    with contextlib.closing(strategy_of(service, environ, **options)) as strategy:
        return strategy.forward(batch, ("logprobs",)).require("logprobs")


def test_a_passing_failure_is_tried_again_and_the_key_is_sent(service: TeacherService) -> None:
    service.plan = [(503, "busy"), (429, "slow down")]
    found = told(service, {"TEACHER_KEY": KEY}, api_key_env="TEACHER_KEY")
    expected = service.model(input_ids=torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, torch.stack([torch.zeros(()), expected[0, 6], expected[1, 7]]))
    assert [authorization for _, authorization in service.seen] == [f"Bearer {KEY}"] * 3


NAN = '{"choices": [{"prompt_logprobs": [null, {"6": {"logprob": NaN}}, {"7": {"logprob": -1}}]}]}'
WRONG = {
    "always busy": ((503, "busy"), "HTTP 503: busy", 3),
    "tells the key": ((401, f"wrong key {KEY}"), r"HTTP 401: wrong key \*\*\*", 1),
    "no log-probs": ((200, '{"choices": [{"text": "x"}]}'), "the reply has no prompt_logprobs", 1),
    "no JSON": ((200, "<html>"), "isn't JSON", 1),
    "nested too deeply": ((200, "[" * 100_000), "isn't JSON", 1),
    "no choice": ((200, "[]"), "doesn't tell log-probs of the prompt", 1),
    "no number": ((200, NAN), "a log-prob of nan at place 1", 1),
    "an impossible token": ((200, NAN.replace("NaN", "-Infinity")), "a log-prob of -inf at place 1", 1),
    "too low for float32": ((200, NAN.replace("NaN", "-1e300")), "a log-prob of -1e.300 at place 1", 1),
    "no such token": ((200, NAN.replace("NaN", f'-1}}, "{10**30}": {{"logprob": -2')), "10{30} at place 1, which", 1),
    "no probability": ((200, NAN.replace("NaN", "0.5")), "a log-prob of 0.5 at place 1", 1),
    "another token": ((200, NAN.replace("NaN", "-1").replace('"6"', '"8"')), "token 8 at place 1, .* sent 6", 1),
    "too much": ((200, " " * (2 << 20)), "is larger than 1 MiB", 1),
    "nothing": ((0, ""), "didn't answer within 0.3 s", 3),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_reply_without_the_log_probs_is_an_error_that_says_who_and_why(service: TeacherService, name: str) -> None:
    reply, said, requests = WRONG[name]
    service.plan = [reply] * 3
    options = {"api_key_env": "TEACHER_KEY", "request_retries": 2, "request_timeout_s": 0.3}
    with pytest.raises(EndpointFailed, match=rf"teacher at http://127.0.0.1:\d+/v1.*{said}") as caught:
        told(service, {"TEACHER_KEY": KEY}, **options)
    assert KEY not in str(caught.value)
    assert (len(service.seen), caught.value.attempts) == (requests, requests)


@pytest.mark.parametrize("api", ["prompt_logprobs", "sglang", "echo", "echo of texts"])
def test_a_service_that_adds_a_token_is_an_error_and_no_shifted_row(service: TeacherService, api: str) -> None:
    service.prefix, service.writes_ids = (3,), api != "echo of texts"
    with pytest.raises(EndpointFailed, match=r"other tokens than it was sent|prompt_tokens is 4, and it was sent 3"):
        told(service, api=api.split()[0])


def test_a_failure_ends_the_run_with_its_sentence(
    tiny_model: Path, teacher: Path, service: TeacherService, tmp_path: Path
) -> None:
    service.plan = [(401, "no")] * 9
    with pytest.raises(Exception, match=r"teacher at http://127.0.0.1:\d+/v1 replied with HTTP 401: no"):
        distil(tmp_path, tiny_model, teacher, *service.keys())


def test_nobody_there_and_no_key_are_said_before_the_run(
    tiny_model: Path, teacher: Path, service: TeacherService, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="TEACHER_KEY is not set; export it"):
        strategy_of(service, api_key_env="TEACHER_KEY")
    nobody = {"endpoint": "http://127.0.0.1:1/v1", "api_key_env": "TEACHER_KEY"}
    with pytest.raises(ValueError, match=r"endpoint: 127.0.0.1:1 can't be reached"):
        strategy_of(service, {"TEACHER_KEY": KEY}, **nobody)
    config = distil_config(tmp_path, tiny_model, teacher, *service.keys(**nobody))
    path = "teacher.strategy_args.strategy_config"
    assert [note.split(":")[0] for note in endpoint_notes(config, {})] == [f"{path}.api_key_env", f"{path}.endpoint"]


@pytest.mark.parametrize(
    ("options", "keys", "path", "said"),
    [
        ({"endpoint": None}, (), "teacher.strategy_args.strategy_config.endpoint", "the address of the service"),
        ({"endpoint": "localhost"}, (), "teacher.strategy_args.strategy_config.endpoint", "an address such as"),
        ({"endpoint": f"http://u:{KEY}@h/v1"}, (), "teacher.strategy_args.strategy_config.endpoint", "without user"),
        ({"model": None}, (), "teacher.strategy_args.strategy_config.model", "the model's name"),
        ({"api_key_env": "sk-1"}, (), "teacher.strategy_args.strategy_config.api_key_env", "the name of an"),
        ({}, ("actor_infer.generating_args.temperature=0.7",), "actor_infer.generating_args.temperature", "expected 1"),
        ({}, ("distill.use_as=loss", "distill.top_k=null"), "distill.top_k", "no service tells"),
        ({}, ("teacher.model_args.dtype=bf16",), "teacher.model_args.dtype", "no effect"),
        ({}, ("teacher.use_sequence_packing=true",), "teacher.use_sequence_packing", "no effect"),
        ({"max_flight": 3}, (), "teacher.strategy_args.strategy_config.max_flight", "did you mean"),
    ],
)
def test_what_cannot_act_is_refused_by_its_key(
    tiny_model: Path,
    teacher: Path,
    service: TeacherService,
    tmp_path: Path,
    options: Any,
    keys: Any,
    path: str,
    said: str,
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        distil(tmp_path, tiny_model, teacher, *service.keys(**options), *keys)
    assert any(violation.path.startswith(path) for violation in caught.value.violations)
    assert KEY not in str(caught.value)
