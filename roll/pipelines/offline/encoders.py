"""What makes tokens of the rows of an offline pipeline, for the run and for `roll data check`."""

from __future__ import annotations

from typing import Any

from roll.configs.schema.offline_config import OfflineConfig, OfflineDataArgs
from roll.data.chat_masks import ConversationEncoder, TrainOn
from roll.pipelines.credit.model_outputs import smallest_embedding


def conversation_encoder(
    config: OfflineConfig, data: OfflineDataArgs, tokenizer: Any, *, train_on: TrainOn = "last"
) -> ConversationEncoder:
    """Return what encodes rows of `data`, a result of `data_args_of`; raises `ValueError` where template, tokenizer or
    image processor don't fit."""
    template = data.template or "native"
    variables = config.chat_template_kwargs
    embedding = smallest_embedding(config, pictures=data.images is not None)
    if data.images is None:
        return ConversationEncoder(
            tokenizer, template=template, train_on=train_on, variables=variables, embedding=embedding
        )
    from roll.data.picture_chat import PictureConversationEncoder
    from roll.utils.picture_tokens import PictureTokens

    trusted = config.actor_train.model_args.trust_remote_code
    tokens = PictureTokens.load(config.model_path("actor_train"), trust_remote_code=trusted)
    return PictureConversationEncoder(
        tokenizer, tokens, template=template, train_on=train_on, variables=variables, embedding=embedding
    )
