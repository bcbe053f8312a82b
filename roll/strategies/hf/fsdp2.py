"""`fsdp2_train` and `fsdp2_infer`: PyTorch FSDP2 (`fully_shard`), one process upwards.

One rank runs the plain module without a process group; several shard every decoder layer, and the root. Weights are
float32; `dtype: bf16` computes under autocast on one rank (on an accelerator with a residual stream in bf16, see
`use_half_stream`), with FSDP's mixed precision on several (gradients summed in `reduce_dtype`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roll.configs.schema.checkpoint_config import STATE_CONTENTS, CheckpointContent
from roll.configs.schema.strategy_config import Fsdp2Config
from roll.distributed.process_group import init_process_group
from roll.distributed.weights import WeightPart
from roll.strategies.base import LossFn, NamedWeights, Output, StatePart
from roll.strategies.hf.gather import Travelling, gathered
from roll.strategies.hf.hf_build import RoleModule, blocks, hf_module
from roll.strategies.hf.hf_strategy import HfTrainStrategy
from roll.strategies.hf.streamed import StreamedWeights
from roll.strategies.state_files import StateFiles
from roll.strategies.training.muon import Muon
from roll.strategies.training.optim import adamw_kernels, begin_moments, decaying, parameter_groups, set_rates
from roll.strategies.training.pretrained import DTYPES, lay_by_input
from roll.strategies.training.state_offload import num_bytes
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.metrics import Metrics
from roll.utils.memory import return_freed_memory
from roll.utils.partition import shard_dim
from roll.utils.pickles import plain_values_only


class Fsdp2Strategy(HfTrainStrategy):
    """See the module docstring; `spec.trains` decides whether there is an optimizer."""

    _optimizers: tuple[torch.optim.Optimizer, ...] = ()
    """AdamW, or Muon and for what it doesn't take AdamW; none without training."""
    sends_from_every_rank = True

    @property
    def _options(self) -> Fsdp2Config:
        options = self._spec.worker.strategy_args.strategy_config
        assert isinstance(options, Fsdp2Config)
        return options

    @property
    def _computed(self) -> torch.dtype:
        return DTYPES[self._options.param_dtype or self._spec.worker.model_args.dtype]

    def _connect(self) -> None:
        role, on_gpu, offloads = self._spec.role, self._device.type == "cuda", self._options.offload_policy
        if offloads and not on_gpu:
            key = f"{role}.strategy_args.strategy_config.offload_policy"
            raise ValueError(f"{key} needs an accelerator, and this rank has none: remove it")
        if self._computed == torch.bfloat16 and on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name(self._device)
            raise ValueError(f"{role}.model_args.dtype: {name} can't compute in bf16; use fp32")
        if self._info.world_size > 1:
            # Offloaded weights and gradients are on the host when norms are summed and checkpoints gathered.
            init_process_group(self._info, backend="cpu:gloo,cuda:nccl" if offloads else self._backend)

    @property
    def _streams(self) -> bool:
        return self._info.world_size > 1

    def _wrap(self, model: RoleModule, weights: StreamedWeights | None) -> nn.Module:
        layers = list(blocks(hf_module(model)))  # they are called otherwise once they are sharded
        if self._info.world_size > 1:
            shard_module(model, layers, self._options, self._computed, self._device.type, self._info.world_size)
        if weights is not None:
            weights.fill(hf_module(model))
        if self._as_engines:
            lay_by_input(hf_module(model))  # before the optimizer makes its moments, which lie likewise
        waiting: dict[StatePart, bool] = {
            "parameters": self._options.param_offload,
            "optimizer": self._options.optimizer_offload,
        }
        self._shelves.on_host = frozenset(part for part, waits in waiting.items() if waits)
        self._anchor: dict[str, Tensor] = {}
        if self._spec.trains:
            self._build_optimizers(model, layers)
            self._keep_anchor(model)
        return model

    def _build_optimizers(self, model: nn.Module, layers: Sequence[nn.Module]) -> None:
        args = self._spec.training.training_args
        groups = parameter_groups(model.parameters(), args.weight_decay)
        if args.optimizer == "muon":
            groups = self._build_muon(model, layers)
        if groups:
            self._build_adamw(groups, next(model.parameters()).device)
        self._decays = decaying(self._groups())

    def _build_muon(self, model: nn.Module, layers: Sequence[nn.Module]) -> list[dict[str, Any]]:
        """Give the matrices of the decoder layers to Muon; return the parameter groups of all else."""
        args = self._spec.training.training_args
        inside = dict.fromkeys(p for layer in layers for p in layer.parameters())
        matrices = [p for p in inside if p.requires_grad and p.dim() > 1]
        if not matrices:
            key = f"{self._spec.role}.training_args.optimizer"
            raise ValueError(f"{key}: no matrix of a decoder layer is trained, so Muon has nothing to do: use adamw")
        muon = Muon(
            matrices,
            lr=args.learning_rate,
            weight_decay=args.weight_decay,
            momentum=args.muon_momentum,
            ns_steps=args.muon_ns_steps,
            adjust_lr_fn=args.muon_adjust_lr_fn,
        )
        self._optimizers = (muon,)
        taken = set(matrices)
        return parameter_groups((p for p in model.parameters() if p not in taken), args.weight_decay)

    def _build_adamw(self, groups: list[dict[str, Any]], device: torch.device) -> None:
        args = self._spec.training.training_args
        adamw = torch.optim.AdamW(
            groups,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            **adamw_kernels(device),
        )
        # Made now and not by the first step: a checkpoint before it, or of a parameter that gets no gradient, is then
        # complete, and writing one doesn't count as a step.
        begin_moments(adamw)
        self._optimizers += (adamw,)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _keep_anchor(self, model: nn.Module) -> None:
        if self._spec.l2 > 0:
            trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
            self._anchor = {name: parameter.detach().clone() for name, parameter in trained}

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        # Several ranks have FSDP's own mixed precision. Adapters are float32 whatever the weights are kept in.
        stored = self._stored if self._adapters is None else torch.float32
        if self._computed == stored or self._info.world_size > 1:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._computed)

    # --- optimizer steps -------------------------------------------------------------------------------------------

    def _zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _abandon(self) -> None:
        units = self._fsdp_modules
        reset: Any = getattr(self._module, "reset_iter_state", None)  # not in torch 2.11
        if units and reset is not None:
            reset()
        for unit in units:
            unit.reshard()
        for parameter in (p for unit in units for group in _parameter_groups(unit) for p in group.fsdp_params):
            # What `set_requires_gradient_sync(False)` has kept back stays, whatever the documentation of torch says.
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        super()._abandon()

    @property
    def _fsdp_modules(self) -> list[Any]:
        """Return the modules that are gathered each by itself; none on one rank."""
        from torch.distributed.fsdp import FSDPModule

        return [module for module in self._module.modules() if isinstance(module, FSDPModule)]

    def _settle(self) -> None:
        super()._settle()
        for unit in self._fsdp_modules:
            unit.reshard()

    def _accumulate(self, loss: Tensor, *, last: bool) -> None:
        if self._info.world_size > 1:
            # Every micro-batch leaves sharded gradients; kept whole until the last one, they take more memory than the
            # weights that sharding saves. Replicas of the shards meet once, at the end.
            self._module.set_requires_all_reduce(last)  # type: ignore[operator]
            if not self._options.shard_between_micro_batches:
                self._module.set_requires_gradient_sync(last)  # type: ignore[operator]
                self._module.set_reshard_after_backward(last)  # type: ignore[operator]
        # FSDP averages gradients over ranks; the loss is already divided by global sizes and wants their sum.
        (loss * self._info.world_size).backward()

    def _apply(self, lr: float) -> tuple[float, bool]:
        with self._on_device("optimizer"):
            return self._step(lr)

    def _step(self, lr: float) -> tuple[float, bool]:
        for name, parameter in self._module.named_parameters():
            if name in self._anchor and parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - self._anchor[name], alpha=self._spec.l2)
        limit = self._spec.max_grad_norm
        parameters = [p for p in self._module.parameters() if p.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, limit if limit > 0 else float("inf"))
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        finite = bool(torch.isfinite(norm))
        if finite:
            set_rates(self._groups(), self._decays, lr, self._progress.weight_decay())
            if self._device.type == "cpu":
                return_freed_memory(if_scarce=True)  # that of activations, before the optimizer makes its moments
            for optimizer in self._optimizers:
                optimizer.step()
        # Not only before the next backward pass: weights are sent in between.
        self._zero_grad()
        return float(norm), finite

    # --- weights ---------------------------------------------------------------------------------------------------

    def _gathered(self, stream: Iterable[Travelling]) -> NamedWeights:
        return gathered(stream)

    def _full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()

    @property
    def _as_engines(self) -> bool:
        """Return whether weights lie as those of an engine on the host do, which may then compute with them. Whether
        there is one doesn't matter: a replay has none, and must round alike."""
        on_host = self._info.world_size == 1 and self._device.type == "cpu"
        return on_host and self._computed == torch.float32 and self._spec.kind == "policy"

    def lend_weights(self, dtype: torch.dtype | None) -> Mapping[str, Tensor]:
        if not self._as_engines:
            return {}
        resident = set(map(id, self.resident_weights(dtype)))
        named = hf_module(self._model).named_parameters()
        return {name: parameter.detach() for name, parameter in named if id(parameter) in resident}

    # --- states on the host ----------------------------------------------------------------------------------------

    def _to_host(self, part: StatePart) -> None:
        if part in self._shelves.on_host and not self._shelves[part]:
            self._shelves[part].store(self._resident(part), self._device)

    @contextlib.contextmanager
    def _on_device(self, *parts: StatePart) -> Iterator[None]:
        """Inside, those of these parts that wait on the host are on the device."""
        self.wake([part for part in parts if part in self._shelves.on_host])
        try:
            yield
        finally:
            for part in parts:
                self._to_host(part)

    def forward(self, batch: TokenBatch, outputs: Sequence[Output], *, adapters: bool = True) -> TokenOutputs:
        with self._on_device("parameters"):
            outputs_of_rows = super().forward(batch, outputs, adapters=adapters)
            if self._info.world_size > 1 and self._options.reshard_after_forward:
                self._module.reshard()  # type: ignore[operator]  # the root, which waits for a backward pass
        return outputs_of_rows

    def train_step(self, batch: TokenBatch, loss_fn: LossFn) -> Metrics:
        self._to_host("optimizer")
        with self._on_device("parameters"):
            return super().train_step(batch, loss_fn)

    @property
    def gathers_on_host(self) -> bool:
        return self._options.offload_policy and self._info.world_size > 1

    def named_weights(self, part: WeightPart = "merged", dtype: torch.dtype | None = None) -> NamedWeights:
        with self._on_device("parameters"):
            yield from super().named_weights(part, dtype)

    # --- sleep -----------------------------------------------------------------------------------------------------

    def _drop_gradients(self) -> int:
        if not self._optimizers:
            return 0
        freed = num_bytes((p.grad for p in self._module.parameters() if p.grad is not None), self._device)
        self._zero_grad()
        return freed

    def _resident(self, part: StatePart) -> Iterable[Tensor]:
        if part == "parameters":
            self._settle()  # frees gathered weights
            yield from self._module.parameters()
        elif part == "optimizer":
            yield from self._anchor.values()
            for state in (state for optimizer in self._optimizers for state in optimizer.state.values()):
                yield from (value for value in state.values() if isinstance(value, Tensor))

    # --- checkpoints -----------------------------------------------------------------------------------------------

    def _state(self, *, optimizer: bool) -> dict[str, Any]:
        """Return weights (with LoRA the trained ones), and the state of an optimizer; the same keys on any layout."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        self._settle()
        if not (self._optimizers and optimizer):
            state: dict[str, Any] = {"model": get_model_state_dict(self._module)}
        else:
            model, moments = get_state_dict(self._module, self._optimizers)
            state = {"model": model, "optimizer": moments}
        if self._adapters is not None:
            state["model"] = {name: tensor for name, tensor in state["model"].items() if self._adapters.keeps(name)}
        return state

    def save(
        self, path: Path, contents: Sequence[CheckpointContent] = STATE_CONTENTS, files: StateFiles | None = None
    ) -> None:
        """Save weights and optimizer in torch's distributed checkpoint format, the schedule's position beside them."""
        import torch.distributed.checkpoint as dcp

        self._shelves.require_awake("parameters", "optimizer")
        files, alone = files or StateFiles(), self._info.world_size == 1
        path.mkdir(parents=True, exist_ok=True)
        with self._on_device("parameters", "optimizer"), _checkpoint_errors(f"{path} couldn't be written"):
            state = self._state(optimizer="optimizer" in contents)
            dcp.save(state, storage_writer=files.torch_writer(path / "state"), no_dist=alone)
        self._folder.write_beside(path, "schedule.json", self._progress.text(contents), files)

    def load(self, path: Path, contents: Sequence[CheckpointContent] = STATE_CONTENTS) -> None:
        """Read what `save` wrote; the world size may differ. Without an optimizer only the weights are read."""
        with self._on_device("parameters", "optimizer"):
            self._load(path, contents)

    def _load(self, path: Path, contents: Sequence[CheckpointContent]) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_state_dict

        self._shelves.require_awake("parameters", "optimizer")
        if self._adapters is not None:
            self._adapters.check_identity(path)
        options = StateDictOptions(strict=self._adapters is None)
        state = self._state(optimizer="optimizer" in contents)
        self._check_names(path, state)
        with (
            plain_values_only(path / "state"),
            _checkpoint_errors(f"{path} doesn't fit the model of {self._spec.role}"),
        ):
            dcp.load(state, checkpoint_id=path / "state", no_dist=self._info.world_size == 1)
        if "optimizer" in state:
            set_state_dict(
                self._module,
                self._optimizers,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
                options=options,
            )
        else:
            set_model_state_dict(self._module, state["model"], options=options)
        if self._spec.trains:
            self._progress.restore((path / "schedule.json").read_text(), contents)

    def _check_names(self, path: Path, state: dict[str, Any]) -> None:
        """Raise `ValueError` unless the checkpoint has just these tensors: torch passes over those nobody asks for."""
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        wanted = set(flatten_state_dict(state)[0])
        try:
            with plain_values_only(path / "state"):
                stored = set(FileSystemReader(path / "state").read_metadata().state_dict_metadata)
        except FileNotFoundError:
            raise ValueError(f"{path} holds no checkpoint of fsdp2: it has no state/.metadata") from None
        kinds = ("model.", "optimizer.state.") if "optimizer" in state else ("model.",)
        odd = sorted(name for name in stored ^ wanted if name.startswith(kinds))
        if odd:
            where = "only the checkpoint" if odd[0] in stored else "only the model"
            misfit = f"{path} doesn't fit the model of {self._spec.role}"
            raise ValueError(f"{misfit}: {len(odd)} tensors don't match; {where} has {odd[0]}")


def shard_module(
    module: nn.Module,
    layers: Sequence[nn.Module],
    options: Fsdp2Config,
    computed: torch.dtype,
    device_type: str,
    world_size: int,
) -> None:
    """Shard each of these layers of `module` over the ranks of the default group, and then what is left of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.distributed.tensor import Shard

    shards = options.fsdp_size or world_size
    if shards == world_size:
        mesh = init_device_mesh(device_type, (shards,))
    else:
        mesh = init_device_mesh(device_type, (world_size // shards, shards), mesh_dim_names=("replicate", "shard"))
    how: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "shard_placement_fn": lambda parameter: Shard(shard_dim(parameter.shape, shards)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=computed, reduce_dtype=DTYPES[options.reduce_dtype], cast_forward_inputs=False
        ),
        "offload_policy": CPUOffloadPolicy() if options.offload_policy else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **how)
    # The head comes last and its backward pass first: it isn't gathered again between them.
    fully_shard(module, **(how | {"reshard_after_forward": False}))  # in place


def _parameter_groups(unit: Any) -> list[Any]:
    """Return what `fully_shard` keeps of the parameters of a module."""
    state = unit._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # one by itself before torch 2.13
    return [group for group in ([state._fsdp_param_group] if several is None else several) if group is not None]


@contextlib.contextmanager
def _checkpoint_errors(what: str) -> Iterator[None]:
    """Turn torch's exception, a `BaseException` with the stacks of all ranks, into `ValueError` with their causes."""
    from torch.distributed.checkpoint.api import CheckpointException

    with warnings.catch_warnings():
        # It assumes one process, which was asked for with `no_dist`.
        warnings.filterwarnings("ignore", message=".*assuming the intent is to", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            causes = "; ".join(dict.fromkeys(str(cause) for cause, _ in error.failures.values()))
            raise ValueError(f"{what}: {causes}") from None
