"""Conversions of values of verl: batches, lengths, optimizers, checkpoints and what else training takes."""

from __future__ import annotations

from roll.workbench.migrate.conversions import conversion, last, mapped
from roll.workbench.migrate.draft import Step


@conversion
def mini_batch(step: Step) -> None:
    """Prompts of a mini-batch: settled at the end, when the ranks are known."""
    step.draft.memo[f"mini:{step.role}"] = (step.value, step.use)
    step.use.ours = (step.place,)


@conversion
def sft_batch(step: Step) -> None:
    """Rows of an optimizer step: settled at the end."""
    step.draft.memo["rows"] = (step.value, step.use)
    step.use.ours = (step.place,)


@conversion
def micro_batch(step: Step) -> None:
    """Responses of a pass."""
    if step.value is None:
        step.dead("null leaves it to the token budget, or to 1")
    else:
        step.put(step.value)


@conversion
def micro_batch_all(step: Step) -> None:
    """Responses of a pass over all devices: settled at the end."""
    if step.value is None:
        step.dead("null leaves it to the number per device")
    else:
        step.draft.memo[f"micro:{step.place}"] = (step.value, step.use)
        step.use.ours = (step.place,)


@last
def token_budget(step: Step) -> None:
    """Tokens of a pass of one device; the ranks of a sequence add up."""
    way = step.place.rpartition("_")[2]
    if step.value is None or not step.draft.get(f"{step.role}.use_dynamic_batching_in_{way}"):
        step.dead("dynamic batching is off")
        return
    ranks = step.draft.get(f"{step.role}.model_args.ulysses_size", 1)
    options = step.draft.get(f"{step.role}.strategy_args.strategy_config", {})
    ranks = max(ranks, options.get("context_parallel_size", 1) if isinstance(options, dict) else 1)
    step.put(step.value * ranks if isinstance(step.value, int) and isinstance(ranks, int) else step.value)
    if ranks > 1:
        step.note(f"times the {ranks} ranks that share a sequence")


@conversion
def warmup(step: Step) -> None:
    """Steps of warm-up; -1 leaves it to the ratio."""
    if isinstance(step.value, int) and step.value > 0:
        step.put(step.value)
    else:
        step.dead("the ratio says it" if step.value else "0 is the default")


@last
def warmup_ratio(step: Step) -> None:
    """A share of all steps, where no number is given."""
    if not step.value:
        step.dead("0 is the default")
    elif step.draft.get(f"{step.role}.training_args.warmup_steps"):
        step.dead("lr_warmup_steps says it")
    else:
        step.put(step.value)


@last
def min_lr(step: Step) -> None:
    """The lowest rate as a share of the peak."""
    peak = step.draft.get(f"{step.role}.training_args.learning_rate")
    if not step.value:
        step.dead("0 is the default")
    elif isinstance(peak, (int, float)) and peak and isinstance(step.value, (int, float)):
        step.put(step.value / peak)
        step.use.fate, step.use.note = "translated", f"a share of the peak {peak:g}"
    else:
        step.absent("there is no learning rate to take a share of")


@conversion
def betas(step: Step) -> None:
    """Both of Adam's constants."""
    if isinstance(step.value, list) and len(step.value) == 2:
        for place, value in zip(step.places, step.value, strict=True):
            step.put(value, place)
    else:
        step.absent("two numbers were expected")


@conversion
def half_cosine(step: Step) -> None:
    """Cycles of the cosine."""
    if step.value in (None, 0.5):
        step.dead("half a cosine is what cosine does")
    else:
        step.put(step.value)


@conversion
def incr_style(step: Step) -> None:
    """How the weight decay grows."""
    if step.value in (None, "constant"):
        step.dead("constant is without it")
    else:
        step.put(step.value)


@conversion
def tokenizer(step: Step) -> None:
    """A tokenizer of its own, for roles that have one."""
    if step.value is None or step.role in ("actor_infer", "reference", "critic"):
        step.dead("null is the model's" if step.value is None else "it reads the tokens of actor_train")
    else:
        step.put(step.value)


