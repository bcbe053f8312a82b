"""Conversions of values of verl: the engine that generates."""

from __future__ import annotations

from typing import Any

from roll.configs.schema.strategy_config import STRATEGIES
from roll.workbench.migrate.conversions import conversion, first, is_engine, mapped
from roll.workbench.migrate.draft import Step

_ENGINE = "actor_infer.strategy_args.strategy_config"


@first
def engine(step: Step) -> None:
    """An inference engine."""
    step.put(mapped(step))


def _engine(step: Step) -> str:
    return step.draft.strategies.get("actor_infer", "")


@conversion
def engine_tp(step: Step) -> None:
    """Devices of one engine."""
    if is_engine(_engine(step)):
        step.put(step.value, step.places[0])
        step.put(step.value, step.places[1])
    else:
        step.dead("hf_infer uses one device per rank")


@conversion
def engine_pp(step: Step) -> None:
    """Pipeline stages of one engine."""
    if step.value in (None, 1) or not is_engine(_engine(step)):
        step.dead("1 is the default")
    else:
        step.put(step.value, f"{_ENGINE}.{'pp_size' if _engine(step) == 'sglang' else 'pipeline_parallel_size'}")


@conversion
def engine_ep(step: Step) -> None:
    """Experts spread over the devices of an engine."""
    if step.value in (None, 1) or _engine(step) != "vllm":
        step.dead("1 is the default")
    else:
        step.put(True, f"{_ENGINE}.enable_expert_parallel")


@conversion
def engine_memory(step: Step) -> None:
    """An engine's share of a device."""
    if is_engine(_engine(step)):
        step.put(step.value, f"{_ENGINE}.{'mem_fraction_static' if _engine(step) == 'sglang' else step.last}")
    else:
        step.dead("hf_infer takes what it needs")


@conversion
def vllm_option(step: Step) -> None:
    """An option of vLLM."""
    if step.value is None:
        step.dead("null leaves the engine's choice")
    elif _engine(step) == "vllm":
        options: Any = STRATEGIES["vllm"]
        if reason := options.reserved.get(step.last) or options.gone.get(step.last):
            step.dead(reason)
        else:
            step.put(step.value, f"{_ENGINE}.{step.last}")
    else:
        step.dead(f"it is vLLM's, and the engine is {_engine(step) or 'another'}")


@conversion
def max_num_seqs(step: Step) -> None:
    """Requests at once."""
    if step.value is None:
        step.dead("null leaves the default")
    else:
        step.put(step.value)


@conversion
def load_format(step: Step) -> None:
    """How an engine reads its weights."""
    if not is_engine(_engine(step)) or step.value is None:
        step.dead("the engine shares the trainer's weights")
    else:
        step.put("dummy" if str(step.value).startswith("dummy") else "auto")
        step.use.fate, step.use.note = "translated", ""
        if step.value not in ("dummy", "auto"):
            step.decide(f"{step.value} is {step.draft.get(f'{_ENGINE}.load_format')}")


@conversion
def sleep(step: Step) -> None:
    """What an engine gives back while others use its device."""
    if _engine(step) != "vllm":
        step.dead("it gives back memory by itself")
    else:
        # Theirs keep a copy of the weights in host memory, which here the next sync would overwrite.
        step.put(None if step.value else 0)
        step.use.fate, step.use.note = "translated", ""


@conversion
def engine_kwargs(step: Step) -> None:
    """An argument of the engine itself."""
    _, _, rest = step.use.key.partition("engine_kwargs.")
    of, dot, word = rest.partition(".")
    wanted = of if dot else _engine(step)
    word = word or of
    options: Any = STRATEGIES.get(_engine(step))
    if step.value is None or step.value == {}:
        step.dead("null leaves the engine's choice")
    elif wanted != _engine(step) or not is_engine(wanted):
        step.dead(f"the engine is {_engine(step) or 'another'}")
    elif reason := options.reserved.get(word.split(".")[0]) or options.gone.get(word.split(".")[0]):
        step.dead(reason)
    else:
        step.put(step.value, f"{_ENGINE}.{word}")


@conversion
def sampled(step: Step) -> None:
    """Whether responses are sampled."""
    if step.value is False:
        step.decide("training samples: greedy responses of one prompt are all the same")
    else:
        step.note("training samples")
