"""Rows with pictures, in the forms that verl, TRL and LLaVA write: their pictures, their places and their tokens."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image
from tiny_pictures import END, PARTS, START, picture_tokenizer
from tiny_pictures import PLACE as PAD

from roll.configs.schema.preference_config import DPODataArgs
from roll.configs.schema.sft_config import SFTDataArgs
from roll.configs.schema.worker_config import DataArgs
from roll.data.chat_masks import ConversationEncoder
from roll.data.picture_chat import PictureConversationEncoder, PicturePromptEncoder
from roll.data.picture_check import PictureFindings
from roll.data.preference_rows import batch_of as pairs_batch
from roll.data.preference_rows import encode_preferences, read_preferences
from roll.data.prompts import LengthRule, encode_prompts
from roll.data.quarantine import Quarantine
from roll.data.row_pictures import PLACE
from roll.data.sft_rows import SFTConversation, batch_of, encode_rows, read_conversations
from roll.data.sources import load_tasks
from roll.data.streaming import Streamer
from roll.data.task_tables import ListTable
from roll.data.templates import TemplateError
from roll.types.chat import pictures_of
from roll.utils.picture_tokens import PictureTokens
from roll.utils.rows import DataError

ANSWER = {"role": "assistant", "content": "ok"}


def image(number: int = 0, size: tuple[int, int] = (56, 56)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


def file_of(number: int = 0, size: tuple[int, int] = (56, 56)) -> bytes:
    file = io.BytesIO()
    image(number, size).save(file, "PNG")
    return file.getvalue()


def url(number: int = 0) -> str:
    return "data:image/png;base64," + base64.b64encode(file_of(number)).decode()


@pytest.fixture(scope="module")
def tokens() -> PictureTokens:
    """4 tokens for 56 x 56 pixels, 2 for 56 x 28: a token has 28 x 28."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil(patch_size=14, size={"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16})
    place, video = picture_tokenizer().convert_tokens_to_ids([PAD, "<|video_pad|>"])
    return PictureTokens(processor, place, [place, video])


def rows_in(folder: Path, *rows: Any, images: str | None = "images", **more: Any) -> list[SFTConversation]:
    for number in range(3):
        (folder / f"{number}.png").write_bytes(file_of(number))
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_conversations(SFTDataArgs(file_name=(str(folder / "data.jsonl"),), images=images, **more))


def shown(conversation: SFTConversation) -> tuple[list[str], list[str]]:
    """Return contents and the digests of pictures."""
    messages = conversation.messages
    return [message["content"].replace(PLACE, "#") for message in messages], [p.digest for p in pictures_of(messages)]


def digests(folder: Path, *numbers: int) -> list[str]:
    import hashlib

    return [hashlib.sha256(file_of(number)).hexdigest() for number in numbers]


