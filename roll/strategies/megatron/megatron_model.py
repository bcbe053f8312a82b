"""A role's model as Megatron builds it: the last pipeline stage gives scores of tokens, the others hidden states."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Literal

import torch
from torch import Tensor, nn

from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.attention.attention import TreePlan
from roll.strategies.attention.varlen_kernel import RowPlan
from roll.strategies.megatron.megatron_architecture import MegatronArchitecture, architecture
from roll.strategies.megatron.megatron_attention import (
    MegatronPackedRows,
    RMSNorm,
    Rotary,
    RotaryAttention,
    parameter_device,
)
from roll.strategies.megatron.megatron_build import transformer_config
from roll.strategies.megatron.megatron_expert_replay import attach
from roll.strategies.megatron.megatron_releases import quiet_models
from roll.strategies.megatron.vocab_parallel import vocab_parallel_outputs
from roll.strategies.training.logits import HeadOutputs, HeadRequest
from roll.strategies.training.micro import MicroLayout

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

Kind = Literal["policy", "value", "reward"]


class TokenGPT(GPTModel):
    """One chunk of the model: the layers of one (virtual) pipeline stage, with embedding and head where they belong."""

    def __init__(
        self,
        config: Any,
        arch: MegatronArchitecture,
        rotary: Rotary,
        *,
        kind: Kind,
        temperature: float,
        transformer_engine: bool,
        stage: int | None,
        first: bool,
        last: bool,
    ) -> None:
        ranks = config.tensor_model_parallel_size
        super().__init__(
            config,
            layer_specs(config, arch, rotary, transformer_engine=transformer_engine, stage=stage),
            vocab_size=-(-arch.vocab // ranks) * ranks,
            max_sequence_length=1,  # of no meaning without learned positions
            pre_process=first,
            post_process=last,
            parallel_output=True,
            share_embeddings_and_output_weights=arch.tied and kind == "policy",
            position_embedding_type="none",
            vp_stage=stage,
        )
        self.arch, self.kind, self.temperature = arch, kind, temperature
        attach(self.decoder, arch.sparse)
        if last and kind == "policy":
            # The same parameters; what is called gives log-probs instead of logits.
            self.output_layer.__class__ = VocabParallelHead
        elif last:
            del self.output_layer
            self.value_head = ValueHead(config)

    def forward(  # type: ignore[override]
        self, shard: MicroLayout, all_positions: Tensor, request: HeadRequest
    ) -> Tensor | HeadOutputs:
        """Run this chunk on a micro-batch, or on this rank's shard of it under context parallelism.

        `shard` has T tokens of each of B rows; `all_positions` [B, S] are of the whole rows, see `MegatronPackedRows`.

        Returns hidden states [T / ranks, B, D] (split with sequence parallelism), on the last chunk scores of N
        positions.
        """
        hidden = self._embedded(shard.ids, shard.positions) if self.pre_process else None
        if hidden is not None and torch.is_grad_enabled() and self.config.recompute_granularity is not None:
            # Megatron's recomputed layers give their weights no gradient unless their input wants one, and that of a
            # frozen embedding doesn't.
            hidden.requires_grad_()
        plan = RowPlan(shard.spans) if shard.tree is None else TreePlan(shard.tree)
        rows = MegatronPackedRows(positions=all_positions, rows=plan, experts=self._experts(shard))
        hidden = self.decoder(hidden_states=hidden, attention_mask=None, packed_seq_params=rows)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            # Every rank scores all positions, so each has the whole gradient of its part.
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        picked = hidden.transpose(0, 1).flatten(0, 1)[shard.index]
        if self.kind != "policy":
            return HeadOutputs(values=self.value_head(picked))
        shared = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if shared else self.output_layer.weight
        return self.output_layer(
            picked, weight, shard.targets, request, vocab=self.arch.vocab, temperature=self.temperature
        )

    def _experts(self, shard: MicroLayout) -> Tensor | None:
        """Return `MegatronPackedRows.experts`. Raises `ValueError` where a router couldn't be told."""
        if shard.experts is None:
            return None
        if self.config.moe_router_fusion:
            raise ValueError("additional_configs.moe_router_fusion can't take the engine's experts; remove it")
        if "moe" in (self.config.recompute_modules or ()) and self.config.recompute_granularity == "selective":
            raise ValueError(
                "recomputed expert layers aren't told the engine's experts: recompute whole layers, or not moe"
            )
        experts = shard.experts.transpose(0, 1)
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            experts = experts.chunk(group.size())[group.rank()]
        return experts

    def _embedded(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Return [T / ranks, B, D]. As in transformers, the padding token (it may be sampled) gets no gradient here."""
        hidden: Tensor = self.embedding(input_ids, positions)
        if self.arch.padding is None or not hidden.requires_grad:
            return hidden
        padding = (input_ids == self.arch.padding).t()[..., None]
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            padding = padding.chunk(group.size())[group.rank()]
        hidden.register_hook(lambda gradient: gradient.masked_fill(padding, 0.0))
        return hidden


class VocabParallelHead(tensor_parallel.ColumnParallelLinear):
    """The output layer as a map from hidden states to what is said about the vocabulary."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, targets: Tensor, request: HeadRequest, *, vocab: int, temperature: float
    ) -> HeadOutputs:
        """See `vocab_parallel_outputs`; `weight` is the embedding's where that is shared."""
        return vocab_parallel_outputs(
            hidden,
            weight,
            targets,
            request,
            temperature=temperature,
            group=self.tp_group,
            vocab_start=self.tp_group.rank() * len(weight),
            vocab=vocab,
        )


