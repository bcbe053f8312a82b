"""The same with a `ToolCallingAgent` of smolagents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from smolagents import LogLevel, OpenAIModel, PromptTemplates, Tool, ToolCallingAgent
from smolagents.agents import EMPTY_PROMPT_TEMPLATES

sys.path.insert(0, str(Path(__file__).parent))
from boxes import ADD, INSTRUCTIONS, LOOK, TOOLS, Boxes

MAX_STEPS = 3
"""What it takes without an error; after the last it asks once more for an answer."""


class Look(Tool):  # type: ignore[misc]
    """Says the number in a box."""

    name, description, inputs, output_type = "look", TOOLS["look"][0], LOOK["properties"], "string"

    def __init__(self, boxes: Boxes) -> None:
        super().__init__()
        self.boxes = boxes

    def forward(self, box: str) -> str:
        return self.boxes.call("look", {"box": box})


class Add(Tool):  # type: ignore[misc]
    """Adds."""

    name, description, inputs, output_type = "add", TOOLS["add"][0], ADD["properties"], "string"

    def __init__(self, boxes: Boxes) -> None:
        super().__init__()
        self.boxes = boxes

    def forward(self, a: int, b: int) -> str:
        return self.boxes.call("add", {"a": a, "b": b})


def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer one question; return the score of the answer."""
    boxes = Boxes(task)
    # It would ask for tool_choice "required", which no engine can promise. A spent budget is final: no retries.
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, tool_choice="auto", retry=False)
    agent = ToolCallingAgent(
        tools=[Look(boxes), Add(boxes)],
        model=model,
        # Its own system prompt has over a thousand tokens.
        prompt_templates=PromptTemplates(**{**EMPTY_PROMPT_TEMPLATES, "system_prompt": INSTRUCTIONS}),
        max_steps=MAX_STEPS,
        verbosity_level=LogLevel.OFF,
    )
    return boxes.score(agent.run(boxes.question))
