"""Values of secret variables are replaced wherever text goes out."""

from __future__ import annotations

import logging

from roll.utils.logging import setup_logging
from roll.utils.secrets import redacted, redacted_tree

ENVIRONMENT = {
    "OPENAI_API_KEY": "sk-0123456789",
    "HF_TOKEN": "hf_abcdefgh",
    "TOKENIZERS_PARALLELISM": "falsefalse",
    "DB_PASSWORD": "short",
    "LONG_TOKEN": "sk-0123456789-and-more",
}


def test_secret_values_become_the_names_of_their_variables():
    text = "key sk-0123456789, hf_abcdefgh; sk-0123456789-and-more; falsefalse short"
    expected = "key [OPENAI_API_KEY], [HF_TOKEN]; [LONG_TOKEN]; falsefalse short"
    assert redacted(text, ENVIRONMENT) == expected


def test_a_tree_keeps_names_of_variables_and_tokens_of_a_vocabulary(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    tree = {
        "judge": {"api_key": "abc", "api_key_env": "OPENAI_API_KEY", "pad_token": "<pad>"},
        "url": ["x?sk-0123456789"],
    }
    assert redacted_tree(tree) == {
        "judge": {"api_key": "[secret]", "api_key_env": "OPENAI_API_KEY", "pad_token": "<pad>"},
        "url": ["x?[OPENAI_API_KEY]"],
    }


def test_headers_of_a_reward_server_are_secrets():
    headers = {"Authorization": "Bearer abc", "X-API-Key": "abc", "Accept": "text/plain", "Max-Token": "5"}
    hidden = redacted_tree({"reward_kwargs": {"headers": headers}})["reward_kwargs"]["headers"]
    assert hidden == {**headers, "Authorization": "[secret]", "X-API-Key": "[secret]"}


def test_passwords_of_addresses_are_secrets_and_ports_and_times_are_not():
    text = "postgres://me:pa:ss!@db:5432/runs, http://host:8080/a@b, at 12:30 me@home, redis://:only@host"
    assert redacted(text, {}) == (
        "postgres://me:[secret]@db:5432/runs, http://host:8080/a@b, at 12:30 me@home, redis://:[secret]@host"
    )


def test_no_secret_in_a_log_line_or_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789")
    setup_logging(file=tmp_path / "log")
    try:
        raise ValueError("refused: Bearer sk-0123456789")
    except ValueError:
        logging.getLogger("x").exception("asking with %s", "sk-0123456789")
    text = (tmp_path / "log").read_text()
    assert "sk-0123456789" not in text
    assert text.count("[OPENAI_API_KEY]") == 3  # the message, the line of code, the exception
