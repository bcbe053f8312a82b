"""Chat templates through whole runs: what was taught ends a response of the exported folder, and variables of the
template reach every prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small import row_of, run_small
from tiny_models import CHATML, char_tokenizer
from toy import config_of, run_toy
from toy_sft import write_sft

from roll.configs.checks.chat_template_checks import template_notes
from roll.configs.errors import ConfigError

SWITCH = CHATML.replace(
    "assistant\n{% endif %}", "assistant\n{% if thinks is defined and not thinks %}(no thought){% endif %}{% endif %}"
)
OWN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_start|>{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)


TEXT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def ends_in(folder: Path) -> set[str]:
    declared = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    ids = declared if isinstance(declared, list) else [declared]
    return set(char_tokenizer().convert_ids_to_tokens(ids))


def with_template(model: Path, target: Path, template: str) -> Path:
    """Copy a model and give its tokenizer another template."""
    import shutil

    shutil.copytree(model, target)
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    return target


def test_the_exported_folder_declares_the_end_that_was_taught(tiny_model: Path, tmp_path: Path) -> None:
    # The base model's settings know </s> alone, and its template ends turns with <|im_end|>.
    assert ends_in(tiny_model) == {"</s>"}
    folder = write_sft(tmp_path, tiny_model)
    run_toy(folder, "max_steps=1", "save_steps=1")
    assert ends_in(folder / "output" / "hf_model") == {"</s>", "<|im_end|>"}
    # What `roll export` makes of a checkpoint takes its settings from here.
    assert ends_in(folder / "output" / "checkpoints" / "checkpoint-1" / "actor_train" / "hf_config") == {
        "</s>", "<|im_end|>",
    }  # fmt: skip


def test_a_template_of_the_configuration_says_what_is_declared(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    template = OWN.replace("'", "\\'")
    run_toy(folder, "max_steps=1", f"actor_train.data_args.template='{template}'")
    assert ends_in(folder / "output" / "hf_model") == {"</s>", "<|im_start|>"}
    folder = write_sft(tmp_path / "text", tiny_model)
    run_toy(folder, "max_steps=1", "actor_train.data_args.template=question_answer")
    assert ends_in(folder / "output" / "hf_model") == {"</s>"}


def test_check_names_tokens_beyond_the_embedding(tiny_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<answer>", "</answer>"], special_tokens=True)
    tokenizer.save_pretrained(model)
    rows = json.loads((model / "config.json").read_text())["vocab_size"]
    beyond = len(tokenizer) - rows  # the tiny model's embedding may have rows to spare
    tokenizer.add_tokens([f"<x{i}>" for i in range(2 - beyond)], special_tokens=True)
    tokenizer.save_pretrained(model)
    note = next(template_notes(config_of(write_sft(tmp_path, tiny_model), f"pretrain={model}")))
    assert note.startswith(f"the tokenizer has 2 tokens beyond the model's embedding of {rows} (")


def test_check_says_what_ends_a_response(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, tiny_model)
    assert list(template_notes(config_of(folder))) == ["a response ends with '</s>', '<|im_end|>'"]
    by_text, why = template_notes(config_of(folder, f"pretrain={with_template(tiny_model, tmp_path / 'text', TEXT)}"))
    assert by_text == "a response ends with '</s>'"
    assert why.startswith(
        "the chat template ends no turn of the assistant with a token of its own; the end of sequence"
    )
    marker = TEXT.replace("{{ m.role }}", "<|im_start|>{{ m.role }}")
    ends, why = template_notes(config_of(folder, f"pretrain={with_template(tiny_model, tmp_path / 'marker', marker)}"))
    assert ends == "a response ends with '</s>', '<|im_start|>'"
    assert "the next role's marker, '<|im_start|>', ends a response, and fine-tuning teaches it" in why
    assert list(template_notes(config_of(folder, "actor_train.data_args.template=plain"))) == []


def test_variables_of_the_template_are_in_prompts_that_are_sampled_from_and_trained(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = with_template(tiny_model, tmp_path / "model", SWITCH)
    rows = [row_of(i) for i in range(4)]
    reward = "def case(response, task):\n    return float(len(response) % 2)\n"
    native = ("max_steps=1", "actor_train.data_args.template=native", "prompt_length=80")

    def prompts(name: str, *variables: str) -> list[str]:
        played = run_small(tmp_path / name, model, *native, *variables, data=rows, reward=reward).prompts()
        return [char_tokenizer().decode(ids) for ids in played]

    usual, told = prompts("usual"), prompts("told", "chat_template_kwargs={thinks: false}")
    assert all(prompt.endswith("<|im_start|>assistant\n") for prompt in usual)
    assert told == [f"{prompt}(no thought)" for prompt in usual]
    own = "rewards.case.chat_template_kwargs={thinks: true}"
    assert prompts("domain", "chat_template_kwargs={thinks: false}", own) == usual


def test_a_variable_that_the_template_doesnt_read_is_refused_before_the_run(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_sft(tmp_path, with_template(tiny_model, tmp_path / "model", SWITCH))
    with pytest.raises(ConfigError, match=r"chat_template_kwargs.enable_thinking: .*it reads thinks"):
        run_toy(folder, "chat_template_kwargs={enable_thinking: false}")
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: .*the template 'plain' is a text"):
        run_toy(folder, "chat_template_kwargs={thinks: false}", "actor_train.data_args.template=plain")