USER = {"role": "user", "content": "what?"}
FORMS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "verl": ({"messages": [{"role": "user", "content": "a<image>b<image>"}, ANSWER], "images": ["0.png", "1.png"]},
             "images", ["a#b#", "ok"]),
    "LLaVA": ({"conversations": [{"from": "human", "value": "<image>\nwhat?"}, {"from": "gpt", "value": "ok"}],
               "image": "0.png"}, "image", ["#\nwhat?", "ok"]),
    "TRL, texts": ({"prompt": [{"role": "system", "content": "s"}, USER], "completion": [ANSWER], "image": "0.png"},
                   "image", ["s", "#what?", "ok"]),
    "TRL, parts": ({"messages": [{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}, {"type": "image"}]}, ANSWER],
                    "images": [{"path": "0.png", "bytes": None}, {"image": "1.png"}]}, "images", ["a#b#", "ok"]),
    "a text prompt": ({"prompt": "<image>what?", "response": "ok", "images": ["0.png"]}, "images", ["#what?", "ok"]),
    "Alpaca": ({"instruction": "what?", "input": "see <image>", "output": "ok", "images": ["0.png"]}, "images",
               ["what?\nsee #", "ok"]),
    "OpenAI's parts": ({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url(0), "detail": "low"}}, {"type": "text", "text": "a"},
        {"type": "image", "image": "1.png"}]}, ANSWER]}, "messages", ["#a#", "ok"]),
    "Anthropic's parts": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {
        "type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(0)).decode()}}]}, ANSWER]},
        "messages", ["#", "ok"]),
    "JSON text": ({"messages": json.dumps([{"role": "user", "content": [{"type": "image"}]}, ANSWER]),
                   "images": '["0.png"]'}, "images", ["#", "ok"]),
    "two turns": ({"messages": [{"role": "user", "content": "<image>"}, ANSWER, {"role": "user", "content": "b<image>"},
                                ANSWER], "images": ["0.png", "1.png"]}, "images", ["#", "ok", "b#", "ok"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_row_shows_its_pictures_at_their_places(tmp_path: Path, name: str) -> None:
    row, column, texts = FORMS[name]
    (conversation,) = rows_in(tmp_path, row, images=column)
    count = "".join(texts).count("#")
    assert shown(conversation) == (texts, digests(tmp_path, *range(count)))
    assert column in conversation.used
    if "images" in row or "image" in row:
        with pytest.raises(DataError, match="holds pictures, videos or sounds.*name their column in data_args.images"):
            rows_in(tmp_path, row, images=None)


def test_rows_of_a_saved_data_set_and_of_parquet_show_theirs(tmp_path: Path) -> None:
    import datasets

    rows = {"messages": [[USER, ANSWER]] * 2, "images": [[image(0)], [image(1)]]}
    message = {"role": datasets.Value("string"), "content": datasets.Value("string")}
    features = datasets.Features({"messages": [message], "images": [datasets.Image()]})
    saved = datasets.Dataset.from_dict(rows, features=features)
    saved.save_to_disk(str(tmp_path / "disk"))
    saved.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("disk", "rows.parquet"):
        read = read_conversations(SFTDataArgs(file_name=(str(tmp_path / name),), images="images"))
        for number, conversation in enumerate(read):
            (picture,) = pictures_of(conversation.messages)
            assert (np.asarray(picture.rgb()) == np.asarray(image(number))).all()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "<image><image>"}, ANSWER], "images": ["0.png"]},
         r"1 pictures in the column 'images', and 2 places for them in the texts \(2 in messages\[0\]\)"),
        ({"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": ["0.png", "1.png"]},
         "2 pictures in the column 'images', and 1 places"),
        ({"messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": []}, "0 pictures .* and 1 places"),
        ({"messages": [USER, {"role": "assistant", "content": "<image>"}], "images": ["0.png"]},
         r"messages\[1\], the assistant's, has a place for a picture"),
        ({"messages": [USER, ANSWER], "images": ["no.png"]}, r"data.jsonl:1: images\[0\]: 'no.png' can't be read"),
        ({"messages": [USER, ANSWER], "images": ["0.png", None]}, r"images\[1\] is null"),
        ({"messages": [{"role": "user", "content": "a\ufffcb"}, ANSWER], "images": ["0.png"]}, "U[+]FFFC in its text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "0.png", "max_pixels": 9}]}, ANSWER]},
         "'max_pixels', which isn't supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text":
          "<image>"}]}, ANSWER]}, "parts that are pictures, and <image> in its text"),
        ({"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}, ANSWER]},
         "a part of type 'video', which holds pictures, videos or sounds"),
        ({"messages": [USER, ANSWER], "images": ["0.png"], "video": "a.mp4"}, "column 'video' holds pictures, videos"),
        ({"messages": [{**USER, "pictures": ["0.png"]}, ANSWER], "images": ["0.png"]},
         r"messages\[0\] has the key 'pictures', which nothing reads"),
        ({"messages": [USER, ANSWER]}, "data.jsonl: no row has a picture in the column 'images'"),
    ],
)  # fmt: skip
def test_rows_whose_pictures_do_not_fit_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_in(tmp_path, row)


