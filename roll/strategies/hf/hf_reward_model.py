"""Reward models: a Hugging Face sequence classifier that gives one value per row.

The score of a text is one output of the classifier, read where transformers reads it: at the last token that isn't
padding. What isn't padding is a matter of ids there, so trailing tokens with the padding id are passed over.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from roll.configs.rules.reward_model_rules import label_violations
from roll.configs.schema.reward_config import RewardModelConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import TrainSpec
from roll.strategies.hf.hf_model import ValueModel, picked_hidden
from roll.strategies.training.logits import HeadOutputs, HeadRequest
from roll.strategies.training.micro import MicroLayout
from roll.strategies.training.pretrained import load_classifier, load_new_classifier, load_tokenizer, text_config

HEAD = "score"
"""What transformers calls the head of a sequence classifier."""

_TOLERANCE = 0.02  # of the size of the logits: above rounding in half precision, below another pooling or head


class RewardModel(ValueModel):
    """A backbone with one output of the classifier's trained head."""

    def __init__(self, classifier: PreTrainedModel, label: int) -> None:
        backbone, head = classifier.base_model, classifier.score
        assert isinstance(backbone, PreTrainedModel)
        assert isinstance(head, nn.Linear)
        super().__init__(backbone)
        with torch.no_grad():
            self.value_head = self.value_head.to(head.weight)
            self.value_head.weight.copy_(head.weight[label : label + 1])
        self._pad: int | None = text_config(classifier).pad_token_id

    def forward(self, layout: MicroLayout, request: HeadRequest) -> HeadOutputs:
        """Return scores of the layout's rows, [B]: its rows have one scored token each, and the scores stand there."""
        assert len(layout.targets) == len(layout.lengths), "a reward model scores one token per row"
        return super().forward(replace(layout, index=pooled_positions(layout, self._pad)), request)

    @torch.no_grad()
    def check(self, classifier: PreTrainedModel, label: int) -> None:
        """Raise `ValueError` unless the scores are the classifier's own logits: encoders pool elsewhere."""
        ids = torch.tensor([[i % text_config(classifier).vocab_size for i in (3, 1, 2)]])
        own = classifier(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
        last = torch.tensor([2])
        layout = MicroLayout(
            ids=ids,
            mask=torch.ones_like(ids),
            positions=torch.arange(3)[None],
            lengths=(3,),
            index=last,
            targets=ids[0, last],
            flat=last,
        )
        values = self(layout, HeadRequest()).values
        assert values is not None
        difference = float((values[0] - own[label].float()).abs())
        if not difference <= 1e-4 + _TOLERANCE * float(own.abs().max()):
            raise ValueError(
                f"{type(classifier).__name__} computes its scores in a way that isn't supported: they differ from a "
                f"linear head at the last token by {difference:.3g}"
            )


class ScoreModel(nn.Module):
    """A classifier with one output that learns: a score where its layout says, [S]."""

    def __init__(self, classifier: PreTrainedModel) -> None:
        super().__init__()
        self.classifier = classifier

    @property
    def backbone(self) -> PreTrainedModel:
        """Return all but the head."""
        backbone = self.classifier.base_model
        assert isinstance(backbone, PreTrainedModel)
        return backbone

    def forward(self, layout: MicroLayout, request: HeadRequest) -> HeadOutputs:
        del request
        picked, head = picked_hidden(self.backbone, layout), self.classifier.score
        assert isinstance(head, nn.Linear)
        return HeadOutputs(values=head(picked.to(head.weight.dtype))[:, 0].float())


def build_score_model(args: ModelArgs, dtype: torch.dtype) -> ScoreModel:
    """Return a classifier with one output on the CPU, to be trained; raises `ValueError` for a model that can't be one.

    A language model gets a head of zeros: the first scores are 0, not noise. A classifier keeps its own.
    """
    classifier = load_new_classifier(args, dtype)
    head = _linear_head(classifier)
    head.float()  # beside adapters the rest may be in half precision
    # What it is read at: the last token that isn't this one.
    text_config(classifier).pad_token_id = load_tokenizer(args).pad_token_id
    return ScoreModel(classifier)


def build_reward_model(spec: TrainSpec, dtype: torch.dtype) -> RewardModel:
    """Return the classifier of a reward model's role on the CPU; raises `ValueError` for a model that is none."""
    assert isinstance(spec.worker, RewardModelConfig)
    classifier = load_classifier(spec.worker.model_args, dtype)
    labels: dict[int, str] = dict(classifier.config.id2label)  # type: ignore[arg-type]
    wrong = next(label_violations(spec.worker.label, [labels[i] for i in sorted(labels)], spec.role), None)
    if wrong is not None:
        raise ValueError(str(wrong))
    _linear_head(classifier)
    model = RewardModel(classifier, spec.worker.label or 0)
    model.check(classifier, spec.worker.label or 0)
    return model


def _linear_head(classifier: PreTrainedModel) -> nn.Linear:
    head = getattr(classifier, HEAD, None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"{type(classifier).__name__} has no linear head called 'score'; reward models must be decoders such as "
            "LlamaForSequenceClassification or Qwen2ForSequenceClassification"
        )
    return head


def pooled_positions(layout: MicroLayout, pad: int | None) -> Tensor:
    """Return int64 [B], the place in the flattened ids whose hidden state is a row's summary.

    The last token whose id isn't `pad`; of a row of nothing else the first; without a padding id the last.
    """
    width = layout.ids.shape[1]
    rows = len(layout.lengths)
    starts = list(accumulate(layout.lengths, initial=0))[:-1] if layout.packed else [i * width for i in range(rows)]
    ids = layout.ids.flatten().tolist()
    positions = []
    for start, length in zip(starts, layout.lengths, strict=True):
        row = ids[start : start + length]
        positions.append(start + next((i for i in reversed(range(length)) if row[i] != pad), 0))
    return torch.tensor(positions, device=layout.ids.device)
