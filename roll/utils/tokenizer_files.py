"""What a model's folder says of its tokenizer and chat template, read from its files: no transformers, no vocabulary.

Enough to render conversations, and to tell the tokens that aren't plain text from those that are: what
`roll/utils/response_ends.py` asks a tokenizer.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from roll.utils.chat_templates import template_environment

PLAIN = -1
"""The number of every character that is plain text."""
_BEGINNING_CHARS = 2_000_000
_ADDED = re.compile(r'"added_tokens":\s*(?=\[)')
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TokenizerFiles:
    """Stands for a tokenizer where its folder is at hand."""

    def __init__(self, folder: Path) -> None:
        """Raise `OSError` or `ValueError` for files that can't be read."""
        settings = _json(folder / "tokenizer_config.json")
        added = [(each["id"], each["content"]) for each in _added_tokens(folder / "tokenizer.json")]
        added += [(int(n), each["content"]) for n, each in settings.get("added_tokens_decoder", {}).items()]
        self.added_tokens_decoder: dict[int, str] = dict(added)
        self._ids = {text: number for number, text in added}
        named = {**_json(folder / "special_tokens_map.json"), **settings}
        self.special_tokens_map = {role: text for role in _ROLES if (text := _text_of(named.get(role)))}
        texts = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, texts))) if texts else None
        self.chat_template = _template(folder, settings)
        by_name = bool(settings.get("chat_template")) or (folder / "additional_chat_templates").is_dir()
        self.has_chat_template = self.chat_template is not None or by_name
        """Whether it has any, be it one of several by name."""

    @property
    def eos_token_id(self) -> int | None:
        """Number of the end-of-sequence token."""
        return self._ids.get(self.special_tokens_map.get("eos_token", ""))

    @property
    def all_special_ids(self) -> list[int]:
        """Numbers of the named tokens."""
        return [self._ids[text] for text in self.special_tokens_map.values() if text in self._ids]

    def get_chat_template(self, **_options: Any) -> str:
        """Return the template."""
        return self.chat_template or ""

    def __call__(self, text: str, **_options: Any) -> dict[str, list[int]]:
        """Return the numbers of added tokens, and `PLAIN` for each character between them."""
        ids: list[int] = []
        at = 0
        for match in self._added.finditer(text) if self._added is not None else ():
            ids += [PLAIN] * (match.start() - at) + [self._ids[match.group()]]
            at = match.end()
        return {"input_ids": ids + [PLAIN] * (len(text) - at)}

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of added tokens."""
        return "".join(self.added_tokens_decoder.get(number, "") for number in ids)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str, add_generation_prompt: bool, **options: Any
    ) -> str:
        """Render as transformers does; raises jinja2's errors."""
        import jinja2

        def refuse(message: str) -> None:
            raise jinja2.exceptions.TemplateError(message)

        def as_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **how)

        environment = template_environment()
        environment.filters["tojson"] = as_json
        environment.globals |= {"raise_exception": refuse, "strftime_now": datetime.now().strftime}
        options.pop("tokenize", None)
        variables = {"tools": None, "documents": None, **self.special_tokens_map, **options}
        text: str = environment.from_string(chat_template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **variables
        )
        return text


def tokenizer_files(name: str) -> TokenizerFiles | None:
    """Return the files of a local folder; None where it isn't one, or can't be read without transformers."""
    folder = Path(name).expanduser()
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return TokenizerFiles(folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None  # whoever loads it says what is wrong with it


def _json(file: Path) -> dict[str, Any]:
    value = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return value if isinstance(value, dict) else {}


def _added_tokens(file: Path) -> list[Any]:
    """Return the added tokens of a tokenizer without its vocabulary, which follows them and may have 30 MB."""
    with file.open(encoding="utf-8") as text:
        beginning = text.read(_BEGINNING_CHARS)
    if (match := _ADDED.search(beginning)) is not None:
        with contextlib.suppress(ValueError):  # the list goes on behind the beginning
            tokens: list[Any] = json.JSONDecoder().raw_decode(beginning, match.end())[0]
            return tokens
    listed = _json(file).get("added_tokens")
    return listed if isinstance(listed, list) else []


def _text_of(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = _json(folder / "chat_template.json").get("chat_template", settings.get("chat_template"))
    if isinstance(template, list):  # several by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template if isinstance(template, str) else None
