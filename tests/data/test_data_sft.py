"""Rows of prompts and responses: what is read, what is refused, what is cut, and the order."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from data_tokenizers import word_tokenizer

from roll.configs.schema.sft_config import SFTDataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.finished_rows import RowOrder
from roll.data.sft_rows import SFTConversation, TaughtRows, batch_of, encode_rows, read_conversations
from roll.utils.readers import DataError

PAIR = SFTDataArgs(prompt="prompt", response="response")
CHAT = SFTDataArgs(messages="messages")


def write(folder: Path, rows: list[Any], name: str = "data.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def pairs(*responses: str) -> list[dict[str, str]]:
    return [{"prompt": f"w{i}", "response": response} for i, response in enumerate(responses)]


def read(files: str | tuple[str, ...], columns: SFTDataArgs) -> list[SFTConversation]:
    return read_conversations(replace(columns, file_name=(files,) if isinstance(files, str) else tuple(files)))


def encoded(folder: Path, rows: list[Any], *, columns: SFTDataArgs = PAIR, **options: Any) -> TaughtRows:
    encoder = ConversationEncoder(word_tokenizer(), template="plain")
    conversations = read(write(folder, rows), columns)
    return encode_rows(conversations, encoder, **{"sequence_length": 100, **options})


# ids of the word tokenizer: <unk> 0, <s> 1, </s> 2, ..., w0 7, w1 8, w2 9
def test_a_row_is_its_prompt_and_its_response_whose_tokens_are_taught(tmp_path: Path) -> None:
    batch = batch_of([(row.id, row) for row in encoded(tmp_path, pairs("w1 w2", "w3")).rows])
    assert batch.row_ids == ("data:1", "data:2")
    assert batch.row("token_ids", 0).tolist() == [1, 7, 8, 9, 2]
    assert batch.row("action_mask", 0).tolist() == [False, False, True, True, True]
    assert batch.row("token_ids", 1).tolist() == [1, 8, 10, 2]
    assert batch.loss_mask is not None
    assert torch.equal(batch.loss_mask, batch.action_mask)


def test_a_conversation_may_be_a_list_or_json_text(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": "w1"}]
    rows = encoded(tmp_path, [{"messages": messages}, {"messages": json.dumps(messages)}], columns=CHAT).rows
    assert rows[0].token_ids.tolist() == rows[1].token_ids.tolist() == [1, 7, 8, 2]


def test_several_files_and_formats_make_one_set(tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("prompt,response\nw0,w1\n")
    files = [write(tmp_path, pairs("w1")), str(tmp_path / "more.csv")]
    assert [row.id for row in read(files, PAIR)] == ["data:1", "more:1"]


BAD_ROWS = {
    "no column": (PAIR, {"prompt": "w0", "answer": "w1"}, r"no column 'response' \(named for response\); col"),
    "empty response": (PAIR, {"prompt": "w0", "response": " \n"}, "the response in 'response' is empty"),
    "response of no text": (PAIR, {"prompt": "w0", "response": 4}, "'response' is 4, expected a text or a list of"),
    "empty prompt": (PAIR, {"prompt": "", "response": "w1"}, "the prompt is empty"),
    "half a letter": (PAIR, {"prompt": "w0", "response": "\ud83d"}, "half of a surrogate pair"),
    "not an object": (PAIR, [1], "expected an object with columns"),
    "nobody answers": (
        CHAT,
        {"messages": [{"role": "user", "content": "w0"}]},
        "ends with a message of the user, expected",
    ),
    "empty answer": (
        CHAT,
        {"messages": [{"role": "user", "content": "w0"}, {"role": "assistant", "content": ""}]},
        "the response in 'messages' is empty",
    ),
    "no content": (CHAT, {"messages": [{"role": "assistant"}]}, r"messages\[0\] is"),
    "no list": (CHAT, {"messages": []}, "expected a non-empty list"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    columns, row, message = BAD_ROWS[name]
    messages = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": "w1"}]
    good = {**pairs("w1")[0], "messages": messages}
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        read(write(tmp_path, [good, row]), columns)


def test_json_that_does_not_parse_and_an_empty_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "w0", "response": "w1"}\n{"prompt"\n')
    with pytest.raises(DataError, match=r"data\.jsonl:2: not JSON"):
        read(str(tmp_path / "data.jsonl"), PAIR)
    (tmp_path / "data.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"data\.jsonl: no rows"):
        read(str(tmp_path / "data.jsonl"), PAIR)


def test_what_a_template_refuses_names_the_row(tmp_path: Path) -> None:
    messages = [{"role": role, "content": "w0"} for role in ("system", "user", "assistant")]
    with pytest.raises(DataError, match=r"data\.jsonl:1: a conversation of 3 messages doesn't fit"):
        encoded(tmp_path, [{"messages": messages}], columns=CHAT)


def test_long_rows_stop_the_run_are_left_out_or_cut(tmp_path: Path) -> None:
    rows = pairs("w1", "w1 w2 w3 w4")  # 4 and 7 tokens: <s> prompt response </s>
    with pytest.raises(DataError, match=r"1 of 2 rows have more than sequence_length = 5 tokens.*jsonl:2 with 7"):
        encoded(tmp_path, rows, sequence_length=5)
    left = encoded(tmp_path, rows, sequence_length=5, truncation="filter")
    assert [row.id for row in left.rows] == ["data:1"]
    assert left.metrics()["data/rows_filtered"] == 1
    cut = encoded(tmp_path, rows, sequence_length=5, truncation="right")
    assert cut.rows[1].token_ids.tolist() == [1, 8, 8, 9, 10]
    assert cut.rows[1].trained.tolist() == [False, False, True, True, True]
    assert cut.metrics() == {
        "data/rows": 2,
        "data/rows_filtered": 0,
        "data/rows_truncated": 1,
        "data/rows_untaught": 0,
        "data/row_length_mean": 4.5,
        "data/row_length_max": 5,
        "data/taught_tokens": 5,
    }


def test_a_row_without_a_token_to_learn_after_the_cut_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [*pairs("w1"), {"prompt": "w0 w1 w2 w3 w4", "response": "w5"}]
    left = encoded(tmp_path, rows, sequence_length=4, truncation="right")
    assert (len(left.rows), left.truncated, left.untaught) == (1, 1, 1)
    with pytest.raises(DataError, match="none of 2 rows has a token of the assistant within sequence_length = 2"):
        encoded(tmp_path, rows, sequence_length=2, truncation="right")


def test_threads_change_nothing(tmp_path: Path) -> None:
    rows = pairs(*(f"w{i}" for i in range(7)))
    one, three = encoded(tmp_path, rows), encoded(tmp_path, rows, num_workers=3)
    assert [row.token_ids.tolist() for row in one.rows] == [row.token_ids.tolist() for row in three.rows]


def test_the_held_out_share_is_drawn_by_the_seed_and_shares_no_row(tmp_path: Path) -> None:
    whole = encoded(tmp_path, pairs(*["w1"] * 20))
    rest, held = whole.split(0.25, seed=1)
    assert (len(rest.rows), len(held)) == (15, 5)
    assert not {row.id for row in rest.rows} & {row.id for row in held}
    assert [row.id for row in held] == [row.id for row in whole.split(0.25, seed=1)[1]]
    assert [row.id for row in held] != [row.id for row in whole.split(0.25, seed=2)[1]]
    assert len(whole.split(0.001, seed=1)[1]) == 1
    with pytest.raises(DataError, match=r"validation_share 0\.99 of 20 rows leaves nothing"):
        whole.split(0.99, seed=1)


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    rows = encoded(tmp_path, pairs(*["w1"] * 5)).rows
    order = RowOrder(rows, batch_of, seed=3)
    drawn = [row_id for _ in range(5) for row_id in order.take(3).row_ids]
    assert order.epoch == 3.0
    assert Counter(row_id.partition("@")[0] for row_id in drawn) == dict.fromkeys([row.id for row in rows], 3)
    assert len(set(drawn)) == 15
    epochs = [[row_id.partition("@")[0] for row_id in drawn[i : i + 5]] for i in (0, 5, 10)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(set(epoch) == {row.id for row in rows} for epoch in epochs)
    plain = RowOrder(rows, batch_of, seed=3, shuffle=False)
    assert plain.take(7).row_ids == (*(f"data:{i}" for i in range(1, 6)), "data:1@e1", "data:2@e1")


def test_a_batch_may_be_larger_than_the_data(tmp_path: Path) -> None:
    batch = RowOrder(encoded(tmp_path, pairs("w1", "w2")).rows, batch_of, seed=0).take(5)
    assert len(set(batch.row_ids)) == 5


def test_the_cursor_goes_on_where_it_was_and_refuses_other_data(tmp_path: Path) -> None:
    rows = encoded(tmp_path, pairs(*["w1"] * 5)).rows
    order = RowOrder(rows, batch_of, seed=3)
    order.take(4)
    state = json.loads(json.dumps(order.state_dict()))
    again = RowOrder(rows, batch_of, seed=3)
    again.load_state_dict(state)
    assert again.take(6).row_ids == order.take(6).row_ids
    changed = ((rows[:4], 3, True), (rows, 4, True), (rows, 3, False))
    for other in (RowOrder(those, batch_of, seed=seed, shuffle=shuffle) for those, seed, shuffle in changed):
        with pytest.raises(DataError, match="resuming would skip or repeat rows"):
            other.load_state_dict(state)
