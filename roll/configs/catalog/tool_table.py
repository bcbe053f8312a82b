"""Tools that come with the framework, and the forms in which policies write calls."""

from __future__ import annotations

from roll.configs.catalog.entries import Entry, Option

TOOLS: dict[str, Entry] = {
    "python": Entry(
        path="roll.envs.tools.python_tool:PythonTool",
        sandboxed=True,
        options={
            "session": Option(bool, default=False),
            "seconds": Option(float, bounds={"gt": 0, "le": 600}, default=5.0),
            "memory_mb": Option(int, bounds={"ge": 64}, default=512),
            "packages": Option(tuple[str, ...], default=()),
        },
    ),
    "calculator": Entry(path="roll.envs.tools.calculator:Calculator"),
    "retrieval": Entry(
        path="roll.envs.tools.retrieval:Retrieval",
        options={
            "folder": Option(str),
            "top_k": Option(int, bounds={"ge": 1, "le": 20}, default=3),
            "passage_words": Option(int, bounds={"ge": 10}, default=150),
        },
    ),
}
"""Classes of `roll.envs.tools.base.Tool` by name: values of `tools[].name` without a `path`."""

TOOL_PARSERS: dict[str, Entry] = {
    "hermes": Entry(path="roll.envs.tools.parsing.hermes:parse"),
    "qwen_coder": Entry(path="roll.envs.tools.parsing.qwen_coder:parse"),
    "seed_oss": Entry(path="roll.envs.tools.parsing.qwen_coder:parse_seed"),
    "glm": Entry(path="roll.envs.tools.parsing.glm:parse"),
    "llama": Entry(path="roll.envs.tools.parsing.llama:parse"),
    "mistral": Entry(path="roll.envs.tools.parsing.mistral:parse"),
    "gemma": Entry(path="roll.envs.tools.parsing.gemma:parse"),
    "harmony": Entry(path="roll.envs.tools.parsing.harmony:parse"),
    "deepseek": Entry(path="roll.envs.tools.parsing.deepseek:parse"),
    "kimi": Entry(path="roll.envs.tools.parsing.kimi:parse"),
    "json": Entry(path="roll.envs.tools.parsing.plain_json:parse"),
}
"""`(text, tools) -> Found`; a new one is a file and a line here. `auto`: the first that gives back what the chat
template writes."""
