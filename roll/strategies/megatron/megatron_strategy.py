"""`megatron_train` and `megatron_infer`: Megatron-core with tensor, pipeline, context, expert and data parallelism.

Gradients are sums: losses come divided by global sizes, and Megatron's averaging over micro-batches and ranks is off
(`calculate_per_token_loss` without its division). The loss is computed on the last pipeline stage, by every tensor- and
context-parallel rank alike.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from roll.configs.schema.checkpoint_config import STATE_CONTENTS, CheckpointContent
from roll.configs.schema.megatron_config import MegatronConfig
from roll.distributed.weights import WeightPart
from roll.distributed.worker import WorkerInfo
from roll.strategies.base import STATE_PARTS, LossFn, NamedWeights, Output, StatePart, TrainSpec
from roll.strategies.megatron.checkpoint import SCHEDULE, load_checkpoint, save_checkpoint
from roll.strategies.megatron.megatron_adapters import MegatronAdapters
from roll.strategies.megatron.megatron_model import build_chunks
from roll.strategies.megatron.megatron_weights import freeze, load_weights, stream_weights
from roll.strategies.megatron.optimizer import Optimizer, wrap_chunks
from roll.strategies.megatron.parallel import broadcast_from_last_stage, connect, send_from_last_stage, stages
from roll.strategies.megatron.platform import cpu_platform
from roll.strategies.state_files import StateFiles
from roll.strategies.training.common import CommonStrategy
from roll.strategies.training.logits import HeadOutputs, blank_outputs, head_request, token_outputs
from roll.strategies.training.micro import MicroLayout, padding_row, shares_prefixes, take_shard, widen
from roll.strategies.training.model_folder import ModelFolder
from roll.strategies.training.pretrained import DTYPES, one_output, weights_folder
from roll.strategies.training.state_offload import storages
from roll.types.batch import TokenBatch, TokenOutputs
from roll.types.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")

# torch 2.13 renames what Megatron 0.16 calls in every step and for every checkpoint.
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+_tensor` is deprecated", category=FutureWarning)
warnings.filterwarnings("ignore", message="`load_state_dict` is deprecated", module=r"megatron\.")
# The distributed optimizer puts gradients into views of the weights, and knows it.
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not", module=r"(roll|megatron)\.")


def _on_platform(method: Callable[P, T]) -> Callable[P, T]:
    """Run a method where Megatron's CUDA calls mean the device that is there."""

    @functools.wraps(method)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with cpu_platform():
            return method(*args, **kwargs)

    return inside


@dataclass(frozen=True)
class _Micro:
    """One micro-batch on its way through the pipeline."""

    batch: TokenBatch
    layout: MicroLayout  # padded so that context-parallel ranks can share it
    shard: MicroLayout  # this rank's part of it
    place: Tensor  # int64 [S], the scored tokens that the shard predicts
    is_padding: bool  # true for a padding row, which only keeps ranks in step


Finish = Callable[[_Micro, TokenOutputs], tuple[Tensor, Any]]
"""(micro-batch, its outputs) -> (loss, what to keep), on the last stage."""


