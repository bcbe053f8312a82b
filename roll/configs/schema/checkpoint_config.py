"""What goes into checkpoints, where they go, how they are written, and what a resumed run takes out of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.schema.acts_if import acting, needs
from roll.configs.schema.fields import number, one_or_many

CheckpointContent = Literal["model", "optimizer", "extra", "hf_model"]
STATE_CONTENTS: tuple[CheckpointContent, ...] = ("model", "optimizer", "extra")
"""What resuming bit for bit takes; `hf_model` is a copy for others to load."""
_RESUMES = needs("^resume_from_checkpoint", fix="set resume_from_checkpoint, or remove the key")


def is_address(location: object) -> bool:
    """Return whether a location is one for fsspec, `protocol://...`, and not a folder."""
    return isinstance(location, str) and "://" in location


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What a checkpoint holds, where it goes, how many are kept, and what a resumed run takes out of one."""

    output_dir: str | None = None
    """Folder of the checkpoints, or an address that fsspec reaches, such as `s3://bucket/run`: each is then written to
    `<output_dir>/checkpoints` first, and uploaded once it is complete. null: `<output_dir>/checkpoints`."""
    max_to_keep: int | None = number(2, ge=1)
    """Newest complete checkpoints that stay, besides the best one (`save_best`). null: all."""
    save_contents: tuple[CheckpointContent, ...] = one_or_many(STATE_CONTENTS)
    """What goes into a checkpoint: `model` (weights of the roles that train), `optimizer` (its moments), `extra`
    (step, position in the schedule and in the data, running statistics) and `hf_model` (the actor as a Hugging Face
    folder). Resuming bit for bit takes the first three; see docs/checkpoints.md."""
    async_save: bool = False
    """Copy the state into host memory in the step, and write, hash and publish the checkpoint while training goes on.
    Takes host memory for one checkpoint; one at a time is on its way."""
    load_contents: tuple[CheckpointContent, ...] = one_or_many(STATE_CONTENTS, acts_if=(_RESUMES,))
    """What a resumed run takes out of its checkpoint. `[model]` starts at step 1 from the weights alone; without
    `extra`, `resume_from_checkpoint` must be a checkpoint's folder."""
    delete_after_load: bool = acting(False, _RESUMES)
    """Delete the checkpoint that the run resumed from: a downloaded copy once it is loaded, any other one when the
    run's next checkpoint is complete. Never one at a remote address."""
    save_hf_model: bool = False
    """Short for `hf_model` in `save_contents`."""

    @property
    def address(self) -> str | None:
        """Return where checkpoints are uploaded to; None: they stay on the disk."""
        return self.output_dir if is_address(self.output_dir) else None

    @property
    def saved(self) -> tuple[CheckpointContent, ...]:
        """Contents of a checkpoint, each once, in the order of the documentation."""
        chosen = {*self.save_contents, *(("hf_model",) if self.save_hf_model else ())}
        return tuple(content for content in (*STATE_CONTENTS, "hf_model") if content in chosen)
