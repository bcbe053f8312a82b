"""Tools under the chat templates that models come with: TRL's collection, read from its wheel, and Mistral's by kind.

Each is asked for the parser of its calls; if there is one, it gives back every call of every kind of argument, and two
rounds of calls are one context, letter for letter. What is measured is the table of docs/tools.md.
"""

from __future__ import annotations

import copy
import json
import re

import pytest
from chat_tokenizers import bpe_tokenizer
from family_templates import LISTED_MARK, NAMED_MARK, NAMED_MARK_WITH_IDS
from peer_wheels import ROOT, unpacked
from test_rollout_tool_forms import OTHERS, SPEC, TEXTS, given_back, two_rounds

from roll.data.templates import TemplateError
from roll.rollout.chat_checks import check_template
from roll.rollout.chat_format import ChatTemplate
from roll.rollout.tool_forms import resolve_parser
from roll.types.chat import Message, ToolCall

FAMILIES = {
    "Qwen2.5": "qwen2_5",
    "Qwen3": "qwen3",
    "Qwen3 Instruct 2507": "qwen3_instruct_2507",
    "Qwen3.5": "qwen3_5_think",
    "Qwen3.5, no thoughts": "qwen3_5_nothink",
    "Qwen3.6": "qwen3_6",
    "Qwen3.8": "qwen3_8",
    "GLM-4.5": "glm4moe",
    "Llama 3.1": "llama3_1",
    "Llama 3.2": "llama3_2",
    "gpt-oss": "gptoss",
    "Gemma 4": "gemma4_v5",
    "Nemotron 3 Nano": "nemotron_3_nano",
    "Nemotron 3 Super": "nemotron_3_super",
    "Nemotron 3 Ultra": "nemotron_3_ultra",
    "DeepSeek V3": "deepseekv3",
    "LFM2.5": "lfm2_2_5_v2",
    "Muse Glimmer": "muse_glimmer",
}
"""Name on the page -> file of the collection."""
BY_KIND = {"Mistral until v7": LISTED_MARK, "Mistral v11": NAMED_MARK_WITH_IDS, "Mistral v13": NAMED_MARK}
MUST_BE_READ = {
    "Qwen3", "Qwen3.5", "GLM-4.5", "Llama 3.1", "gpt-oss", "Gemma 4", "Nemotron 3 Nano", *BY_KIND,
}  # fmt: skip
_MARK = re.compile(r"<[|｜][^<>\s{}'\"]{1,40}>|<[a-z_]{1,20}[|]>|\[/?[A-Z_]{3,20}\]")


def tokenizer_of(template: str):
    """Every mark of a template as a special token."""
    tokenizer = copy.deepcopy(bpe_tokenizer(template))
    marks = sorted({"<s>", "</s>", *_MARK.findall(template)})
    tokenizer.add_special_tokens({"extra_special_tokens": marks})
    return tokenizer


def measured(name: str, template: str) -> tuple[str, str, str, str]:
    """The parser, calls given back of those written, and whether rounds of calls and of questions are one context."""
    tokenizer = tokenizer_of(template)
    try:
        parser = resolve_parser("auto", tokenizer)
    except ValueError:
        return "refused", "", "", ""
    chat, right, total = ChatTemplate(tokenizer), 0, 0
    for arguments in [*({"text": text} for text in TEXTS), *OTHERS]:
        call = ToolCall("call00000", SPEC.name, json.dumps(arguments, ensure_ascii=False))
        for content in ("", "I will look."):
            total += 1
            try:
                right += given_back(chat, parser, Message("assistant", content, (call,))) == [(SPEC.name, arguments)]
            except AssertionError:
                continue
    thinks = ("think" in template or "channel" in template) and "</think>" not in chat.opening
    rounds = "yes"
    try:
        carried, rendered = two_rounds(template, None, thinks=thinks, make=tokenizer_of)
        rounds = "yes" if carried == rendered else "no"
    except TemplateError:
        rounds = "refused"
    try:
        check_template(tokenizer)
        questions = "yes"
    except TemplateError as error:
        hint = re.search(r"chat_template_kwargs: \{(.*?)\}", str(error))
        questions = f"with `{hint[1]}`" if hint else "refused"
    return f"`{parser}`", f"{right} of {total}", rounds, questions


@pytest.mark.timeout(3600)
def test_auto_gives_back_every_call_that_the_templates_of_models_write_or_says_that_it_cant(tmp_path, evidence_folder):
    files = unpacked("trl", ROOT / "benchmarks" / "requirements-trl.txt", tmp_path) / "trl" / "chat_templates"
    templates = {name: (files / f"{file}.jinja").read_text("utf-8") for name, file in FAMILIES.items()} | BY_KIND
    rows = {name: measured(name, template) for name, template in templates.items()}
    lines = [f"| {name} | {' | '.join(row)} |" for name, row in rows.items()]
    (evidence_folder / "tool_templates.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, (parser, given, rounds, _) in rows.items():
        if name in MUST_BE_READ:
            assert parser != "refused" and rounds == "yes", name
        if parser != "refused":
            assert given.split(" of ")[0] == given.split(" of ")[1], (name, given)
    page = (ROOT / "docs" / "tools.md").read_text("utf-8")
    assert not [line for line in lines if line not in page]
