"""Compute log-probs and values of tokens with a transformers model, without keeping logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from roll.configs.catalog.family_table import family_of
from roll.strategies.hf.fused import can_fuse, fused_logprobs
from roll.strategies.hf.hf_packing import row_arguments
from roll.strategies.training.logits import HeadOutputs, HeadRequest, head_outputs
from roll.strategies.training.micro import MicroLayout
from roll.strategies.training.pretrained import load_tokenizer as load_tokenizer  # extensions import it from here
from roll.strategies.training.pretrained import text_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_MULTIPLIED, _DIVIDED = ("logit_scale", "lm_head_multiplier"), ("logits_scaling", "logits_mup_width_multiplier")
"""Fields of configurations with a factor of the logits (Cohere, Falcon-H1), or a divisor (Granite, Inkling)."""


def logit_factor(model: nn.Module) -> float:
    """Return what the model multiplies the output of its head with."""
    config, factor = text_config(model), 1.0
    for name in (*_MULTIPLIED, *_DIVIDED):
        value = float(getattr(config, name, None) or 1.0)
        factor *= 1 / value if name in _DIVIDED and not family_of(config.model_type).multiplies_logits else value
    return factor


_CHECKED_TOKENS = 256
_CHECKED_TOLERANCE = 0.02
"""Of the spread of the logits: above rounding in half precision, below any factor that matters."""


def picked_hidden(decoder: nn.Module, layout: MicroLayout) -> Tensor:
    """Return the last hidden states [S, D] at the positions that predict the layout's targets."""
    hidden = decoder(
        input_ids=layout.ids,
        attention_mask=layout.mask,
        position_ids=layout.positions,
        use_cache=False,
        **row_arguments(layout),
    ).last_hidden_state
    return hidden.flatten(0, 1)[layout.index]


class PolicyModel(nn.Module):
    """A causal LM as a map from tokens to per-token log-probs and entropies.

    The head runs only where a token is scored, in chunks whose logits are recomputed in the backward pass, so memory
    never holds positions x vocabulary.
    """

    def __init__(self, lm: PreTrainedModel, temperature: float, *, fused: bool = False) -> None:
        super().__init__()
        self.lm = lm
        self.temperature = temperature
        self._fused = fused
        self._softcap = getattr(text_config(lm), "final_logit_softcapping", None)
        self._factor = logit_factor(lm)

    def forward(self, layout: MicroLayout, request: HeadRequest) -> HeadOutputs:
        """Return log-probs of the layout's targets, and what else is asked at their positions."""
        picked = self._picked(layout)
        head, targets = self.lm.get_output_embeddings(), layout.targets
        temperature = self.temperature / self._factor
        if self._fused and targets.dim() == 1 and can_fuse(head, self._softcap, request):
            return HeadOutputs(logprobs=fused_logprobs(picked, head, targets, temperature))
        return head_outputs(picked, head, targets, request, temperature=temperature, softcap=self._softcap)

    def _picked(self, layout: MicroLayout) -> Tensor:
        return picked_hidden(self.lm.get_decoder(), layout)

    @torch.no_grad()
    def check(self) -> None:
        """Raise `ValueError` unless these log-probs are those of the model's own logits.

        Some architectures do more to their logits than apply a head; unnoticed, the trainer would optimise a
        distribution that nothing was sampled from.
        """
        device = next(self.lm.parameters()).device
        ids = torch.tensor([[0, 1]], device=device)
        own = self.lm(input_ids=ids, use_cache=False).logits[0, -1].float() / self.temperature
        targets = torch.arange(min(len(own), _CHECKED_TOKENS), device=device)
        layout = MicroLayout(
            ids=ids,
            mask=torch.ones_like(ids),
            positions=torch.arange(2, device=device)[None],
            lengths=(2,),
            index=torch.ones_like(targets),
            targets=targets,
            flat=targets,
        )
        scored = self(layout, HeadRequest()).logprobs
        expected = own.log_softmax(-1)[: len(targets)]
        spread = float(own.max() - own[~own.isneginf()].min())
        if not torch.allclose(scored, expected, rtol=0.0, atol=1e-3 + _CHECKED_TOLERANCE * spread):
            difference = float((scored - expected).abs().max())
            raise ValueError(
                f"{type(self.lm).__name__} computes its logits in a way that isn't supported: its log-probs differ "
                f"from those of its output head by up to {difference:.3g}"
            )


class ValueModel(nn.Module):
    """A backbone with a scalar head, zero at the start so that the first values are 0, not noise."""

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(text_config(backbone).hidden_size, 1, bias=False)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, layout: MicroLayout, request: HeadRequest) -> HeadOutputs:
        del request
        picked = picked_hidden(self.backbone, layout)
        return HeadOutputs(values=self.value_head(picked.to(self.value_head.weight.dtype))[:, 0].float())
