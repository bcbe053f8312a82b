"""What a forward and backward pass of a Hugging Face module keeps, per micro-batch (after arXiv:2205.05198).

Counted are tensors that autograd saves in a layer of transformers with scaled-dot-product attention, which keeps no
scores, and the largest tensors that are there beside them for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.workbench.planning.architecture import Architecture
from roll.workbench.planning.recurrent import DeltaRule, StateSpace

SLICE = 1 << 24
"""Numbers of a slice of the logits that are float32 at a time, see `roll/strategies/training/logits.py`."""
CHUNK = 1 << 25
CHUNK_ON_ACCELERATOR = 1 << 28
"""Logits that exist at a time."""
_CHUNK = 64
"""Tokens that a gated delta rule computes at once."""
IN_FLIGHT = 1 << 28
"""Bytes of offloaded activations that are on the device while they are copied, see
`roll/strategies/training/activation_offload.py`; one tensor may be larger."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchShape:
    """The largest micro-batch."""

    rows: int
    width: int
    """Tokens of a row, padding included."""
    tokens: int
    """Tokens of all rows, padding included."""
    scored: int
    """Tokens whose log-probs are wanted."""
    packed: bool = False

    @property
    def mask(self) -> int:
        """Return bytes of the attention mask: padded rows have one of width x width."""
        return 0 if self.packed else self.rows * self.width * self.width


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Kinds of numbers in a pass."""

    computed: int
    """Bytes of what matrices multiply."""
    residual: int
    """Bytes of the stream between layers: float32 under autocast."""
    on_accelerator: bool = False

    @property
    def chunk(self) -> int:
        """Return logits that exist at a time."""
        return CHUNK_ON_ACCELERATOR if self.on_accelerator else CHUNK

    @property
    def casts(self) -> bool:
        """Return whether autocast copies what it multiplies."""
        return self.computed != self.residual


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one rank."""

    saved: int
    """By all layers together, from the forward to the backward pass."""
    moment: int
    """Beside them, in the worst moment: a layer that is computed again, and gradients on their way."""
    logits: int
    """Of the head, with their gradients and slices."""
    host: int = 0
    """Of `saved`, what waits in host memory."""

    @property
    def total(self) -> int:
        """Return bytes in the worst moment."""
        return self.saved + max(self.moment, self.logits)


def layer_bytes(
    arch: Architecture, numbers: Numbers, *, sparse: bool, masked: bool, shared: int = 1, recurrent: bool = False
) -> int:
    """Return bytes per token that a layer saves without checkpointing; `shared`: ranks that split heads and MLP."""
    b, r, h = numbers.computed, numbers.residual, arch.hidden
    query, key = arch.query // shared, arch.key // shared
    norm = (4 if b == r == 4 or numbers.casts else 6) * h
    into = b * h  # what a matrix multiplies; autocast makes a copy for each of several
    copies = 3 if numbers.casts else 1
    # A mask makes torch repeat keys and values for every query head.
    keys = query if masked and arch.kv_heads != arch.heads else key
    # Packed rows are attended to one after the other, and their outputs laid end to end.
    outputs = 1 if masked else 2
    attention = b * (query + outputs * query + 2 * keys) + 4 * arch.heads // shared
    if arch.decoder.qk_norm:
        attention += (query + key) * (8 if b == 4 else 6)
    if arch.decoder.delta_rule:
        attention += 3 * b * query  # gates, what they are computed from and what they multiply
    if recurrent and arch.mixer is not None:
        mixer = arch.mixer
        attention = _state_space(mixer, numbers) if isinstance(mixer, StateSpace) else _delta_rule(mixer, numbers)
    mlp = _experts(arch, numbers, shared) if sparse else 4 * b * arch.intermediate // shared
    sandwich = len(arch.decoder.norms) > 2
    return (
        2 * (r * h + norm + into * copies)
        - (into if numbers.casts else 0)
        + attention
        + mlp
        + (2 * norm if sandwich else 0)
    )


