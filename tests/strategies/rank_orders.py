"""Orders in which a run may call a training backend, played on one rank and on several: the same numbers come out."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from layout_contract import shard_of
from safetensors.torch import load_file
from train_contract import LOSS, build, make_batch

ISSUE = ("forward", "train", "forward", "save", "export", "load", "train", "export")
AFTER_FORWARD = (
    "forward", "export", "forward", "train", "forward", "send", "forward", "train_with_an_end", "train", "forward",
    "send_bf16", "forward", "nap", "forward", "save", "forward", "train", "forward", "load", "forward", "train",
    "forward_with_an_end", "export", "backward_with_an_end", "forward_with_an_end", "forward", "train", "send",
)  # fmt: skip
"""Everything that may come after a pass without gradients, and after one that an exception ended."""
ORDERS = {"issue": ISSUE, "after a pass without gradients": AFTER_FORWARD}


def undisturbed(order: Sequence[str]) -> tuple[str, ...]:
    """The same order without exceptions, whose numbers must come out."""
    return tuple("nap" if call.endswith("_with_an_end") else call for call in order)


class Interrupted(Exception):
    """Ends a pass, as a loss of one's own may, or memory that runs out."""


@dataclass
class Played:
    """What a rank has seen, by number and name of the call; weights on rank 0 alone."""

    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    """Log-probs of this rank's rows."""
    norms: dict[str, float] = field(default_factory=dict)
    weights: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """What was exported or sent."""


class Player:
    """Makes the calls of an order on one rank."""

    def __init__(self, info, spec, folder: Path) -> None:
        self.strategy, self.info, self.folder = build(spec, info), info, folder
        layout = self.strategy.layout
        self.mine = make_batch().select(shard_of(layout.dp_rank, layout.dp_size))
        self.played = Played()

    def play(self, calls) -> Played:
        for number, call in calls:
            getattr(self, call)(f"{number} {call}")
        return self.played

    def forward(self, name: str) -> None:
        self.played.rows[name] = self.strategy.forward(self.mine, ("logprobs",)).logprobs.clone()

    def reference(self, name: str) -> None:
        self.played.rows[name] = self.strategy.forward(self.mine, ("logprobs",), adapters=False).logprobs.clone()

    def train(self, name: str) -> None:
        self.played.norms[name] = self.strategy.train_step(self.mine, LOSS).result().get("actor/grad_norm", 0.0)

    def train_with_an_end(self, name: str) -> None:
        """A window ends after its first micro-batch."""
        accumulate = self.strategy._accumulate

        def once(loss, *, last):
            accumulate(loss, last=last)
            raise Interrupted

        self.strategy._accumulate = once
        self._ended(lambda: self.strategy.train_step(self.mine, LOSS))
        del self.strategy._accumulate

    def forward_with_an_end(self, name: str) -> None:
        """A layer raises in a pass without gradients."""
        layer = self.strategy._model.lm.model.layers[1].mlp
        self._ended(lambda: self.strategy.forward(self.mine, ("logprobs",)), layer.register_forward_pre_hook(_end))

    def backward_with_an_end(self, name: str) -> None:
        """A layer raises in the first backward pass of a window."""
        layer = self.strategy._model.lm.model.layers[0].mlp
        self._ended(lambda: self.strategy.train_step(self.mine, LOSS), layer.register_full_backward_pre_hook(_end))

    @staticmethod
    def _ended(call, hook=None) -> None:
        try:
            call()
        except Interrupted:
            return
        finally:
            if hook is not None:
                hook.remove()
        raise AssertionError("nothing was interrupted")

    def send(self, name: str) -> None:
        self._keep(name, self.strategy.named_weights())

    def send_bf16(self, name: str) -> None:
        self._keep(name, self.strategy.named_weights(dtype=torch.bfloat16))

    def nap(self, name: str) -> None:
        self.strategy.sleep()
        self.strategy.wake()

    def export(self, name: str) -> None:
        path = self.folder / name.replace(" ", "_")
        self.strategy.export(path)
        if self.info.rank == 0:
            for part in sorted({file.parent for file in path.rglob("*.safetensors")}):
                tensors = {k: v for file in part.glob("*.safetensors") for k, v in load_file(file).items()}
                self.played.weights[f"{name} {part.relative_to(path)}"] = tensors
            shutil.rmtree(path)

    def save(self, name: str) -> None:
        self.strategy.save(self.folder / "saved")
        if self.info.world_size > 1:
            dist.barrier()  # a run hears of every rank before it goes on

    def load(self, name: str) -> None:
        self.strategy.load(self.folder / "saved")

    def _keep(self, name: str, weights) -> None:
        for key, tensor in weights:
            if self.info.rank == 0:
                self.played.weights.setdefault(name, {})[key] = tensor.detach().clone()


def _end(*arguments) -> None:
    raise Interrupted


def play_order(info, spec, folder: Path, order: Sequence[str]) -> Played:
    """All calls of an order."""
    return Player(info, spec, folder).play(enumerate(order))


def _join_once() -> None:
    """Let all strategies of this process, which is a copy for one call, share a process group."""
    from roll.distributed import process_group
    from roll.strategies.hf import fsdp2

    join = process_group.init_process_group

    def once(*arguments, **options):
        if not dist.is_initialized():
            join(*arguments, **options)

    process_group.init_process_group = fsdp2.init_process_group = once


def _forget_second_groups() -> None:
    """Let another engine of this process have `zero_hpz_partition_size`: DeepSpeed makes its groups once."""
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is not None:
        groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def play_and_resume(info, specs, folder: Path, order: Sequence[str]) -> list[tuple[Played, Played]]:
    """Of each role: all calls; then those after `save` by one that is built anew and loads."""
    _join_once()
    answers = []
    for number, spec in enumerate(specs):
        place = folder / str(number)
        played = play_order(info, spec, place, order)
        _forget_second_groups()
        again = Player(info, spec, place)
        again.load("")
        answers.append((played, again.play(list(enumerate(order))[order.index("save") + 1 :])))
        _forget_second_groups()
    return answers


def differences(several: Sequence[Played], one: Played) -> dict[str, float]:
    """Largest differences of several ranks from one: log-probs and weights as they are, norms relative."""
    found = {"logprobs": 0.0, "norms": 0.0, "weights": 0.0}
    for name, rows in one.rows.items():
        mine = torch.cat([played.rows[name] for played in several])
        found["logprobs"] = max(found["logprobs"], float((mine - rows).abs().max()))
    for name, norm in one.norms.items():
        found["norms"] = max(found["norms"], abs(several[0].norms[name] - norm) / norm)
    assert several[0].weights.keys() == one.weights.keys()
    for name, tensors in one.weights.items():
        mine = several[0].weights[name]
        assert mine.keys() == tensors.keys()
        for key, tensor in tensors.items():
            if "bf16" not in name:  # one unit in the last place is much there
                found["weights"] = max(found["weights"], float((mine[key] - tensor).abs().max()))
    return found


def first_other(resumed: Played, whole: Played) -> str | None:
    """Return the first call whose numbers aren't the same to the bit; None: all are."""
    for name, rows in resumed.rows.items():
        if not torch.equal(rows, whole.rows[name]):
            return name
    for name, norm in resumed.norms.items():
        if norm != whole.norms[name]:
            return f"{name}: {norm} and {whole.norms[name]}"
    for name, tensors in resumed.weights.items():
        other = [key for key, tensor in tensors.items() if not torch.equal(tensor, whole.weights[name][key])]
        if other:
            return f"{name}: {other[0]}"
    return None
