"""A rollout of one's own: the model answers, is asked to look again, and only its second answer is scored.

Everything it says is trained on, with the reward of the end; what is put between isn't.
"""

from __future__ import annotations

from roll.rollout.episode import Episode


class SecondLook:
    """`rewards.<domain>.rollout: examples/custom_rollout/second_look.py:SecondLook`"""

    async def play(self, episode: Episode) -> None:
        """Play one episode; many are played at once on the same object."""
        await episode.generate(await episode.first_prompt())
        await episode.generate(episode.encode("Check: the answer is"))
        await episode.step_env()
