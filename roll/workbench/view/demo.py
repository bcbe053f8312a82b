"""The recorded runs that come with the package, for `roll view --demo`; docs/generate/view_demo.py has made them."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent / "demo"
DEMOS = {"quickstart": ("quickstart",), "agentic": ("dial", "dial-collapsed")}
"""Folders by the name of the demo. The agentic one is a game whose environment has a fault, learned twice: as it should
be, and with a learning rate so high that the policy collapses."""


def demo_runs(name: str = "quickstart") -> list[Path]:
    """Return the folders of a demo's runs."""
    return [HERE / folder for folder in DEMOS[name]]
