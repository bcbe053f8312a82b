"""Policy optimisation: rewards -> advantages -> loss. Shared by every pipeline that trains a policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.configs.catalog.entries import OWN_PATH, Entry
from roll.configs.catalog.estimator_table import ESTIMATORS, Estimator, estimator_of
from roll.configs.catalog.loss_table import LOSSES, Loss, loss_of
from roll.configs.catalog.stage_table import declared_in_source
from roll.configs.schema.acts_if import ActsIf, acting, needs
from roll.configs.schema.fields import args_by_name, args_of, named, number, one_or_many

NormLevel = Literal["batch", "group", "running"]
LossAggMode = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum", "prompt-mean"
]
KlPenalty = Literal["kl", "abs", "mse", "low_var_kl", "full"]
KlLoss = Literal["kl", "abs", "mse", "low_var_kl", "kl+", "abs+", "low_var_kl+", "full"]
_KL_NAMES = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
_KL_LOSS_NAMES = {**_KL_NAMES, "k1+": "kl+", "k2+": "mse", "mse+": "mse", "k3+": "low_var_kl+"}
_KL_PENALTY_NAMES = {
    **_KL_NAMES,
    **{f"{name}+": _KL_NAMES.get(name, name) for name in ("kl", "abs", "mse", "low_var_kl", *_KL_NAMES)},
}
"""A penalty has no gradient, so that `+` says nothing there."""

_FULL_KL = needs(
    "full_kl", words="with a KL term of type `full`", fix="use_kl_loss=true kl_loss_type=full, or remove it"
)
USES_CRITIC = needs("uses_critic", words="with `adv_estimator` gae", fix="adv_estimator=gae, or remove it")


def of_losses(*keys: str, **more: str) -> ActsIf:
    """Return the condition that the loss has an option which one of these keys gives."""
    readers = (name for name, loss in LOSSES.items() if {option.key for option in loss.options.values()} & {*keys})
    return needs("policy_loss", *readers, **more)


_BOUNDS_WEIGHTS = needs(
    "caps_weights", words="with `policy_loss` decoupled_ppo, or with `kl_loss_ratio` and `use_kl_loss`",
    fix="policy_loss=decoupled_ppo, or remove it",
)  # fmt: skip
_CLIPS = of_losses(
    "pg_clip_low", "pg_clip_high",
    fix="policy_loss=ppo, or remove it: cispo has cispo_epsilon_low and cispo_epsilon_high, gmpo policy_loss_args",
)  # fmt: skip
_ONE_CLIP = needs(
    "reads_pg_clip", words="where `pg_clip_low` or `pg_clip_high` is null", why="both say another range",
    fix="remove it",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainInferCorrection:
    """Correct for the difference between the sampler's and the trainer's probabilities of the same tokens.

    ratio = p_train / p_infer: p_train under the weights before the step, p_infer as sampled, be it that the engine
    computes otherwise, that it had older weights (`async_generation_ratio`), or both.
    """

    level: Literal["token", "segment", "geometric", "sequence"] = "token"
    """One ratio per token; per segment as the geometric mean (one response, or each of its pieces if the weights
    changed on the way); per row as the geometric mean; or per row as the product."""
    importance_upper: float | None = number(2.0, gt=0)
    """Multiply the loss of a token by min(ratio, this). null: no weight, only the filters below."""
    importance_lower: float = number(0.0, ge=0, acts_if=(needs("importance_upper"),))
    """Smallest weight."""
    importance_mean_one: bool = acting(False, needs("importance_upper"))
    """Divide the weights by their mean over the batch's tokens: the step is as large as without weights."""
    rejection: Literal["mask", "icepop"] = "mask"
    """What becomes of tokens that a filter rejects: `mask` takes them out of the loss and out of its denominators;
    `icepop` gives them weight 0 and leaves them in the denominators."""
    ratio_low: float | None = number(None, ge=0, lt=1)
    """Reject what has a ratio below this. null: off."""
    ratio_high: float | None = number(None, gt=1)
    """Reject what has a ratio above this. null: off."""
    difference_low: float | None = number(None, ge=-1, lt=0)
    """Reject what has a difference p_train - p_infer (mean over the level's unit) below this. null: off."""
    difference_high: float | None = number(None, gt=0, le=1)
    """Reject what has such a difference above this. null: off."""
    divergence: Literal["k2", "k3"] = "k3"
    """How the next two measure a token with log-ratio d: d^2 / 2, or exp(d) - 1 - d."""
    divergence_high: float | None = number(None, gt=0)
    """Reject what diverges by more than this: the mean of the level's unit, at level `sequence` the sum. null: off."""
    row_divergence_high: float | None = number(None, gt=0)
    """Reject rows with a token that diverges by more than this. null: off."""


