"""dspy: ReAct with one tool, over Chat Completions."""

from __future__ import annotations

import dspy


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def play(task, base_url, api_key):
    """Pay for the right sum."""
    # cache: the answer to a prompt is remembered, whichever endpoint and episode gave it.
    lm = dspy.LM("openai/policy", api_base=base_url, api_key=api_key, cache=False)
    with dspy.context(lm=lm):
        answer = dspy.ReAct("question -> answer", tools=[add])(question=task["question"])
    return float(task["answer"] in answer.answer)
