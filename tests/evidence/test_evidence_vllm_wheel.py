"""The next vLLM, read and not run: what our engine imports, calls and overrides stands in its wheel.

There is no build of it for CPUs. `ROLL_PEER_WHEELS` names a folder that has the wheel already; else pip fetches it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peer_wheels import VARIABLE

NEXT = "0.33.0"
OURS = Path(__file__).parents[2] / "roll" / "strategies" / "engines" / "vllm"
Read = Callable[[str], ast.Module | None]
"""Of a module's name, its code; None: there is no such module."""


def wheel_reader(folder: Path) -> Read:
    """Read modules of the next release."""
    wheels = Path(os.environ.get(VARIABLE, folder))
    if not list(wheels.glob(f"vllm-{NEXT}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(wheels), f"vllm=={NEXT}"]
        subprocess.run(command, check=True)
    (wheel,) = wheels.glob(f"vllm-{NEXT}-*.whl")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())

    def read(module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        return next((ast.parse(archive.read(f)) for f in (f"{path}.py", f"{path}/__init__.py") if f in names), None)

    return read


def installed_reader(_: Path) -> Read:
    """Read modules of the release that the suite runs, which shows that this reader sees what is there."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm isn't installed")
    root = Path(spec.origin).parents[1]

    def read(module: str) -> ast.Module | None:
        path = root / module.replace(".", "/")
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((ast.parse(file.read_text("utf-8")) for file in files if file.is_file()), None)

    return read


@pytest.fixture(scope="module", params=[installed_reader, wheel_reader], ids=["installed", NEXT])
def read(request, tmp_path_factory) -> Read:
    return request.param(tmp_path_factory.mktemp("wheel"))


def bound(module: ast.Module) -> set[str]:
    """Names that a module has: what it defines, imports, or lists for `__getattr__`."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            if isinstance(node.value, ast.Dict):
                names |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return names


def class_of(module: ast.Module | None, name: str) -> ast.ClassDef:
    assert module is not None
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def methods(node: ast.ClassDef) -> dict[str, ast.arguments]:
    return {f.name: f.args for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)}


def fields(node: ast.ClassDef) -> set[str]:
    return {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


def our_code() -> Iterator[ast.AST]:
    for file in sorted(OURS.glob("*.py")):
        yield from ast.walk(ast.parse(file.read_text("utf-8")))


def test_every_name_that_we_import_is_there(read: Read):
    imports = [node for node in our_code() if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm")]
    assert len(imports) >= 15
    missing = []
    for node in imports:
        module = read(str(node.module))
        missing += [f"{node.module}.{a.name}" for a in node.names if module is None or a.name not in bound(module)]
    assert not missing


def test_every_call_of_the_engine_has_the_arguments_that_its_method_takes(read: Read):
    known = methods(class_of(read("vllm.v1.engine.async_llm"), "AsyncLLM"))
    calls = [
        node
        for node in our_code()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("engine", "self._engine", "AsyncLLM")
    ]
    assert len({call.func.attr for call in calls}) >= 15  # type: ignore[attr-defined]
    for call in calls:
        name = call.func.attr  # type: ignore[attr-defined]
        assert name in known, f"AsyncLLM has no {name}"
        args = known[name]
        taken = [each.arg for each in (*args.posonlyargs, *args.args)][1:]
        assert len(call.args) <= len(taken), ast.unparse(call)
        asked = {word.arg for word in call.keywords}
        assert args.kwarg is not None or asked <= {*taken, *(each.arg for each in args.kwonlyargs)}, ast.unparse(call)


def test_our_transfer_engine_has_what_the_base_class_leaves_to_it(read: Read):
    base = class_of(read("vllm.distributed.weight_transfer.base"), "WeightTransferEngine")
    abstract = {
        node.name: node.args
        for node in base.body
        if isinstance(node, ast.FunctionDef) and "abstractmethod" in map(ast.unparse, node.decorator_list)
    }
    ours = methods(class_of(ast.parse((OURS / "transfer.py").read_text("utf-8")), "HostWeightTransferEngine"))
    assert abstract.keys() <= ours.keys()
    for name, args in abstract.items():
        assert len(args.args) == len(ours[name].args), name
    assert {"parse_update_info"} <= methods(base).keys()


def test_every_argument_of_an_engine_and_of_a_request_is_a_field(read: Read):
    from roll.configs.schema.engine_config import VllmConfig

    engine = fields(class_of(read("vllm.engine.arg_utils"), "EngineArgs"))
    engine |= fields(class_of(read("vllm.engine.arg_utils"), "AsyncEngineArgs"))
    asked = set(VllmConfig().declared_arguments)
    for node in our_code():
        if isinstance(node, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "model" for k in node.keys):
            asked |= {key.value for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("arguments["):
            asked.add(node.targets[0].slice.value)  # type: ignore[attr-defined]
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "arguments":
            asked |= {key.value for key in node.value.keys}  # type: ignore[attr-defined]
    assert len(asked) >= 20 and asked <= engine, asked - engine

    request = fields(class_of(read("vllm.sampling_params"), "SamplingParams"))
    calls = [node for node in our_code() if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("._params")]
    calls += [node for node in our_code() if isinstance(node, ast.Call) and ast.unparse(node.func) == "VllmParams"]
    words = {word.arg for call in calls for word in call.keywords if word.arg is not None}
    assert len(words) >= 12 and words <= request, words - request
