"""Rows as people hand them in: spellings of a conversation, what stands beside its text, flags, tools and pictures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from data_tokenizers import word_tokenizer

from roll.configs.schema.preference_config import DPODataArgs
from roll.configs.schema.sft_config import SFTDataArgs
from roll.configs.schema.worker_config import DataArgs
from roll.data.chat_masks import ConversationEncoder, TrainOn
from roll.data.messages import parse_conversation
from roll.data.preference_rows import read_preferences
from roll.data.prompts import encode_prompts
from roll.data.row_conversations import unused_columns
from roll.data.sft_rows import SFTConversation, TaughtRow, encode_rows, read_conversations
from roll.data.sources import load_tasks
from roll.data.templates import EmbeddingRows, PromptEncoder, TemplateError
from roll.utils.rows import DataError

USER, ANSWER = {"role": "user", "content": "w0"}, {"role": "assistant", "content": "w1"}
TOOL = {"name": "w5", "description": "w6", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "function": {"name": "w5", "arguments": {"w7": "w8"}}}
# Writes tools, thoughts and calls as words of the tokenizer; <|end|> ends a turn.
AGENTS = (
    "{% if tools %}<|system|> {% for t in tools %}{{ t.function.name }} {% endfor %}<|end|> {% endif %}"
    "{% for m in messages %}<|{{ m.role if m.role != 'tool' else 'user' }}|> "
    "{% if m.thinking %}{{ m.thinking }} {% endif %}{% if m.content %}{{ m.content }} {% endif %}"
    "{% for c in m.tool_calls or [] %}<s> {{ c.function.name }} {{ c.function.arguments['w7'] }} </s> {% endfor %}"
    "<|end|> {% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path, rows: list[Any]) -> str:
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "data.jsonl")


def read(folder: Path, *rows: Any, data: SFTDataArgs | None = None) -> list[SFTConversation]:
    data = data or SFTDataArgs()
    from dataclasses import replace

    return read_conversations(replace(data, file_name=(write(folder, list(rows)),)))


def taught(folder: Path, row: Any, *, template: str = "native", chat: str = AGENTS, train_on: TrainOn = "last") -> str:
    """Return the words that are taught."""
    tokenizer = word_tokenizer(chat_template=chat, adds_bos=False)
    encoder = ConversationEncoder(tokenizer, template=template, train_on=train_on)
    (found,) = encode_rows(read(folder, row), encoder, sequence_length=200).rows
    assert isinstance(found, TaughtRow)
    return str(tokenizer.decode(found.token_ids[found.trained]))


SPELLINGS = {
    "texts": {"prompt": "w0", "completion": "w1"},
    "TRL's messages": {"prompt": [USER], "completion": [ANSWER]},
    "prompt and response": {"prompt": "w0", "response": "w1"},
    "OpenAI's": {"messages": [USER, ANSWER]},
    "JSON text": {"messages": json.dumps([USER, ANSWER])},
    "content in parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "w0"}]}, ANSWER]},
    "ShareGPT": {"conversations": [{"from": "human", "value": "w0"}, {"from": "gpt", "value": "w1"}]},
    "ShareGPT in roles": {"conversations": [USER, ANSWER]},
    "Alpaca": {"instruction": "w0", "input": "", "output": "w1"},
    "keys of null": {"messages": [{**USER, "tool_calls": None, "name": None}, {**ANSWER, "tool_calls": []}]},
}


@pytest.mark.parametrize("form", SPELLINGS)
def test_every_spelling_of_a_row_is_the_same_conversation_to_sft_and_dpo(tmp_path: Path, form: str) -> None:
    (found,) = read(tmp_path, SPELLINGS[form])
    assert found.messages == (USER, ANSWER)
    labelled = {**SPELLINGS[form], "label": True}
    (preference,) = read_preferences(DPODataArgs(file_name=(write(tmp_path, [labelled]),)), pairs=False)
    assert preference.conversations == ((USER, ANSWER),)


def test_alpacas_columns_are_read_also_where_its_columns_are_named(tmp_path: Path) -> None:
    row = {"system": "w9", "history": [["w5", "w6"]], "instruction": "w0", "input": "w7", "output": "w1"}
    for data in (SFTDataArgs(), SFTDataArgs(prompt="instruction", response="output")):
        (found,) = read(tmp_path, row, data=data)
        assert [message["content"] for message in found.messages] == ["w9", "w5", "w6", "w0\nw7", "w1"]
        assert unused_columns(row, found.used) == []


def test_prompts_of_rlvr_are_made_of_the_same_columns(tmp_path: Path) -> None:
    system = {"role": "system", "content": "w9"}

    def task(row: Any, **columns: str) -> Any:
        (found,) = load_tasks(write(tmp_path, [row]), columns=DataArgs(**columns), seed=0)
        return found.payload["messages"] or found.payload["prompt"]

    assert task({"prompt": "w0", "system": "w9"}) == [system, USER]
    assert (
        task({"prompt": [USER], "system": "w9"}) == task({"messages": [system, USER], "system": "w9"}) == [system, USER]
    )
    assert task({"instruction": "w0", "input": "w7"}, prompt="instruction") == "w0\nw7"
    assert task({"instruction": "w0", "context": "w7"}, prompt="instruction") == "w0\nw7"  # Dolly's
    assert task({"prompt": "w0", "history": [["w5", "w6"]]})[-1] == USER
    assert task({"prompt": "w0", "history": "of Rome", "input": "w7", "system": None}) == "w0"
    with pytest.raises(DataError, match=r"data.jsonl:1: the column 'chat_template_kwargs' sets variables"):
        task({"prompt": "w0", "chat_template_kwargs": {"enable_thinking": False}})
    assert task({"prompt": "w0", "chat_template_kwargs": {"enable_thinking": None, "tools": []}}) == "w0"
    with pytest.raises(DataError, match=r"data.jsonl:1: the column 'system' is 5, expected the text"):
        task({"prompt": "w0", "system": 5})


def test_a_system_column_stands_before_any_conversation_and_may_not_contradict_it(tmp_path: Path) -> None:
    system = {"role": "system", "content": "w9"}
    (found,) = read(tmp_path, {**SPELLINGS["ShareGPT"], "system": "w9"})
    assert found.messages == (system, USER, ANSWER)
    (found,) = read(tmp_path, {"messages": [system, USER, ANSWER], "system": "w9 "})
    assert found.messages == (system, USER, ANSWER)
    with pytest.raises(DataError, match=r"data.jsonl:1: the column 'system' and the system message .* differ"):
        read(tmp_path, {"messages": [system, USER, ANSWER], "system": "w8"})


def test_sharegpts_calls_and_observations_are_calls_and_results(tmp_path: Path) -> None:
    call = json.dumps({"name": "w5", "arguments": {"w7": "w8"}})
    row = {
        "conversations": [
            {"from": "human", "value": "w0"}, {"from": "function_call", "value": call},
            {"from": "observation", "value": "w2"}, {"from": "gpt", "value": "w1"},
        ]
    }  # fmt: skip
    (found,) = read(tmp_path, row)
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert found.messages == (USER, calling, {"role": "tool", "content": "w2"}, ANSWER)


# --- keys beside the content --------------------------------------------------------------------


def test_what_stands_beside_the_content_is_taught_where_the_template_writes_it(tmp_path: Path) -> None:
    assert taught(tmp_path, {"messages": [USER, {**ANSWER, "thinking": "w2 w3"}]}) == "w2 w3 w1 <|end|>"
    # Calls stand behind the content, between special tokens, and the end of the turn behind them.
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert taught(tmp_path, {"messages": [USER, calling]}) == "<s> w5 w8 </s> <|end|>"
    as_text = {**CALL, "function": {"name": "w5", "arguments": '{"w7": "w8"}'}}
    assert taught(tmp_path, {"messages": [USER, {**ANSWER, "tool_calls": [as_text]}]}) == "w1 <s> w5 w8 </s> <|end|>"


def test_a_name_that_is_the_role_says_nothing_more(tmp_path: Path) -> None:
    plain = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    row = {"messages": [{**USER, "name": "user"}, {**ANSWER, "name": "assistant"}]}
    assert taught(tmp_path, row, chat=plain) == "<|assistant|> w1 <|end|>"


@pytest.mark.parametrize("key", ["thinking", "reasoning_content", "reasoning", "tool_calls", "name", "function_call"])
def test_what_a_template_leaves_out_of_a_message_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    value: Any = [CALL] if key == "tool_calls" else {"name": "w5", "arguments": "{}"} if "call" in key else "w2"
    row = {"messages": [USER, {**ANSWER, key: value}]}
    plain = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    with pytest.raises(DataError, match=rf"data.jsonl:1: the chat template leaves out '{key}' of message 2 \(role"):
        taught(tmp_path, row, chat=plain)
    with pytest.raises(DataError, match=rf"data.jsonl:1: a template with {{prompt}} has no place for '{key}'"):
        taught(tmp_path, row, template="plain")
    prompt = [{**USER, key: value}]
    tasks, encoder = (
        load_tasks(write(tmp_path, [{"prompt": prompt}]), seed=0),
        PromptEncoder(word_tokenizer(chat_template=plain)),
    )
    with pytest.raises(TemplateError, match=rf"leaves out '{key}' of message 1"):
        encode_prompts(tasks, encoder, prompt_length=99)


def test_thoughts_that_the_template_drops_from_earlier_turns_only_are_fine(tmp_path: Path) -> None:
    # As Qwen3's: only the last answer's thought is written; at inference a model sees the same.
    last = "{% if m.thinking and loop.last %}{{ m.thinking }} {% endif %}"
    chat = "{% for m in messages %}<|{{ m.role }}|> " + last + "{{ m.content }} <|end|> {% endfor %}"
    row = {"messages": [USER, {**ANSWER, "thinking": "w2"}, USER, {**ANSWER, "thinking": "w3"}]}
    assert taught(tmp_path, row, chat=chat) == "<|assistant|> w3 w1 <|end|>"  # no prompt asks for the header


def test_the_name_of_a_tool_is_in_the_call_that_it_answers(tmp_path: Path) -> None:
    calling = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    result = {"role": "tool", "content": "w2", "name": "w5", "tool_call_id": "1"}
    assert taught(tmp_path, {"messages": [USER, calling, result, ANSWER]}) == "w1 <|end|>"
    with pytest.raises(DataError, match="leaves out 'name' of message 3"):
        taught(tmp_path, {"messages": [USER, calling, {**result, "name": "w9"}, ANSWER]})


def test_calls_that_cannot_be_read_and_contents_of_other_kinds_are_named() -> None:
    def parse(**message: Any) -> Any:
        return parse_conversation([{"role": "assistant", "content": "w1", **message}], "f:1")

    with pytest.raises(DataError, match=r"f:1: messages\[0\] has the tool calls .*: a call has no name"):
        parse(tool_calls=[{"id": 1}])
    with pytest.raises(DataError, match=r"f:1: messages\[0\] has the tool calls 'f\(\)'"):
        parse(tool_calls="f()")
    with pytest.raises(DataError, match=r"messages\[0\] has a part of type 'thinking', expected parts of type text"):
        parse(content=[{"type": "thinking", "thinking": "w2"}])
    with pytest.raises(DataError, match=r"messages\[0\] is .*and null beside tool_calls"):
        parse(content=None)
    # Arrow gives every part the keys of all; a deep list isn't a crash.
    assert parse(content=[{"type": "text", "text": "w1", "image": None}])[0]["content"] == "w1"
    with pytest.raises(DataError, match="a string but not JSON"):
        parse_conversation("[" * 100_000, "f:1")


# --- tools of a row -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tools",
    [[{"type": "function", "function": TOOL}], [TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]],
    ids=["OpenAI's", "bare", "JSON text", "list of JSON texts"],
)
def test_the_tools_of_a_row_are_offered_by_the_template(tmp_path: Path, tools: Any) -> None:
    tokenizer = word_tokenizer(chat_template=AGENTS, adds_bos=False)
    row = {"messages": [USER, ANSWER], "tools": tools}
    (found,) = encode_rows(read(tmp_path, row), ConversationEncoder(tokenizer), sequence_length=99).rows
    assert tokenizer.decode(found.token_ids) == "<|system|> w5 <|end|> <|user|> w0 <|end|> <|assistant|> w1 <|end|>"
    (pair,) = read_preferences(
        DPODataArgs(file_name=(write(tmp_path, [{"prompt": "w0", "chosen": "w1", "rejected": "w2", "tools": tools}]),)),
        pairs=True,
    )
    assert pair.tools == found_tools(tmp_path, row)
    (task,) = load_tasks(write(tmp_path, [{"prompt": "w0", "tools": tools}]), seed=0)
    assert PromptEncoder(tokenizer).render(task) == "<|system|> w5 <|end|> <|user|> w0 <|end|> <|assistant|>"


def found_tools(folder: Path, row: Any) -> Any:
    return read(folder, row)[0].tools


def test_tools_that_the_template_leaves_out_or_that_are_none_are_refused(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER], "tools": [TOOL]}
    plain = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    with pytest.raises(DataError, match=r"data.jsonl:1: the chat template leaves out the row's tools \(w5\)"):
        taught(tmp_path, row, chat=plain)
    with pytest.raises(DataError, match="has no place for 'tools'"):
        taught(tmp_path, row, template="plain")
    for tools in ([], None, "", "[]"):
        assert taught(tmp_path, {**row, "tools": tools}, chat=plain) == "<|assistant|> w1 <|end|>"
    for tools in ("python", ["python"], 5, [{"parameters": {}}]):
        with pytest.raises(DataError, match=r"data.jsonl:1: 'tools' (is|has)"):
            read(tmp_path, {**row, "tools": tools})
        with pytest.raises(DataError, match=r"data.jsonl:1: 'tools' (is|has)"):
            load_tasks(write(tmp_path, [{"prompt": "w0", "tools": tools}]), seed=0)


# --- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flag", "no", "yes"), [("loss", 0, 1), ("loss_mask", 0, 1), ("train", False, True),
                                                 ("weight", 0.0, 1.0), ("trainable", "false", "true")])  # fmt: skip
def test_a_flag_decides_whether_its_message_is_taught(tmp_path: Path, flag: str, no: Any, yes: Any) -> None:
    second = {"role": "assistant", "content": "w3"}

    def row(one: Any, other: Any) -> dict[str, Any]:
        return {"messages": [USER, {**ANSWER, flag: one}, USER, {**second, flag: other}]}

    assert taught(tmp_path, row(no, yes), train_on="all") == "w3 <|end|>"
    assert taught(tmp_path, row(yes, no), train_on="last") == "w1 <|end|>"
    assert taught(tmp_path, row(None, None), train_on="all") == "w1 <|end|> w3 <|end|>"
    with pytest.raises(DataError, match=r"data.jsonl:1: the flags of its messages leave no token of the assistant"):
        taught(tmp_path, row(no, no), train_on="all")


def test_flags_that_are_neither_yes_nor_no_are_refused(tmp_path: Path) -> None:
    for value in (0.5, [0, 1], "maybe"):
        with pytest.raises(DataError, match=r"data.jsonl:1: messages\[1\] has weight .*expected true or false"):
            read(tmp_path, {"messages": [USER, {**ANSWER, "weight": value}]})
    with pytest.raises(DataError, match=r"messages\[0\] has train True and is of the user; only the assistant's"):
        read(tmp_path, {"messages": [{**USER, "train": True}, ANSWER]})
    with pytest.raises(DataError, match="flags that contradict each other"):
        read(tmp_path, {"messages": [USER, {**ANSWER, "train": True, "loss": 0}]})
    pair = {"prompt": "w0", "chosen": [{**ANSWER, "weight": 0}], "rejected": "w2"}
    with pytest.raises(DataError, match="a flag leaves the response out"):
        read_preferences(DPODataArgs(file_name=(write(tmp_path, [pair]),)), pairs=True)


@pytest.mark.parametrize("column", [("weight", 2.0), ("loss_mask", [0, 1]), ("train", False), ("loss", 0)])
def test_a_column_that_weights_a_row_is_refused(tmp_path: Path, column: tuple[str, Any]) -> None:
    name, value = column
    with pytest.raises(DataError, match=rf"data.jsonl:1: the column '{name}' is .*all rows count alike"):
        read(tmp_path, {"messages": [USER, ANSWER], name: value})
    assert read(tmp_path, {"messages": [USER, ANSWER], name: None})


def test_a_column_that_sets_the_template_for_one_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl:1: the column 'enable_thinking' sets variables of the chat"):
        read(tmp_path, {"messages": [USER, ANSWER], "enable_thinking": False})


# --- columns ------------------------------------------------------------------------------------


def test_columns_that_nothing_reads_are_known(tmp_path: Path) -> None:
    row = {"messages": [USER, ANSWER], "source": "web", "score": 3, "tools": None, "empty": None}
    (found,) = read(tmp_path, row)
    assert unused_columns(row, found.used) == ["source", "score"]
    pair = {"prompt": "w0", "chosen": "w1", "rejected": "w2", "score_chosen": 4}
    (preference,) = read_preferences(DPODataArgs(file_name=(write(tmp_path, [pair]),)), pairs=True)
    assert unused_columns(pair, preference.used) == ["score_chosen"]


# --- pictures -----------------------------------------------------------------------------------

PICTURES: dict[str, dict[str, Any]] = {
    "verl's images": {"images": [{"bytes": "iVBORw0KGgo=", "path": None}], "text": "<image>w0"},
    "TRL's image": {"image": "a/b.JPG"},
    "a URL": {"image": "https://host/x"},
    "images": {"images": ["a.png", "b.png"]},
    "videos": {"videos": [{"video": "a.mp4", "fps": 2}]},
    "audio": {"audio": {"array": [0.0], "sampling_rate": 8}},
    "datasets' form under any name": {"figure": {"bytes": None, "path": "x"}},
    "a data URI under any name": {"figure": "data:image/png;base64,iVBO"},
    "numbered": {"image_1": "a.png"},
    "a path beside a place": {"image_path": "x/1", "text": "<image>\nw0"},
    "a name beside a place": {"image": "000001", "text": "w0 <image>"},
}
PARTS: dict[str, dict[str, Any]] = {
    "OpenAI's": {"type": "image_url", "image_url": {"url": "x"}},
    "Responses'": {"type": "input_image", "image_url": "x"},
    "TRL's": {"type": "image"},
    "Qwen's": {"image": "x.png"},
    "a video": {"type": "video", "video": "x"},
    "sound": {"type": "input_audio", "input_audio": {}},
}


@pytest.mark.parametrize("name", PICTURES)
def test_rows_with_pictures_are_refused_by_every_reader(tmp_path: Path, name: str) -> None:
    text = PICTURES[name].get("text", "w0")
    more = {key: value for key, value in PICTURES[name].items() if key != "text"}
    message = rf"data.jsonl:1: the column '{next(iter(more))}'.* holds pictures, videos or sounds, .*aren't supported"
    with pytest.raises(DataError, match=message):
        load_tasks(write(tmp_path, [{"prompt": text, **more}]), columns=DataArgs(deduplicate=True), seed=0)
    with pytest.raises(DataError, match=message):
        read(tmp_path, {"messages": [{"role": "user", "content": text}, ANSWER], **more})
    pair = {"prompt": text, "chosen": "w1", "rejected": "w2", **more}
    with pytest.raises(DataError, match=message):
        read_preferences(DPODataArgs(file_name=(write(tmp_path, [pair]),)), pairs=True)


@pytest.mark.parametrize("name", PARTS)
def test_messages_with_pictures_are_refused_by_every_reader(tmp_path: Path, name: str) -> None:
    messages = [{"role": "user", "content": [PARTS[name], {"type": "text", "text": "w0"}]}, ANSWER]
    message = r"data.jsonl:1: .*\[0\] has a part of type .*holds pictures, videos or sounds"
    with pytest.raises(DataError, match=message):
        load_tasks(write(tmp_path, [{"prompt": messages[:1]}]), seed=0)
    for row in ({"messages": messages}, {"conversations": messages}):
        with pytest.raises(DataError, match=message):
            read(tmp_path, row)
    pair = {"prompt": messages[:1], "chosen": "w1", "rejected": "w2"}
    with pytest.raises(DataError, match=message):
        read_preferences(DPODataArgs(file_name=(write(tmp_path, [pair]),)), pairs=True)


def test_llavas_rows_and_pictures_beside_a_messages_content_are_refused(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "<image>\nw0"}, {"from": "gpt", "value": "w1"}]
    with pytest.raises(DataError, match="data.jsonl:1: the column 'image' holds pictures"):
        read(tmp_path, {"id": "1", "image": "coco/train2017/1.jpg", "conversations": turns})
    with pytest.raises(DataError, match=r"data.jsonl:1: messages\[0\] has 'images', which holds pictures"):
        read(tmp_path, {"messages": [{**USER, "images": ["x"]}, ANSWER]})
    with pytest.raises(DataError, match=r"data.jsonl:1: messages\[0\] has 'pictures', which holds pictures"):
        read(tmp_path, {"messages": [{**USER, "pictures": ["x"]}, ANSWER]})


def test_a_decoded_picture_of_a_saved_data_set_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    import datasets
    from PIL import Image

    rows = {"prompt": ["w0"], "figure": [Image.new("RGB", (2, 2))]}
    features = datasets.Features({"prompt": datasets.Value("string"), "figure": datasets.Image()})
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(str(tmp_path / "disk"))
    saved.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("disk", "rows.parquet"):
        with pytest.raises(DataError, match=r"\[row 1\]: the column 'figure' holds pictures"):
            load_tasks(str(tmp_path / name), seed=0)


@pytest.mark.parametrize(
    "more",
    [
        {"image": None},
        {"images": []},
        {"images": [None]},
        {"image": "python:3.11-slim"},  # a container's
        {"video_url": "https://host/talk"},  # where a transcript comes from
        {"imagery": "a.png"},
    ],
)
def test_text_about_pictures_is_text(tmp_path: Path, more: dict[str, Any]) -> None:
    assert len(load_tasks(write(tmp_path, [{"prompt": "w0", **more}]), seed=0)) == 1
    assert read(tmp_path, {"messages": [USER, ANSWER], **more})
    (task,) = load_tasks(write(tmp_path, [{"prompt": "the tag <image> in HTML"}]), seed=0)
    assert task.payload["prompt"] == "the tag <image> in HTML"


# --- tokens beyond the embedding ----------------------------------------------------------------


def test_a_token_beyond_the_embedding_is_named_with_its_number_and_the_model(tmp_path: Path) -> None:
    tokenizer = word_tokenizer(adds_bos=False)  # w1 is 8
    message = r"has the token 'w1' with number 8, and models/m has an embedding of 8 tokens .*resize_token_embeddings"
    small = EmbeddingRows(8, "models/m")
    rows = read(tmp_path, {"messages": [USER, ANSWER]})
    for template in ("native", "plain"):
        encoder = ConversationEncoder(tokenizer, template=template, embedding=small)
        with pytest.raises(DataError, match=rf"data.jsonl:1: the conversation {message}"):
            encode_rows(rows, encoder, sequence_length=99)
        tasks = load_tasks(write(tmp_path, [{"prompt": "w1"}]), seed=0)
        prompts = PromptEncoder(tokenizer, template=template, embedding=small)
        with pytest.raises(TemplateError, match=rf"task 'data:1': the prompt {message}"):
            encode_prompts(tasks, prompts, prompt_length=99)
    # A tokenizer may have more tokens than the model, as long as no row has them.
    fits = ConversationEncoder(tokenizer, embedding=EmbeddingRows(9, "models/m"))
    assert len(encode_rows(rows, fits, sequence_length=99).rows) == 1
