"""Start a pipeline from a YAML file.

    python examples/start_pipeline.py --config_path examples/quickstart --config_name rlvr_smollm2 max_steps=10

The file is composed by Hydra (defaults lists, interpolation) and checked in full before anything heavy is imported.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roll.configs.pipeline import RunConfig

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    # `python examples/start_pipeline.py` puts examples/ on the path; a checkout that isn't installed needs its root.
    sys.path.insert(0, str(HERE.parent))


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Start a pipeline from a YAML file.",
        epilog="Every key: docs/configuration.md. Exit code 2: the configuration or the data can't be used.",
    )
    parser.add_argument("--config_path", required=True, help="folder of the file, from here or from examples/")
    parser.add_argument("--config_name", required=True, help="name of the file, without .yaml")
    parser.add_argument("--print_config", action="store_true", help="print all keys with their values, and end")
    parser.add_argument("--check", action="store_true", help="check everything, print the plan, and end")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. rollout_batch_size=16")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run; 0 when the pipeline ended, 2 when configuration or data can't be used, 1 for any other failure."""
    options = parse_arguments(arguments)
    from roll.configs.agentic import AgenticConfig
    from roll.configs.environment import check_environment
    from roll.configs.errors import ConfigError
    from roll.configs.loader import load_config, to_yaml
    from roll.envs.registry import EnvLoadError, check_envs

    folder = Path(options.config_path)
    if not folder.is_dir() and (HERE / folder).is_dir():
        folder = HERE / folder
    try:
        config = load_config(folder, options.config_name, options.overrides)
        if options.print_config:
            print(to_yaml(config), end="")
            return 0
        check_environment(config)
        if isinstance(config, AgenticConfig):
            check_envs(config)
    except (ConfigError, EnvLoadError) as error:
        print(error, file=sys.stderr)
        return 2
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    if options.check:
        print(config.batch.explain())
        print(config.placement.explain())
        return 0
    return run(config)


def run(config: RunConfig) -> int:
    """Run the pipeline. What goes wrong is said in a few lines; the traceback goes to `<logging_dir>/error.txt`."""
    from roll.pipelines import run_pipeline
    from roll.utils.logging import setup_logging

    setup_logging(file=config.logging_path / "controller.log")
    try:
        run_pipeline(config)
    except KeyboardInterrupt:
        print("interrupted; resume with resume_from_checkpoint=auto", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - the last boundary: everything is reported, nothing is hidden
        details = config.logging_path / "error.txt"
        details.write_text(traceback.format_exc(), encoding="utf-8")
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        print(f"error: {kind}{error}\n(traceback: {details})", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
