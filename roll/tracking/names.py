"""The one metrics namespace: every name a run may log, with its unit, meaning and aggregation.

The table of docs/metrics.md is built from this one (`make docs`), and trackers refuse a name that isn't in it, so
neither can drift. In a pattern, `<word>` stands for one part of a name and a final `*` for any rest. Code
of users (a loss, an estimator, a filter of their own) logs under `custom/`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from roll.configs.catalog.validation_metrics import name_part as name_part
from roll.configs.catalog.validation_metrics import name_parts as name_parts


@dataclass(frozen=True, slots=True)
class MetricName:
    """One row of the table."""

    pattern: str
    unit: str
    meaning: str
    aggregation: str
    """How many values become one: over what, and how."""


_M = MetricName
_RESPONSES = "mean over trained responses"
_TOKENS = "mean over action tokens"
_LOSS_TOKENS = "mean over loss tokens"
_OPTIMIZER_STEPS = "mean over optimizer steps"
_VALUE = "value of this step"
_ITS_RESPONSES = "mean over its responses"
_ITS_EPISODES = "mean over its episodes"
_GROUPS = "mean over groups"
_WITHIN_STEP = "sum within the step"
_TASKS = "mean over its tasks"
_SAMPLED = "mean over tokens sampled under these weights"
_PAIRS = "mean over pairs or rows"
_HELD_OUT = "mean over the taught tokens of held-out rows, or over pairs"
_ROWS = "mean over responses"
_ITS_ROWS = "mean over responses with such tokens"
_AS_LOSS = "as `actor/loss`"

GROUPS: dict[str, tuple[MetricName, ...]] = {
    "Reward": (
        _M("reward/mean", "reward", "Raw reward, as the reward functions gave it", _RESPONSES),
        _M("reward/std", "reward", "Its spread", "standard deviation over trained responses"),
        _M("reward/max", "reward", "Best raw reward", "max over trained responses"),
        _M("reward/min", "reward", "Worst raw reward", "min over trained responses"),
        _M("reward/turn_mean", "reward", "Reward of a turn, penalties included", "mean over turns of environments"),
        _M("reward/clipped_share", "fraction", "Rewards changed by `reward_clip`", _RESPONSES),
        _M(
            "reward/shaping/<term>",
            "reward",
            "What shaping added (`overlong`, `length`), or put in place (`cosine_length`)",
            _RESPONSES,
        ),
        _M("reward/<domain>/mean", "reward", "Raw reward in one domain", _ITS_RESPONSES),
        _M("reward/<domain>/std", "reward", "Its spread", "standard deviation over its responses"),
        _M("reward/<domain>/part/<part>", "reward", "One named part of it, unweighted", _ITS_RESPONSES),
        _M("reward/<domain>/too_hard", "responses", "Answers that can't be checked in 2 s and 200 MB", _WITHIN_STEP),
        _M("reward/<domain>/part/env/<part>", "reward", "A part that the environment itself names", _ITS_RESPONSES),
    ),
    "Teacher": (
        _M("distill/reverse_kl", "nats", "Student's log-prob of sampled tokens less the teacher's", _TOKENS),
        _M("distill/divergence", "nats", "`distill.divergence` of the two distributions", "as the loss"),
    ),
    "Environments": (
        _M("env/episodes", "episodes", "Episodes begun in training", _WITHIN_STEP),
        _M("env/steps", "responses", "Responses given to environments", _WITHIN_STEP),
        _M("env/restarts", "processes", "Processes that ended or were killed, and were started again", _WITHIN_STEP),
        _M("env/timeouts", "calls", "Calls or starts that took too long", _WITHIN_STEP),
        _M("env/replayed", "episodes", "Episodes rebuilt in another process", _WITHIN_STEP),
        _M("env/recycled", "processes", "Processes replaced for their memory", _WITHIN_STEP),
        _M("env/discarded", "messages", "What processes sent that nobody had asked for", _WITHIN_STEP),
        _M("env/<tag>/success", "fraction", "Episodes that succeed, as their environment says", _ITS_EPISODES),
        _M("env/<tag>/*", "own", "What the environment counts, summed over an episode", _ITS_EPISODES),
        _M("role/<tag>/<role>/reward", "reward", "Reward of a role that the policy plays", _ITS_EPISODES),
        _M("role/<tag>/<role>/success", "fraction", "Episodes in which the role succeeds", _ITS_EPISODES),
        _M("role/<tag>/<role>/turns", "turns", "Turns of the role in an episode", _ITS_EPISODES),
    ),
    "Tools": (
        _M("tools/calls", "calls", "Calls that were made", _WITHIN_STEP),
        _M("tools/errors", "calls", "Calls that the policy was told an error of, those below included", _WITHIN_STEP),
        _M("tools/unknown", "calls", "Of tools that don't exist", _WITHIN_STEP),
        _M("tools/bad_calls", "calls", "That couldn't be read: broken JSON, no name", _WITHIN_STEP),
        _M("tools/bad_arguments", "calls", "With arguments that the schema doesn't allow", _WITHIN_STEP),
        _M("tools/refused", "calls", "That a tool refused, or that exceed `max_parallel_calls`", _WITHIN_STEP),
        _M("tools/timeouts", "calls", "That took longer than `timeout_s`", _WITHIN_STEP),
        _M("tools/failed", "calls", "In which a tool's own code raised", _WITHIN_STEP),
        _M("tools/cut_replies", "replies", "Longer than `max_reply_tokens`", _WITHIN_STEP),
        _M("tools/<tool>/*", "own", "What the tool itself counts", _WITHIN_STEP),
    ),
    "Agents": (
        _M("agent/episodes", "episodes", "That agents were started for, or took", _WITHIN_STEP),
        _M("agent/calls", "calls", "That the policy answered", _WITHIN_STEP),
        _M("agent/side_calls", "calls", "Beside the task (`side_calls`): answered, not trained", _WITHIN_STEP),
        _M("agent/spent", "episodes", "That ran out of `max_calls`, `max_tokens` or context", _WITHIN_STEP),
        _M("agent/never_called", "episodes", "Failed: the agent never called the model", _WITHIN_STEP),
        _M("agent/crashes", "episodes", "Failed: the agent ended otherwise than it should", _WITHIN_STEP),
        _M("agent/timeouts", "episodes", "Failed: it took over `timeout_s`", _WITHIN_STEP),
        _M(
            "agent/mismatch_<class>",
            "calls",
            "Histories that aren't what was sampled: `template`, `retokenised`, `dropped_thinking`, `edited`, "
            "`dropped_response`",
            _WITHIN_STEP,
        ),
    ),
    "Responses": (
        _M("response/length_mean", "tokens", "Length of a response", _RESPONSES),
        _M("response/length_max", "tokens", "Longest response", "max over trained responses"),
        _M("response/length_min", "tokens", "Shortest response", "min over trained responses"),
        _M("response/truncated_share", "fraction", "Responses cut off by the length limit", _RESPONSES),
        _M("prompt/length_mean", "tokens", "Length of a prompt", _RESPONSES),
        _M("prompt/length_max", "tokens", "Longest prompt", "max over trained responses"),
        _M("episode/turns_mean", "turns", "Turns of an episode (1 for RLVR)", _RESPONSES),
    ),
    "Groups and rollouts": (
        _M("group/zero_signal_share", "fraction", "Groups whose rewards are all equal: no gradient", _GROUPS),
        _M("group/reward_std_mean", "reward", "Spread of the reward inside a group", _GROUPS),
        _M("group/size_mean", "responses", "Responses of a group that are trained on", _GROUPS),
        _M("rollout/groups", "groups", "Groups trained on", "sum"),
        _M("rollout/responses", "responses", "Responses (episodes) trained on", "sum"),
        _M("rollout/rows", "rows", "Training rows: an episode has one for every context that began in it", "sum"),
        _M("rollout/filtered_groups", "groups", "Groups dropped by a filter", "sum"),
        _M("rollout/filtered_responses", "responses", "Responses left out by `response_filter_config`", "sum"),
        _M("rollout/unscored_responses", "responses", "Responses that no reward function scores (None)", "sum"),
        _M("rollout/unscored_groups", "groups", "Groups dropped since too few of their responses are scored", "sum"),
        _M("rollout/failed_groups", "groups", "Groups dropped for too few members", "sum"),
        _M("rollout/failed_episodes", "responses", "Episodes that failed, never trained on", "sum"),
        _M("rollout/failed_<status>", "responses", "Those of this status", "sum"),
        _M("rollout/no_room", "responses", "Episodes cut off because `sequence_length` left no room", "sum"),
        _M("rollout/surplus_episodes", "responses", "Redundant episodes that their group didn't need", "sum"),
        _M("rollout/aborted_requests", "requests", "Requests stopped because the batch was full", "sum"),
        _M("rollout/returned_prompts", "groups", "Unfinished groups put back for a later step", "sum"),
        _M("rollout/open_groups", "groups", "Groups in flight when the step had its batch, if ahead", "once a step"),
        _M("rollout/ready_groups", "groups", "Finished groups left for later steps, if ahead", "once a step"),
        _M("rollout/engine_restarts", "engines", "Engines that died and were replaced", "sum"),
        _M("rollout/resumed_responses", "responses", "On their way at the last weight update, went on", "sum"),
        _M("rollout/restarted_responses", "responses", "On their way at the last weight update, started over", "sum"),
        _M("rollout/discarded_tokens", "tokens", "Thrown away by responses that started over", "sum"),
        _M("rollout/reissued_requests", "requests", "Requests of dead engines that were given out again", "sum"),
        _M("rollout/masked_share", "fraction", "Responses masked out of the loss", _RESPONSES),
        _M("dropped/<reason>", "items", "What left the run; examples are in `dropped.jsonl`", "sum"),
    ),
    "Advantages": (
        _M("advantage/mean", "–", "Advantage before whitening and clipping", _TOKENS),
        _M("advantage/max", "–", "Largest", "max over action tokens"),
        _M("advantage/min", "–", "Smallest", "min over action tokens"),
        _M("advantage/zero_signal_share", "fraction", "Groups without a signal, as the estimator sees them", _GROUPS),
        _M("advantage/group_of_one_share", "fraction", "Responses alone in their group", _GROUPS),
        _M(
            "advantage/step_groups_of_one_share",
            "fraction",
            "States that one turn of the task's group met: no step advantage (`gigpo`)",
            "mean over states",
        ),
        _M("advantage/clipped_share", "fraction", "Advantages changed by `advantage_clip`", _TOKENS),
    ),
    "Actor": (
        _M("actor/loss", "–", "The whole loss", "global denominators, mean over optimizer steps"),
        _M("actor/pg_loss", "–", "Its policy-gradient term", _AS_LOSS),
        _M("actor/kl_loss", "nats", "Its KL term, before the coefficient", _AS_LOSS),
        _M("actor/kl_clamped_share", "fraction", "Tokens with a log-ratio to the reference beyond +-10", _LOSS_TOKENS),
        _M("actor/kl_token_max", "nats", "Largest KL term of a token, before the coefficient", "max over loss tokens"),
        _M("actor/entropy_loss", "nats", "Its entropy term, likewise", _AS_LOSS),
        _M("actor/sft_loss", "nats", "Its imitation term on positive samples, likewise", _AS_LOSS),
        _M("actor/entropy", "nats", "Entropy, estimated from the sampled tokens", _LOSS_TOKENS),
        _M("actor/ratio_mean", "–", "New over old probability", _LOSS_TOKENS),
        _M("actor/ratio_max", "–", "Its largest value", "max over loss tokens"),
        _M("actor/ratio_min", "–", "Its smallest value", "min over loss tokens"),
        _M("actor/ppo_kl", "nats", "KL from the old policy to the new one, estimated", _LOSS_TOKENS),
        _M("actor/clip_share", "fraction", "Tokens where the clip took the gradient away", _LOSS_TOKENS),
        _M("actor/clip_high_share", "fraction", "Of those, at the upper bound", _LOSS_TOKENS),
        _M("actor/sequence_mask_share", "fraction", "Tokens left out by `sequence_mask` (`ppo`)", _LOSS_TOKENS),
        _M("actor/cov_share", "fraction", "Tokens that `clip_cov` or `kl_cov` treats apart", _LOSS_TOKENS),
        _M("actor/dual_clip_share", "fraction", "Tokens at the dual-clip bound", _LOSS_TOKENS),
        _M("actor/loss_weight_mean", "–", "Constant factor of the token's loss (`cispo`, `tis`, `topr`)", _LOSS_TOKENS),
        _M("actor/behave_weight_mean", "–", "Old over sampling probability (`decoupled_ppo`)", _LOSS_TOKENS),
        _M("actor/kimi15_penalty_mean", "–", "Its squared log-ratio term (`kimi15`)", _LOSS_TOKENS),
        _M("actor/grad_norm", "–", "Gradient norm before the clip", _OPTIMIZER_STEPS),
        _M("actor/lr", "–", "Learning rate", _OPTIMIZER_STEPS),
        _M("actor/optimizer_steps", "steps", "Optimizer steps taken", "sum"),
        _M("actor/skipped_steps", "steps", "Optimizer steps left out for a non-finite gradient", "sum"),
        _M("actor/nonfinite_rows", "rows", "Rows a step left out: -inf or NaN at a loss token; only if any", "sum"),
        _M("actor/loss_tokens", "tokens", "Tokens that counted in the loss", "sum"),
        _M(
            "actor/shared_tokens",
            "tokens",
            "Tokens not computed again for each row that begins with them; only if any",
            "sum",
        ),
    ),
    "Critic": (
        _M("critic/loss", "–", "Value loss", "global denominators, mean over optimizer steps"),
        _M("critic/value_mean", "–", "Predicted value", _LOSS_TOKENS),
        _M("critic/explained_variance", "fraction", "1 - Var(R - V) / Var(R) before the update", "over action tokens"),
        _M("critic/clip_share", "fraction", "Values at the clip", _LOSS_TOKENS),
        _M("critic/grad_norm", "–", "Gradient norm before the clip", _OPTIMIZER_STEPS),
        _M("critic/lr", "–", "Learning rate", _OPTIMIZER_STEPS),
        _M("critic/optimizer_steps", "steps", "Optimizer steps taken", "sum"),
        _M("critic/skipped_steps", "steps", "Optimizer steps left out for a non-finite gradient", "sum"),
        _M("critic/nonfinite_rows", "rows", "Rows a step left out: inf or NaN at a loss token; only if any", "sum"),
        _M("critic/loss_tokens", "tokens", "Tokens that counted in the loss", "sum"),
        _M(
            "critic/shared_tokens",
            "tokens",
            "Tokens not computed again for each row that begins with them; only if any",
            "sum",
        ),
    ),
    "Divergences": (
        _M("mismatch/kl", "nats", "KL from the sampling engine to the trainer, same weights", _SAMPLED),
        _M("mismatch/ratio_max", "–", "Largest trainer-to-engine ratio", "max over the same tokens"),
        _M("mismatch/ratio_min", "–", "Smallest", "min over the same tokens"),
        _M("mismatch/abs_log_ratio_mean", "nats", "Difference of the log-probs", _SAMPLED),
        _M("mismatch/chi2", "–", "Chi-squared, mean of ratio^2 - 1: the noise of weights without a cap", _SAMPLED),
        _M("mismatch/above_2_share", "fraction", "Tokens with a ratio above 2", _SAMPLED),
        _M("mismatch/below_half_share", "fraction", "Tokens with a ratio below 1/2", _SAMPLED),
        _M(
            "mismatch/kl_k1",
            "nats",
            "The same KL by the mean difference of the log-probs: noisier, may be below 0",
            _SAMPLED,
        ),
        _M("mismatch/ppl_train", "–", "Perplexity of a response's tokens under the trainer", _ITS_ROWS),
        _M("mismatch/ppl_infer", "–", "Likewise under the engine that sampled them", _ITS_ROWS),
        _M("mismatch/ppl_ratio", "–", "The trainer's perplexity of a response to the engine's", _ITS_ROWS),
        _M("mismatch/log_ppl_abs_diff", "nats", "Difference of the logarithms of the two", _ITS_ROWS),
        _M("mismatch/all_kl", "nats", "KL from the sampling policy to the trainer's, old weights and all", _TOKENS),
        _M("mismatch/all_ratio_max", "–", "Largest trainer-to-sampler ratio, likewise", "max over action tokens"),
        _M("mismatch/all_ratio_min", "–", "Smallest, likewise", "min over action tokens"),
        _M("mismatch/all_abs_log_ratio_mean", "nats", "Difference of the log-probs, likewise", _TOKENS),
        _M("mismatch/all_chi2", "–", "Chi-squared, likewise", _TOKENS),
        _M("mismatch/all_above_2_share", "fraction", "Tokens with a ratio above 2, likewise", _TOKENS),
        _M("mismatch/all_below_half_share", "fraction", "Tokens with a ratio below 1/2, likewise", _TOKENS),
        _M("mismatch/all_kl_k1", "nats", "As `mismatch/kl_k1`, likewise", _TOKENS),
        _M("mismatch/all_ppl_train", "–", "As `mismatch/ppl_train`, of all tokens", _ROWS),
        _M("mismatch/all_ppl_infer", "–", "Likewise under the policies that sampled them", _ROWS),
        _M("mismatch/all_ppl_ratio", "–", "The trainer's perplexity to the sampler's", _ROWS),
        _M("mismatch/all_log_ppl_abs_diff", "nats", "Difference of the logarithms of the two", _ROWS),
        _M("mismatch/weight_mean", "–", "Train/infer importance weight", _TOKENS),
        _M("mismatch/weight_capped_share", "fraction", "Weights at their upper or lower bound", _TOKENS),
        _M("mismatch/undefined_weights", "tokens", "Tokens of weight 0: a ratio 0 / 0, or of 0 and infinity", "sum"),
        _M("mismatch/ess", "fraction", "Effective sample size of the weights; a rejected token has 0", _VALUE),
        _M("mismatch/rejected_share", "fraction", "Tokens rejected by a filter", _TOKENS),
        _M("mismatch/rejected_row_share", "fraction", "Responses rejected as a whole", _RESPONSES),
        _M("staleness/mean", "updates", "Weight updates between a token's weights and the step's", _TOKENS),
        _M("staleness/max", "updates", "The oldest token's", "max over action tokens"),
        _M("staleness/share_0", "fraction", "Tokens that the step's own weights sampled", _TOKENS),
        _M("staleness/share_1", "fraction", "Tokens sampled one update before", _TOKENS),
        _M("staleness/share_2_or_more", "fraction", "Tokens older than that", _TOKENS),
        _M("kl/reference", "nats", "KL from the policy to the reference, before the update", _TOKENS),
        _M("kl/clamped_share", "fraction", "Tokens with a log-ratio to the reference beyond +-10", _TOKENS),
        _M("kl/token_max", "nats", "Largest KL of one token, before the coefficient", "max over action tokens"),
        _M("kl/coef", "–", "Coefficient of the KL term in the reward", _VALUE),
    ),
    "Fine-tuning": (
        _M("sft/loss", "nats", "Negative log-likelihood of a taught token", "mean over taught tokens"),
        _M("sft/tokens", "tokens", "Taught tokens of the step", "sum"),
        _M("sft/rows", "rows", "Rows of the step", _VALUE),
        _M("sft/row_length_mean", "tokens", "Length of a row, prompt and all", "mean over rows"),
        _M("sft/epoch", "passes", "Passes over the rows so far, in fractions", _VALUE),
    ),
    "Preferences": (
        _M("preference/loss", "–", "Loss of a pair, or of a labelled row", _PAIRS),
        _M("preference/accuracy", "fraction", "Chosen has the higher reward (KTO: right side of the KL)", _PAIRS),
        _M("preference/margin", "reward", "Reward of the chosen response less that of the rejected one", _PAIRS),
        _M("preference/chosen_reward", "reward", "`beta` x what the loss compares; or the model's score", _PAIRS),
        _M("preference/rejected_reward", "reward", "Likewise of rejected, or undesirable, responses", _PAIRS),
        _M("preference/chosen_logprob", "nats", "Log-probability of a chosen, or desirable, response", _PAIRS),
        _M("preference/rejected_logprob", "nats", "Likewise of rejected, or undesirable, responses", _PAIRS),
        _M("preference/kl", "nats", "KTO: KL from the reference, that rewards are compared with", _VALUE),
        _M("preference/score", "reward", "Score of a reward model that learns scores", _PAIRS),
        _M("preference/tokens", "tokens", "Response tokens of the step (of a reward model: sequences)", "sum"),
        _M("preference/rows", "rows", "Pairs, or rows, of the step", _VALUE),
        _M("preference/row_length_mean", "tokens", "Length of a sequence, prompt and all", "mean over sequences"),
        _M("preference/epoch", "passes", "Passes over the rows so far, in fractions", _VALUE),
    ),
    "Validation": (
        _M(
            "val/accuracy",
            "fraction",
            "Right answers, episodes that succeed, or pairs in order",
            "mean over tasks of all domains",
        ),
        _M("val/reward", "reward", "Reward of whatever was scored, in all domains", "mean over responses"),
        _M("val/loss", "nats", "Loss of a held-out token (fine-tuning), pair or labelled row", _HELD_OUT),
        _M("val/margin", "reward", "As `preference/margin`, held out; likewise the next ones", _PAIRS),
        _M("val/chosen_reward", "reward", "As `preference/chosen_reward`", _PAIRS),
        _M("val/rejected_reward", "reward", "As `preference/rejected_reward`", _PAIRS),
        _M("val/chosen_logprob", "nats", "As `preference/chosen_logprob`", _PAIRS),
        _M("val/rejected_logprob", "nats", "As `preference/rejected_logprob`", _PAIRS),
        _M("val/kl", "nats", "As `preference/kl`", _PAIRS),
        _M("val/score", "reward", "As `preference/score`", _PAIRS),
        _M("val/perplexity", "–", "Its exponential", "exp of `val/loss`"),
        _M("val/token_accuracy", "fraction", "Held-out tokens that were the likeliest ones", _HELD_OUT),
        _M("val/tokens", "tokens", "Held-out tokens", "sum"),
        _M("val/responses", "responses", "Validation responses", "sum"),
        _M("val/env_restarts", "processes", "Environment processes that were started again meanwhile", "sum"),
        _M("val/env_timeouts", "calls", "Calls of environments that took too long meanwhile", "sum"),
        _M("val/agent/*", "own", "As `agent/*`, of the validation's episodes", "sum"),
        _M("val/<domain>/accuracy", "fraction", "Right answers in one domain; episodes that succeed", _TASKS),
        _M("val/<domain>/reward", "reward", "Reward in one domain", _ITS_RESPONSES),
        _M("val/<domain>/accuracy_spread", "fraction", "Standard error of the accuracy, by the bootstrap", _VALUE),
        _M("val/accuracy_spread", "fraction", "Likewise over all tasks", _VALUE),
        _M("val/<domain>/best_at_<k>", "reward", "Highest reward of k responses, exact over all draws of k", _TASKS),
        _M("val/<domain>/worst_at_<k>", "reward", "Lowest reward of k responses", _TASKS),
        _M("val/<domain>/pass_at_<k>", "fraction", "Tasks solved in k responses, unbiased", _TASKS),
        _M("val/<domain>/maj_at_<k>", "fraction", "The answer that most of k responses state is right", _TASKS),
        _M("val/<domain>/maj_at_<k>_spread", "fraction", "Its standard error, by the bootstrap", _VALUE),
        _M("val/<domain>/length_mean", "tokens", "Length of a response", _ITS_RESPONSES),
        _M("val/<domain>/turns_mean", "turns", "Turns of an episode", _ITS_RESPONSES),
        _M("val/<tag>/role/<role>/reward", "reward", "Reward of a role that the policy plays", _ITS_EPISODES),
        _M("val/<tag>/role/<role>/success", "fraction", "Episodes in which the role succeeds", _ITS_EPISODES),
        _M("val/<tag>/role/<role>/turns", "turns", "Turns of the role in an episode", _ITS_EPISODES),
        _M("val/<domain>/failed", "responses", "Responses without a score", "sum"),
    ),
    "Amounts": (
        _M("sync/gigabytes", "GB", "Weights that left the trainer; each engine got as many", _VALUE),
        _M("sync/delta_share", "fraction", "That of the bytes of all weights, with `delta_weight_sync`", _VALUE),
        _M("sync/gathered_gigabytes", "GB", "Weights gathered from the trainer's ranks; 0 on one rank", _VALUE),
        _M("sync/copied_gigabytes", "GB", "Host copies between the trainer's tensors and an engine's model", _VALUE),
        _M("tokens/prompt", "tokens", "Prompt tokens of the trained responses", "sum"),
        _M("tokens/response", "tokens", "Response tokens trained on", "sum"),
        _M("tokens/read", "tokens", "Tokens of the rows of a step, prompts too (fine-tuning)", "sum"),
        _M("data/rows", "rows", "Rows that are trained on (fine-tuning)", "value at the start"),
        _M("data/rows_held_out", "rows", "Rows kept for validation", "value at the start"),
        _M("data/rows_filtered", "rows", "Rows left out for their length", "value at the start"),
        _M("data/rows_truncated", "rows", "Rows cut to the length limit", "value at the start"),
        _M("data/rows_untaught", "rows", "Rows left out because nothing to learn was left", "value at the start"),
        _M("data/row_length_mean", "tokens", "Length of a row", "mean over all rows"),
        _M("data/row_length_max", "tokens", "Longest row", "max over all rows"),
        _M("data/taught_tokens", "tokens", "Taught tokens of all rows", "value at the start"),
        _M("data/prompts", "rows", "Prompts in the data", "value at the start"),
        _M("data/prompts_filtered", "rows", "Rows left out for their length", "value at the start"),
        _M("data/prompts_truncated", "rows", "Prompts cut to the length limit", "value at the start"),
        _M("data/rows_bad", "rows", "Rows that can't be used and were left out", "value at the start"),
        _M("data/rows_duplicate", "rows", "Rows left out because they repeat a prompt", "value at the start"),
        _M("data/success_rate", "fraction", "Running success rate of the rows played so far", "mean over these rows"),
        _M("data/passed_over", "rows", "Rows that the curriculum by success has passed over", "value so far"),
        _M("data/prompt_length_mean", "tokens", "Length of a prompt", "mean over all prompts"),
        _M("data/prompt_length_max", "tokens", "Longest prompt", "max over all prompts"),
        _M("data/<domain>/share", "fraction", "Share of a domain in the batch", _RESPONSES),
    ),
    "Time and machine (differ between equal runs)": (
        _M("time/<span>", "s", "Seconds in a span and the spans inside; `time/step`: the step", _WITHIN_STEP),
        _M("time/<span>/self", "s", "Seconds in a span without the spans inside", _WITHIN_STEP),
        _M("time/controller", "s", "Part of the step not spent waiting for workers", _WITHIN_STEP),
        _M("time/controller_share", "fraction", "The same, of `time/step`", _VALUE),
        _M("throughput/tokens_per_second", "tokens/s", "Trained tokens, prompts too, per step time", _VALUE),
        _M("throughput/generated_per_second", "tokens/s", "Response tokens per generation time", _VALUE),
        _M("throughput/responses_per_second", "1/s", "Trained responses, per step time", _VALUE),
        _M("throughput/sync_gb_per_second", "GB/s", "Weights to each engine, per time of the sync", _VALUE),
        _M("memory/host_gib", "GiB", "Resident memory of the controller", _VALUE),
    ),
    "Judge": (
        _M("judge/responses", "responses", "Responses that were to be graded", _WITHIN_STEP),
        _M("judge/requests", "requests", "Requests made for them", _WITHIN_STEP),
        _M("judge/cache_hits", "responses", "Responses whose answer was there, or under way", _WITHIN_STEP),
        _M("judge/retries", "requests", "Further tries of requests", _WITHIN_STEP),
        _M("judge/unparsed", "responses", "Answers that state no score", _WITHIN_STEP),
        _M("judge/failures", "responses", "Responses without a score", _WITHIN_STEP),
        _M("judge/prompt_tokens", "tokens", "Tokens of requests, as the judge reports them", _WITHIN_STEP),
        _M("judge/completion_tokens", "tokens", "Tokens of its answers", _WITHIN_STEP),
        _M("judge/cost", "own", "Price of both, by `judge.input_cost` and `judge.output_cost`", _WITHIN_STEP),
    ),
    "Your own": (_M("custom/*", "own", "Of your own loss or filter", "as you merge them"),),
}

TIMING_PREFIXES = ("time/", "throughput/", "memory/", "judge/")
"""Names that differ between two runs that computed the same; a resumed run's judge starts with an empty cache."""


