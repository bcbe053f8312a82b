"""The filters of system calls, as the kernel would run them: what they let through, call by call."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import pytest

from roll.isolation.sandbox import confine, syscalls

ALLOW, ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
EPERM, ENOSYS = 1, 38
COLUMN, ARCHITECTURE = syscalls.MACHINES["x86_64"]


@pytest.fixture(autouse=True)
def x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "_machine", lambda: (COLUMN, ARCHITECTURE))


def verdict(program: bytes, number: int, arguments: Iterable[int] = (), architecture: int = ARCHITECTURE) -> int:
    """Return what a filter says: the four instructions that ours are made of, over the kernel's seccomp_data."""
    data = struct.pack("=iIQ6Q", number, architecture, 0, *[*arguments, *[0] * 6][:6])
    word, at = 0, 0
    while True:
        code, yes, no, value = struct.unpack_from("=HBBI", program, 8 * at)
        at += 1
        if code == 0x20:  # load a word
            (word,) = struct.unpack_from("=I", data, value)
        elif code == 0x15:  # jump if equal
            at += yes if word == value else no
        elif code == 0x45:  # jump if a bit is set
            at += yes if word & value else no
        elif code == 0x54:  # and
            word &= value
        else:
            assert code == 6, code  # return
            return value


def both(number: int, *arguments: int) -> int:
    """Return what a program with both filters gets: the strictest, and the lowest number is."""
    return min(verdict(program, number, arguments) for program in (confine.seccomp_program(), confine.seccomp_rest()))


def test_a_program_may_make_the_calls_of_the_list_and_no_others():
    listed = set(syscalls.allowed(COLUMN).values())
    pretended = set(syscalls.pretended(COLUMN).values())
    checked = set(syscalls.checked(COLUMN).values())
    assert not listed & (pretended | checked)
    for number in {*range(600), 0x40000000 | 41, 0x40000000 | 57} - checked:
        expected = ALLOW if number in listed else ERRNO if number in pretended else ERRNO | EPERM
        assert both(number) == expected, number


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("clone", (0x01200011,), ALLOW),  # a fork, as the C library makes it
        ("clone", (0x10000000 | 17,), ERRNO | EPERM),  # with a user namespace
        ("clone", (0x8000 | 17,), ERRNO | EPERM),  # its parent's child
        ("clone3", (), ERRNO | ENOSYS),
        ("prlimit64", (0,), ALLOW),
        ("prlimit64", (1,), ERRNO | EPERM),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), ERRNO | EPERM),  # types into the terminal
        ("socketpair", (1, 1), ALLOW),
        ("socketpair", (1, 0x80801), ALLOW),  # not blocking, closed by exec
        ("socketpair", (1, 2), ERRNO | EPERM),
        ("socketpair", (2, 1), ERRNO | EPERM),
    ],
)
def test_some_calls_are_allowed_with_certain_arguments(name: str, arguments: tuple[int, ...], expected: int):
    assert both(syscalls.checked(COLUMN)[name], *arguments) == expected


def test_a_program_can_only_read_and_set_its_name_with_prctl():
    number = syscalls.checked(COLUMN)["prctl"]
    assert [option for option in range(70) if both(number, option) == ALLOW] == [15, 16]


def test_the_warm_parent_may_confine_itself_and_its_children_further():
    number = syscalls.checked(COLUMN)["prctl"]
    program = confine.seccomp_program()
    # PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_SET_SECCOMP
    assert [option for option in range(70) if verdict(program, number, [option]) == ALLOW] == [1, 15, 16, 22]
    more = set(range(600)) - set(syscalls.allowed(COLUMN).values()) - set(syscalls.checked(COLUMN).values())
    assert {number for number in more if verdict(program, number) == ALLOW} == {109, 444, 445, 446}
    # setpgid, and the three of Landlock


def test_another_architecture_is_killed():
    for program in (confine.seccomp_program(), confine.seccomp_rest()):
        assert verdict(program, 0, architecture=0x40000003) == KILL
