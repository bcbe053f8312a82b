"""Models that the installed vLLM can't sample from where a run has no accelerator, or lacks a package that their class
imports: seen in config.json before anything is started."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from roll.configs.catalog.family_table import family_of
from roll.configs.checks.dtype_choice import THIS_MACHINE, choose_dtype
from roll.configs.checks.engine_arguments import package_folder
from roll.configs.checks.machine_checks import MISSING, Machine
from roll.configs.errors import Violation, problem
from roll.configs.schema.rl_config import RLConfig
from roll.configs.schema.run_config import RunConfig

_LINEAR_HEADS = (64, 128)
"""Numbers of its heads, of keys and values alike."""
TOWER_ADAPTERS = "vLLM names the layers of a picture model's language model otherwise than adapters of it do"


def vllm_problems(config: RunConfig, role: str, tree: Mapping[str, Any], machine: Machine) -> Iterator[Violation]:
    """Yield why vLLM can't sample from a role's model; `tree` is its config.json."""
    key, args = f"{role}.strategy_args.strategy_name", config.roles[role].model_args
    adapters = role == "actor_infer" and isinstance(config, RLConfig) and config.lora_sync == "adapters"
    if adapters and is_picture_tree(tree):
        yield problem("lora_sync", TOWER_ADAPTERS, "merged", "adapters")
    package = family_of(tree.get("model_type")).vllm_imports
    if package is not None and package not in machine.packages:
        yield problem(key, import_obstacle(tree, package), MISSING[package], "vllm")
    if config.num_nodes > 1 or machine.accelerators or machine.amd:
        return  # other machines may have some
    if why := head_obstacle(tree):
        yield problem(key, why, "hf_infer or sglang", "vllm")
    dtype = choose_dtype({THIS_MACHINE: machine}).dtype if args.dtype == "auto" else args.dtype
    if why := delta_rule_obstacle(tree, dtype, machine.processor.features, adapters=adapters):
        by_type = dtype != "bf16" and not delta_rule_obstacle(tree, "bf16", machine.processor.features)
        fix = f"{role}.model_args.dtype=bf16, or hf_infer" if by_type else "hf_infer"
        yield problem(f"{role}.model_args.dtype" if by_type else key, why, fix, args.dtype if by_type else "vllm")


def is_picture_tree(tree: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a picture model."""
    return isinstance(tree.get("text_config"), dict) and "vision_config" in tree


def import_obstacle(tree: Mapping[str, Any], package: str) -> str:
    """Return the sentence about a package that vLLM's class of a model imports, and that can't be imported."""
    return f"vLLM's module for models of type {tree.get('model_type')} imports {package}, which isn't there"


def head_obstacle(tree: Mapping[str, Any]) -> str:
    """Return why the installed vLLM can't compute a model's attention on a CPU; empty: it can, or nobody can tell."""
    size, hidden, heads = (tree.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if type(size) is not int and type(hidden) is int and type(heads) is int and heads > 0:
        size = hidden // heads
    sizes = cpu_head_sizes()
    if type(size) is not int or tree.get("kv_lora_rank") or not sizes or size in sizes:
        return ""  # vLLM keeps compressed keys in another way
    return (
        f"without an accelerator vLLM's attention takes heads of {', '.join(map(str, sizes))} numbers, and those of "
        f"this model have {size}"
    )


@cache
def cpu_head_sizes() -> tuple[int, ...]:
    """Return the sizes that the installed vLLM's attention on a CPU takes; none if its source doesn't show them."""
    folder = package_folder("vllm")
    file = None if folder is None else folder / "v1" / "attention" / "backends" / "cpu_attn.py"
    if file is None or not file.is_file():
        return ()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
            values = [line.value for line in node.body if isinstance(line, ast.Return)]
            with contextlib.suppress(ValueError):
                return tuple(ast.literal_eval(values[0])) if values and values[0] is not None else ()
    return ()


def delta_rule_obstacle(
    tree: Mapping[str, Any], dtype: str, features: frozenset[str], *, adapters: bool = False
) -> str:
    """Return why vLLM can't compute a model's gated delta rule on a CPU; empty: it can, or the model has none.

    `features`: the processor's instruction sets; none where nobody knows them.
    """
    decoder = family_of(tree.get("model_type")).decoder
    if decoder is None or decoder.delta_rule is None:
        return ""
    where = "without an accelerator vLLM computes layers of type linear_attention"
    if dtype != "bf16":
        return f"{where} in bf16 only, and dtype is {dtype}"
    if features and not features & {"avx512_bf16", "amx_bf16"}:
        return f"{where} with instructions of avx512_bf16, which this processor doesn't have"
    sizes = {**decoder.defaults, **tree}
    heads = {sizes.get(key) for key in ("linear_key_head_dim", "linear_value_head_dim")}
    if len(heads) > 1 or not heads <= set(_LINEAR_HEADS):
        sizes_here = ", ".join(sorted(map(str, heads)))
        return f"{where} with heads of {' or '.join(map(str, _LINEAR_HEADS))} numbers, and this model has {sizes_here}"
    return f"{where} without adapters beside them: send merged weights (lora_sync)" if adapters else ""
