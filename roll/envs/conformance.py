"""Does a class keep what `Env` promises? Each violation is a sentence, with the line of the environment's code.

`check_env` is run over every bundled environment by the tests. `roll envs test` runs the same checks in a process of
their own (`probe.py`), which what is tested may hang or end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from roll.envs import conformance_checks as checks
from roll.envs import conformance_seeds as seed_checks
from roll.envs.base import Env
from roll.envs.shared_generators import restored_generators
from roll.envs.trial import SEED_BITS, EnvFinding, Findings, Trial, blame, described, run_seeds
from roll.envs.watched import Clock, OutOfTime

STOPPED = "stopped after"
SEEDS_TAKEN, PLAYED, ELSEWHERE = "63-bit seeds", "is played", "same in another process"

CHECKS: dict[str, Callable[[Trial], Findings]] = {
    SEEDS_TAKEN: seed_checks.takes_seeds,
    PLAYED: checks.is_played,
    "speed": checks.is_fast,
    "same seed, same episode": seed_checks.repeats_itself,
    ELSEWHERE: seed_checks.repeats_itself_elsewhere,
    "nothing but the seed": seed_checks.draws_from_its_seed,
    "seeds differ": seed_checks.seeds_differ,
    "unknown actions": checks.refuses_unknown_actions,
    "end of an episode": checks.ends_well,
    "close": checks.closes_twice,
    "render": checks.renders,
    "states": checks.names_states,
    "solution": checks.solves_itself,
    "output": checks.prints_little,
}


def check_env(
    make: Callable[[], Env],
    *,
    seeds: int | Sequence[int] = 8,
    max_steps: int = 50,
    timeout_s: float = 30.0,
    budget_s: float = 120.0,
) -> list[EnvFinding]:
    """Return one finding or more per check, `ok` included.

    Args:
        make: makes an instance; if it can be pickled, episodes are compared with those of a second process.
        seeds: episodes that each check plays, with seeds as runs have them; or the seeds themselves.
        max_steps: actions per seed.
        timeout_s: seconds that one call of the environment may take (in the main thread).
        budget_s: seconds that the calls of one check may take; then it stops where it is and says so.
    """
    clock = Clock(timeout_s, budget_s)
    trial = Trial(make, run_seeds(seeds) if isinstance(seeds, int) else seeds, max_steps, clock)
    findings: list[EnvFinding] = []
    for name in CHECKS:
        findings += (latest := run_check(name, trial))
        if name == SEEDS_TAKEN:
            trial = with_taken_seeds(trial)
        if makes_others_useless(latest):
            break
    return findings


def run_check(name: str, trial: Trial) -> list[EnvFinding]:
    """Return what one check found; an environment may raise anything. The shared generators are left as they were."""
    findings: list[EnvFinding] = []
    trial.clock.begin()
    try:
        with restored_generators():
            for level, message, *where in CHECKS[name](trial):
                findings.append(EnvFinding(level, name, message, *where))
    except OutOfTime:
        findings.append(EnvFinding("info", name, f"{STOPPED} {trial.clock.budget_s:g} s: not all was played"))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - it is a finding
        findings.append(EnvFinding("error", name, described(error), blame(error)))
    return findings or [EnvFinding("ok", name)]


def makes_others_useless(findings: Sequence[EnvFinding]) -> bool:
    """Return whether the other checks would say the same."""
    return any(finding.check == PLAYED and finding.level == "error" for finding in findings)


def with_taken_seeds(trial: Trial) -> Trial:
    """Return the trial with seeds that the environment takes, so that the further checks find what else there is."""
    trial.clock.begin()
    try:
        with restored_generators():
            bits, _ = seed_checks.bits_taken(trial)
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - of which the checks speak
        return trial
    return trial if bits == SEED_BITS else replace(trial, seeds=[seed % 2**bits for seed in trial.seeds])