def test_rows_of_text_may_stand_beside_rows_with_pictures(tmp_path: Path) -> None:
    text, seen = rows_in(tmp_path, {"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER], "images": ["0.png"]})
    assert [len(pictures_of(each.messages)) for each in (text, seen)] == [0, 1]


# --- tokens -------------------------------------------------------------------------------------


def encoded(tokens: PictureTokens, conversations: list[SFTConversation], **options: Any) -> Any:
    encoder = PictureConversationEncoder(picture_tokenizer(), tokens, train_on=options.pop("train_on", "last"))
    return encode_rows(conversations, encoder, sequence_length=options.pop("sequence_length", 400), **options)


def test_a_place_has_a_token_for_each_feature_and_none_of_them_is_taught(tmp_path: Path, tokens: PictureTokens) -> None:
    (tmp_path / "wide.png").write_bytes(file_of(5, (56, 28)))
    row = {
        "messages": [
            {"role": "user", "content": "a<image>b<image>"},
            ANSWER,
            {"role": "user", "content": "<image>"},
            ANSWER,
        ],
        "images": ["0.png", "wide.png", "0.png"],
    }
    text = {"messages": [{"role": "user", "content": "plain"}, ANSWER]}
    conversations = rows_in(tmp_path, row, text)
    found = encoded(tokens, conversations, train_on="all")
    tokenizer = picture_tokenizer()
    pad = START + PAD * 4 + END
    expected = (
        f"<|im_start|>user\na{pad}b{START}{PAD * 2}{END}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
        f"<|im_start|>user\n{pad}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    )
    first, second = found.rows
    assert first.token_ids.tolist() == tokenizer(expected)["input_ids"]
    assert tokenizer.decode(first.token_ids[first.trained]) == "ok<|im_end|>" * 2
    assert first.pictures == pictures_of(conversations[0].messages) and len(first.pictures) == 3
    # A row of text is what the encoder of texts makes of it.
    (alone,) = encode_rows(conversations[1:], ConversationEncoder(tokenizer, train_on="all"), sequence_length=400).rows
    assert second.token_ids.tolist() == alone.token_ids.tolist()
    batch = batch_of([("a", first), ("b", second)])
    assert batch.pictures == (first.pictures, ())
    assert not batch.loss_mask[batch.token_ids == tokens.place].any()


def test_places_and_counts_are_those_of_the_models_own_processor(tmp_path: Path, tokens: PictureTokens) -> None:
    sizes = [(28 + 7 * k, 30 + 11 * (k % 9)) for k in range(20)]
    names = [f"s{k}.png" for k in range(len(sizes))]
    for name, size in zip(names, sizes, strict=True):
        (tmp_path / name).write_bytes(file_of(1, size))
    rows = [{"messages": [USER, ANSWER], "images": [name]} for name in names]
    found = encoded(tokens, rows_in(tmp_path, *rows))
    for row in found.rows:
        grid = tokens.pixels(row.pictures)[1]
        assert int((row.token_ids == tokens.place).sum()) == int(grid.prod()) // 4


def test_long_rows_with_pictures_are_left_out_whole(tmp_path: Path, tokens: PictureTokens) -> None:
    rows = [{"messages": [USER, ANSWER], "images": ["0.png"] * count} for count in (1, 8)]
    conversations = rows_in(tmp_path, *rows)
    lengths = [row.length for row in encoded(tokens, conversations).rows]
    kept = encoded(tokens, conversations, sequence_length=lengths[0], truncation="filter")
    assert (len(kept.rows), kept.filtered) == (1, 1)
    with pytest.raises(DataError, match="1 of 2 rows have more than sequence_length"):
        encoded(tokens, conversations, sequence_length=lengths[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (f"<image>{PAD}", r"shows 1 pictures and has 2 places for them \(<\|image_pad\|>\)"),
        ("<image><|video_pad|>", "a place for a video, and videos aren't supported"),
    ],
)
def test_texts_with_tokens_of_pictures_are_refused(
    tmp_path: Path, tokens: PictureTokens, content: str, message: str
) -> None:
    row = {"messages": [{"role": "user", "content": content}, ANSWER], "images": ["0.png"]}
    with pytest.raises(DataError, match=f"data.jsonl:1: .*{message}"):
        encoded(tokens, rows_in(tmp_path, row))


def test_templates_without_a_place_for_pictures_are_refused(tokens: PictureTokens) -> None:
    tokenizer = picture_tokenizer()
    with pytest.raises(TemplateError, match="has no place for pictures"):
        PictureConversationEncoder(tokenizer, tokens, template="plain")
    blind = (
        "{% for m in messages %}{{ m.role }}:{{ m.content if m.content is string else m.content[0].text }};{% endfor %}"
    )
    with pytest.raises(TemplateError, match="writes 0 places for a picture"):
        PictureConversationEncoder(tokenizer, tokens, template=blind)


def test_templates_that_take_parts_alone_get_parts(tmp_path: Path, tokens: PictureTokens) -> None:
    parts = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for p in m.content %}{% if p.type == 'image' %}"
        + PAD
        + "{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoder = PictureConversationEncoder(picture_tokenizer(), tokens, template=parts)
    conversations = rows_in(tmp_path, {"messages": [USER, ANSWER], "images": ["0.png"]})
    (row,) = encode_rows(conversations, encoder, sequence_length=99).rows
    expected = f"<|im_start|>user\n{PAD * 4}what?<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    assert picture_tokenizer().decode(row.token_ids) == expected


def test_pairs_show_their_pictures_in_both_sequences(tmp_path: Path, tokens: PictureTokens) -> None:
    rows_in(tmp_path, {"messages": [USER, ANSWER], "images": ["0.png"]})
    prompt = [{"role": "user", "content": "<image>what?"}]
    rows = [
        {"prompt": prompt, "chosen": "yes", "rejected": "no", "images": ["0.png"]},
        {"chosen": [*prompt, {**ANSWER, "content": "yes"}], "rejected": [*prompt, ANSWER], "images": ["1.png"]},
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DPODataArgs(file_name=(str(tmp_path / "pairs.jsonl"),), images="images")
    preferences = read_preferences(data, pairs=True)
    encoder = PictureConversationEncoder(picture_tokenizer(), tokens)
    found = encode_preferences(preferences, encoder, sequence_length=200)
    batch = pairs_batch([(str(k), row) for k, row in enumerate(found.rows)])
    seen = [[picture.digest for picture in row] for row in batch.pictures]
    assert seen == [digests(tmp_path, 0)] * 2 + [digests(tmp_path, 1)] * 2
    assert (batch.token_ids == tokens.place).sum() == 4 * 4
    first, second = ([{"role": "user", "content": [{"type": "image", "image": f"{k}.png"}]}] for k in range(2))
    other = {"chosen": [*first, ANSWER], "rejected": [*second, {**ANSWER, "content": "no"}]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(other))
    with pytest.raises(DataError, match="chosen and rejected differ before the last message"):
        read_preferences(DPODataArgs(file_name=(str(tmp_path / "pairs.jsonl"),), images="chosen"), pairs=True)


def test_another_picture_is_another_row_to_a_resumed_run(tmp_path: Path, tokens: PictureTokens) -> None:
    from roll.data.finished_rows import fingerprint

    prints = {
        fingerprint(encoded(tokens, rows_in(tmp_path, {"messages": [USER, ANSWER], "images": [name]})).rows)
        for name in ("0.png", "1.png")
    }
    assert len(prints) == 2


# --- prompts ------------------------------------------------------------------------------------


def prompts_in(folder: Path, *rows: Any, **more: Any) -> Any:
    for number in range(3):
        (folder / f"{number}.png").write_bytes(file_of(number))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = DataArgs(images="images", file_name=(str(folder / "prompts.jsonl"),), **more)
    return load_tasks(columns.file_name, columns=columns, seed=0)


VERL = {
    "data_source": "d", "prompt": [{"role": "user", "content": "a<image>"}], "images": [{"path": "0.png"}],
    "reward_model": {"ground_truth": "1"},
}  # fmt: skip


def prompt_encoder(tokens: PictureTokens) -> PicturePromptEncoder:
    return PicturePromptEncoder(picture_tokenizer(), tokens)


@pytest.mark.parametrize(
    "row",
    [
        VERL,
        {"prompt": "a<image>", "images": ["0.png"], "answer": "1"},
        {"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image"}]}], "images": "0.png"},
        {"messages": json.dumps([{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "image", "image": "0.png"}]}])},
    ],
)  # fmt: skip
def test_prompts_show_their_pictures_and_are_expanded(
    tmp_path: Path, tokens: PictureTokens, row: dict[str, Any]
) -> None:
    (task,) = prompts_in(tmp_path, row)
    assert [picture.digest for picture in task.pictures] == digests(tmp_path, 0)
    found = encode_prompts([task], prompt_encoder(tokens), prompt_length=200)
    expected = f"<|im_start|>user\na{START}{PAD * 4}{END}<|im_end|>\n<|im_start|>assistant\n"
    assert found.prompt_ids(task) == tuple(picture_tokenizer()(expected)["input_ids"])
    assert found.metrics["data/prompt_length_max"] == len(found.prompt_ids(task))


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_prompts_whose_parts_hold_their_pictures_name_their_own_column(tmp_path: Path, column: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", "image": url()}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps({column: [message], "answer": "1"}))
    (task,) = load_tasks(str(tmp_path / "prompts.jsonl"), columns=DataArgs(images=column), seed=0)
    (shown_message,) = task.payload["messages"]
    assert (shown_message["content"], task.payload["prompt"]) == (f"a{PLACE}", None)
    assert [picture.digest for picture in task.pictures] == digests(tmp_path, 0)


def test_the_same_question_about_another_picture_is_another_prompt(tmp_path: Path) -> None:
    rows = [{**VERL, "images": [name]} for name in ("0.png", "1.png", "0.png")]
    assert len(prompts_in(tmp_path, *rows)) == 3
    kept = prompts_in(tmp_path, *rows, deduplicate=True)
    assert [task.pictures[0].digest for task in kept] == digests(tmp_path, 0, 1)
    prints = {ListTable(prompts_in(tmp_path, row)).fingerprint for row in rows}
    assert len(prints) == 2
    first, _, again = prompts_in(tmp_path, *rows)
    assert first.pictures[0] is again.pictures[0]  # rows that show it share it


def test_streamed_prompts_are_the_same_and_keep_no_picture(tmp_path: Path, tokens: PictureTokens) -> None:
    rows = [{**VERL, "images": [f"{number}.png"]} for number in range(3)]
    tasks = [replace(task, domain="all") for task in prompts_in(tmp_path, *rows)]
    whole = encode_prompts(tasks, prompt_encoder(tokens), prompt_length=200)
    data = DataArgs(images="images", file_name=(str(tmp_path / "prompts.jsonl"),))
    streamer = Streamer(
        data, prompt_encoder(tokens), LengthRule(200, "error"), tags={"all": ["*"]}, seed=0, default_tag=None,
        prompt_length=200, quarantine=Quarantine(), folder=tmp_path,
    )  # fmt: skip
    streamed = streamer.scan({"all": []})
    table = streamed.tables["all"]
    assert table.fingerprint == ListTable(tasks).fingerprint
    for at, task in enumerate(tasks):
        assert streamed.prompts.prompt_ids(table[at]) == whole.prompt_ids(task)
        assert table[at].pictures == task.pictures
        assert table[at].pictures[0] is not table[at].pictures[0]


def test_a_damaged_picture_is_one_bad_row(tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(file_of()[:100])
    rows = [VERL, {**VERL, "images": ["cut.png"]}]
    with pytest.raises(DataError, match=r"prompts.jsonl:2: images\[0\]: it is damaged or cut short"):
        prompts_in(tmp_path, *rows)
    quarantine = Quarantine(1)
    columns = DataArgs(images="images")
    (task,) = load_tasks(str(tmp_path / "prompts.jsonl"), columns=columns, seed=0, quarantine=quarantine)
    assert task.id.endswith(":1")


def test_prompts_whose_pictures_nobody_reads_are_refused(tmp_path: Path) -> None:
    prompts_in(tmp_path, VERL)
    with pytest.raises(DataError, match="the column 'images' holds pictures.*name their column in data_args.images"):
        load_tasks(str(tmp_path / "prompts.jsonl"), seed=0)
    with pytest.raises(DataError, match=r"messages\[0\] has the key 'pictures', which nothing reads"):
        prompts_in(tmp_path, {"messages": [{**USER, "pictures": ["0.png"]}], "answer": "1"})
    with pytest.raises(DataError, match="no row has a picture in the column 'images'"):
        prompts_in(tmp_path, {"prompt": "w", "answer": "1"})


# --- roll data check ----------------------------------------------------------------------------


def test_data_check_says_how_many_pictures_there_are_and_which_are_outliers(
    tmp_path: Path, tokens: PictureTokens
) -> None:
    for number in range(3):
        (tmp_path / f"small{number}.png").write_bytes(file_of(number, (28, 28)))
    (tmp_path / "large.png").write_bytes(file_of(9, (280, 56)))
    names = ["small0.png", "small1.png", "small0.png", "small2.png", "large.png"]
    rows = [{"messages": [USER, ANSWER], "images": [name]} for name in names]
    findings = PictureFindings(tokens)
    for conversation in rows_in(tmp_path, *rows, {"messages": [USER, ANSWER]}):
        findings.add(conversation.pictures, conversation.where)
    counted, costs, outliers = findings.lines()
    assert counted.startswith("pictures: 5 in 5 rows, 4 different ones of ")
    assert counted.endswith("width 28 to 280 (half up to 28), height 28 to 56 (half up to 28)")
    most = tokens.tokens(rows_in(tmp_path, rows[4])[0].pictures[0])
    assert most > 4  # the others have a token each
    assert costs == f"tokens of a picture: half up to 1, 99 % {most}, all {most}"
    assert outliers.startswith("outliers: 1 pictures take more than 4 times as many tokens as half of them: ")
    assert f"data.jsonl:5, picture 1: 280 x 56 pixels, {most} tokens" in outliers
    assert list(PictureFindings(tokens).lines()) == ["pictures: none"]


def test_a_turn_that_is_written_in_another_way_later_has_the_pictures_up_to_it(
    tmp_path: Path, tokens: PictureTokens
) -> None:
    """The template drops thoughts of earlier turns: each turn has a sequence of its own."""
    think = PARTS.replace(
        "{% if m.content is string %}",
        "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{% if m.content is string %}",
    )
    answer = {"role": "assistant", "content": "ok", "reasoning_content": "hm"}
    seen = {"role": "user", "content": "<image>"}
    row = {"messages": [seen, answer, seen, answer], "images": ["0.png", "1.png"]}
    encoder = PictureConversationEncoder(picture_tokenizer(), tokens, template=think, train_on="all")
    found = encode_rows(rows_in(tmp_path, row), encoder, sequence_length=400).rows
    assert [[picture.digest for picture in each.pictures] for each in found] == [
        digests(tmp_path, 0),
        digests(tmp_path, 0, 1),
    ]
    assert [int((each.token_ids == tokens.place).sum()) for each in found] == [4, 8]
