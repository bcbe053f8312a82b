"""A language model with a tower: rows of tokens and pictures as log-probs.

The tower runs once for each different picture of a micro-batch, and its features go to every row that shows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.configs.catalog.family_table import family_of
from roll.strategies.hf.hf_model import PolicyModel
from roll.strategies.hf.hf_packing import row_arguments
from roll.strategies.training.micro import MicroLayout, PictureInputs
from roll.strategies.training.place_tokens import forbid_places


class PicturePolicyModel(PolicyModel):
    """See `PolicyModel`; its layouts may have pictures."""

    def __init__(self, lm: PreTrainedModel, temperature: float, *, fused: bool = False) -> None:
        super().__init__(lm, temperature, fused=fused)
        forbid_places(lm)

    def _picked(self, layout: MicroLayout) -> Tensor:
        positions, pictures = layout.positions, layout.pictures
        # Of tokens alone all four are the same. Without them the model would make up its own, and see no rows.
        hidden = self.lm.get_decoder()(
            **({"input_ids": layout.ids} if pictures is None else read_pictures(self.lm, layout.ids, pictures)),
            attention_mask=layout.mask,
            position_ids=positions if positions.dim() == 3 else positions.expand(4, -1, -1),
            use_cache=False,
            **row_arguments(layout),
        ).last_hidden_state
        return hidden.flatten(0, 1)[layout.index]


def read_pictures(lm: Any, ids: Tensor, pictures: PictureInputs) -> dict[str, Any]:
    """Return what goes into the language model of `lm` in place of `ids` [B, T] that show pictures.

    Modules are called in the same order whether rows show any: ranks that compute together must agree on it.
    """
    features: Any = lm.base_model.get_image_features(pictures.pixels, pictures.grid, return_dict=True)
    # Beside those in place of tokens some families have others, added in between the first layers.
    between = list(getattr(features, "deepstack_features", None) or ())
    embedded = lm.get_input_embeddings()(ids)
    if not len(pictures.features):
        sums = [torch.cat(list(each)).sum() for each in (features.pooler_output, *between)]
        return {"inputs_embeds": embedded + (torch.stack(sums).sum() * 0).to(embedded.dtype)}
    first, *between = (torch.cat(list(each))[pictures.features] for each in (features.pooler_output, *between))
    places = ids == lm.config.image_token_id
    inputs = {"inputs_embeds": embedded.masked_scatter(places[..., None], first.to(embedded.dtype))}
    return inputs | ({"visual_pos_masks": places, "deepstack_visual_embeds": between} if between else {})


def freeze_tower(model: nn.Module, *, tower: bool, projector: bool) -> None:
    """Take the parameters of a model's tower, or of its projector, out of training. Raises `ValueError` without one."""
    names = family_of(model.config.model_type).pictures  # type: ignore[union-attr]
    if names is None:
        key = "freeze_vision_tower" if tower else "freeze_projector"
        raise ValueError(f"{key}: {type(model).__name__} isn't given pictures and trains no tower; remove it")
    for name, parameter in model.named_parameters():
        if name.startswith(names.tower) and (projector if name.startswith(names.projector) else tower):
            parameter.requires_grad_(False)
