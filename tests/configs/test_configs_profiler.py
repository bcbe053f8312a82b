"""`profile_steps`, `profiler`, `tracing`: what is taken, what is refused and why, what the plan says."""

from __future__ import annotations

import pytest
from refused import check_refused

from roll.configs.checks.machine_checks import MISSING, Machine, machine_checks
from roll.configs.parsing.loader import load_config
from roll.pipelines.run.clusters import placements
from roll.tracking.profiling.profile_plan import command

ON = "profile_steps=[2]"


def test_one_step_or_role_may_be_written_without_a_list(job):
    config = load_config(job, "job", ["profile_steps=2", "profiler.roles=actor_train", "profiler.ranks=0"])
    assert (config.profile_steps, config.profiler.roles, config.profiler.ranks) == ((2,), ("actor_train",), (0,))
    assert config.profiler_path == config.logging_path / "profiler"
    assert "profiles: step 2, in" in config.explain_results()
    assert "with torch on rank 0 of actor_train" in config.explain_results()


@pytest.mark.parametrize(
    ("overrides", "path", "fragments"),
    [
        (["profile_steps=[-1]"], "profile_steps", ["steps of the run"]),
        (["profile_steps=[2,9]", "max_steps=8"], "profile_steps", ["0 to 8"]),
        ([ON, "profiler.roles=actor_trian"], "profiler.roles", ["actor_train"]),
        ([ON, "profiler.ranks=[1]"], "profiler.ranks", ["0 to 0"]),
        (
            ["profile_steps=[1,2,3]", "profiler.max_traces=5", "max_steps=8"],
            "profiler.max_traces",
            ["the 6 traces that 3 steps of 2 ranks make"],
        ),
        (["profiler.record_shapes=true"], "profiler.record_shapes", ["no step is profiled", "profile_steps=[2]"]),
        ([ON, "profiler.tools=[]", "profiler.with_stack=true"], "profiler.with_stack", ["an option of torch.profiler"]),
        (["executor=inline", "profiler.ray_timeline=true"], "profiler.ray_timeline", ["executor"]),
        (["tracing.episode_share=0.5"], "tracing.episode_share", ["tracing.enabled=true"]),
        (["tracing.enabled=true", "tracing.endpoint=localhost:4317"], "tracing.endpoint", ["http://localhost:4318"]),
        ([ON, "profiler.tools=[nsys]"], "profiler.tools[0]", ["torch"]),
        (["profiler_timeline=true"], "profiler_timeline", ["profile_steps says which steps"]),
    ],
)
def test_what_cant_act_is_refused_with_its_reason(job, overrides, path, fragments):
    check_refused(job, overrides, path, fragments)


def said(config, machine):
    return [str(violation) for violation in machine_checks(config, machine) if "profiler" in str(violation)]


def test_tools_that_look_at_an_accelerator_are_refused_where_there_is_none(job):
    config = load_config(job, "job", [ON, "profiler.tools=[torch,memory,nsight]", "profiler.activities=[cuda]"])
    found = said(config, Machine())
    assert len(found) == 3
    assert all("an accelerator for it, and this machine has none" in words for words in found)
    assert "resident memory around each call is in the trace anyway" in found[0]
    gpu = Machine(accelerators=("NVIDIA H100",))
    assert said(config, gpu) == []
    (words,) = said(config, Machine(accelerators=("NVIDIA H100",), nsight=False))
    assert "no nsys on the PATH" in words
    assert said(load_config(job, "job", [ON]), Machine()) == []


def test_an_endpoint_needs_its_package(job):
    config = load_config(job, "job", ["tracing.enabled=true", "tracing.endpoint=http://localhost:4318"])
    exporter = "opentelemetry.exporter.otlp.proto.http"
    found = [str(v) for v in machine_checks(config, Machine(packages=frozenset(MISSING) - {exporter}))]
    assert any("pip install -e '.[otel]'" in words for words in found)
    assert not any("otel" in str(v) for v in machine_checks(config, Machine()))


def test_chosen_ranks_are_started_under_nsight_and_one_process_by_a_command(job, tmp_path):
    options = [ON, "profiler.tools=nsight", "profiler.roles=actor_train", f"profiler_output_dir={tmp_path}"]
    placed = {p.role: p.nsight for p in placements(load_config(job, "job", options))}
    assert list(placed["actor_train"]) == [0]
    assert not placed["actor_infer"]
    given = placed["actor_train"][0]
    assert given["o"] == f"{tmp_path}/nsight.actor_train-0.%p"
    assert (given["capture-range"], given["capture-range-end"]) == ("cudaProfilerApi", "repeat")
    assert not any(p.nsight for p in placements(load_config(job, "job", [ON])))
    shown = command(tmp_path, ["roll", "train", "my run.yaml"])
    assert shown.startswith("nsys profile --trace=cuda,nvtx,osrt,cudnn,cublas --capture-range=cudaProfilerApi ")
    assert shown.endswith(f"-o {tmp_path}/nsight.%p roll train 'my run.yaml'")
