"""Models that a start would refuse for what only a forward pass shows: asked of a small one of their configuration.

For `roll check` (check_process.py), where config.json is at hand. Types that the project's own tests run with every
engine and trainer aren't asked, nor is code of a folder's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from roll.configs.checks.model_families import untested_roles
from roll.configs.schema.run_config import RunConfig
from roll.configs.schema.worker_config import ForwardConfig
from roll.pipelines.run.model_options import Problem

_PACKED, _SHARED = "use_sequence_packing", "use_prefix_sharing"


def proof_problems(config: RunConfig, refused: Collection[str]) -> Iterator[Problem]:
    """Yield (key, sentence, fix) of what the start would refuse of a role's model; not of roles that are `refused`."""
    for role, worker, _ in untested_roles(config):
        name = worker.strategy_args.strategy_name
        key = f"{role}.strategy_args.strategy_name"
        if role in refused:
            continue
        if name == "hf_infer":
            yield from ((key, sentence, "") for sentence in _sampler(config, role))
        elif isinstance(worker, ForwardConfig) and not name.startswith("megatron"):
            for sentence in _trainer(config, role):
                way = next((way for way in (_SHARED, _PACKED) if way in sentence), None)
                yield f"{role}.{way}" if way else key, sentence.removeprefix(f"{role}.{way}: "), ""


def _sampler(config: RunConfig, role: str) -> Iterator[str]:
    from roll.pipelines.workers.train_worker import resolved_model_args
    from roll.strategies.small_proofs import sampler_refusal

    if sentence := sampler_refusal(resolved_model_args(config, role), config.max_sequence_length):
        yield sentence


def _trainer(config: RunConfig, role: str) -> Iterator[str]:
    from roll.pipelines.workers.train_worker import train_spec
    from roll.strategies.small_proofs import trainer_refusal

    kind = config.kind_of(role)
    if kind == "reward":
        return  # its head is made when the run starts
    spec = train_spec(config, role, kind=kind, trains=role in config.trained_roles, total_optimizer_steps=1)
    if sentence := trainer_refusal(spec):
        yield sentence
