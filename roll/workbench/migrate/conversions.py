"""Conversions of values that several systems share. Rows name them with a colon."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from roll.configs.schema.training_args import TrainingArgs
from roll.workbench.migrate.draft import Step
from roll.workbench.migrate.overrides import NOTHING

Conversion = Callable[[Step], None]
CONVERSIONS: dict[str, Conversion] = {}
"""By name."""
FIRST: set[str] = set()
"""Names of those that others look at the result of."""
LAST: set[str] = set()
"""Names of those that look at the results of others."""

DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "torch.bfloat16": "bf16",
    "torch.float16": "fp16", "torch.float32": "fp32", "auto": "bf16",
}  # fmt: skip
_SCHEDULE = TrainingArgs.__dataclass_fields__["lr_scheduler_type"]
SCHEDULES = {**{name: name for name in get_args(get_type_hints(TrainingArgs)["lr_scheduler_type"])},
             **_SCHEDULE.metadata.get("also", {})}  # fmt: skip
"""Names of schedules, by ours."""


def conversion(function: Conversion) -> Conversion:
    """Enter a conversion under its name, without the underscore that Python may want after it."""
    CONVERSIONS[function.__name__.rstrip("_")] = function
    return function


def first(function: Conversion) -> Conversion:
    """Enter one whose result others look at."""
    FIRST.add(function.__name__.rstrip("_"))
    return conversion(function)


def last(function: Conversion) -> Conversion:
    """Enter one that looks at the results of others."""
    LAST.add(function.__name__.rstrip("_"))
    return conversion(function)


def mapped(step: Step) -> Any:
    """Return the value in our words."""
    value = step.value
    try:
        return step.row.values.get(value, value)
    except TypeError:  # a list is no key
        return value


def simple(step: Step) -> None:
    """Put the value, in our words, where it belongs."""
    value = mapped(step)
    if step.row.fate == "decided":
        step.use.note = step.row.note
        if value == step.value and step.key_paths[0] == step.use.key:
            step.use.fate, step.use.note = "translated", ""
    step.put(value)


def is_engine(name: str) -> bool:
    """Return whether a backend generates only, in processes of its own."""
    return name in ("vllm", "sglang")


def _truth(value: Any) -> bool:
    return value.strip().lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)


def _positive(value: Any) -> Any:
    return None if isinstance(value, (int, float)) and value <= 0 else value


_VALUES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not": (lambda value: not _truth(value), "The other way round."),
    "truth": (_truth, "A switch; a number of ranks counts as on."),
    "positive": (_positive, "Null in place of 0 and -1."),
    "steps": (_positive, "A number of steps; null, 0 and -1 leave it to the epochs."),
    "period": (lambda value: max(0, int(value or 0)), "Steps between two events; -1 and null are never."),
    "or_zero": (lambda value: 0.0 if value is None else value, "Null is 0."),
    "stops": (lambda value: [text for text in value if text] if isinstance(value, list) else value or [],
              "Texts that end a response."),
}  # fmt: skip
"""Conversions of a value by itself, with what they do."""
_NEUTRAL = {"zero_is_none": 0, "one_is_none": 1, "false_is_none": False, "none_is_none": None}
"""Conversions of keys without a counterpart, by what asks for nothing besides null."""


def _of_value(convert: Callable[[Any], Any], text: str) -> Conversion:
    def conversion_(step: Step) -> None:
        step.put(convert(step.value))

    conversion_.__doc__ = text
    return conversion_


def _unless(neutral: Any) -> Conversion:
    word = "null" if neutral is None else str(neutral).lower()

    def conversion_(step: Step) -> None:
        if step.value is None or step.value == neutral:
            step.dead(f"{word} asks for nothing")
        else:
            step.absent(step.row.note)

    conversion_.__doc__ = f"Null and {word} ask for nothing."
    return conversion_


CONVERSIONS.update({name: _of_value(*how) for name, how in _VALUES.items()})
CONVERSIONS.update({name: _unless(neutral) for name, neutral in _NEUTRAL.items()})


@conversion
def nothing(step: Step) -> None:
    """Write nothing; the row says why."""
    step.dead(step.row.note)


@conversion
def or_default(step: Step) -> None:
    """Write the value; null leaves the default."""
    step.note("null leaves the default") if step.value is None else step.put(step.value)


@conversion
def if_true(step: Step) -> None:
    """Write the key where it is on."""
    step.put(True) if _truth(step.value) else step.note("off is the default here too")


@conversion
def list_(step: Step) -> None:
    """Write a text with commas as a list."""
    value = step.value
    step.use.fate = "translated"
    if isinstance(value, str):
        step.put([part.strip() for part in value.split(",") if part.strip()])
        step.decide("text where a list is meant: split at its commas")
    else:
        step.put(value)


@conversion
def files(step: Step) -> None:
    """Translate one or many files."""
    value = step.value
    if isinstance(value, str) and value.strip().startswith("[") and value.strip().endswith("]"):
        value = [part.strip(" '\"") for part in value.strip()[1:-1].split(",") if part.strip()]
        step.decide("text where a list is meant: it is split at its commas")
    if value is None or value == []:
        step.dead("no file")
    else:
        step.put(list(dict.fromkeys(value)) if isinstance(value, list) else value)


@conversion
def dtype(step: Step) -> None:
    """Translate a type by its short name."""
    value = mapped(step)
    step.put(DTYPES.get(str(value), value) if value is not None else None)


@conversion
def both(step: Step) -> None:
    """Write the value at every place that there is."""
    for key_path in filter(step.draft.knows, step.key_paths):
        step.put(mapped(step), key_path)
    if not step.use.ours and step.value is not None:
        step.dead(f"pipeline {step.draft.pipeline} has no {step.key_path}")


@last
def if_free(step: Step) -> None:
    """Write the value where no other key says it."""
    now, value = step.draft.get(step.key_path, NOTHING), mapped(step)
    if value is None:
        step.note("null leaves it to " + step.key_path)
    elif now is NOTHING:
        step.put(value)
        step.use.fate = "translated"
    elif now == value:
        step.use.ours, step.use.fate = (step.key_path,), "translated"
    else:
        step.decide(f"{step.key_path} is {now}, which another key says")


@conversion
def schedule(step: Step) -> None:
    """Write a learning rate schedule; one that isn't here is asked for."""
    value = str(mapped(step) or "constant")
    known = SCHEDULES.get(value) or SCHEDULES.get(value.lower())
    if known is not None:
        step.put(known)
        step.use.fate, step.use.note = "translated", ""
        if value == "polynomial" and step.draft.their("lr_scheduler_kwargs.lr_end") is None:
            step.note("it ends at min_lr_ratio, 0 unless set; transformers' own at a learning rate of 1e-7")
    else:
        step.absent(f"there is no schedule {value} here")


