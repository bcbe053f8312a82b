"""Faults that are planted on purpose, one at a time, and the tests that have to notice.

Each stands for a mistake that somebody could make: a sign, an off-by-one, a forgotten reduction, state that isn't
saved. `where` are the tests that reach the changed file, so that a fault costs seconds and not the whole suite.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Replace `old`, which stands exactly once in `function` of `file`, by `new`."""

    name: str
    file: str
    """Below roll/."""
    old: str
    new: str
    where: tuple[str, ...]
    """Test files or folders below tests/."""
    function: str = ""
    """Its qualified name; empty: the whole file."""


def _fault(name: str, file: str, old: str, new: str, *where: str) -> Fault:
    return Fault(name=name, file=file, old=old, new=new, where=where)


FAULTS = (
    _fault(
        "1 and '1' make the same key",
        "utils/seeding.py",
        'encoded = f"{type(part).__name__}:{part}".encode()',
        "encoded = str(part).encode()",
        "rollout/test_rollout_agent.py",
        "rollout/test_rollout_env_tasks.py",
        "types",
        "utils",
        "data/test_data_sampler.py",
    ),
    _fault(
        "bins overflow",
        "utils/partition.py",
        "if load + cost <= capacity",
        "if load <= capacity",
        "utils/test_utils_partition.py",
    ),
    _fault(
        "rows aren't reordered",
        "types/ragged.py",
        "return self.select([position[row_id] for row_id in row_ids])",
        "return self.select(range(len(position)))",
        "types/test_types_ragged.py",
    ),
    _fault(
        "the PPO ratio is upside down",
        "algorithms/losses.py",
        "ratio = bounded_exp(at_level(inputs.log_ratio, inputs.mask, ratio_type))",
        "ratio = bounded_exp(-at_level(inputs.log_ratio, inputs.mask, ratio_type))",
        "algorithms/test_algorithms_losses.py",
    ),
    _fault(
        "token and sequence means swap denominators",
        "algorithms/aggregation.py",
        'denominators.tokens if mode in ("token-mean", "prompt-mean") else denominators.sequences',
        'denominators.sequences if mode in ("token-mean", "prompt-mean") else denominators.tokens',
        "algorithms/test_algorithms_aggregation.py",
    ),
    _fault(
        "the full KL is the reverse one",
        "algorithms/kl.py",
        "return reverse_kl(logprobs, ref_logprobs,",
        "return reverse_kl(ref_logprobs, logprobs,",
        "algorithms/test_algorithms_kl.py",
    ),
    _fault(
        "a group's spread is the biased one",
        "algorithms/groups.py",
        "std = (squares / (size - 1).clamp(min=1)).sqrt()",
        "std = (squares / size).sqrt()",
        "algorithms/test_algorithms_groups.py",
        "algorithms/test_algorithms_advantages.py",
    ),
    _fault(
        "prompts that are put back come in reverse",
        "data/sampler.py",
        "self._returned.extendleft(reversed(tasks))",
        "self._returned.extendleft(tasks)",
        "data/test_data_sampler.py",
    ),
    _fault(
        "a checkpoint forgets unfinished prompts",
        "data/sampler.py",
        "for task in (*unfinished, *self._returned)]",
        "for task in self._returned]",
        "data/test_data_sampler.py",
    ),
    _fault(
        "GSM8K reads the first marked number",
        "rewards/gsm8k.py",
        '_, mark, rest = text.rpartition("####")',
        '_, mark, rest = text.partition("####")',
        "rewards/test_rewards_gsm8k.py",
    ),
    _fault(
        "falling into a hole ends nothing",
        "envs/frozen_lake.py",
        'over = sign in "GH"',
        'over = sign in "G"',
        "envs/test_envs_frozen_lake.py",
    ),
    _fault(
        "the first answer counts, not the last",
        "envs/wrappers.py",
        "return max(compiled.finditer(text), key=re.Match.start, default=None)",
        "return min(compiled.finditer(text), key=re.Match.start, default=None)",
        "envs/test_envs_wrappers.py",
    ),
    _fault(
        "results of ranks keep the order of ranks",
        "distributed/dispatch.py",
        "return joined if joined.row_ids == batch.row_ids else joined.reorder(batch.row_ids)",
        "return joined",
        "distributed/test_distributed_dispatch.py",
        "distributed/test_distributed_executors.py",
    ),
    _fault(
        "the learning rate is one step ahead",
        "strategies/training/optim.py",
        "self._lr_factor(self.steps)",
        "self._lr_factor(self.steps + 1)",
        "strategies/test_strategies_train.py",
        "pipelines/test_pipelines_keys_training.py",
    ),
    _fault(
        "each rank divides by its own sizes",
        "strategies/training/micro.py",
        "dist.all_reduce(sums, group=self.group)",
        "dist.barrier(group=self.group)",
        "strategies/test_fsdp2_ranks.py",
    ),
    _fault(
        "FSDP averages gradients",
        "strategies/hf/fsdp2.py",
        "(loss * self._info.world_size).backward()",
        "loss.backward()",
        "strategies/test_fsdp2_ranks.py",
    ),
    _fault(
        "tensor ranks hold each other's shards",
        "strategies/megatron/mapping.py",
        "first, last = rank * total // ranks, (rank + 1) * total // ranks",
        "first, last = (ranks - 1 - rank) * total // ranks, (ranks - rank) * total // ranks",
        "strategies/test_megatron_layouts.py",
    ),
    _fault(
        "tokens carry the first version",
        "strategies/engines/hf/hf_infer.py",
        "sequence.record([token], [logprob], self._version, self._rules)",
        "sequence.record([token], [logprob], [*sequence.versions, self._version][0], self._rules)",
        "strategies/test_engines_hf.py",
        "strategies/test_strategies_hf_infer.py",
    ),
    _fault(
        "the prompt takes no room",
        "strategies/engines/responses.py",
        "room = self.max_context - len(request.prompt_ids)",
        "room = self.max_context",
        "strategies/test_engines_hf.py",
        "strategies/test_strategies_hf_infer.py",
    ),
    _fault(
        "a token is scored by its own hidden state",
        "strategies/training/micro.py",
        "index=(position_of[flat] - int(ahead))",
        "index=position_of[flat]",
        "strategies/test_strategies_train.py",
        "strategies/test_hf_packing.py",
    ),
    _fault(
        "the oldest checkpoint is the latest",
        "checkpoint/store.py",
        "key=lambda checkpoint: checkpoint.serial, reverse=True)",
        "key=lambda checkpoint: checkpoint.serial)",
        "checkpoint/test_checkpoint_store.py",
    ),
    _fault(
        "one checkpoint too many is kept",
        "checkpoint/store.py",
        "there[self.max_to_keep :]",
        "there[self.max_to_keep + 1 :]",
        "checkpoint/test_checkpoint_store.py",
    ),
    _fault(
        "a resumed run's last row is lost",
        "tracking/steplines.py",
        'if record["step"] <= last_step]',
        'if record["step"] < last_step]',
        "tracking",
    ),
    _fault(
        "a user's mistake exits like a failure",
        "cli/exits.py",
        "return Exit.MISTAKE if mistake else Exit.FAILED",
        "return Exit.FAILED",
        "cli",
        "configs/test_configs_broken.py",
    ),
    _fault(
        "failed episodes fill a group",
        "rollout/episode_groups.py",
        "return self.trainable >= self.size or len(self.ended) == len(self.names)",
        "return len(self.ended) >= self.size",
        "rollout/test_rollout_redundancy.py",
    ),
    _fault(
        "engines never have room again",
        "rollout/routing.py",
        "self._change(rank, -1)",
        "self._change(rank, 0)",
        "rollout/test_rollout_continuous.py",
    ),
    _fault(
        "a conversation forgets what it was told",
        "rollout/turn_tree.py",
        "            number = self._parents[number]\n",
        "            number = None\n",
        "rollout/test_rollout_conversation.py",
    ),
    _fault(
        "a turn that branches share is trained in each of their rows",
        "pipelines/rollouts/assemble.py",
        "shown = [(played[k], False) for k in row.context]",
        "shown = [(played[k], True) for k in row.context]",
        "pipelines/test_pipelines_branches.py",
        "rollout/test_rollout_agent_fuzz.py",
    ),
    _fault(
        "branches are credited as one sequence",
        "pipelines/credit/turn_credit.py",
        "if len(set(continued)) == len(continued):",
        "if True:",
        "pipelines/test_pipelines_branches.py",
    ),
    _fault(
        "an edited response is continued as it was sampled",
        "rollout/message_graph.py",
        "named = repr((message.role, _content(message))).encode()",
        'named = repr((message.role, "" if message.role == "assistant" else _content(message))).encode()',
        "rollout/test_rollout_message_graph.py",
    ),
    _fault(
        "a response that was closed is closed again",
        "rollout/chat_format.py",
        "if closing and sampled and sampled[-1] in (ids[closing - 1], self._end_of_call, self._end_of_all):",
        "if False:",
        "rollout/test_rollout_message_graph.py",
        "rollout/test_rollout_chat.py",
    ),
    _fault(
        "engines go on with what nobody waits for",
        "rollout/lockstep_driver.py",
        "            self._cancelled.append(request_id)\n",
        "            pass\n",
        "rollout/test_rollout_parallel_calls.py",
    ),
    _fault(
        "only the role that acts is paid",
        "rollout/roles.py",
        "            for name in self._totals:\n                amount",
        "            for name in {role} & set(self._totals):\n                amount",
        "rollout/test_rollout_roles.py",
    ),
    _fault(
        "a role is told what the others were told",
        "rollout/conversation.py",
        "history = histories[role]",
        "history = histories[spec.roles[0] if spec.roles else role]",
        "rollout/test_rollout_roles.py",
    ),
    _fault(
        "the reward of a scripted player is the policy's",
        "envs/players.py",
        "role_rewards={role: value for role, value in paid.items() if role not in self._scripts},",
        "role_rewards=paid,",
        "envs/test_envs_players.py",
    ),
    _fault(
        "aborted groups lose their prompts",
        "rollout/async_scheduler.py",
        "self._source.put_back([group.task for group in self._open.values()])",
        "self._source.put_back([])",
        "rollout",
    ),
    _fault(
        "a run is resumed under another seed",
        "pipelines/run/checkpoints.py",
        'if "extra" in contents and state["seed"] != self._config.seed:',
        "if False:",
        "pipelines/test_pipelines_keys.py",
    ),
    _fault(
        "overlong responses are praised",
        "pipelines/credit/credit.py",
        "shaped = shaped + config.overlong_shaping.penalty * overlong",
        "shaped = shaped - config.overlong_shaping.penalty * overlong",
        "pipelines/test_pipelines_credit.py",
    ),
    _fault(
        "rl_loss_coef does nothing",
        "pipelines/workers/worker_losses.py",
        'combine.add("actor/pg_loss", pg, config.rl_loss_coef)',
        'combine.add("actor/pg_loss", pg, 1.0)',
        "pipelines/test_pipelines_losses.py",
        "pipelines/test_pipelines_keys_training.py",
    ),
    _fault(
        "any batch size fits",
        "configs/schema/batch_plan.py",
        "return self.rows % self.mini_batch == 0",
        "return True",
        "configs/test_configs_derived.py",
        "configs/test_configs_broken.py",
    ),
    _fault(
        "a shard's top tokens are numbered from 0",
        "strategies/megatron/vocab_parallel.py",
        "torch.cat([ids + self.start, ids.new_full(",
        "torch.cat([ids, ids.new_full(",
        "strategies/test_megatron_vocab_parallel.py",
    ),
    _fault(
        "the mass of all other tokens is forgotten",
        "algorithms/divergences.py",
        "return torch.cat([logprobs, _log1mexp(mass)], dim=-1)",
        "return torch.cat([logprobs, torch.full_like(mass, -50.0)], dim=-1)",
        "algorithms/test_algorithms_divergences.py",
    ),
    _fault(
        "an environment's error ends its process",
        "envs/env_pool.py",
        'case ("error", str(error)) if kind != "close":',
        'case ("error", str(error)) if kind == "open":',
        "envs/test_envs_pool.py",
        "envs/test_envs_pool_faults.py",
    ),
    _fault(
        "any key opens a session of the endpoint",
        "gateway/registry.py",
        "return opened if opened.has_key(key) else 401",
        "return opened",
        "gateway/test_gateway_hostile.py",
    ),
    _fault(
        "a field that the endpoint can't keep is dropped in silence",
        "gateway/protocols/body_fields.py",
        'if field.kind == "refused" and value not in field.neutral:',
        'if field.kind == "nothing":',
        "gateway/test_gateway_clients.py",
    ),
    _fault(
        "an agent may sample from another distribution",
        "gateway/session.py",
        "if asked is not None and asked != run:",
        "if asked is not None and asked == -2:",
        "gateway/test_gateway_session.py",
    ),
    _fault(
        "a call goes on when its client has left",
        "gateway/app.py",
        "            task.cancel()\n",
        "            pass\n",
        "gateway/test_gateway_hostile.py",
    ),
)
