"""Which roles can compute beginnings that rows share once."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.errors import Violation, problem
from roll.configs.schema.megatron_config import MegatronConfig
from roll.configs.schema.worker_config import ForwardConfig


def sharing_obstacle(worker: ForwardConfig) -> str | None:
    """Return what in a role's section rules it out, as a clause; None: nothing."""
    args = worker.model_args
    if args.ring_attention_size > 1:
        return "with model_args.ring_attention_size keys travel by rows, and a tree of rows isn't cut that way"
    if args.lora_dropout:
        return "with model_args.lora_dropout a token is another in every row that has it"
    if args.torch_compile and not worker.use_sequence_packing:
        return "with model_args.torch_compile it needs use_sequence_packing: true"
    if args.attn_implementation == "fa2" and args.ulysses_size == 1:
        return "with model_args.attn_implementation: fa2 attention is flash-attn's, which knows no tree of rows"
    if args.attn_implementation == "eager" and not (worker.use_sequence_packing or args.ulysses_size > 1):
        return "with model_args.attn_implementation: eager it needs use_sequence_packing: true"
    options = worker.strategy_args.strategy_config
    return _megatron_obstacle(options) if isinstance(options, MegatronConfig) else None


def _megatron_obstacle(options: MegatronConfig) -> str | None:
    if options.moe_aux_loss_coeff:
        return "strategy_config.moe_aux_loss_coeff balances the tokens of whole rows"
    if options.additional_configs.get("moe_z_loss_coeff"):
        return "additional_configs.moe_z_loss_coeff takes a mean over the tokens of whole rows"
    return None


def sharing_rules(role: str, worker: ForwardConfig) -> Iterator[Violation]:
    """Refuse the key where something else in the section rules it out."""
    why = sharing_obstacle(worker) if worker.use_prefix_sharing else None
    if why is not None:
        yield problem(f"{role}.use_prefix_sharing", f"it can't act: {why}", "remove one of the two")
