"""Tokenizers are read as their folder says: the same text has the same tokens before saving and after loading."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tiny_models import CHATML, char_tokenizer

from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.training.pretrained import load_tokenizer

WORDS = ["<pad>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "Up", "Down", "#", "_", "P", "\n", " ", "user"]
TEXT = "<|im_start|>user\n# _ P\nUp Down<|im_end|>\n"


def word_tokenizer():
    """One token per word, blank and line end."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s|[^\s]+"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def ids_of(tokenizer, text=TEXT):
    return tokenizer(text, add_special_tokens=False).input_ids


def saved(tokenizer, folder, family, **config):
    """A folder of this model type; `config` are changes of tokenizer_config.json, None removes a key."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family, "vocab_size": len(tokenizer)}))
    file = folder / "tokenizer_config.json"
    content = {**json.loads(file.read_text()), **config}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return ModelArgs(model_name_or_path=str(folder))


@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral", "gemma", "gpt2"])
@pytest.mark.parametrize("make", [word_tokenizer, char_tokenizer])
def test_a_generic_tokenizer_gives_the_same_tokens_whatever_the_model_type(tmp_path, make, family, named):
    before = make()
    after = load_tokenizer(saved(before, tmp_path, family, tokenizer_class=named))
    assert ids_of(after) == ids_of(before)
    assert after.decode(ids_of(after)) == TEXT
    assert after.unk_token_id not in ids_of(after)
    assert (after.pad_token_id, after.eos_token_id) == (before.pad_token_id, before.eos_token_id)
    messages = [{"role": "user", "content": "Up"}]
    assert after.apply_chat_template(messages, tokenize=False) == before.apply_chat_template(messages, tokenize=False)


def test_a_generic_tokenizer_of_a_folder_is_loaded_without_what_models_need(tmp_path):
    args = saved(word_tokenizer(), tmp_path, "qwen2")
    code = (
        "import sys\nfrom roll.configs.schema.worker_config import ModelArgs\n"
        "from roll.strategies.training.pretrained import load_tokenizer\n"
        f"load_tokenizer(ModelArgs(model_name_or_path={args.model_name_or_path!r}))\n"
        "print([name for name in ('transformers.modeling_utils', 'torch._dynamo') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_what_was_loaded_can_be_saved_and_loaded_again(tmp_path, family):
    first = load_tokenizer(saved(word_tokenizer(), tmp_path / "first", family))
    again = load_tokenizer(saved(first, tmp_path / "again", family))
    assert ids_of(again) == ids_of(first) == ids_of(word_tokenizer())
    assert "trust_remote_code" not in (tmp_path / "again" / "tokenizer_config.json").read_text()


def test_a_folder_that_names_a_class_gets_that_class(tmp_path):
    args = saved(char_tokenizer(), tmp_path, "qwen2", tokenizer_class="Qwen2Tokenizer")
    assert type(load_tokenizer(args)).__name__.startswith("Qwen2Tokenizer")


def test_code_that_comes_with_the_model_goes_before_the_generic_class(tmp_path):
    args = saved(word_tokenizer(), tmp_path, "qwen2", auto_map={"AutoTokenizer": ["own.Own", None]})
    (tmp_path / "own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    trusting = ModelArgs(model_name_or_path=args.model_name_or_path, trust_remote_code=True)
    assert type(load_tokenizer(trusting)).__name__ == "Own"


def test_without_a_padding_token_the_end_of_sequence_pads(tmp_path):
    tokenizer = word_tokenizer()
    tokenizer.pad_token = None
    assert load_tokenizer(saved(tokenizer, tmp_path, "qwen2", pad_token=None)).pad_token == "</s>"
