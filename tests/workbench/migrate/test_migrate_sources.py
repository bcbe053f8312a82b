"""Reading other people's files: shell scripts of which nothing is run, defaults lists, references, hostile files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from roll.workbench.migrate.overrides import Unexpanded, parsed
from roll.workbench.migrate.shell_words import read_script
from roll.workbench.migrate.sources import read_source
from roll.workbench.migrate.translate import migrate


def source(tmp_path: Path, text: str, name: str = "run.sh") -> Any:
    (tmp_path / name).write_text(text, "utf-8")
    return read_source(tmp_path / name)


def words(text: str) -> list[str]:
    return [word.text for word in read_script(text).commands[-1]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("A=1\nrun x=$A y=${A} z=\"$A-${A}\" q='$A'", ["run", "x=1", "y=1", "z=1-1", "q=$A"]),
        ("run n=${N:-16} p=${P:-\"${HOME}/d\"} e=${E-}", ["run", "n=16", "p=${oc.env:HOME}/d", "e="]),
        ("N=4\nrun n=${N:-16} m=${N:+yes} k=${M:+yes}", ["run", "n=4", "m=yes", "k="]),
        ("A=(a=1 \\\n  'b=x y' # c\n)\nA+=(c=3)\nrun \"${A[@]}\" ${A[0]}", ["run", "a=1", "b=x y", "c=3", "a=1"]),
        ("O='a=1 b=2'\nrun $O \"$O\"", ["run", "a=1", "b=2", "a=1 b=2"]),
        ("run a=1 \\\n  b=2 \\\n  # no\n", ["run", "a=1", "b=2"]),
        ("if true; then A=1; else A=2; fi\nexport B=3\nrun a=$A b=$B", ["run", "a=2", "b=3"]),
        ("cat > f <<EOF\nrun a=9\nEOF\nrun a=1 > log 2>&1", ["run", "a=1"]),
        ("X=a; X+=b\nrun x=$X", ["run", "x=ab"]),
        ("N=4\nrun a=$((1024 * 2)) b=$((N*2+${M:-1})) c=$(( (7 - $N) ** 2 / 2 )) d=$((-7/2)) e=$((-7%2))",
         ["run", "a=2048", "b=9", "c=4", "d=-3", "e=-1"]),
        ("run l='[\"a\",\"b\"]' m=['a','b'] p=<path_to>", ["run", 'l=["a","b"]', "m=[a,b]", "p=<path_to>"]),
    ],
)  # fmt: skip
def test_a_scripts_own_variables_are_filled_in(script: str, expected: list[str]):
    assert words(script) == expected


@pytest.mark.parametrize(
    "value",
    [
        "$(date)",
        "`date`",
        "$((1024 * x))",
        "$((9**99))",
        "$((1/0))",
        "$((print(1)))",
        "$1",
        "${#A}",
        "${A//x/y}",
        "$NOT_SET",
    ],
)
def test_what_would_have_to_be_run_is_named_and_not_run(value: str, tmp_path: Path):
    script = f"python3 -m verl.trainer.main_ppo data.max_prompt_length={value} trainer.nnodes=2"
    (tmp_path / "run.sh").write_text(script, "utf-8")
    report, tree = migrate(tmp_path / "run.sh")
    (use,) = report.of("unexpanded")
    assert use.key == "data.max_prompt_length" and value in use.note and "prompt_length" in use.note
    assert tree["prompt_length"] == "???"
    assert any(line.startswith("prompt_length") for line in report.missing)
    assert tree["num_nodes"] == 2


def test_nothing_of_a_script_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import os
    import subprocess

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"something was run: {args}")

    for place, name in ((os, "system"), (os, "popen"), (subprocess, "Popen"), (subprocess, "run")):
        monkeypatch.setattr(place, name, refuse)
    mark = tmp_path / "mark"
    found = source(
        tmp_path,
        f"touch {mark}\nX=$(touch {mark})\nY=`touch {mark}`\npython3 -m verl.trainer.main_ppo data.a=$X data.b=\"$Y\" "
        f"data.c=$(touch {mark}) data.d=${{Z:-$(touch {mark})}} | sh -c 'touch {mark}'",
    )  # fmt: skip
    assert not mark.exists()
    assert all(isinstance(value, Unexpanded) for value in found.tree["data"].values())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("0.", 0.0), ("True", True), ("null", None), ("None", None), ("[a,b]", ["a", "b"]),
        ("['/a b/c','d']", ["/a b/c", "d"]), ("{a:1,b:{c:x}}", {"a": 1, "b": {"c": "x"}}), ("a,b", ["a", "b"]),
        ("<path to>", "<path to>"), ("/x/y.parquet", "/x/y.parquet"), ("", None), ("['unclosed", "['unclosed"),
        ("${trainer.project_name}", "${trainer.project_name}"),
    ],
)  # fmt: skip
def test_values_of_overrides_are_hydras(text: str, value: Any):
    assert parsed(text) == value


def test_references_are_filled_in_without_computing_anything(tmp_path: Path):
    found = source(
        tmp_path,
        "trainer: {name: x, folder: 'ckpt/${trainer.name}/${.name}', own: '${oc.select:trainer.name,y}',"
        " other: '${oc.select:no.such,7}', home: '${oc.env:HOME}/d', sum: '${eval:1+1}', gone: '${no.such}'}\n",
        "a.yaml",
    ).tree["trainer"]
    assert found["folder"] == "ckpt/x/x"
    assert (found["own"], found["other"], found["home"]) == ("x", 7, "${oc.env:HOME}/d")
    assert isinstance(found["sum"], Unexpanded) and isinstance(found["gone"], Unexpanded)


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{n}: &{n} [{','.join([f'*{p}'] * 9)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)
)
GROWS = "exp_name: a\n" + "".join(
    f"v{i}: '${{v{i - 1}}}${{v{i - 1}}}${{v{i - 1}}}${{v{i - 1}}}'\n" if i else "v0: aaaaaaaaaa\n" for i in range(30)
)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("bomb.yaml", BOMB, "values once its aliases are filled in"),
        ("grows.yaml", GROWS, "values once its references are filled in"),
        ("tag.yaml", "exp_name: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("list.yaml", "- 1\n- 2\n", "keys and values"),
        ("broken.yaml", "a: [1\nb: }\n", "valid YAML"),
        ("deep.yaml", "a: " + "{a: " * 200 + "1" + "}" * 200, "levels"),
        ("words.txt", "hello world", "no key=value"),
        ("quote.sh", "python3 -m verl.trainer.main_ppo a.b='x", "isn't closed"),
        ("loop.sh", "A=aaaaaaaaaa\n" + "A=$A$A$A$A\n" * 20 + "python3 -m verl.trainer.main_ppo a.b=$A", "grows beyond"),
        ("whose.yaml", "apples: 3\npears: 4\n", "--from"),
    ],
)
def test_hostile_files_get_one_plain_error(name: str, text: str, said: str, tmp_path: Path):
    (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(ValueError, match=said):
        migrate(tmp_path / name)


def test_binary_and_huge_files_get_one_plain_error(tmp_path: Path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.yaml").write_text("a: " + "x" * (5 << 20), "utf-8")
    for name, said in (("a.yaml", "UTF-8"), ("b.yaml", "larger than")):
        with pytest.raises(ValueError, match=said):
            migrate(tmp_path / name)


def test_a_line_of_a_megabyte_is_read(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(f"rollout_batch_size: 8\nexp_name: {'x' * 1_000_000}\n", "utf-8")
    report, _ = migrate(tmp_path / "a.yaml", "roll")
    assert len(report.text()) < 20_000 or report.missing


def test_defaults_that_go_round_in_a_circle_are_named(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("defaults: [b@_here_]\nrollout_batch_size: 8\n", "utf-8")
    (tmp_path / "b.yaml").write_text("defaults: [a@_here_]\nmax_steps: 8\n", "utf-8")
    with pytest.raises(ValueError, match="circle"):
        migrate(tmp_path / "a.yaml")


def test_a_default_without_a_file_is_missing_and_a_reference_to_itself_is_named(tmp_path: Path):
    (tmp_path / "a.yaml").write_text(
        "defaults: [../elsewhere/site@_here_, _self_]\nrollout_batch_size: 8\nexp_name: ${exp_name}\nseed: ${a}\n"
        "a: ${b}\nb: ${a}\n",
        "utf-8",
    )
    report, _ = migrate(tmp_path / "a.yaml", "roll")
    assert any("../elsewhere/site@_here_" in line for line in report.missing)
    assert {"exp_name", "seed"} <= {use.key for use in report.of("unexpanded")}


SFT = (
    "torchrun --standalone {flags} -m verl.trainer.fsdp_sft_trainer data.train_files=/d.parquet "
    "data.micro_batch_size_per_gpu=4 data.train_batch_size=64 model.partial_pretrain=Qwen/Qwen2.5-0.5B {rest}"
)


@pytest.mark.parametrize("flags", ["--nnodes=2 --nproc_per_node=4", "--nnodes 2 --nproc-per-node 4"])
def test_fine_tuning_has_the_devices_that_torchrun_starts(tmp_path: Path, flags: str):
    # 64 rows = 4 per device x 2 accumulation x 8 ranks
    (tmp_path / "run.sh").write_text(SFT.format(flags=flags, rest="trainer.experiment_name=a"), "utf-8")
    report, tree = migrate(tmp_path / "run.sh")
    assert tree is not None
    assert (tree["num_nodes"], tree["num_gpus_per_node"]) == (2, 4)
    assert tree["actor_train"]["device_mapping"] == "0-7"
    assert tree["actor_train"]["training_args"]["gradient_accumulation_steps"] == 2
    assert not any("torchrun" in line for line in report.decisions)


def test_a_number_of_devices_that_the_script_is_given_is_asked_for(tmp_path: Path):
    (tmp_path / "run.sh").write_text("n=$1\n" + SFT.format(flags="--nproc_per_node=$n", rest=""), "utf-8")
    report, _ = migrate(tmp_path / "run.sh")
    assert any("torchrun" in line and "num_gpus_per_node" in line for line in report.decisions)


def test_a_name_to_be_given_is_that_of_the_folder_too(tmp_path: Path):
    rest = 'trainer.experiment_name="a_$(date)"'
    (tmp_path / "run.sh").write_text(SFT.format(flags="--nproc_per_node=1", rest=rest), "utf-8")
    _, tree = migrate(tmp_path / "run.sh")
    assert tree is not None and (tree["exp_name"], tree["output_dir"]) == ("???", "output/${exp_name}")


JOB = "python3 -m verl.trainer.main_ppo "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{JOB}a.b={'${a:-' * 1500}x{'}' * 1500}", "levels deep"),
        (f"{JOB}a.b={'$((' * 800}1{'))' * 800}", "levels deep"),
        ("A=(a a)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 30 + f"{JOB}a.b=1", "grow beyond"),
        (f"x={'y' * 200_000}\n" + "".join(f"v{i}=a$x\n" for i in range(500)) + f"{JOB}a.b=1", "grow beyond"),
        (f"{JOB}{'.'.join(['a'] * 5000)}=1", "words"),
        ("cat <<EOF\n" + "\n" * 500_000, "no key=value"),
        (f"export{' -a b=1' * 20_000}", "no key=value"),
        (f"echo{' x.py' * 100_000}", "no key=value"),
    ],
)
def test_scripts_that_grow_or_nest_without_end_get_one_plain_error(text: str, said: str, tmp_path: Path):
    (tmp_path / "a.sh").write_text(text, "utf-8")
    with pytest.raises(ValueError, match=said):
        migrate(tmp_path / "a.sh")


def test_aliases_in_an_override_stay_text():
    bomb = "[&a [1,1], &b [*a,*a], &c [*b,*b]]"
    assert parsed(bomb) == bomb


@pytest.mark.parametrize("entry", ["z" * 5000, '"a\\0b"'])
def test_defaults_that_can_be_no_file_are_told(entry: str, tmp_path: Path):
    (tmp_path / "a.yaml").write_text(f"defaults: [{entry}]\nrollout_batch_size: 8\n", "utf-8")
    with pytest.raises(ValueError, match="can be no file"):
        migrate(tmp_path / "a.yaml")


def test_an_included_file_without_a_list_of_defaults_is_read(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("defaults: [b]\nrollout_batch_size: 8\n", "utf-8")
    (tmp_path / "b.yaml").write_text("defaults: 5\nmax_steps: 3\n", "utf-8")
    _, tree = migrate(tmp_path / "a.yaml", "roll")
    assert tree["max_steps"] == 3


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("LR=1\nrun() {\n  local name=$1; shift\n  go lr=$LR name=$name \"$@\"\n}\nLR=2\nrun x a=1 'b=1 2'",
         ["go", "lr=2", "name=x", "a=1", "b=1 2"]),
        ("function f { go a=$1 b=${2:-3} c=$*; }\nf 1", ["go", "a=1", "b=3", "c=1"]),
        ("f() {\n  f\n  go a=1\n}\nf", ["go", "a=1"]),
        ("f() {\n  go a=$1\n}", ["go", "a=$1"]),
    ],
)  # fmt: skip
def test_a_function_is_read_where_it_is_called_with_its_arguments(script: str, expected: list[str]):
    assert words(script) == expected


def test_functions_that_call_each_other_many_times_over_get_one_plain_error():
    # f0 would be called 2 ** 30 times.
    script = "f0() { go; }\n" + "".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}\n" for i in range(1, 31)) + "f30"
    with pytest.raises(ValueError, match="grow beyond"):
        read_script(script)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("L=1\nfor L in 2 3; do\n{}\ndone", "which the script sets while it runs"),
        ("L=1\nread -r L < f\n{}", "which the script sets while it runs"),
        ("L=1\nunset L\n{}", "which the script unsets"),
        ("L=1\nwhile [ $# -gt 0 ]; do case $1 in --lr) L=$2;; esac; done\n{}", "$2"),
    ],
)
def test_a_variable_that_is_set_while_the_script_runs_is_named(script: str, why: str, tmp_path: Path):
    found = source(tmp_path, script.replace("{}", "python -m verl.trainer.main_ppo a.lr=$L")).tree["a"]["lr"]
    assert isinstance(found, Unexpanded) and why in found.parts[0]


def test_a_file_that_the_script_writes_has_its_variables_filled_in(tmp_path: Path):
    text = "M=a/b\ncat > c.yaml <<EOF\nm: \"$M\"\nn: 'x $N'\no: \\$M\np: [$1]\nEOF\ntrl sft --config c.yaml"
    tree = source(tmp_path, text).tree
    assert (tree["m"], tree["o"]) == ("a/b", "$M")
    assert tree["n"] == Unexpanded("x $N", ("$N, which the script doesn't set",))
    assert tree["p"] == [Unexpanded("$1", ("$1",))]
    assert source(tmp_path, text.replace("<<EOF", "<<'EOF'")).tree["m"] == "$M"


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("[ $X ] && L=1 || L=2\n{} a.lr=$L", "line 1: L depends on a condition; the last in the script was taken, 2"),
        ("if $X; then L=a.b=1; fi\n{} a.lr=1 $L", "line 1: L depends on a condition"),
        ("if $X; then L=1; else L=; fi\n{} a.lr=1 $L", "was taken, an empty text"),
        ("source .env\n{} a.lr=1", "line 1: .env isn't read"),
        ("{} a.lr=1 \\\n  # no \\\n  a.b=2", "line 3: a.b=2 isn't of the command above it"),
        ("{} a.lr=1 \\ \n  a.b=2", "line 2: a.b=2 isn't of the command above it"),
    ],
)
def test_what_may_differ_when_the_script_runs_is_told_with_its_line(script: str, note: str, tmp_path: Path):
    notes = source(tmp_path, script.replace("{}", "python -m verl.trainer.main_ppo")).notes
    assert any(note in line for line in notes), notes
    plain = source(tmp_path, "if $X; then export NCCL_DEBUG=INFO; fi\npython -m verl.trainer.main_ppo a.lr=1")
    assert not plain.notes  # nothing refers to it


def test_brackets_in_each_other_stay_text():
    assert parsed("[" * 600 + "]" * 600) == "[" * 600 + "]" * 600
