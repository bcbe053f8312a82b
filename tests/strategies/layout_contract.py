"""One check for every backend and parallel layout: the same numbers as a plain transformers + AdamW loop.

The reference is written against torch and transformers alone, one unpadded row at a time, float32, one process.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist
from train_contract import LOSS, build, make_batch, make_spec

from roll.configs.schema.strategy_config import STRATEGIES, StrategyArgs
from roll.distributed.weights import weights_checksum
from roll.strategies.deepspeed.deepspeed_strategy import DeepSpeedStrategy
from roll.strategies.hf.fsdp2 import Fsdp2Strategy
from roll.types.batch import TokenOutputs

STEPS = 5
"""The first has no moments yet, the last is taken on weights that moments of four steps have moved."""
LEARNING_RATE = 1e-3
CLIP = 0.5
DECAY = 0.1
EPSILON = 1e-6
"""Of Adam. The usual 1e-8 turns rounding into whole steps where a gradient nearly cancels, as that of a key bias does:
softmax doesn't see a constant that is added to all scores."""

TP2, PP2, CP2, EP2 = (
    {f"{kind}_parallel_size": 2} for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
)
VP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
PLAIN = {"use_distributed_optimizer": False}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
PACKED = {"worker": {"use_sequence_packing": True}}

FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 4}, "qwen3_moe": {}}
"""What every backend can run -> changes of the tiny model's configuration."""


FSDP = {
    "one rank": (1, {}),
    "sharded over two": (2, {}),
    "replicated over two": (2, {"fsdp_size": 1, "reshard_after_forward": False}),
}
"""How FSDP2 shares a model: ranks, options."""


@dataclass
class Run:
    """What a run said before training, at each step, and what its weights became."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    outputs: TokenOutputs | None = None
    """All that the forward pass before training was asked for."""
    seen: object = None
    """What a test's own look at the strategy of rank 0 found at the end."""


@functools.cache
def reference(path) -> Run:
    """Optimizer steps by hand on the model in a folder."""
    from transformers import AutoModelForCausalLM

    return by_hand(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def contract_loss(logprobs, batch):
    """`train_contract.LOSS` of a whole batch."""
    return -(logprobs * batch.advantages).sum() / batch.loss_mask.sum()


def by_hand(model, loss_of=contract_loss, *, make=make_batch, tables=False) -> Run:
    """Optimizer steps on what trains of a causal language model; `loss_of(log-probs [N], batch)`.

    With `tables` the loss gets the log-probs of all tokens, [N, V].
    """
    batch = make()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPSILON)

    def scored():
        logprobs, entropies, whole = [], [], []
        for i in range(len(batch)):
            ids, acting = batch.row("token_ids", i), batch.row("action_mask", i)
            table = model(ids[None]).logits[0].float().log_softmax(-1)[:-1]
            zero = torch.zeros(1)
            logprobs.append(torch.cat([zero, table.gather(-1, ids[1:, None])[:, 0]]) * acting)
            entropies.append(torch.cat([zero, -(table.exp() * table).sum(-1)]) * acting)
            whole.append(torch.cat([torch.zeros_like(table[:1]), table]))
        return torch.cat(logprobs), torch.cat(entropies), torch.cat(whole)

    with torch.no_grad():
        logprobs, entropy, table = scored()
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(scored()[2 if tables else 0], batch)
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return Run(logprobs, entropy, losses, norms, weights, seen=table)


def layout_spec(path, strategy: str, options: dict, **changes):
    """A training role on `strategy` with these options; `worker`, `model` and `training` as for `make_spec`."""
    training = {"learning_rate": LEARNING_RATE, "weight_decay": DECAY, "adam_epsilon": EPSILON}
    training |= changes.pop("training", {})
    spec = make_spec(path, training=training, max_grad_norm=CLIP, **changes)
    args = StrategyArgs(strategy_name=strategy, strategy_config=STRATEGIES[strategy](**options))
    return dataclasses.replace(spec, worker=dataclasses.replace(spec.worker, strategy_args=args))


def shard_of(dp_rank: int, dp_size: int) -> list[int]:
    """Uneven on purpose: the first data-parallel rank has most rows, so the others must fill up their passes."""
    if dp_size == 1:
        return list(range(6))
    return list(range(6 - dp_size + 1)) if dp_rank == 0 else [6 - dp_size + dp_rank]


def my_rows(strategy, make=make_batch):
    """The rows of this rank's data-parallel part."""
    return make().select(shard_of(strategy.layout.dp_rank, strategy.layout.dp_size))