class ValueHead(nn.Module):
    """A scalar per hidden state, zero at the start so that the first values are 0, not noise."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        shape, device = (1, config.hidden_size), parameter_device(config)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values float32 [N] of [N, D]."""
        return (hidden @ self.weight[0]).float()


def layer_specs(
    config: Any, arch: MegatronArchitecture, rotary: Rotary, *, transformer_engine: bool, stage: int | None
) -> Any:
    """Return Megatron's layers with the attention of this package, and without Transformer Engine with its norm."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*legacy GroupedMLP.*")
        block = get_gpt_decoder_block_spec(
            config, use_transformer_engine=transformer_engine, normalization="RMSNorm", vp_stage=stage
        )
    attention = functools.partial(RotaryAttention, rotary=rotary, windows=arch.windows)
    for layer in block.layer_specs:
        inner = layer.submodules.self_attention.submodules
        inner.core_attention = attention
        if not transformer_engine:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            if arch.qk_norm:
                inner.q_layernorm = inner.k_layernorm = RMSNorm
    if not transformer_engine:
        block.layer_norm = RMSNorm
    return block


def build_chunks(
    hf_config: Any,
    options: MegatronConfig,
    *,
    kind: Kind,
    dtype: torch.dtype,
    trains: bool,
    temperature: float,
    recompute: bool,
    longest: int | None = None,
) -> list[TokenGPT]:
    """Return this rank's part of the model, one chunk per virtual pipeline stage, its parameters not yet loaded.

    Call it with Megatron's process groups initialised, without an accelerator inside `cpu_platform`. `kind`: a value
    or reward model has a scalar head instead of the vocabulary's. `recompute`: activations, where the options leave it
    open. `longest`: see `Rotary`.
    Raises `ValueError`, see `architecture` and `transformer_config`.
    """
    arch = architecture(hf_config)
    config = transformer_config(arch, options, dtype=dtype, trains=trains, recompute=recompute)
    rotary = Rotary(hf_config, arch.head_dim, longest)
    stages = config.virtual_pipeline_model_parallel_size
    with quiet_models():
        return [
            TokenGPT(
                config,
                arch,
                rotary,
                kind=kind,
                temperature=temperature,
                transformer_engine=options.transformer_impl == "transformer_engine",
                stage=stage,
                first=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                last=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            )
            for stage in (range(stages) if stages else [None])
        ]
