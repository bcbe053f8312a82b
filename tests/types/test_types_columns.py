"""Columns of responses are arrays, and whoever reads them can't tell them from tuples."""

import copy
import dataclasses
import json
import pickle
import threading
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.strategies.base import Completion
from roll.types.columns import Column, PackedColumns
from roll.types.trajectory import Turn

INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT64 = st.floats(allow_nan=False)
TOKENS = st.lists(st.tuples(INT64, FLOAT64, INT64), max_size=40)
COLUMNS = {"response_ids": "int64", "logprobs": "float64", "versions": "int64"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A completion of tuples."""

    id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: str = "stop"


def columns_of(tokens: list[tuple[int, float, int]]) -> dict[str, tuple]:
    ids, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    return {"token_ids": ids, "logprobs": logprobs, "versions": versions}


def completion(tokens: list[tuple[int, float, int]], name: str = "a") -> Completion:
    return Completion(id=name, finish_reason="stop", **columns_of(tokens))


def turn(tokens: list[tuple[int, float, int]], **fields: object) -> Turn:
    ids, logprobs, versions = columns_of(tokens).values()
    return Turn(
        prompt_ids=(1, 2), response_ids=ids, logprobs=logprobs, versions=versions, finish_reason="stop", **fields
    )


@given(TOKENS, st.slices(40), st.sampled_from(["token_ids", "logprobs", "versions"]))
def test_a_column_reads_as_the_tuple_that_it_was_made_from(tokens, cut, name):
    expected = columns_of(tokens)[name]
    found = getattr(completion(tokens), name)
    assert type(found) is tuple and found == expected and hash(found) == hash(expected)
    assert list(map(type, found)) == list(map(type, expected)), "Python numbers, not numpy's"
    assert found[cut] == expected[cut] and list(reversed(found)) == list(reversed(expected))
    assert (0, *found, 1) == (0, *expected, 1) and found + found == expected + expected
    assert json.dumps(found) == json.dumps(expected) and repr(found) == repr(expected)


@given(TOKENS, TOKENS)
def test_completions_are_equal_and_hashed_as_those_of_tuples_are(first, second):
    plain = [Plain(id="a", **columns_of(tokens)) for tokens in (first, second)]
    packed = [completion(tokens) for tokens in (first, second)]
    assert (packed[0] == packed[1]) == (plain[0] == plain[1])
    assert packed[0] == completion(first) and hash(packed[0]) == hash(completion(first))
    assert len(set(packed)) == len(set(plain))


def test_a_log_prob_of_minus_zero_equals_zero_as_in_tuples():
    # Their bytes differ, so what is compared are the numbers.
    zero, minus = completion([(1, 0.0, 0)]), completion([(1, -0.0, 0)])
    assert zero == minus and hash(zero) == hash(minus)


@given(TOKENS, st.booleans())
def test_a_turn_comes_out_of_pickle_and_copies_as_it_went_in(tokens, read_before):
    whole = turn(tokens, metrics={"a": 1.0}, observation="told", after=3)
    if read_before:
        assert len(whole.logprobs) == len(tokens)
    for same in (pickle.loads(pickle.dumps(whole, protocol=5)), copy.copy(whole), copy.deepcopy(whole)):
        assert same == whole and same.logprobs == columns_of(tokens)["logprobs"]
        assert repr(same) == repr(whole) and dataclasses.asdict(same) == dataclasses.asdict(whole)


def test_tuples_that_were_read_do_not_travel():
    whole = completion([(i, -0.5, 7) for i in range(1000)])
    packed = len(pickle.dumps(whole))
    assert whole.token_ids and whole.logprobs and whole.versions
    assert len(pickle.dumps(whole)) == packed <= 24 * 1000 + 400  # 8 bytes each, and the names


@given(TOKENS)
def test_arrays_are_read_only_and_handed_on_without_a_copy(tokens):
    given_, whole = columns_of(tokens), turn(tokens)
    handed = turn([]).replace(**{name: whole.array(name) for name in COLUMNS})
    for (name, dtype), expected in zip(COLUMNS.items(), given_.values(), strict=True):
        found = whole.array(name)
        assert found.dtype == dtype and found.tolist() == list(expected) and not found.flags.writeable
        assert not tokens or np.shares_memory(found, handed.array(name))
    assert handed == whole and handed.num_response_tokens == len(tokens) and handed.num_tokens == len(tokens) + 2


@given(st.lists(INT64, min_size=1, max_size=20), st.slices(20))
def test_a_column_takes_every_kind_of_sequence(numbers, cut):
    def taken(ids):
        return Completion(id="a", token_ids=ids, logprobs=(), versions=(), finish_reason="stop").token_ids

    numpys = np.array(numbers, np.int64)
    for way in (numbers, tuple(numbers), iter(numbers), array("q", numbers), numpys, list(numpys)):
        assert taken(way) == tuple(numbers)
    assert taken(np.array(numbers, ">i8")) == taken(numpys[::-1])[::-1] == tuple(numbers)
    # A part of another's array is that part, and not the bytes that it lies in.
    lent = np.frombuffer(numpys.tobytes(), np.int64)
    assert taken(lent) == tuple(numbers) and taken(lent[cut]) == tuple(numbers[cut])


def test_numbers_of_narrower_types_are_the_same_numbers():
    made = Completion(
        id="a",
        token_ids=array("i", [1, -2]),
        logprobs=np.array([-0.1, -3.0], np.float32),
        versions=np.array([7, 8], np.int16),
        finish_reason="stop",
    )
    assert (made.token_ids, made.versions) == ((1, -2), (7, 8))
    assert made.logprobs == (-0.10000000149011612, -3.0)  # float32's nearest to -0.1, digit by digit


@pytest.mark.parametrize(
    ("column", "value", "error"),
    [
        ("token_ids", (2**63,), OverflowError),
        ("token_ids", np.array([2**64 - 1], np.uint64), OverflowError),  # numpy's own conversion gives -1
        ("token_ids", (1.5,), TypeError),
        ("token_ids", (None,), TypeError),
        ("token_ids", "12", TypeError),
        ("logprobs", (None,), TypeError),
        ("logprobs", np.zeros((2, 2)), TypeError),
    ],
)
def test_what_is_no_column_of_numbers_is_refused(column, value, error):
    fields = {"token_ids": (), "logprobs": (), "versions": ()}
    with pytest.raises(error):
        Completion(id="a", finish_reason="stop", **(fields | {column: value}))


def test_bytes_are_numbers_as_they_are_in_a_tuple_and_no_packed_column():
    made = Completion(id="a", token_ids=b"\1\2\3\4", logprobs=(), versions=(), finish_reason="stop")
    assert made.token_ids == tuple(b"\1\2\3\4") == (1, 2, 3, 4)


def test_responses_cannot_be_changed():
    whole = completion([(3, -0.5, 7)])
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.token_ids = (4,)
    with pytest.raises(ValueError, match="read-only"):
        whole.array("token_ids")[0] = 4
    mutable = [3]
    made = Completion(id="a", token_ids=mutable, logprobs=(), versions=(), finish_reason="stop")
    mutable[0] = 4
    owned = np.array([3], np.int64)
    other = Completion(id="a", token_ids=owned, logprobs=(), versions=(), finish_reason="stop")
    owned[0] = 4
    assert made.token_ids == other.token_ids == (3,)


@given(TOKENS, st.booleans())
def test_replace_gives_what_dataclasses_replace_gives(tokens, read_before):
    whole = turn(tokens, reward=0.5)
    if read_before:
        assert len(whole.versions) == len(tokens)
    changes = {"reward": 2.0, "logprobs": [-1.0] * len(tokens)}
    changed = whole.replace(**changes)
    assert changed == dataclasses.replace(whole, **changes) and changed.logprobs == (-1.0,) * len(tokens)
    assert whole == turn(tokens, reward=0.5)


def test_replace_checks_the_fields_and_knows_their_names():
    whole = turn([(3, -0.5, 7)])
    with pytest.raises(ValueError, match="one log-prob and one version per response token, got 1 tokens, 2 log-probs"):
        whole.replace(logprobs=(-1.0, -2.0))
    with pytest.raises(TypeError, match=r"Turn has no fields \['rewards'\]"):
        whole.replace(rewards=1.0)
    with pytest.raises(TypeError, match="response_ids"):  # columns have no default
        Turn(prompt_ids=(), logprobs=(), versions=(), finish_reason="stop")


def test_a_column_is_made_a_tuple_once():
    # Otherwise a loop over positions would take the square of a response's length.
    whole = completion([(3, -0.5, 7)])
    assert whole.token_ids is whole.token_ids


def test_threads_that_read_at_once_find_the_same_numbers():
    whole, found = completion([(i, -0.5, 7) for i in range(1000)]), []
    readers = [threading.Thread(target=lambda: found.append(whole.token_ids)) for _ in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert len(found) == 8 and set(found) == {tuple(range(1000))}


def test_a_class_with_columns_may_be_extended():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(Completion):
        entropies: Column[float] = Column("d")

    made = More(id="a", token_ids=[1], logprobs=[-0.5], versions=[7], finish_reason="stop", entropies=[0.25])
    assert made.entropies == (0.25,) and made.array("token_ids").tolist() == [1]
    assert made.replace(entropies=[0.5]).entropies == (0.5,)
    assert issubclass(More, PackedColumns) and "entropies" not in {f.name for f in dataclasses.fields(Completion)}
    with pytest.raises(KeyError):
        completion([]).array("entropies")


def test_columns_of_two_classes_may_share_a_name():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Other(PackedColumns):
        token_ids: Column[float] = Column("d")

    assert Other(token_ids=[0.5]).array("token_ids").tolist() == [0.5]
    assert completion([(3, -0.5, 7)]).array("token_ids").tolist() == [3]