def play(info, spec, look=None, make=make_batch, loss=LOSS, split=None, more=()) -> dict:
    """One rank's part of the run; `look(strategy)` is asked at its end. `split(batch, dp_rank, dp_size)`: its rows.

    `more`: further outputs of the forward pass.
    """
    strategy, batch = build(spec, info), make()
    layout = strategy.layout
    place = layout.dp_rank, layout.dp_size
    mine = batch.select(shard_of(*place)) if split is None else split(batch, *place)
    outputs = strategy.forward(mine, ("logprobs", "entropy", *more))
    history = [strategy.train_step(mine, loss) for _ in range(STEPS)]
    weights = {name: tensor.detach().clone() for name, tensor in strategy.named_weights()}
    # A pass without gradients may leave anything gathered: what is exported after it are the trained weights.
    strategy.forward(mine, ("logprobs",))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in strategy.named_weights())
    return {
        "layout": layout,
        "outputs": outputs if layout.collects else None,
        "losses": [m.result().get("loss", 0.0) for m in history] if layout.collects else None,
        "norms": [m.result()["actor/grad_norm"] for m in history] if info.rank == 0 else None,
        "weights": weights if info.rank == 0 else None,
        "sent": (list(weights), weights_checksum(weights.items())) if strategy.sends_from_every_rank else None,
        "seen": look(strategy) if look is not None and info.rank == 0 else None,
    }


def run_layout(ranks, spec, world: int, look=None, play=play) -> Run:
    """The ranks' answers put together."""
    return put_together(ranks.run(play, world, spec, look))


def put_together(answers) -> Run:
    """Make one run of what `play` returned on every rank."""
    # Each rank may send a part of the weights to the engines, so all must see the same of them, bit by bit.
    assert all(a["sent"] is not None and a["sent"] == answers[0]["sent"] for a in answers)
    kept = sorted((a for a in answers if a["layout"].collects), key=lambda a: a["layout"].dp_rank)
    assert [a["layout"].dp_rank for a in kept] == list(range(kept[0]["layout"].dp_size))
    outputs = TokenOutputs.concat([a["outputs"] for a in kept]).reorder(make_batch().row_ids)
    return Run(
        logprobs=outputs.logprobs,
        entropy=outputs.entropy,
        losses=[sum(parts) for parts in zip(*(a["losses"] for a in kept), strict=True)],
        norms=answers[0]["norms"],
        weights=answers[0]["weights"],
        outputs=outputs,
        seen=answers[0]["seen"],
    )


def relative(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference over largest value."""
    return float((mine - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12))


def differences(run: Run, expected: Run) -> dict[str, float]:
    """Relative difference of each quantity."""
    assert run.weights.keys() == expected.weights.keys()
    return {
        "logprobs": relative(run.logprobs, expected.logprobs),
        "entropy": relative(run.entropy, expected.entropy),
        "loss": relative(torch.tensor(run.losses), torch.tensor(expected.losses)),
        "grad_norm": relative(torch.tensor(run.norms), torch.tensor(expected.norms)),
        "weights": max(relative(run.weights[name], expected.weights[name]) for name in expected.weights),
    }


def check_layout(
    ranks, path, strategy: str, options: dict, world: int, *, tolerance: float = 1e-4, look=None, play=play, **changes
) -> Run:
    """Raise unless the layout gives the reference's numbers; returns the run."""
    run = run_layout(ranks, layout_spec(path, strategy, options, **changes), world, look, play)
    wrong = {name: value for name, value in differences(run, reference(path)).items() if not value <= tolerance}
    assert not wrong, f"{strategy} {options} on {world} rank(s): relative differences {wrong}, allowed {tolerance}"
    return run


def check_layouts(ranks, strategy: str, world: int, cases: dict, *, play=play, tolerance: float = 1e-4) -> None:
    """`check_layout` for roles that share a process group: name -> (path, options, changes)."""
    specs = [layout_spec(path, strategy, options, **changes) for path, options, changes in cases.values()]
    by_rank = ranks.run(each, world, play, specs)
    wrong = {}
    for (name, (path, *_)), *answers in zip(cases.items(), *by_rank, strict=True):
        found = differences(put_together(answers), reference(path))
        wrong |= {f"{name}: {what}": value for what, value in found.items() if not value <= tolerance}
    assert not wrong, f"{strategy} on {world} rank(s): relative differences {wrong}, allowed {tolerance}"


def each(info, function, specs, *args) -> list:
    """`function(info, spec, *args)` for roles of one layout, one after another in one process group."""
    answers = []
    for spec in specs:
        try:
            answers.append(function(info, spec, *args))
        except Exception as error:
            error.add_note(f"with {spec}")
            raise
        stay_connected()
    return answers


def stay_connected() -> None:
    """Let the next roles of this process use the process group it has; Megatron's do so by themselves."""
    if dist.is_initialized():
        Fsdp2Strategy._connect = DeepSpeedStrategy._connect = lambda self: None


def refusal(info, spec):
    """What a rank says that can't build this role; None: nothing."""
    try:
        build(spec, info)
    except ValueError as error:
        if info.world_size > 1:
            dist.barrier()  # a rank that is refused at once would leave while others still connect
        return str(error)
    return None