@dataclass(frozen=True, kw_only=True)
class PfPpo:
    """Policy-filtration PPO: draw the training rows again according to their scores."""

    reweight_method: Literal["pow", "max_min", "max_random"] = "pow"
    """Weight of a row in the draw: |score|^weight_pow; 1 for the batch's best and worst scores, else 0; 0.4
    for the best, else 0.1."""
    weight_pow: float = number(2.0, gt=0)
    """Exponent of `pow`; the other methods have none."""


@dataclass(frozen=True, kw_only=True)
class OverlongShaping:
    """Soft penalty near the length limit (`max_new_tokens`, else `response_length`): 0 up to `buffer` tokens
    before it, linear to `-penalty` at it."""

    buffer: int = number(512, ge=1)
    """Tokens before the limit at which the penalty begins."""
    penalty: float = number(1.0, gt=0)
    """Penalty at the limit, subtracted from the score as a part of its own."""


@dataclass(frozen=True, kw_only=True)
class CosineLength:
    """A reward by correctness and length in place of the score (arXiv:2502.03373): from the first to the second number
    of `right` (scores above 0) or `wrong`, along half a cosine up to the length limit."""

    right: tuple[float, float] = (2.0, 1.0)
    """Reward of a right response of no tokens, and of one at the limit."""
    wrong: tuple[float, float] = (-10.0, 0.0)
    """Likewise of a wrong one, which may think longer."""
    exceeded: float = -10.0
    """Reward at the limit itself."""