def is_timing(name: str) -> bool:
    """Return True for a metric that depends on the machine; comparisons of runs leave it out."""
    return name.startswith(TIMING_PREFIXES)


def undocumented(names: Iterable[str]) -> list[str]:
    """Return those of `names` that the table doesn't have."""
    return [name for name in names if not _matches(name)]


def check_names(names: Iterable[str]) -> None:
    """Assert that every name is in the table; the message gives the nearest ones."""
    unknown = undocumented(names)
    if not unknown:
        return
    patterns = [metric.pattern for group in GROUPS.values() for metric in group]
    near = difflib.get_close_matches(unknown[0], patterns, n=3, cutoff=0.5)
    raise AssertionError(
        f"undocumented metric names {unknown}; nearest to {unknown[0]!r}: {near or 'none'}. "
        "Add a row to roll/tracking/names.py, or log under custom/"
    )


_MEANINGS = {
    "step": "Latest step of training on record",
    "last_row_timestamp_seconds": "When it was written, in seconds since 1970",
}
"""Of what trackers add by themselves."""


@lru_cache(maxsize=4096)
def meaning(name: str) -> str:
    """Return what a metric means, with its unit in brackets; empty for one that the table doesn't have."""
    for group in GROUPS.values():
        for metric in group:
            if re.fullmatch(_regex(metric.pattern), name):
                return f"{metric.meaning} [{metric.unit}]"
    return _MEANINGS.get(name, "")


def _regex(pattern: str) -> str:
    parts = re.split(r"(<\w+>|\*$)", pattern)
    return "".join(".+" if p == "*" else "[^/]+" if p.startswith("<") else re.escape(p) for p in parts)


@lru_cache(maxsize=1)
def _all_names() -> re.Pattern[str]:
    return re.compile("|".join(_regex(metric.pattern) for group in GROUPS.values() for metric in group))


@lru_cache(maxsize=4096)
def _matches(name: str) -> bool:
    return _all_names().fullmatch(name) is not None
