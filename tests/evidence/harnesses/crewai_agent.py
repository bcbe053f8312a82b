"""crewai: a crew of one agent with one tool, over Chat Completions."""

from __future__ import annotations

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def play(task, base_url, api_key):
    """Pay for the right sum."""
    llm = LLM(model="openai/policy", base_url=base_url, api_key=api_key)
    agent = Agent(role="adder", goal="add", backstory="It adds.", llm=llm, tools=[add], verbose=False)
    work = Task(description=task["question"], expected_output="The sum.", agent=agent)
    result = Crew(agents=[agent], tasks=[work], verbose=False).kickoff()
    return float(task["answer"] in result.raw)
