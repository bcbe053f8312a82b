"""What passes through memory for a while, by hand: weights at the start, weights on their way, experts of a step."""

from __future__ import annotations

import pytest
from planned import model_folder, plan_of, rlvr_job, sft_job
from published_cases import LLAMA_3_8B, LLAMA_7B
from test_planning_plan import sizes, use_of

from roll.workbench.planning.machines import GIB, MIB

COUNT = 8_030_261_248
"""Parameters of Llama 3 8B; 8 ranks divide every tensor."""
EMBEDDING = 128_256 * 4096
"""Its largest tensor; the head has as many numbers."""
NORMS = (2 * 32 + 1) * 4096
"""Vectors, which ZeRO 3 keeps whole on every rank as well."""
PROCESS = 2 * GIB


def start_of(folder, devices, strategy, options, *, ranks=8):
    """Bytes of weights on a device and on the host while they are read; what a host has of its ranks is divided."""
    model = model_folder(folder / "model", LLAMA_3_8B)
    plan = plan_of(folder, sft_job(model, ranks=ranks, length=512, strategy=strategy, options=options), devices)
    found = [sizes(use_of(place, "actor_train", "start"), "actor_train")["weights"] for place in plan.hosts]
    on_device = [sizes(use_of(p, "actor_train", "start"), "actor_train")["weights"] for p in plan.devices]
    return (max(on_device) if on_device else None), found[0] // ranks


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def test_a_rank_of_zero_3_starts_with_its_share_and_the_largest_tensor(tmp_path):
    share = (COUNT // 8 + NORMS) * 2
    device, host = start_of(tmp_path, "h100:8", "deepspeed_train", zero(3))
    assert device == share + EMBEDDING * 2
    assert host == PROCESS + EMBEDDING * 2
    # Without an accelerator all of that is on the host.
    assert start_of(tmp_path, "cpu:512", "deepspeed_train", zero(3)) == (None, share + EMBEDDING * 2)
    to_host = zero(3, offload_param={"device": "cpu"})
    device, host = start_of(tmp_path, "h100:8", "deepspeed_train", to_host)
    assert device == NORMS * 2 + EMBEDDING * 2
    assert host == PROCESS + COUNT // 8 * 2 + EMBEDDING * 2


def test_zero_3_that_makes_something_else_of_whole_weights_reads_them_all_on_each_rank(tmp_path):
    device, host = start_of(tmp_path, "h100:8", "deepspeed_train", zero(3, zero_hpz_partition_size=2))
    assert device == (COUNT // 8 + NORMS) * 2 + EMBEDDING * 2
    assert host == PROCESS + COUNT * 4


def test_zero_2_reads_the_whole_model_in_the_type_that_computes(tmp_path):
    # It is laid out flat beside itself, on the host where the device has no room for both.
    assert start_of(tmp_path, "h100:8", "deepspeed_train", zero(2)) == (COUNT * 2, PROCESS + 2 * COUNT * 2)
    # Plain copies stay in float32, and come to the device in pieces.
    assert start_of(tmp_path, "h100:8", "deepspeed_train", zero(0)) == (COUNT * 4, PROCESS + EMBEDDING * 2)


def test_shards_of_fsdp2_are_never_on_the_host_of_an_accelerator(tmp_path):
    outside = (2 * EMBEDDING + 4096) * 4
    device, host = start_of(tmp_path, "h100:8", "fsdp2_train", {})
    assert (device, host) == (COUNT // 8 * 4 + outside, PROCESS + outside)
    device, host = start_of(tmp_path, "h100:8", "fsdp2_train", {"offload_policy": True})
    assert (device, host) == (outside, PROCESS + COUNT // 8 * 4 + outside)


# --- weight sync ------------------------------------------------------------------------------------------------------

LARGEST = 32_000 * 4096 * 2
"""Bytes of Llama 7B's embedding in bf16: 250 MiB."""
APART = {"actor_train": {"device_mapping": [0, 1, 2, 3], "training_args": {"gradient_accumulation_steps": 32}},
         "actor_infer": {"device_mapping": [4, 5, 6, 7]}}  # fmt: skip


def sync_buffers(plan):
    """Device -> bytes of buffers of the trainer and of the engine while weights are passed on."""
    found = {}
    for place in plan.devices:
        role = next(use.role for use in place.uses if use.phase == "sync")
        use = use_of(place, role, "sync")
        found[place.name] = tuple(sizes(use, end).get("sync buffers", 0) for end in ("actor_train", "actor_infer"))
    return found


def test_buckets_of_a_broadcast_are_on_the_devices_of_both_ends(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    # Two batches of 256 MiB with a quarter of each, and the tensor that is cut out.
    gathered = 2 * (256 + 64) * MIB + LARGEST
    plan = plan_of(tmp_path, rlvr_job(model, slots=8, weight_transport="broadcast", **APART), "h100:8")
    # The engine has three, one more for vLLM's processes, and the tensor that they load.
    assert sync_buffers(plan) == {
        "device 0": (gathered + 2 * 256 * MIB, 0),
        "devices 1-3": (gathered, 0),
        "devices 4-7": (0, 4 * 256 * MIB + LARGEST),
    }
    assert plan.shared == 0
    # A bucket is as large as the largest tensor at least.
    small = {"weight_transport": "broadcast", "model_update_buffer_size_mb": 64}
    plan = plan_of(tmp_path, rlvr_job(model, slots=8, **APART, **small), "h100:8")
    assert sync_buffers(plan)["device 0"] == (gathered + 2 * LARGEST, 0)
    assert sync_buffers(plan)["devices 4-7"] == (0, 4 * LARGEST + LARGEST)


def test_buckets_in_shared_memory_are_on_the_host_and_read_there(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    plan = plan_of(tmp_path, rlvr_job(model, slots=8, **APART), "h100:8")
    assert sync_buffers(plan) == {"devices 0-3": (2 * (256 + 64) * MIB + LARGEST, 0), "devices 4-7": (0, LARGEST)}
    # Buckets on the host have 16 MiB, or one tensor that is larger; four ranks send.
    assert plan.shared == 4 * 2 * LARGEST
    assert sizes(use_of(plan.hosts[0], "actor_infer", "sync"), "actor_infer")["sync buffers"] == 4 * 2 * LARGEST
    # Of tensors that are larger than a bucket rank 0 sends all.
    small = plan_of(tmp_path, rlvr_job(model, slots=8, model_update_buffer_size_mb=64, **APART), "h100:8")
    assert small.shared == 2 * LARGEST + 3 * 2 * 64 * MIB
    stored = plan_of(tmp_path, rlvr_job(model, slots=8, weight_transport="object_store", **APART), "h100:8")
    assert stored.shared == 4 * 256 * MIB  # a bucket of each engine for its processes


def test_both_ends_of_a_sync_on_one_device_are_there_at_once(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    served = 256 * MIB + LARGEST
    for infer, own in (("vllm", served), ("sglang", served), ("hf_infer", 2 * LARGEST)):
        job = rlvr_job(model, slots=1, actor_infer={"strategy_args": {"strategy_name": infer}}, executor="ray")
        if infer != "vllm":
            job["actor_infer"]["strategy_args"].pop("strategy_config")
        plan = plan_of(tmp_path, job, "h100:1")
        # One rank casts a tensor at a time; two buckets are opened by CUDA handles.
        assert sync_buffers(plan) == {"device 0": (2 * LARGEST + 2 * 256 * MIB, own)}
        assert plan.shared == 0
        uses = [use_of(plan.devices[0], role, "sync").nbytes for role in ("actor_train", "actor_infer")]
        assert uses[0] == uses[1]


def test_each_rank_of_a_trainer_has_buckets_for_the_engine_on_its_device(tmp_path):
    model = model_folder(tmp_path / "model", LLAMA_7B)
    train = {"device_mapping": [0, 1, 2, 3], "training_args": {"gradient_accumulation_steps": 32}}
    gathered = 2 * (256 + 64) * MIB + LARGEST
    for mapping, senders in (([0, 1, 2, 3], ["devices 0-3"]), ([2, 3], ["devices 2-3"])):
        job = rlvr_job(model, slots=4, actor_train=train, actor_infer={"device_mapping": mapping})
        plan = plan_of(tmp_path, job, "h100:4")
        assert plan.shared == 0
        for name, (trainer, engine) in sync_buffers(plan).items():
            assert trainer == gathered + (2 * 256 * MIB if name in senders else 0)
            assert engine == (256 * MIB + LARGEST if name in senders else 0)


# --- rollouts ---------------------------------------------------------------------------------------------------------

QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768,
}  # fmt: skip


@pytest.mark.parametrize(("keys", "ahead"), [({}, 0), ({"async_generation_ratio": 1, **APART}, 1)])
def test_experts_of_every_token_are_counted_while_a_step_goes_on(tmp_path, keys, ahead):
    model = model_folder(tmp_path / "model", QWEN3_MOE)
    # 128 responses of 2048 tokens with the prompt, each token 8 experts in 48 layers: 192 MiB.
    step = 128 * 2048 * 48 * 8 * 2
    more = {"policy_loss": "decoupled_ppo"} if ahead else {}
    jobs = {replay: rlvr_job(model, slots=8, router_replay=replay, **keys, **more) for replay in (True, False)}
    host = plan_of(tmp_path, jobs[True], "h200:8").hosts[0]

    def held(role, phase):
        return sizes(use_of(host, role, phase), "controller").get("routed experts", 0)

    turns = (1 + ahead) * step
    assert held("actor_infer", "generate") == turns
    # The batch; of it the mini-batch, which is the whole step, the parts for ranks, on their way and at the ranks.
    assert held("actor_train", "train") == turns + step + 4 * step
    assert held("actor_train", "score") == turns + step + 3 * step
    assert held("actor_train", "sync") == turns
    assert held("actor_train", "start") == 0
    without = plan_of(tmp_path, jobs[False], "h200:8").hosts[0]
    assert "controller" not in {role for use in without.uses for role, _ in use.items}


def test_rows_of_experts_are_put_in_order_in_a_copy(tmp_path):
    model, gathered = model_folder(tmp_path / "model", {**QWEN3_MOE, "num_experts": 2}), {}
    for ranks in (2, 4):
        job = sft_job(model, ranks=ranks, length=64, strategy="fsdp2_train", options={})
        held = sizes(use_of(plan_of(tmp_path, job, "h200:8").devices[0], "actor_train", "score"), "actor_train")
        gathered[ranks] = held["gathered weights"]
    # Two ranks have an expert each. Four have rows of both; gate, up and down of a layer are copied, in bf16.
    assert gathered[4] - gathered[2] == 2 * 3 * 768 * 2048 * 2
