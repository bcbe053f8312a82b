"""Making a DeepSpeed engine: its process group, its JSON, its optimizer, and the module it wraps."""

from __future__ import annotations

import copy
import importlib.util
import logging
import os
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roll.configs.schema.deepspeed_config import DeepSpeedConfig
from roll.configs.schema.training_args import TrainingArgs
from roll.distributed.process_group import connect as join_group
from roll.distributed.worker import WorkerInfo
from roll.strategies.base import TrainSpec
from roll.strategies.hf.hf_build import RoleModule
from roll.strategies.hf.hf_model import PolicyModel
from roll.strategies.training.logits import HeadOutputs, HeadRequest
from roll.strategies.training.micro import MicroLayout
from roll.strategies.training.optim import parameter_groups

logger = logging.getLogger(__name__)


def connect(info: WorkerInfo, device: torch.device, backend: str) -> None:
    """Join torch's process group and show it to DeepSpeed; `ValueError` if the package isn't installed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise ValueError(f"{info.role}: deepspeed is not installed: pip install -e '.[deepspeed]'")
    join_group(info, backend)
    # Read from the environment all along; roles that share a process share their device.
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # not found out, with a warning
    # DeepSpeed calls collectives by the names that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed.c10d_logger")
    # Its kernels are built with ninja, which pip puts beside an interpreter that needn't be on the PATH.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = beside + os.pathsep + os.environ["PATH"]
    import deepspeed

    if device.type == "cpu":
        # DeepSpeed would compile an operator for sums through shared memory, at first use and on every rank at once,
        # and print that it did. gloo sums as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def engine_json(spec: TrainSpec, options: DeepSpeedConfig, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's JSON: what the user gave, with sizes, clipping and types filled in from the rest of the role.

    Sizes are for DeepSpeed's own arithmetic only: how a batch is cut, and when it ends, this project decides.
    """
    explicit = {f.name: getattr(options, f.name) for f in fields(options) if getattr(options, f.name) is not None}
    made: dict[str, Any] = copy.deepcopy(explicit)
    for name in ("train_batch_size", "optimizer", "scheduler", "bf16", "fp16"):
        made.pop(name, None)
    zero = made.setdefault("zero_optimization", {})
    if device.type == "cpu":
        for name in ("offload_optimizer", "offload_param"):
            if name in zero:
                zero[name]["pin_memory"] = False  # page-locked memory is for copies to an accelerator
    dtype, autocast = spec.worker.model_args.dtype, options.stage == 0 and spec.trains
    if dtype in ("bf16", "fp16") and not autocast:
        made[dtype] = {**(getattr(options, dtype) or {}), "enabled": True}
    if autocast and dtype != "fp32":
        made["torch_autocast"] = {"enabled": True, "dtype": {"bf16": "bfloat16", "fp16": "float16"}[dtype]}
    made["train_micro_batch_size_per_gpu"] = 1
    made["gradient_accumulation_steps"] = 1
    if spec.trains:
        # Clipping at stage 0 is this project's own: DeepSpeed's would take a step with a gradient that isn't finite.
        made["gradient_clipping"] = max(spec.max_grad_norm, 0.0) if options.stage else 0.0
        made["zero_allow_untested_optimizer"] = True
        made["zero_force_ds_cpu_optimizer"] = False
        if dtype == "bf16" and options.stage:
            # Sums over micro-batches and ranks in float32, as the other backends do.
            made.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
            made.setdefault("communication_data_type", "fp32")
    return made


def adamw(module: nn.Module, args: TrainingArgs, options: DeepSpeedConfig, device: torch.device) -> Any:
    """Return AdamW with decoupled decay, on the fastest kernel for where its states lie; all compute the same update.

    Host memory beside an accelerator: DeepSpeed's CPU kernel. An accelerator: its fused kernel. Otherwise torch's own.
    """
    groups = parameter_groups(module.parameters(), args.weight_decay)
    betas = (args.adam_beta1, args.adam_beta2)
    common: dict[str, Any] = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
    if device.type == "cpu":
        return torch.optim.AdamW(groups, **common)
    if options.offloads("offload_optimizer") and _builds("CPUAdamBuilder"):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **common)
    if not options.offloads("offload_optimizer") and _builds("FusedAdamBuilder"):
        from deepspeed.ops.adam import FusedAdam

        return FusedAdam(groups, adam_w_mode=True, **common)
    return torch.optim.AdamW(groups, **common)


def _builds(kernel: str) -> bool:
    """Return whether DeepSpeed can load a kernel here, compiling it first where it isn't installed."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(kernel)
    try:
        if builder is None or not builder.is_compatible(verbose=False):
            return False
        builder.load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        logger.warning("DeepSpeed's %s can't be built here (%s); torch's AdamW takes its place", kernel, error)
        return False
    return True


class Engine(nn.Module):
    """Call a DeepSpeed engine like the model it wraps.

    DeepSpeed's hooks look for tensors in tuples and dicts only, so the layout goes in and the scores come out as such.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine = engine

    def forward(self, layout: MicroLayout, request: HeadRequest) -> HeadOutputs:
        return HeadOutputs(**self.engine(vars(layout).copy(), request))


class HookableModule(nn.Module):
    """A model whose inputs and outputs DeepSpeed's hooks can see into."""

    def __init__(self, model: RoleModule) -> None:
        super().__init__()
        self.model = model

    def hold_head(self) -> None:
        """Gather the head of a policy once per pass under ZeRO 3.

        The model runs it on as many chunks as there are tokens. Gathering it for each would be a different number of
        collectives on each rank, which never end.
        """
        import deepspeed

        if isinstance(self.model, PolicyModel):
            head = self.model.lm.get_output_embeddings()
            head._forward_pre_hooks.clear()
            head._forward_hooks.clear()
            for parameter in head.parameters():
                deepspeed.zero.register_external_parameter(self, parameter)

    def forward(self, layout: dict[str, Any], request: HeadRequest) -> dict[str, Tensor | None]:
        """Return the fields of `HeadOutputs`."""
        # Around the model's own hooks: it has no parameters of its own, and its types are closed to them.
        return vars(self.model.forward(MicroLayout(**layout), request))