class MegatronStrategy(CommonStrategy):
    """See the module docstring; `spec.trains` decides whether there is an optimizer."""

    _optimizer: Optimizer | None = None
    _adapters: MegatronAdapters | None = None
    sends_from_every_rank = True

    @_on_platform
    def __init__(self, spec: TrainSpec, info: WorkerInfo) -> None:
        super().__init__(spec, info)
        layout = connect(info, self._options, backend=self._backend, seed=spec.seed)
        from megatron.core import parallel_state

        self._share_rows(layout, parallel_state.get_data_parallel_group())
        self._context = parallel_state.get_context_parallel_group()
        self._build()
        accelerated, packed = self._device.type != "cpu", spec.worker.use_sequence_packing
        self._micros.shares_prefixes = shares_prefixes(spec, packed=packed, accelerated=accelerated)

    @property
    def _options(self) -> MegatronConfig:
        options = self._spec.worker.strategy_args.strategy_config
        assert isinstance(options, MegatronConfig)
        return options

    def _build(self) -> None:
        spec, options, args = self._spec, self._options, self._spec.worker.model_args
        assert spec.kind != "reward" or spec.trains, "the configuration refuses reward models on Megatron"
        if spec.kind == "reward":
            self._config = one_output(self._config, str(args.model_name_or_path))
            self._config.get_text_config().pad_token_id = self._tokenizer.pad_token_id
        dtype = DTYPES[args.dtype]
        self._modules = build_chunks(
            self._config,
            options,
            kind=spec.kind,
            dtype=dtype,
            trains=spec.trains,
            temperature=spec.temperature,
            recompute=not args.disable_gradient_checkpointing,
            longest=spec.max_sequence_length,
        )
        """The bare chunks of the model that this rank holds, in the order of the layers."""
        config = self._modules[0].config
        # Micro-batches are as wide as their rows, so each message between stages says its own size.
        config.variable_seq_lengths = True
        # Between two stages, messages of the interleaved schedule can only be told apart in this form.
        config.overlap_p2p_comm = stages(options) is not None
        config.batch_p2p_comm = not config.overlap_p2p_comm
        load_weights(self._modules, weights_folder(args))
        if args.uses_lora:
            self._adapters = MegatronAdapters(self._modules, self._form(dtype), spec, weights_folder(args))
        model = functools.partial(_hf_model, self._config, spec.kind)
        adapters = None if self._adapters is None else self._adapters.peft
        self._folder = ModelFolder(spec, self._tokenizer, model, adapters, writes=self._info.rank == 0)
        self._chunks: list[Any] = [module.to(self._device) for module in self._modules]
        """What the schedule calls: the chunks, in gradient buffers where they train."""
        if not spec.trains:
            for module in self._modules:
                module.requires_grad_(False).eval()
            return
        if self._adapters is None:
            freeze(self._modules, args.freeze_module_prefix)
        self._check_trainable()
        self._chunks = wrap_chunks(self._modules, options)
        self._optimizer = Optimizer(
            self._chunks, self._spec.training.training_args, options, dtype, max_norm=spec.max_grad_norm, l2=spec.l2
        )
        config.finalize_model_grads_func = _finalize
        if options.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self._chunks]
            config.no_sync_func = waits if len(waits) > 1 else waits[0]

    def _check_trainable(self) -> None:
        trained = torch.tensor(float(any(p.requires_grad for m in self._modules for p in m.parameters())))
        trained = trained.to(self._device)
        dist.all_reduce(trained)
        if not trained:
            raise ValueError(f"{self._spec.role}: freeze_module_prefix leaves nothing to train")

    # --- computing -------------------------------------------------------------------------------------------------

    @_on_platform
    @torch.no_grad()
    def forward(self, batch: TokenBatch, outputs: Sequence[Output], *, adapters: bool = True) -> TokenOutputs:
        self._shelves.require_awake("parameters")
        assert adapters or self._adapters is not None, f"{self._spec.role} has no adapters to leave out"

        def keep(micro: _Micro, scored: TokenOutputs) -> tuple[Tensor, TokenOutputs | None]:
            return torch.zeros((), device=self._device), None if micro.is_padding else scored

        with contextlib.nullcontext() if adapters or self._adapters is None else self._adapters.off():
            results = self._pass(batch, outputs, keep, training=False)
        scored = [result for result in results if result is not None]
        merged = blank_outputs(batch, outputs)
        if not len(batch):
            return merged
        if scored:
            merged = TokenOutputs.concat(scored).reorder(batch.row_ids)
        columns = {
            name: broadcast_from_last_stage(column.to(self._device)).cpu() for name, column in merged.columns().items()
        }
        return merged.with_columns(**columns)

    @_on_platform
    def _attempt(self, batch: TokenBatch, loss_fn: LossFn, lr: float) -> tuple[Metrics, float, bool]:
        optimizer = self._optimizer
        assert optimizer is not None, "only a role that trains takes steps"
        self.wake(self._shelves.asleep("gradients"))
        batch, totals = self._losses.begin(batch, loss_fn)
        self._micros.shared_tokens = 0
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()

        def loss_of(micro: _Micro, scored: TokenOutputs) -> tuple[Tensor, Metrics]:
            return self._losses.of(scored, micro.batch, loss_fn, totals, is_padding=micro.is_padding)

        results = self._pass(batch, loss_fn.needs, loss_of, training=True)
        metrics, self._losses.nonfinite = send_from_last_stage((Metrics.merged(results), self._losses.nonfinite))
        if self._micros.shared_tokens:
            metrics.add_sum(f"{self._spec.metric_prefix}/shared_tokens", float(self._micros.shared_tokens))
        return metrics, *optimizer.step(lr, self._progress.weight_decay())

    def _pass(self, batch: TokenBatch, needs: Sequence[Output], finish: Finish, *, training: bool) -> list[Any]:
        """Run all micro-batches through Megatron's schedule; return what `finish` kept, in order, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        parts, shared = self._micros.parts(batch, training=training)
        if stages(self._options) is not None:
            # The interleaved schedule takes turns in groups of one micro-batch per stage.
            parts += [[] for _ in range(-len(parts) % self._options.pipeline_model_parallel_size)]
        micros = self._laid_out(batch, parts, needs, training=training, shared=shared)
        factor = self._auxiliary_factor(micros) if training else None

        def step(micros: Iterator[_Micro], chunk: Any) -> tuple[Any, Callable[[Any], tuple[Tensor, Tensor, Any]]]:
            micro = next(micros)
            scored = chunk(micro.shard, micro.layout.positions, head_request(needs))
            return scored, functools.partial(end, micro)

        def end(micro: _Micro, scored: Any) -> tuple[Tensor, Tensor, Any]:
            loss, result = finish(micro, self._outputs(micro, scored, needs))
            # The number of tokens is for an average that isn't taken.
            return loss if factor is None else loss * factor, torch.zeros((), dtype=torch.int), result

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(micros) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(micros),
            seq_length=1,  # of no meaning: every message between stages says its own
            micro_batch_size=1,
            forward_only=not training,
        )
        return results

    def _laid_out(
        self, batch: TokenBatch, parts: list[list[int]], needs: Sequence[Output], *, training: bool, shared: bool
    ) -> list[_Micro]:
        batches = [batch.select(rows) if rows else padding_row(batch) for rows in parts]
        worker = self._spec.worker
        multiple = worker.sequence_length_round_in_infer
        if training:
            multiple = self._spec.training.sequence_length_round_in_train
        packed = worker.use_sequence_packing
        lay = functools.partial(self._micros.laid_out, packed=packed, multiple=multiple, shared=shared)
        layouts = [lay(micro, needs) for micro in batches]
        rank, ranks = dist.get_rank(self._context), dist.get_world_size(self._context)
        layouts = [
            widen(layout, ranks * self._splits, least)
            for layout, least in zip(layouts, self._least_shapes(layouts), strict=True)
        ]
        return [
            _Micro(micro, layout, *take_shard(layout, rank, ranks), is_padding=not rows)
            for micro, layout, rows in zip(batches, layouts, parts, strict=True)
        ]

    def _least_shapes(self, layouts: Sequence[MicroLayout]) -> list[tuple[int, int]]:
        """Return the shape of each micro-batch, the same on all ranks: they gather each other's tokens for experts."""
        options = self._options
        tensor = options.tensor_model_parallel_size
        across = options.expert_model_parallel_size > 1 or (options.expert_tensor_parallel_size or tensor) > tensor
        if options.moe_token_dispatcher_type != "allgather" or not across:
            return [(0, 0)] * len(layouts)
        shapes = torch.tensor([layout.ids.shape for layout in layouts], device=self._device)
        dist.all_reduce(shapes, op=dist.ReduceOp.MAX, group=self._peers.group)
        return [(rows, tokens) for rows, tokens in shapes.tolist()]

    @property
    def _splits(self) -> int:
        """Return ranks among which activations are split along the sequence."""
        return self._options.tensor_model_parallel_size if self._options.sequence_parallel else 1

    def _outputs(self, micro: _Micro, scored: HeadOutputs, needs: Sequence[Output]) -> TokenOutputs:
        kind = self._spec.kind
        return token_outputs(kind, micro.batch, micro.layout, scored, needs, micro.place, self._context)

    def _auxiliary_factor(self, micros: Sequence[_Micro]) -> float | None:
        """Return tokens of the mini-batch that a router sees, over all data-parallel ranks; None without experts.

        Megatron multiplies a router's losses with the tokens of their micro-batch. Dividing every gradient by all
        tokens makes them means; the loss proper is multiplied first.
        """
        config = self._modules[0].config
        if config.num_moe_experts is None:
            return None
        tokens = torch.tensor(float(sum(micro.shard.ids.numel() for micro in micros)) / self._splits)
        tokens = tokens.to(self._device)
        dist.all_reduce(tokens, group=self._peers.group)
        factor = float(tokens)
        config.grad_scale_func = lambda loss: loss / factor
        return factor

    # --- sleep -----------------------------------------------------------------------------------------------------

    @_on_platform
    def sleep(self, parts: Sequence[StatePart] = STATE_PARTS) -> int:
        if not self._shelves.asleep("parameters"):
            self._settle()
        return super().sleep(parts)

    def _drop_gradients(self) -> int:
        """Give up the buffers that all gradients are views of."""
        if self._optimizer is None:
            return 0
        buffers = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        gradients = (buffer.grad_data for buffer in buffers)
        return self._shelves["gradients"].store(gradients, self._device, copy=False)

    def _resident(self, part: StatePart) -> Iterator[Tensor]:
        parameters = [parameter for chunk in self._chunks for parameter in chunk.parameters()]
        if part == "parameters":
            yield from parameters
        elif self._optimizer is not None:
            # Float32 weights are their own master copies: they go with the parameters.
            shared = {storage._cdata for storage in storages(parameters, self._device)}
            yield from (t for t in self._optimizer.tensors() if t.untyped_storage()._cdata not in shared)

    # --- weights ---------------------------------------------------------------------------------------------------

    def named_weights(self, part: WeightPart = "merged", dtype: torch.dtype | None = None) -> NamedWeights:
        """Yield full tensors; every rank must walk it to the end: gathering a split tensor is a collective."""
        assert part == "merged" or self._adapters is not None, f"{self._spec.role} has no adapters"
        self._shelves.require_awake("parameters")
        with cpu_platform():
            self._settle()
            stream = iter(self._stream(part, dtype))
        while True:
            # The consumer's code runs between two tensors, on a machine as it is.
            with cpu_platform():
                item = next(stream, None)
            if item is None:
                return
            yield item

    def _stream(self, part: WeightPart, dtype: torch.dtype | None) -> NamedWeights:
        if part == "adapters" and self._adapters is not None:
            return self._adapters.weights()
        merges = part == "merged" and self._adapters is not None
        return stream_weights(self._modules, dtype, self._adapters.merged if merges and self._adapters else None)

    def _settle(self) -> None:
        """Wait for weights that are still being gathered after an optimizer step."""
        if self._spec.trains and self._options.overlap_param_gather:
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    @_on_platform
    def save(
        self, path: Path, contents: Sequence[CheckpointContent] = STATE_CONTENTS, files: StateFiles | None = None
    ) -> None:
        self._shelves.require_awake("parameters", "optimizer")
        self._settle()
        optimizer = self._optimizer if "optimizer" in contents else None
        files = files or StateFiles()
        save_checkpoint(path, self._spec.role, self._modules, optimizer, files, self._adapters)
        self._folder.write_beside(path, SCHEDULE, self._progress.text(contents), files)

    @_on_platform
    def load(self, path: Path, contents: Sequence[CheckpointContent] = STATE_CONTENTS) -> None:
        self._shelves.require_awake("parameters", "optimizer")
        self._settle()
        optimizer = self._optimizer if "optimizer" in contents else None
        if self._adapters is not None:
            self._adapters.peft.check_identity(path)
        counts = load_checkpoint(path, self._spec.role, self._modules, optimizer, self._adapters)
        if self._optimizer is not None:
            self._progress.restore(counts, contents)
            if optimizer is None:
                self._optimizer.take_weights()
            else:
                optimizer.set_steps(self._progress.updates)

    def export(self, path: Path, files: StateFiles | None = None) -> None:
        super().export(path, files)
        if self._adapters is not None and self._spec.kind == "policy":  # a score needs its head, too
            with cpu_platform():
                self._adapters.export(path / "adapter", writes=self._info.rank == 0, files=files or StateFiles())

    def _form(self, dtype: torch.dtype) -> Any:
        """Return the role's model as transformers has it, on the meta device."""
        from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

        kinds = {"policy": AutoModelForCausalLM, "reward": AutoModelForSequenceClassification, "value": AutoModel}
        with torch.device("meta"):
            return kinds[self._spec.kind].from_config(self._config, dtype=dtype)


def _hf_model(config: Any, kind: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    made = AutoModelForSequenceClassification if kind == "reward" else AutoModelForCausalLM
    with torch.device("meta"):
        return made.from_config(config)


def _finalize(chunks: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Sum gradients over ranks as Megatron does, but don't divide them by a number of tokens."""
    from megatron.core.distributed import finalize_model_grads

    del num_tokens
    finalize_model_grads(chunks, None, **options)
