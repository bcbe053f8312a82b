"""Rows of preferences: what is read, what is refused, what is cut, and that pairs stay whole."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from data_tokenizers import word_tokenizer

from roll.configs.schema.preference_config import DPODataArgs, PreferenceDataArgs, RewardDataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.finished_rows import EncodedRows, RowOrder, fingerprint
from roll.data.preference_rows import (
    Preference,
    PreferenceRow,
    batch_of,
    encode_preferences,
    mismatched,
    read_preferences,
    scored_batch_of,
)
from roll.distributed.dispatch import split_batch
from roll.distributed.layout import RankLayout
from roll.utils.rows import DataError

PAIRS = DPODataArgs()
SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "dpo" / "dpo_zh_demo.json"


def write(folder: Path, rows: list[Any], name: str = "data.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def read(folder: Path, rows: list[Any], data: PreferenceDataArgs = PAIRS, *, pairs: bool = True) -> list[Preference]:
    return read_preferences(replace(data, file_name=(write(folder, rows),)), pairs=pairs)


def encoded(
    folder: Path, rows: list[Any], data: PreferenceDataArgs = PAIRS, *, pairs: bool = True, **options: Any
) -> EncodedRows[PreferenceRow]:
    encoder = ConversationEncoder(word_tokenizer(), template="plain")
    return encode_preferences(read(folder, rows, data, pairs=pairs), encoder, **{"sequence_length": 100, **options})


def batch(rows: EncodedRows[PreferenceRow]) -> Any:
    return batch_of([(row.id, row) for row in rows.rows])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


ANSWERS = {"chosen": "w1 w2", "rejected": "w3"}
SAME = {
    "texts": {"prompt": "w0", **ANSWERS},
    "prompt as messages": {"prompt": [user("w0")], **ANSWERS},
    "answers as messages": {"prompt": "w0", "chosen": said("w1 w2"), "rejected": [said("w3")]},
    "whole conversations": {"chosen": [user("w0"), said("w1 w2")], "rejected": [user("w0"), said("w3")]},
    "whole conversations and a prompt": {
        "prompt": "w0",
        "chosen": [user("w0"), said("w1 w2")],
        "rejected": [user("w0"), said("w3")],
    },
    "ShareGPT": {
        "conversations": [{"from": "human", "value": "w0"}],
        "chosen": {"from": "gpt", "value": "w1 w2"},
        "rejected": {"from": "gpt", "value": "w3"},
    },
    "ShareGPT in messages": {"messages": [user("w0")], "chosen": said("w1 w2"), "rejected": said("w3")},
    "Alpaca": {"instruction": "w0", "input": "", **ANSWERS},
}


# ids of the word tokenizer: <unk> 0, <s> 1, </s> 2, ..., w0 7, w1 8, w2 9, w3 10
@pytest.mark.parametrize("form", SAME)
def test_every_spelling_of_a_pair_is_the_same_pair(tmp_path: Path, form: str) -> None:
    found = batch(encoded(tmp_path, [SAME[form]]))
    assert found.row_ids == ("data:1/chosen", "data:1/rejected")
    assert found.unit_ids == ("data:1", "data:1")
    assert found.row("token_ids", 0).tolist() == [1, 7, 8, 9, 2]
    assert found.row("action_mask", 0).tolist() == [False, False, True, True, True]
    assert found.row("token_ids", 1).tolist() == [1, 7, 10, 2]
    assert found.require("preferred").tolist() == [True, False]


def test_alpacas_columns_and_a_system_column_are_the_prompt(tmp_path: Path) -> None:
    system = {"role": "system", "content": "w9"}
    alpaca = {"system": "w9", "history": [["w5", "w6"]], "instruction": "w0", "input": "w7", **ANSWERS}
    (found,) = read(tmp_path, [alpaca])
    assert found.conversations[0] == (system, user("w5"), said("w6"), user("w0\nw7"), said("w1 w2"))
    for form, row in SAME.items():
        (found,) = read(tmp_path, [{**row, "system": "w9"}])
        assert found.conversations == ((system, user("w0"), said("w1 w2")), (system, user("w0"), said("w3"))), form
    with pytest.raises(DataError, match=r"data\.jsonl:1: history has 'w5', expected pairs of a prompt and its answer"):
        read(tmp_path, [{**alpaca, "history": ["w5"]}])


SAME_SINGLE = {
    "TRL": {"prompt": "w0", "completion": "w1", "label": True},
    "TRL's messages": {"prompt": [user("w0")], "completion": [said("w1")], "label": True},
    "whole messages": {"messages": [user("w0"), said("w1")], "label": True},
    "ShareGPT": {"conversations": [{"from": "human", "value": "w0"}, {"from": "gpt", "value": "w1"}], "kto_tag": True},
    "Alpaca": {"instruction": "w0", "input": "", "output": "w1", "kto_tag": True},
}


@pytest.mark.parametrize("form", SAME_SINGLE)
def test_every_spelling_of_a_labelled_response_is_the_same(tmp_path: Path, form: str) -> None:
    (found,) = read(tmp_path, [SAME_SINGLE[form]], pairs=False)
    assert (found.conversations, found.desirable) == (((user("w0"), said("w1")),), True)


def test_a_single_response_that_is_nowhere_is_said_with_the_columns(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:1: no column with the response \(completion, output.*'prompt'"):
        read(tmp_path, [{"prompt": "w0", "label": True}], pairs=False)
    with pytest.raises(DataError, match=r"data\.jsonl:1: 'messages' ends with a message of the user"):
        read(tmp_path, [{"messages": [user("w0")], "label": True}], pairs=False)


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    data = DPODataArgs(prompt="question", chosen_key="better", rejected_key="worse")
    assert read(tmp_path, [{"question": "w0", "better": "w1", "worse": "w2"}], data)[0].conversations[0][1] == said(
        "w1"
    )


@pytest.mark.skipif(not SHARED.is_file(), reason="the shared folder's dpo data isn't there")
def test_the_shared_pairs_are_read() -> None:
    found = read_preferences(DPODataArgs(file_name=(str(SHARED),)), pairs=True)
    assert len(found) == 300
    assert all([m["role"] for m in preference.conversations[0]][-2:] == ["user", "assistant"] for preference in found)


PICTURE = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w0"}]}]
GOOD = {"prompt": "w0", **ANSWERS}
BAD_ROWS = {
    "no column": ({"prompt": "w0", "chosen": "w1"}, r"no column 'rejected' \(named for rejected\)"),
    "no prompt": (ANSWERS, "'chosen' is a text, and no column has its prompt"),
    "empty prompt": ({**GOOD, "prompt": " "}, "the prompt is empty"),
    "answered prompt": ({**GOOD, "prompt": [user("w0"), said("w1")]}, "the prompt ends with the assistant's words"),
    "empty response": ({**GOOD, "rejected": " "}, "the response in 'rejected' is empty"),
    "response of no text": ({**GOOD, "chosen": 4}, "'chosen' is 4, expected a text or a list of messages"),
    "the same twice": ({**GOOD, "rejected": "w1 w2"}, "chosen and rejected are the same"),
    "user last": ({**GOOD, "chosen": [user("w0")]}, "'chosen' ends with a message of the user"),
    "another prompt": ({**GOOD, "chosen": [user("w5"), said("w1")]}, "'chosen' begins with another prompt"),
    "another history": (
        {"chosen": [user("w0"), said("w1")], "rejected": [user("w5"), said("w2")]},
        "differ before the last message",
    ),
    "an answer alone": ({"chosen": [said("w1")], "rejected": [said("w2")]}, "nothing that it answers"),
    "a message without a role": ({**GOOD, "chosen": [{"content": "w1"}]}, r"chosen\[0\] is"),
    "an image in a message": (
        {**GOOD, "prompt": PICTURE},
        r"prompt\[0\] has a part of type 'image', which holds pictures",
    ),
    "an image column": ({**GOOD, "images": ["a.png"]}, "the column 'images' holds pictures, videos or sounds"),
    "a speaker of no name": ({**GOOD, "chosen": {"from": ["gpt"], "value": "w1"}}, r"chosen\[0\] is"),
    "a system column of no text": ({**GOOD, "system": ["w1"]}, "'system' is .*, expected the text of the system"),
    "a history of no turns": ({"instruction": "w0", "history": 5, **ANSWERS}, "history has 5, expected pairs"),
    "half a letter": ({**GOOD, "chosen": "\ud83d"}, "half of a surrogate pair"),
    "not an object": ([1], "expected an object with columns"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, name: str) -> None:
    row, message = BAD_ROWS[name]
    with pytest.raises(DataError, match=rf"data\.jsonl:2: .*{message}"):
        read(tmp_path, [GOOD, row])


def test_an_empty_column_of_images_is_no_image(tmp_path: Path) -> None:
    assert len(read(tmp_path, [{**GOOD, "images": []}])) == 1


def test_labels_may_be_written_in_any_way_that_is_clear(tmp_path: Path) -> None:
    labels = [True, False, 1, 0, "true", "False"]
    rows = [{"prompt": "w0", "completion": "w1", "label": label} for label in labels]
    found = read(tmp_path, rows, pairs=False)
    assert [preference.desirable for preference in found] == [True, False, True, False, True, False]
    liked = batch(encoded(tmp_path, rows[:2], pairs=False))
    assert liked.row_ids == liked.unit_ids == ("data:1", "data:2")
    assert liked.require("preferred").tolist() == [True, False]
    with pytest.raises(DataError, match=r"data\.jsonl:1: the label is 'good', expected true or false"):
        read(tmp_path, [{**rows[0], "label": "good"}], pairs=False)
    with pytest.raises(DataError, match=r"data\.jsonl:1: the label is 2"):
        read(tmp_path, [{**rows[0], "label": 2}], pairs=False)


def test_margins_and_scores_are_numbers(tmp_path: Path) -> None:
    margins = RewardDataArgs(margin="margin")
    found = scored_batch_of([(row.id, row) for row in encoded(tmp_path, [{**GOOD, "margin": "1.5"}], margins).rows])
    assert found.require("targets").tolist() == [1.5, 1.5]
    scored = {"prompt": "w0", "completion": "w1", "score": -2}
    assert read(tmp_path, [scored], RewardDataArgs(), pairs=False)[0].target == -2.0
    for wrong in ("high", True, None, float("inf"), float("nan"), 1e300):
        with pytest.raises(DataError, match=r"data\.jsonl:1: the score is .*, expected a finite number"):
            read(tmp_path, [{**scored, "score": wrong}], RewardDataArgs(), pairs=False)


def test_a_pair_is_kept_left_out_or_cut_as_a_whole(tmp_path: Path) -> None:
    long = {"prompt": "w0", "chosen": "w1 w2 w3 w4", "rejected": "w5"}  # 7 and 4 tokens
    with pytest.raises(DataError, match=r"1 of 2 rows have more than sequence_length = 5 tokens.*jsonl:2 with 7"):
        encoded(tmp_path, [GOOD, long], sequence_length=5)
    left = encoded(tmp_path, [GOOD, long], sequence_length=5, truncation="filter")
    assert ([row.id for row in left.rows], left.filtered) == (["data:1"], 1)
    cut = encoded(tmp_path, [GOOD, long], sequence_length=5, truncation="right")
    assert [part.token_ids.tolist() for part in cut.rows[1].sequences] == [[1, 7, 8, 9, 10], [1, 7, 12, 2]]
    assert (cut.truncated, cut.untaught) == (1, 0)


def test_a_pair_without_a_difference_after_the_cut_is_left_out_and_counted(tmp_path: Path) -> None:
    twins = {"prompt": "w0", "chosen": "w1 w2 w3", "rejected": "w1 w2 w4"}
    one_sided = {"prompt": "w0 w0 w0", "chosen": "w1", "rejected": "w2"}
    found = encoded(tmp_path, [GOOD, twins, one_sided], sequence_length=4, truncation="right")
    assert ([row.id for row in found.rows], found.truncated, found.untaught) == (["data:1"], 3, 2)


def test_threads_change_nothing(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "chosen": "w1", "rejected": "w2"} for i in range(7)]
    one, three = encoded(tmp_path, rows), encoded(tmp_path, rows, num_workers=3)
    assert fingerprint(one.rows) == fingerprint(three.rows)


def test_a_label_or_a_target_that_changed_is_other_data(tmp_path: Path) -> None:
    row = {"prompt": "w0", "completion": "w1", "label": True, "score": 1}
    for data, changed in ((PAIRS, {"label": False}), (RewardDataArgs(), {"score": 2})):
        before, after = (encoded(tmp_path, [{**row, **more}], data, pairs=False) for more in ({}, changed))
        assert fingerprint(before.rows) != fingerprint(after.rows)


def test_an_epoch_deals_out_whole_pairs(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "chosen": "w1 w2 w3"[: 2 + 3 * (i % 3)], "rejected": "w4"} for i in range(7)]
    order = RowOrder(encoded(tmp_path, rows).rows, batch_of, seed=3)
    taken = order.take(9)  # two of them again, in the next epoch
    assert len(taken) == 18
    assert len(taken.units()) == 9
    for ranks in (1, 2, 4):
        layouts = [RankLayout(rank, ranks) for rank in range(ranks)]
        for part in split_batch(taken, layouts, balance=True):
            assert all(len(unit) == 2 for unit in part.units())


def test_a_score_is_read_at_the_last_token_that_is_no_padding(tmp_path: Path) -> None:
    # The plain template ends with </s> (2); a classifier that pads with it passes over it.
    rows = encoded(tmp_path, [GOOD], without_end={2}).rows
    found = scored_batch_of([(row.id, row) for row in rows])
    assert found.row("token_ids", 0).tolist() == [1, 7, 8, 9]
    assert found.row("action_mask", 0).tolist() == [False, False, False, True]
    assert found.row("loss_mask", 1).tolist() == [False, False, True]


def test_a_mismatched_row_has_its_own_prompt_and_the_response_of_the_row_before(tmp_path: Path) -> None:
    rows = [{"prompt": f"w{i}", "completion": text, "label": True} for i, text in enumerate(("w5", "w6 w6", "w4"))]
    found = mismatched(batch(encoded(tmp_path, rows, pairs=False)), 4)
    # prompts <s> w0, <s> w1, <s> w2; responses w4 </s>, w5 </s>, w6 w6 </s>, the last cut to 4 tokens
    assert [found.row("token_ids", i).tolist() for i in range(3)] == [[1, 7, 11, 2], [1, 8, 12, 2], [1, 9, 13, 13]]
    assert [found.row("action_mask", i).tolist() for i in range(3)] == [[False, False, True, True]] * 3
