"""What a token costs between vLLM's engine core and a finished response, without a model.

    OMP_NUM_THREADS=1 python benchmarks/engine_frontend.py

Made-up outputs of the engine core go through vLLM's own `OutputProcessor` and its queues, into `VllmBackend`'s reading
of log-probs and `InFlightResponse.record`. `one by one` is what a response with stop strings takes, `whole` what every
other does. Ways take turns; figures are processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def outputs_of_a_pass(streams: int, number: int, *, last: bool) -> list[Any]:
    """Return what the engine core sends after a pass: a token of every stream."""
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    outputs = []
    for stream in range(streams):
        token = 1000 + (stream * 31 + number) % 50_000
        logprobs = LogprobsLists(np.array([[token]]), np.array([[-0.5]], dtype=np.float32), np.array([1]), None)
        end = FinishReason.LENGTH if last else None
        name = f"r{stream}"
        outputs.append(
            EngineCoreOutput(request_id=name, new_token_ids=[token], new_logprobs=logprobs, finish_reason=end)
        )
    return outputs


async def read(streams: int, tokens: int, *, whole: bool) -> tuple[float, int]:
    """Return the processor seconds of `streams` responses of `tokens` tokens, and the tokens that were recorded."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    from roll.strategies.base import Request, SamplingParams
    from roll.strategies.engines.responses import InFlightResponse, ResponseRules
    from roll.strategies.engines.vllm.vllm_engine import drawn_logprobs

    rules = ResponseRules(frozenset({0}), 1 << 20)
    kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
    params = VllmParams(n=1, logprobs=0, flat_logprobs=True, detokenize=False, output_kind=kind, max_tokens=tokens + 1)
    processor, queues, responses = OutputProcessor(None, log_stats=False), [], []
    for stream in range(streams):
        name = f"r{stream}"
        request = EngineCoreRequest(
            request_id=name, prompt_token_ids=[5] * 300, mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None, external_req_id=name,
        )  # fmt: skip
        queues.append(RequestOutputCollector(kind, name))
        processor.add_request(request, None, queue=queues[-1])
        asked = SamplingParams(max_new_tokens=tokens + 1)
        responses.append(InFlightResponse(Request(id=name, prompt_ids=(5,) * 300, params=asked, seed=1)))

    async def consume(stream: int) -> None:
        while True:
            output = queues[stream].get_nowait() or await queues[stream].get()
            (part,) = output.outputs
            responses[stream].record(part.token_ids, drawn_logprobs(part.token_ids, part.logprobs), 1, rules)
            if output.finished:
                return

    tasks = [asyncio.create_task(consume(stream)) for stream in range(streams)]
    await asyncio.sleep(0)
    seconds = 0.0
    for number in range(tokens):
        made = outputs_of_a_pass(streams, number, last=number == tokens - 1)
        begun = time.process_time()
        processor.process_outputs(made)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seconds += time.process_time() - begun
    begun = time.process_time()
    await asyncio.gather(*tasks)
    return seconds + time.process_time() - begun, sum(len(response.tokens) for response in responses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=512, help="responses that are decoded at once")
    parser.add_argument("--tokens", type=int, default=60, help="of each")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    costs: dict[str, list[float]] = {"one by one": [], "whole": []}
    count = args.streams * args.tokens
    for round_ in range(args.rounds + 1):  # the first is a warm-up
        for name in sorted(costs, reverse=bool(round_ % 2)):
            seconds, recorded = asyncio.run(read(args.streams, args.tokens, whole=name == "whole"))
            assert recorded == count, f"{recorded} of {count} tokens came out"
            if round_:
                costs[name].append(seconds / count * 1e6)
    print(f"{args.streams} streams of {args.tokens} tokens, {args.rounds} rounds\n")
    print("| tokens come | processor us per token, median | of the rounds |\n|---|---|---|")
    for name, each in costs.items():
        print(f"| {name} | {median(each):.1f} | {min(each):.1f} to {max(each):.1f} |")


if __name__ == "__main__":
    main()