@conversion
def template(step: Step) -> None:
    """Translate a template; a model family's name is the tokenizer's own template."""
    value = step.value
    known = ("native", "plain", "question_answer", "step_by_step")
    if not any(step.draft.knows(key_path) for key_path in step.key_paths):
        step.dead(f"{step.role} has no rows of its own")
    elif value is None or value in known:
        step.use.fate, step.use.note = "translated", ""
        if value is not None:
            step.put(value)
    elif "{%" in str(value) or "{{" in str(value) or str(value).count("{prompt}") == 1:
        step.use.fate, step.use.note = "translated", ""
        for key_path in step.key_paths:
            step.put(value, key_path)
    else:
        step.put("native")
        step.decide(f"{value} is a model family's template: native is what the tokenizer itself brings")


@last
def truncation(step: Step) -> None:
    """Turn off sampling options in training that the trainer's log-probs wouldn't know."""
    value, key = step.value, step.key_path.rpartition(".")[2]
    off = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}[key]
    role, pipeline = step.role, step.draft.pipeline
    changes = value is not None and not (value in (off, 0) if key == "top_k" else value == off)
    if role == "judge" or not changes:
        step.use.fate, step.use.note = "translated", ""
        step.put(off if value is None else value)
    elif pipeline in ("rlvr", "agentic", "distill") and role == "actor_infer":
        if step.draft.has("train_infer_correction"):
            step.put(value)
            step.decide("kept: train_infer_correction corrects for it")
        else:
            why = "off in training: the trainer's log-probs are those of the full distribution"
            step.decide(f"{why}. To keep {value}, set it and train_infer_correction")
    else:
        step.put(value)


@conversion
def model_config(step: Step) -> None:
    """Translate an override of the model's config.json."""
    word = step.use.key.split(".override_config.")[-1].removeprefix("model_config.").removeprefix("model_init_kwargs.")
    step.put(step.value, f"{step.key_path}.{word}")


@conversion
def template_variables(step: Step) -> None:
    """Translate a variable of the chat template, or all of them as JSON text, as TRL's command line takes them."""
    _, _, word = step.use.key.partition("chat_template_kwargs.")
    if word:
        step.put(step.value, f"{step.key_path}.{word}")
        return
    value = json.loads(step.value) if isinstance(step.value, str) else step.value
    for name, each in (value or {}).items():
        step.put(each, f"{step.key_path}.{name}")


@conversion
def if_scores(step: Step) -> None:
    """Write the value for roles that compute log-probs."""
    if step.role in ("critic", "reward_model"):
        step.dead("it is about log-probs")
    else:
        step.put(step.value)


@conversion
def optimizer(step: Step) -> None:
    """Translate an optimizer by name."""
    name = str(step.value).lower()
    if step.value is None or name.startswith("adam"):
        step.dead("the optimizer is AdamW")
    elif name == "muon":
        step.put("muon")
    else:
        step.absent("optimizers are adamw and muon")


@last
def with_lora(step: Step) -> None:
    """Translate a key of adapters, where there are some."""
    if not step.draft.get(f"{step.role}.model_args.lora_rank"):
        step.dead("lora_rank is 0")
    elif step.key_path.endswith("lora_target") and isinstance(step.value, str) and "," in step.value:
        list_(step)
    elif step.key_path.endswith("lora_target") and step.value == "all":
        step.put("all-linear")
    else:
        step.put(step.value)


@conversion
def half_type(step: Step) -> None:
    """Turn `bf16: true` into a type."""
    name = step.use.key.rpartition(".")[2]
    if isinstance(step.value, dict):
        step.dead("model_args.dtype says it")
    elif _truth(step.value):
        step.put(name)
    else:
        step.note("the other types say it")
