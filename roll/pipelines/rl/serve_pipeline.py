"""The engines of a configuration behind the endpoint, without a pipeline around them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from roll.configs.catalog.strategy_table import is_lockstep
from roll.configs.schema.rlvr_config import RLVRConfig
from roll.configs.schema.run_config import RunConfig
from roll.distributed.cluster import Cluster
from roll.gateway.reading import ResponseReader, reads_effort
from roll.gateway.server import Gateway
from roll.gateway.serving import ServedModel
from roll.pipelines.rollouts.drivers import sampling_params
from roll.pipelines.run.clusters import start_clusters
from roll.pipelines.run.loop import prepare
from roll.pipelines.run.run_dtype import settled
from roll.pipelines.workers.infer_worker import ClusterEngines, InferWorker, engine_died
from roll.pipelines.workers.train_worker import resolved_model_args
from roll.rollout.agent import Agent
from roll.rollout.continuous_driver import ContinuousDriver
from roll.rollout.tool_forms import resolve_parser
from roll.strategies.training.pretrained import load_tokenizer

_DECODE_STEPS = 4
"""What a poll of a lockstep engine does at once: fewer than in training, so that new requests wait less."""
_POLL_SECONDS = 1.0


class Serving:
    """See the module docstring.

    Args:
        config: of a mere validation; its engines are started, nothing else of it.
        name: of the model, for clients.
        tool_parser: how calls are found in responses; `auto`: as the chat template writes them.
        thinking_tags: what stands between them is kept apart from the content; None: nothing is.
        max_new_tokens: of a response to a call that doesn't say.
        ignore_fields: of requests, that are left out where they would be refused.

    Raises:
        ValueError: there is no such tool parser, or the text of responses doesn't show the tags.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        name: str,
        tool_parser: str,
        thinking_tags: tuple[str, str] | None,
        max_new_tokens: int,
        ignore_fields: Collection[str],
    ) -> None:
        assert isinstance(config, RLVRConfig)
        config = settled(config)
        self._config, self._name, self._ignored = config, name, tuple(ignore_fields)
        tokenizer = load_tokenizer(resolved_model_args(config, "actor_train"))
        agent = Agent(tokenizer, variables=config.chat_template_kwargs)
        has_template = bool(getattr(tokenizer, "chat_template", None))
        self._chat = agent.chat
        tags = agent.thought_tags(thinking_tags)
        self._reading = ResponseReader(
            decode=lambda ids: agent.decode_response(ids, ()),
            token_text=lambda token: str(tokenizer.decode([token])),
            tool_parser=resolve_parser(tool_parser, tokenizer) if has_template else "",
            thinking_tags=tags,
            opened=agent.forced_think_prefix(tags),
            opened_with=lambda variables: agent.opening_tag(tags, variables),
            marks=agent.marks,
            takes_effort=reads_effort(agent.chat),
        )
        self._params = sampling_params(config.actor_infer.generating_args, max_new_tokens)

    def run(self, host: str, port: int, key: str, *, tell: Callable[[str], None]) -> None:
        """Serve until interrupted; `tell` prints a line. Raises what ends the engines."""
        prepare(self._config)
        with contextlib.ExitStack() as stack:
            clusters = stack.enter_context(start_clusters(self._config, total_steps=0))
            driver = stack.enter_context(contextlib.closing(self._driver(clusters.actor_infer)))
            driver.run(self._serve(driver, Gateway(host, port), key, tell))

    def _driver(self, cluster: Cluster) -> ContinuousDriver:
        config = self._config

        async def restart(rank: int) -> None:  # with the weights of the model's folder, which nobody has changed
            await cluster.call_rank_async(rank, InferWorker.restart)

        return ContinuousDriver(
            ClusterEngines(cluster),
            max_running_requests=config.max_running_requests,
            poll_budget=_DECODE_STEPS if is_lockstep(config.actor_infer.strategy_args.strategy_name) else _POLL_SECONDS,
            timeout=config.rpc_timeout,
            is_death=engine_died,
            restart=restart,
            max_restarts=config.engine_restarts,
        )

    async def _serve(self, driver: ContinuousDriver, gateway: Gateway, key: str, tell: Callable[[str], None]) -> None:
        model = ServedModel(
            driver,
            self._chat,
            self._reading,
            self._params,
            name=self._name,
            max_length=self._config.max_sequence_length,
            penalises=self._config.actor_infer.strategy_args.strategy_name != "sglang",
        )
        await gateway.start()
        try:
            address = gateway.open(model, key, ignore_fields=self._ignored, root=True)
            tell(f"serving {self._name} at {address}; ends with Ctrl-C")
            tell(f"  OPENAI_BASE_URL={address} ANTHROPIC_BASE_URL={gateway.address}")
            tell(f"  OPENAI_API_KEY={key} ANTHROPIC_API_KEY={key}")
            await model.until_failed()
        finally:
            # A task of its own: the one that waits here may be cancelled.
            await asyncio.shield(asyncio.ensure_future(gateway.stop()))