@conversion
def fire(step: Step) -> None:
    """A hot first token."""
    if step.value:
        step.put(30.0)
    else:
        step.dead("false asks for nothing")


@conversion
def profiled(step: Step) -> None:
    """What a profile is made with, where steps are profiled."""
    if not step.draft.their("global_profiler.steps"):
        step.dead("no step is profiled")
    elif step.value is None or (step.last == "tool" and mapped(step) == step.value and step.value != "torch"):
        step.absent("tools are torch, memory and nsight")
    else:
        step.put(mapped(step))


@conversion
def timeline(step: Step) -> None:
    """Ray's own timeline."""
    if step.value is None:
        step.dead("null asks for none")
    else:
        step.put(True)
        step.decide("the file is ray_timeline.json in profiler_output_dir")


_STATE = ["model", "optimizer", "extra"]


@conversion
def contents(step: Step) -> None:
    """What a checkpoint holds, or what of it is loaded; the actor's counts for all roles."""
    wanted = step.value if isinstance(step.value, list) else [step.value]
    if step.value is None or sorted(map(str, wanted)) == sorted(_STATE):
        step.dead("model, optimizer and extra are the default")
    elif step.use.key.startswith("critic."):
        step.dead("a checkpoint holds all roles; the actor's contents count")
    elif step.last == "load_contents":
        loaded = [word for word in wanted if word in _STATE]
        step.put(loaded)
        if loaded != wanted:
            step.decide("hf_model is saved, never loaded")
    else:
        step.put(wanted)


@last
def address(step: Step) -> None:
    """A second place of checkpoints, which here is the only one."""
    if step.value is None:
        step.dead("null asks for none")
    else:
        step.put(step.value)
        step.decide("checkpoints go to this address alone; default_local_dir isn't written")


@last
def keep_one(step: Step) -> None:
    """Whether the checkpoint before goes."""
    if step.value:
        step.put(1)
    else:
        step.dead("false asks for nothing")


@conversion
def compile_(step: Step) -> None:
    """torch.compile is of the log-probs there, of the layers here."""
    if step.value:
        step.decide("left off: there it compiles the log-probs alone, model_args.torch_compile here the layers")
    else:
        step.dead("false asks for nothing")


@conversion
def master_dtype(step: Step) -> None:
    """The type that weights are trained in."""
    if str(step.value) in ("fp32", "float32", "None"):
        step.dead("weights that are trained are fp32")
    else:
        step.decide("weights that are trained stay fp32; dtype is that of the forward pass")


@conversion
def of_training(step: Step) -> None:
    """A key of recomputation."""
    if step.value is None:
        step.dead("null leaves the default")
    elif step.role not in ("actor_train", "critic"):
        step.dead("it doesn't train")
    else:
        step.put(step.value)


@last
def recompute_modules(step: Step) -> None:
    """What is recomputed selectively."""
    granularity = step.draft.get(f"{step.role}.strategy_args.strategy_config.recompute_granularity")
    if granularity != "selective":
        step.dead("only recompute_granularity: selective reads it")
    else:
        step.put(step.value)


@last
def sequence_parallel(step: Step) -> None:
    """Splitting along the sequence, which tensor parallelism makes possible."""
    size = step.draft.get(f"{step.role}.strategy_args.strategy_config.tensor_model_parallel_size", 1)
    if step.value and size == 1:
        step.dead("tensor_model_parallel_size is 1")
    else:
        step.put(step.value)


@conversion
def each_role(step: Step) -> None:
    """A key of every role that has the policy's model."""
    for place in step.places:
        role = place.split(".")[0]
        if step.draft.hint(place) is not None and (role != "reference" or _has_reference(step)):
            step.put(step.value, place)


def _has_reference(step: Step) -> bool:
    actor, algorithm = "actor_rollout_ref.actor", "algorithm"
    return bool(step.draft.their(f"{actor}.use_kl_loss") or step.draft.their(f"{algorithm}.use_kl_in_reward"))
