"""The same with LangGraph's agent and LangChain's `ChatOpenAI`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.prebuilt import create_react_agent

sys.path.insert(0, str(Path(__file__).parent))
from boxes import INSTRUCTIONS, Boxes

MAX_CALLS = 5


def play(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Answer one question; return the score of the answer."""
    boxes = Boxes(task)

    @tool
    def look(box: str) -> str:
        """Read the number in a box"""
        return boxes.call("look", {"box": box})

    @tool
    def add(a: int, b: int) -> str:
        """Sum of two numbers"""
        return boxes.call("add", {"a": a, "b": b})

    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)
    agent = create_react_agent(model, [look, add], prompt=INSTRUCTIONS)
    question = {"messages": [("user", boxes.question)]}
    try:
        state = agent.invoke(question, {"recursion_limit": 2 * MAX_CALLS})  # the model and the tools are a step each
    except GraphRecursionError:
        return boxes.score(None)
    return boxes.score(state["messages"][-1].content)
