"""Tiny sequence classifiers for the tests of reward models: random ones, and one that likes a case."""

from __future__ import annotations

from pathlib import Path

from tiny_models import char_tokenizer


def build_tiny_classifier(
    folder: Path, family: str = "llama", *, labels: int = 1, hidden: int = 32, seed: int = 0, **options: object
) -> Path:
    """A random classifier saved with the character tokenizer; `options` are changes of its configuration."""
    import torch
    from transformers import AutoModelForSequenceClassification

    tokenizer = char_tokenizer()
    config = _config(family, tokenizer, hidden=hidden, num_labels=labels, **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config)
        torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_case_lover(folder: Path, *, nan_for: str = "") -> Path:
    """A classifier whose score of a text is +1 if its last character is lower case and -1 if it is anything else.

    Made by hand: attention and MLP give nothing, so the last hidden state is the normalised embedding of the last
    token, whose first entry says the case. Characters in `nan_for` have an embedding that is no number.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    tokenizer = char_tokenizer()
    config = _config("llama", tokenizer, hidden=32, num_labels=1, rms_norm_eps=1e-12)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = -1.0
        for token, index in tokenizer.get_vocab().items():
            if len(token) == 1 and token.islower():
                embedding[index, 0] = 1.0
            if token in nan_for:
                embedding[index, 0] = float("nan")
        # RMS norm makes a lone +-1 of 32 entries +-sqrt(32).
        model.score.weight[0, 0] = 32**-0.5
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _config(family: str, tokenizer: object, *, hidden: int, **options: object):
    from transformers import AutoConfig

    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 64,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **options,
    }
    return AutoConfig.for_model(family, **shape)
