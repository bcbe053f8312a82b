"""OpenHands: its agent with a terminal in an empty folder, over Chat Completions by litellm."""

from __future__ import annotations

import tempfile

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr


def play(task, base_url, api_key):
    """Pay for the right sum."""
    said = []
    llm = LLM(model="openai/policy", base_url=base_url, api_key=SecretStr(api_key), usage_id="agent")
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
    with tempfile.TemporaryDirectory() as folder:
        conversation = Conversation(agent=agent, workspace=folder, visualizer=None, callbacks=[said.append])
        conversation.send_message(task["question"])
        conversation.run()
        conversation.close()
    return float(task["answer"] in str(said[-1]))