@dataclass(frozen=True, kw_only=True)
class PolicyOptimisation:
    """How responses and scores become an update."""

    ppo_epochs: int = number(1, ge=1)
    """Passes over the responses of one step."""
    l2: float = number(0.0, ge=0)
    """Coefficient of the L2 pull of the actor's weights towards the reference, i.e. the weights it started
    from: l2 * (w - w_start) joins the gradient. 0: off. Keeps a copy of those weights."""
    gamma: float = number(1.0, ge=0, le=1)
    """Discount per action token, for `gae`, `vapo`, `reinforce`, `reinforce_plus_plus` and `optimal_token_baseline`."""
    lambd: float = number(0.95, ge=0, le=1)
    """Lambda of `gae`."""
    adv_estimator: str = named("grpo", args="adv_estimator_args")
    """gae, reinforce, reinforce_plus_plus, reinforce_plus_plus_baseline, grpo, dr_grpo, rloo, rloo_std, remax, opo,
    gpg, gdpo, pass_at_k, best_of_n, vapo, optimal_token_baseline; for environments also gigpo, step_reinforce; or a
    function of your own as `package.module:name` or `path/to/file.py:name`. With options: `{name: grpo, eps: 0.01}`.
    `gae` and `vapo` need a `critic`."""
    adv_estimator_args: dict[str, Any] = args_of("adv_estimator", ESTIMATORS)
    """Options of the estimator, see below; `adv_estimator: {name: ..., option: ...}` is short for both keys. One of
    your own gets them as keyword arguments."""
    stages: tuple[str, ...] = one_or_many(args="stage_args")
    """Stages of your own between rollouts and update, each as `package.module:name` or `path/to/file.py:name`: reward
    shaping, filters, masks, changes to advantages. With options: `{name: my.py:entropy_mask, share: 0.2}`. See
    docs/your_own_algorithm.md."""
    stage_args: dict[str, Any] = args_by_name({})
    """Options by stage; they are keyword arguments of the function or class."""
    reward_clip: float | None = number(None, gt=0)
    """Clamp normalised scores to +- this. null: off."""
    whiten_rewards: bool = False
    """Whiten the token rewards over all action tokens of the batch, before an estimator that reads them: `gae`,
    `reinforce`, `reinforce_plus_plus`."""
    whiten_advantages: bool = False
    """Whiten the advantages over all action tokens of the batch."""
    advantage_clip: float | None = number(None, gt=0)
    """Clamp advantages to +- this, last of all. null: off."""
    add_token_level_kl: bool = False
    """Subtract a KL penalty towards the reference from every token's reward. Needs a `reference`."""
    kl_penalty: KlPenalty = acting("kl", also=_KL_PENALTY_NAMES)
    """Estimator of that penalty: k1, |k1|, k2 (`mse`) or k3 (`low_var_kl`); `full` is no estimate but the KL of the two
    distributions over the whole vocabulary, or with `kl_top_k` a lower bound of it."""
    init_kl_coef: float = number(0.2, ge=0)
    """Coefficient of that penalty, or its first value when `target_kl` is set."""
    target_kl: float | None = number(None, gt=0, acts_if=(needs("add_token_level_kl"),))
    """Mean KL per token that the adaptive controller steers to, once per step. null: the coefficient stays."""
    kl_horizon: int = number(10_000, ge=1, acts_if=(needs("target_kl"),))
    """Responses over which the adaptive controller reacts."""
    use_kl_loss: bool = False
    """Add a KL term towards the reference to the loss. Needs a `reference`."""
    kl_loss_coef: float = number(0.001, ge=0)
    """Coefficient of that term."""
    kl_loss_type: KlLoss = acting("low_var_kl", also=_KL_LOSS_NAMES)
    """Estimator of that term, as for `kl_penalty`. With `+` it has the value of the estimator and the gradient of
    `mse`, which is unbiased (straight through); `full` has its own, at the states that were sampled."""
    kl_top_k: int | None = number(None, ge=1, acts_if=(_FULL_KL,))
    """Of `full`: compare the probabilities of the reference's likeliest tokens, this many, and of all others together.
    null: of every token, which takes 12 bytes per token of a row and entry of the vocabulary."""
    kl_loss_ratio: bool = True
    """Multiply that term, token by token, by the ratio p_train / p_sampled, whose gradient counts. It is bounded like
    the importance weight (`importance_upper` of `train_infer_correction`, else `decoupled_ppo_cap`). Without it the
    gradient isn't that of the KL for tokens that older weights sampled, with `low_var_kl` not even for fresh ones."""
    allow_both_kl: bool = False
    """Permit the KL in the reward and in the loss at once; without it the pair is refused as a likely mistake."""
    pg_clip: float = number(0.2, gt=0, lt=1, acts_if=(_CLIPS, _ONE_CLIP))
    """Clip range of the probability ratio, [1 - clip, 1 + clip]. With `gspo` use the order of 3e-4: its ratio is a
    geometric mean over the response. Other losses have ranges of their own."""
    pg_clip_low: float | None = number(None, gt=0, lt=1, acts_if=(_CLIPS,))
    """Lower range, if different. null: `pg_clip`."""
    pg_clip_high: float | None = number(None, gt=0, acts_if=(_CLIPS,))
    """Upper range, if different (clip-higher). null: `pg_clip`."""
    ratio_type: Literal["token", "segment"] = acting("token", of_losses("ratio_type"))
    """Probability ratio of `ppo` and `decoupled_ppo`: each token's, or for all tokens of a turn's response their
    geometric mean."""
    dual_clip_loss: bool = acting(False, of_losses("dual_clip_c"))
    """Bound the `ppo` loss of tokens with negative advantage at `dual_clip_c` times the advantage."""
    dual_clip_c: float = number(3.0, gt=1, acts_if=(needs("dual_clip_loss"),))
    """That bound."""
    loss_agg_mode: LossAggMode = "token-mean"
    """From token losses to one number: mean over the mini-batch's tokens; mean over rows of the token sum; of
    the token mean; of the token sum divided by `response_length` (what `dr_grpo` was published with); sum over the
    mini-batch's tokens; mean over prompts of the mean over the tokens of their responses."""
    policy_loss: str = named("ppo", args="policy_loss_args")
    """ppo, gspo, decoupled_ppo, cispo, topr, reinforce, tis, kimi15, sapo, gmpo, dppo, clip_cov, kl_cov; or a
    function of your own as `package.module:name` or `path/to/file.py:name`. With options:
    `{name: kimi15, tau: 0.1}`."""
    policy_loss_args: dict[str, Any] = args_of("policy_loss", LOSSES)
    """Options of the loss, see below; `policy_loss: {name: ..., option: ...}` is short for both keys. One of your own
    gets them as keyword arguments."""
    decoupled_ppo_cap: float | None = acting(5.0, _BOUNDS_WEIGHTS, idle=(None,), bounds={"gt": 0})
    """`decoupled_ppo`: largest weight p_old / p_sampled of a token; also the bound of `kl_loss_ratio`. null: no
    bound."""
    cispo_epsilon_low: float = number(1.0, gt=0, acts_if=(of_losses("cispo_epsilon_low"),))
    """`cispo`: lowest weight is 1 - this; 1 or more: no lower bound."""
    cispo_epsilon_high: float = number(0.28, gt=0, acts_if=(of_losses("cispo_epsilon_high"),))
    """`cispo`: highest weight is 1 + this."""
    topr_positive_weight: float = number(1.0, ge=0, acts_if=(of_losses("topr_positive_weight"),))
    """`topr`: factor on responses with advantage >= 0."""
    topr_negative_weight: float = number(1.0, ge=0, acts_if=(of_losses("topr_negative_weight"),))
    """`topr`: factor on responses with negative advantage."""
    topr_level: Literal["sequence", "token"] = acting("sequence", of_losses("topr_level"))
    """`topr`: whether the clamped ratio of negative responses is that of the whole response or of each token."""
    tis_lower_bound: float = number(0.0, ge=0, acts_if=(of_losses("tis_lower_bound"),))
    """`tis`: smallest importance weight."""
    tis_upper_bound: float = number(1.0, gt=0, acts_if=(of_losses("tis_upper_bound"),))
    """`tis`: largest importance weight."""
    kimi15_tau: float = number(0.1, ge=0, acts_if=(of_losses("kimi15_tau"),))
    """`kimi15`: half of this multiplies the squared log-ratio."""
    kimi15_level: Literal["sequence", "token"] = acting("sequence", of_losses("kimi15_level"))
    """`kimi15`: whether that log-ratio is the whole response's (the paper) or each token's."""
    sapo_tau_positive: float = number(1.0, gt=0, acts_if=(of_losses("sapo_tau_positive"),))
    """`sapo`: temperature of the soft gate for tokens with positive advantage."""
    sapo_tau_negative: float = number(1.05, gt=0, acts_if=(of_losses("sapo_tau_negative"),))
    """`sapo`: temperature of the soft gate for tokens with negative advantage."""
    entropy_loss_coef: float = number(0.0, ge=0)
    """Entropy bonus. 0: off, and no gradient through the entropy."""
    rl_loss_coef: float = number(1.0, ge=0)
    """Factor on the policy loss."""
    sft_loss_coef: float = number(0.0, ge=0)
    """Negative log-likelihood of responses with positive advantage, added to the loss. 0: off."""
    value_clip: float | None = number(0.2, gt=0)
    """How far the critic may move from its old value before the loss stops pulling. null: plain squared error."""
    critic_warmup: int = number(0, ge=0, acts_if=(USES_CRITIC,))
    """First steps in which only the critic trains. 0: none."""
    difficulty_loss_weight: bool = False
    """Weigh rows by how rarely their group solves the task: 2 if never to 0.5 if always, then mean 1."""
    length_loss_weight: bool = False
    """Weigh rows by how short they are: 1.5 for the batch's shortest to 0.5 for its longest, then mean 1."""
    add_len_reward: bool = False
    """Add a reward in [-0.5, 0.5] for being short within the group; wrong answers only ever lose by it."""
    max_len_mask: bool = False
    """Leave responses cut off at the length limit out of the loss."""
    difficulty_mask: bool = False
    """Leave groups out of the loss whose mean score isn't between the two thresholds."""
    difficulty_low_threshold: float = acting(0.1, needs("difficulty_mask"))
    """Groups up to this mean score are left out."""
    difficulty_high_threshold: float = acting(0.95, needs("difficulty_mask"))
    """Groups from this mean score on are left out."""
    error_max_len_clip: bool = False
    """Leave wrong answers (score <= 0) of `error_max_len_threshold` tokens or more out of the loss."""
    error_max_len_threshold: int | None = number(None, ge=1, acts_if=(needs("error_max_len_clip"),))
    """That length. Required by `error_max_len_clip`."""
    train_infer_correction: TrainInferCorrection | None = None
    """Importance weights and rejection filters between sampler and trainer. null: none, the mismatch is only
    measured."""
    allow_uncorrected_async: bool = acting(
        False, needs("async_generation_ratio", fix="async_generation_ratio=1, or remove it")
    )
    """Permit `async_generation_ratio` above 0 without `train_infer_correction` and without a `policy_loss` made for it
    (decoupled_ppo, tis, topr, cispo): only the loss's own clip then knows that samples are of older weights."""
    pf_ppo: PfPpo | None = None
    """Draw training rows again by score. null: off."""

    @property
    def clip_low(self) -> float:
        """Lower clip range."""
        return self.pg_clip if self.pg_clip_low is None else self.pg_clip_low

    @property
    def clip_high(self) -> float:
        """Upper clip range."""
        return self.pg_clip if self.pg_clip_high is None else self.pg_clip_high

    @property
    def reads_pg_clip(self) -> bool:
        """Return whether `pg_clip` is a bound of the range."""
        return self.pg_clip_low is None or self.pg_clip_high is None

    @property
    def caps_weights(self) -> bool:
        """Return whether something reads `decoupled_ppo_cap`."""
        return "behave_cap" in self.loss.options or (self.use_kl_loss and self.kl_loss_ratio)

    @property
    def dual_clip(self) -> float | None:
        """Return the bound of the dual clip, None where it is off."""
        return self.dual_clip_c if self.dual_clip_loss else None

    @property
    def reward_mean_over(self) -> NormLevel | None:
        """Over what the subtracted mean score is taken; None: nothing is subtracted."""
        return None

    @property
    def reward_std_over(self) -> NormLevel | None:
        """Over what the dividing standard deviation is taken; None: no division."""
        return None

    @property
    def cosine_length(self) -> CosineLength | None:
        """Reward by length, where a pipeline has one."""
        return None

    @property
    def overlong_shaping(self) -> OverlongShaping | None:
        """Soft penalty near the length limit of a response; None: off."""
        return None

    @property
    def stage_needs(self) -> dict[str, tuple[str, ...]]:
        """Return what each stage of the user's own says that it needs, by its path."""
        declared = {path: declared_in_source(path) for path in self.stages if OWN_PATH.match(path)}
        return {path: own.needs for path, own in declared.items() if own is not None}

    @property
    def model_needs(self) -> tuple[str, ...]:
        """Return what the estimator and stages of the user's own need."""
        return (*self.estimator.needs, *(name for needed in self.stage_needs.values() for name in needed))

    @property
    def uses_reference(self) -> bool:
        """Return whether something reads reference log-probs: a KL term, or a stage of the user's own."""
        in_reward = self.add_token_level_kl and self.init_kl_coef > 0
        return in_reward or (self.use_kl_loss and self.kl_loss_coef > 0) or "ref_logprobs" in self.model_needs

    @property
    def full_kl(self) -> bool:
        """Return whether a KL term reads whole distributions."""
        return self.full_kl_penalty or self.full_kl_loss

    @property
    def full_kl_penalty(self) -> bool:
        """Return whether that in the reward does."""
        return self.add_token_level_kl and self.init_kl_coef > 0 and self.kl_penalty == "full"

    @property
    def full_kl_loss(self) -> bool:
        """Return whether that in the loss does."""
        return self.use_kl_loss and self.kl_loss_coef > 0 and self.kl_loss_type == "full"

    @property
    def uses_critic(self) -> bool:
        """Return whether the estimator, or a stage of the user's own, reads values."""
        return "values" in self.model_needs

    @property
    def estimator(self) -> Estimator:
        """Return what the catalog says of `adv_estimator`."""
        return estimator_of(self.adv_estimator)

    @property
    def loss(self) -> Loss:
        """Return what the catalog says of `policy_loss`."""
        return loss_of(self.policy_loss)

    @property
    def estimator_options(self) -> dict[str, Any]:
        """Return the options in force: those written in `adv_estimator_args`, and those that keys of their own give."""
        return {**self._from_keys(self.estimator), **self.adv_estimator_args}

    @property
    def loss_options(self) -> dict[str, Any]:
        """Return the options in force: those written in `policy_loss_args`, and those that keys of their own give."""
        return {**self._from_keys(self.loss), **self.policy_loss_args}

    def _from_keys(self, entry: Entry) -> dict[str, Any]:
        options = entry.options.items()
        return {name: getattr(self, option.source or option.key) for name, option in options if option.key}
