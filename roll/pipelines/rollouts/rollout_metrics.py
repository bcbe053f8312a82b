"""What a step's rollouts look like, in numbers (`reward/`, `response/`, `group/`, `rollout/`, `tokens/`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean, stdev

from roll.pipelines.rollouts.assemble import Rollouts
from roll.pipelines.rollouts.validation import successes
from roll.tracking.names import name_part, name_parts
from roll.types.metrics import Metrics
from roll.types.trajectory import Trajectory, Turn


def rollout_metrics(rollouts: Rollouts) -> Metrics:
    """Return metrics of the episodes that will be trained on; one with several rows counts once."""
    metrics, trajectories = Metrics(), rollouts.trajectories
    rewards = [t.reward for t in trajectories]
    # An episode of several turns has as many responses, each with a limit of its own.
    lengths = [turn.num_response_tokens for t in trajectories for turn in t.turns]
    prompts = [t.num_tokens - t.num_response_tokens for t in trajectories]
    metrics.update(
        {
            "reward/mean": fmean(rewards),
            "reward/std": stdev(rewards) if len(rewards) > 1 else 0.0,
            "reward/max": max(rewards),
            "reward/min": min(rewards),
            "response/length_mean": fmean(lengths),
            "response/length_max": max(lengths),
            "response/length_min": min(lengths),
            "rollout/no_room": sum(t.status == "truncated" and bool(t.error) for t in trajectories),
            "response/truncated_share": fmean(t.status == "truncated" for t in trajectories),
            "prompt/length_mean": fmean(prompts),
            "prompt/length_max": max(prompts),
            "episode/turns_mean": fmean(len(t.turns) for t in trajectories),
            "rollout/responses": len(trajectories),
            "rollout/rows": len(rollouts.batch),
            "tokens/prompt": sum(prompts),
            "tokens/response": sum(t.num_response_tokens for t in trajectories),
        }
    )
    for trajectory in trajectories:
        for name, value in trajectory.counts.items():
            metrics.add_sum(name, value)
    _groups(rollouts, metrics)
    _domains(rollouts, metrics)
    for name, values in role_values((task.tag, t) for task, t in zip(rollouts.tasks, trajectories, strict=True)):
        metrics.add_mean(f"role/{name}", sum(values), len(values))
    return metrics


def role_values(played: Iterable[tuple[str, Trajectory]]) -> list[tuple[str, list[float]]]:
    """Return `<tag>/<role>/<what>` with a value per episode (of a tag), for roles that the policy played: `reward`,
    `success` where the environment says it, and `turns`."""
    values: dict[str, list[float]] = defaultdict(list)
    for tag, trajectory in played:
        turns: dict[str, list[Turn]] = defaultdict(list)
        for turn in trajectory.turns:
            if turn.role:
                turns[turn.role].append(turn)
        for role, own in turns.items():
            name = f"{name_part(tag)}/{name_part(role)}"
            values[f"{name}/reward"].append(trajectory.role_rewards.get(role, trajectory.reward))
            values[f"{name}/turns"].append(float(len(own)))
            if "success" in own[-1].metrics:
                values[f"{name}/success"].append(own[-1].metrics["success"])
    return sorted(values.items())


def _groups(rollouts: Rollouts, metrics: Metrics) -> None:
    groups: dict[int, list[float]] = defaultdict(list)
    for index, trajectory in zip(rollouts.group_index.tolist(), rollouts.trajectories, strict=True):
        groups[index].append(trajectory.reward)
    spreads = [stdev(rewards) if len(rewards) > 1 else 0.0 for rewards in groups.values()]
    metrics.update(
        {
            "rollout/groups": len(groups),
            "group/size_mean": fmean(len(rewards) for rewards in groups.values()),
            "group/reward_std_mean": fmean(spreads),
            "group/zero_signal_share": fmean(spread == 0 for spread in spreads),
        }
    )


def _domains(rollouts: Rollouts, metrics: Metrics) -> None:
    domains: dict[str, list[Trajectory]] = defaultdict(list)
    for task, trajectory in zip(rollouts.tasks, rollouts.trajectories, strict=True):
        domains[task.domain].append(trajectory)
    for domain, members in sorted(domains.items()):
        rewards = [t.reward for t in members]
        named = name_part(domain)
        metrics.update(
            {
                f"reward/{named}/mean": fmean(rewards),
                f"reward/{named}/std": stdev(rewards) if len(rewards) > 1 else 0.0,
                f"data/{named}/share": len(members) / len(rollouts.trajectories),
            }
        )
        for trajectory in members:
            for part, value in trajectory.reward_parts.items():
                if part.rpartition(".")[2] == "too_hard":
                    metrics.add_sum(f"reward/{named}/too_hard", value)
                else:
                    metrics.add_mean(f"reward/{named}/part/{name_parts(part, 'env/')}", value)
            for name, value in episode_counts(trajectory).items():
                metrics.add_mean(f"env/{named}/{name}", value)
        for success in successes(members):
            metrics.add_mean(f"env/{named}/success", success)


def episode_counts(trajectory: Trajectory) -> dict[str, float]:
    """Return what an environment counted, summed over the turns. Success isn't a count: see `successes` and
    `role_values`."""
    counts: dict[str, float] = defaultdict(float)
    for turn in trajectory.turns:
        for name, value in turn.metrics.items():
            counts[name] += value
    return {name: value for name, value in counts.items() if name.partition("/")[0] != "success"}