def _delta_rule(rule: DeltaRule, numbers: Numbers) -> int:
    """Return bytes per token of a gated delta rule as transformers computes it without a kernel: chunks in float32."""
    b = numbers.computed
    keys, values, chunk = rule.value_heads * rule.key_head_dim, rule.value, _CHUNK * rule.value_heads
    # Queries and keys: as they come, normalised, with decays and betas. Of a chunk: five matrices of its tokens' pairs.
    inside = 4 * (9 * keys + 5 * values + 5 * chunk + rule.value * rule.key_head_dim // _CHUNK)
    return inside + 2 * b * rule.convolved + (3 * b + 4) * values


def _state_space(rule: StateSpace, numbers: Numbers) -> int:
    """Return bytes per token of a state-space layer as transformers computes it without a kernel: chunks in float32.

    The factors are those of what autograd saves of such layers of twelve sizes, to 0.1 %.
    """
    value, chunk = rule.value, rule.chunk
    # Inputs and outputs of the state for every head; of a chunk: matrices of its tokens' pairs, and states at its end.
    inside = 5 * rule.heads * rule.state + 3 * rule.heads * chunk + 9 * value * rule.state // (4 * chunk)
    return 4 * (inside + 10 * value + 7 * rule.heads) + 3 * numbers.computed * rule.convolved


def selective_bytes(arch: Architecture, numbers: Numbers, *, sparse: bool, shared: int = 1) -> int:
    """Return a layer's bytes per token with selective recomputation: its input, outputs of products and attention."""
    b, h, width = numbers.computed, arch.hidden, 2 * arch.intermediate
    mlp = b * (width // shared + h)
    if sparse:
        mlp = arch.experts_per_token * b * (2 * arch.expert_width // shared + h) + b * arch.experts
        mlp += b * (2 * arch.shared_width // shared + h) if arch.shared_width else 0
    attention = b * (2 * (arch.query + arch.key) // shared + h) + 4 * arch.heads // shared
    return numbers.residual * h + attention + mlp


def _experts(arch: Architecture, numbers: Numbers, shared: int) -> int:
    """Return a layer's bytes per token in experts: each token passes some, with a copy for each, and the shared one."""
    b, r, h = numbers.computed, numbers.residual, arch.hidden
    each = b * (2 * h + 4 * arch.expert_width // shared) + (2 * r * h if numbers.casts else 0)
    return arch.experts_per_token * each + 8 * arch.experts + 4 * b * arch.shared_width // shared


def moment_bytes(arch: Architecture, numbers: Numbers, *, sparse: bool, shared: int = 1) -> int:
    """Return bytes per token of gradients on their way through a layer."""
    b, r = numbers.computed, numbers.residual
    width = arch.expert_width * arch.experts_per_token if sparse else arch.intermediate
    return b * 2 * width // shared + (b + r) * arch.hidden


def logits_bytes(arch: Architecture, numbers: Numbers, batch: MicroBatchShape, *, kind: str, backward: bool) -> int:
    """Return bytes of the head on its largest chunk of positions, with the gradients of a backward pass."""
    if kind != "policy":
        return 8 * batch.scored
    b, vocab = numbers.computed, arch.vocab
    rows = min(batch.scored, max(1, numbers.chunk // vocab))
    chunk = rows * vocab
    # Of a slice in float32: log-probs, in whose memory the gradient is made; what a logsumexp takes in a forward pass;
    # logits of another type once more.
    widened = b < 4
    slices = 4 * ((1 if backward else 2) + widened) * min(chunk, max(1, SLICE // vocab) * vocab)
    capped = 8 * chunk if arch.decoder.softcap else 0
    # Several chunks each have a gradient of the head's weight before it is added to their sum in float32.
    head = vocab * arch.hidden * (b + 4) if backward and batch.scored > rows else 0
    return chunk * b * (2 if backward else 1) + slices + capped + head


def activations(
    arch: Architecture,
    numbers: Numbers,
    batch: MicroBatchShape,
    *,
    kind: str,
    checkpointed: bool,
    offloaded: bool,
    layers: int | None = None,
    shared: int = 1,
    selective: bool = False,
) -> Activations:
    """Return what a forward and backward pass of one micro-batch takes.

    `checkpointed`: layers are computed again in the backward pass, `selective`ly without products and attention.
    """
    count = arch.layers if layers is None else layers
    tokens, r, h = batch.tokens, numbers.residual, arch.hidden
    masked = not batch.packed and batch.rows > 1
    sparse = any(arch.sparse)
    each = [
        layer_bytes(arch, numbers, sparse=kind_of, masked=masked, shared=shared, recurrent=recurrent)
        for kind_of, recurrent in zip(arch.sparse[:count], arch.recurrent or (False,) * count, strict=False)
    ]
    worst = max(each)
    ends = tokens * (r * h * 2 + 4 * h) + batch.scored * h * numbers.computed + batch.mask
    retained = [
        selective_bytes(arch, numbers, sparse=kind_of, shared=shared) if selective else r * h for kind_of in arch.sparse
    ]
    saved = tokens * sum(retained[:count] if checkpointed else each)
    again = tokens * max(0, worst - min(retained)) if checkpointed else 0
    moment = again + tokens * moment_bytes(arch, numbers, sparse=sparse, shared=shared)
    head = logits_bytes(arch, numbers, batch, kind=kind, backward=True)
    if offloaded:
        # What a layer saves comes back when it is its turn; the next, or the last to go, is there beside it.
        stream, widest = tokens * r * h, tokens * numbers.computed * max(arch.intermediate, arch.query, h)
        in_flight = max(IN_FLIGHT if numbers.on_accelerator else 0, stream if checkpointed else widest)
        return Activations(
            saved=ends + min(saved, in_flight),
            moment=moment + (stream if checkpointed else tokens * worst),
            logits=head,
            host=saved,
        )
    return Activations(saved=saved + ends, moment=moment, logits=head)


def forward_bytes(arch: Architecture, numbers: Numbers, batch: MicroBatchShape, *, kind: str, shared: int = 1) -> int:
    """Return bytes of a pass without gradients: a layer at work, then the head."""
    b, r, h = numbers.computed, numbers.residual, arch.hidden
    if any(arch.sparse):
        mlp = b * (arch.experts_per_token * (2 * h + 4 * arch.expert_width // shared) + 3 * arch.shared_width // shared)
    else:
        mlp = 3 * b * arch.intermediate // shared
    attention = b * (2 * arch.query + 2 * arch.key) // shared
    layer = batch.tokens * (2 * r * h + 2 * b * h + max(mlp, attention))
    picked = batch.tokens * r * h + batch.scored * h * b
    return batch.mask + max(layer, picked + logits_bytes(arch, numbers, batch, kind=kind, backward=False))
