"""What every inference engine promises, as functions over one running engine; see `CASES` at the end.

The model is tiny and random, in float32, so that every log-prob can be compared with a transformers forward. `CASES`
leave the engine idle and usable; the functions after them end it.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from dataclasses import dataclass, field

import psutil
import pytest
import torch

from roll.configs.catalog.transport_table import Lane
from roll.configs.schema.worker_config import ModelArgs
from roll.distributed.transports import Transfer, receive, send
from roll.distributed.transports.delta import Delta, WeightCopy
from roll.distributed.transports.rendezvous import RendezvousStore
from roll.distributed.transports.shared import SharedMemoryTransport
from roll.distributed.transports.shm_places import share
from roll.strategies.base import EngineDied, InferEngine, Request, SamplingParams
from roll.strategies.training.pretrained import load_causal_lm, load_tokenizer, named_tensors
from roll.utils.response_ends import response_ends
from roll.utils.seeding import stable_hash

TOLERANCE = 1e-5


@contextlib.contextmanager
def by_shared_memory(version, weights, copies=(None, None), delta=None):
    """The stream at an engine's end of a transfer whose other end is a thread of this process.

    `copies`: the ends' for a delta.
    """
    store = RendezvousStore("127.0.0.1")
    transfer = Transfer(version=version, name=uuid.uuid4().hex, bucket_bytes=100_000, timeout=300.0, checksum=True)
    transport = SharedMemoryTransport(transfer, store.address, (Lane((0,), (0,)),))
    sent = []
    sender = threading.Thread(target=lambda: sent.append(send(transport, weights, delta=delta, copy=copies[0])))
    sender.start()
    try:
        with receive(transport, [], 0, delta=delta, copy=copies[1]) as incoming:
            yield incoming
    finally:
        sender.join(60)
    assert incoming.summary() == sent[0].summary


@dataclass
class EngineUnderTest:
    """An engine, and a transformers model that has the same weights."""

    engine: InferEngine
    path: object
    max_context: int
    promises: frozenset[str] = frozenset({"seeds", "top_p", "top_k", "repetition_penalty", "combined"})
    """Which sampling options the engine follows exactly; `combined`: all at once, top-p after top-k."""
    loads_in_place: bool = True
    """Whether weights in shared memory are loaded without a copy: not by several workers, and not by SGLang."""
    number: int = 0
    weights: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Version -> weights, of the versions of the running case."""

    def __post_init__(self):
        args = ModelArgs(model_name_or_path=str(self.path))
        self.model, self.tokenizer = load_causal_lm(args, torch.float32), load_tokenizer(args)
        self.ends = response_ends(self.tokenizer)  # its own end of sequence, and what the chat template ends turns with
        self.remember()

    def remember(self):
        self.weights[self.engine.version] = {n: t.detach().clone() for n, t in named_tensors(self.model)}

    def request(self, name, prompt, *, seed=None, **params):
        return Request(
            id=name,
            prompt_ids=tuple(prompt),
            params=SamplingParams(**{"max_new_tokens": 8, "ignore_eos": True, **params}),
            seed=stable_hash(name if seed is None else seed, bits=128),
            order=(self.number,),
        )

    @property
    def moment(self):
        """A budget that lets running responses get some tokens."""
        return 3 if self.engine.lockstep else 0.05

    def collect(self, count, seconds=120.0):
        done, end = {}, time.monotonic() + seconds
        while len(done) < count:
            assert time.monotonic() < end, f"{len(done)} of {count} responses after {seconds:g} s"
            for completion in self.engine.poll(5):
                assert completion.id not in done
                done[completion.id] = completion
        return done

    def run(self, requests):
        self.engine.submit(requests)
        return self.collect(len(requests))

    def update(self, seed):
        """New weights for the reference model and the engine."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.mul_(1 + 0.3 * torch.randn(tensor.shape, generator=generator))
        version = self.engine.version + 1
        kind = ("stream", "buckets", "in place")[version % 3]
        if kind == "in place":
            share(self.model.parameters())
        taken = torch.clone if kind == "buckets" else torch.Tensor.detach
        weights = lambda: ((n, taken(t.detach())) for n, t in named_tensors(self.model))  # noqa: E731
        if kind == "stream":
            self.engine.update_weights(version, weights())
        else:
            with by_shared_memory(version, weights) as incoming:
                self.engine.update_weights(version, incoming)
            if kind == "in place" and self.loads_in_place:
                assert incoming.summary().copied == 0, "weights were copied before the engine's model loaded them"
        assert self.engine.version == version
        self.remember()

    def logprob_tables(self, request, completion):
        """[tokens, V]: log-probs of all tokens at each step, under the weights of the token's version."""
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        tables = {}
        current = self.weights[self.engine.version]
        for version in set(completion.versions):
            self.model.load_state_dict(self.weights[version], strict=False)
            with torch.no_grad():
                tables[version] = self.model(ids).logits[0].float()
        self.model.load_state_dict(current, strict=False)
        start = len(request.prompt_ids) - 1
        rows = [
            adjusted(tables[version][start + i], request.params, ids[0, : start + 1 + i])
            for i, version in enumerate(completion.versions)
        ]
        return torch.stack(rows).log_softmax(-1)

    def check(self, request, completion):
        """Every log-prob is that of the distribution that the request asks for, under the weights of its version."""
        assert completion.token_ids
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.versions)
        table = self.logprob_tables(request, completion)
        tokens = torch.tensor(completion.token_ids)[:, None]
        expected, found = table.gather(-1, tokens)[:, 0], torch.tensor(completion.logprobs)
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
        if request.params.temperature == 0:
            torch.testing.assert_close(expected, table.max(-1).values, atol=TOLERANCE, rtol=0)


def adjusted(logits, params, context):
    """Logits [V] after penalty, temperature, top-k and top-p, written down as in their papers."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[context] = True
    penalised = torch.where(logits > 0, logits / params.repetition_penalty, logits * params.repetition_penalty)
    logits = torch.where(seen, penalised, logits) / (params.temperature or 1.0)
    if params.top_k > 0 and params.temperature > 0:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    if params.top_p < 1 and params.temperature > 0:
        ordered, index = logits.softmax(-1).sort(descending=True)
        cut = ordered.cumsum(-1) - ordered >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(seen).scatter(0, index, cut), -torch.inf)
    return logits


def log_probs_are_those_of_transformers_at_every_temperature(t):
    requests = [
        t.request(f"r{i}", range(7, 9 + 5 * (i % 4)), max_new_tokens=5 + i, temperature=(1.0, 0.7, 0.0)[i % 3])
        for i in range(12)
    ]
    done = t.run(requests)
    for request in requests:
        completion = done[request.id]
        assert len(completion.token_ids) == request.params.max_new_tokens
        assert completion.finish_reason == "length"
        t.check(request, completion)


def truncated_and_penalised_draws_report_the_log_probs_of_that_draw(t):
    options = {"top_p": 0.5, "top_k": 4, "repetition_penalty": 2.0}
    chosen = [{name: value} for name, value in options.items() if name in t.promises]
    if not chosen:
        pytest.skip("this engine doesn't promise it")
    if "combined" in t.promises:
        chosen.append({"temperature": 0.8, **{name: options[name] for one in chosen for name in one}})
    requests = [t.request(f"r{i}-{k}", [9, 8, 7], **o) for i, o in enumerate(chosen) for k in range(4)]
    greedy = [t.request(f"g{i}", [9, 8], temperature=0.0, **o) for i, o in enumerate(chosen) if len(o) == 1]
    done = t.run(requests + greedy)
    for request in requests + greedy:
        t.check(request, done[request.id])


def a_seed_repeats_a_response_and_another_one_doesnt(t):
    if "seeds" not in t.promises:
        pytest.skip("this engine has no seed per request")
    first = t.run([t.request("r", [9, 8, 7], max_new_tokens=20)])["r"]
    again = t.run([t.request("r", [9, 8, 7], max_new_tokens=20)])["r"]
    assert first.token_ids == again.token_ids
    samples = t.run([t.request(f"r{i}", [9, 8, 7], max_new_tokens=20) for i in range(8)])
    assert len({c.token_ids for c in samples.values()}) == 8


def sampled_frequencies_follow_the_models_distribution(t):
    params = {"max_new_tokens": 1, "temperature": 0.3}
    done = t.run([t.request(f"r{i}", [9, 8], **params) for i in range(400)])
    drawn = torch.tensor([c.token_ids[0] for c in done.values()])
    table = t.logprob_tables(t.request("x", [9, 8], **params), next(iter(done.values())))[0].exp()
    counts = torch.bincount(drawn, minlength=len(table)) / 400
    # Standard error of a frequency is at most sqrt(0.25 / 400) = 0.025.
    assert (counts - table).abs().max() < 0.1


def responses_end_at_the_end_of_sequence_unless_they_ignore_it(t):
    options = {"max_new_tokens": 60}
    stop = [t.request(f"s{i}", [9, 8], ignore_eos=False, **options) for i in range(60)]
    run_on = [t.request(f"i{i}", [9, 8], **options) for i in range(60)]
    done = t.run(stop + run_on)
    ended = [done[r.id] for r in stop if done[r.id].finish_reason == "stop"]
    assert ended
    for completion in ended:
        assert completion.token_ids[-1] in t.ends
        assert t.ends.isdisjoint(completion.token_ids[:-1])
    assert {completion.token_ids[-1] for completion in ended} == t.ends
    for request in stop:
        if done[request.id].finish_reason == "length":
            assert t.ends.isdisjoint(done[request.id].token_ids)
            assert len(done[request.id].token_ids) == 60
    assert all(len(done[r.id].token_ids) == 60 for r in run_on)
    assert not all(t.ends.isdisjoint(done[r.id].token_ids) for r in run_on)
    t.check(stop[0], done[stop[0].id])


def responses_end_at_stop_tokens_and_stop_strings(t):
    tokens = tuple(range(20, 25))
    letters = t.tokenizer.convert_ids_to_tokens(list(range(30, 50)))
    strings = tuple(a + b for a in letters for b in letters)
    by_token = [t.request(f"t{i}", [9, 8, 7], max_new_tokens=60, stop_token_ids=tokens) for i in range(20)]
    by_string = [t.request(f"s{i}", [9, 8, 7], max_new_tokens=60, stop_strings=strings) for i in range(20)]
    done = t.run(by_token + by_string)

    def ends(request, response):
        text = t.tokenizer.decode(response)
        return bool(set(tokens) & set(response)) if request in by_token else any(one in text for one in strings)

    for requests in (by_token, by_string):
        assert any(done[r.id].finish_reason == "stop" for r in requests)
        for request in requests:
            completion = done[request.id]
            assert ends(request, completion.token_ids) == (completion.finish_reason == "stop")
            assert not ends(request, completion.token_ids[:-1])
            t.check(request, completion)


def responses_end_where_the_context_is_full(t):
    prompt = [9] * (t.max_context - 5)
    request = t.request("full", prompt, max_new_tokens=50)
    completion = t.run([request])["full"]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    t.check(request, completion)
    request = t.request("almost", [9] * (t.max_context - 1), max_new_tokens=50)
    assert len(t.run([request])["almost"].token_ids) == 1


def malformed_requests_are_refused_before_anything_is_queued(t):
    good = t.request("good", [9])
    for bad, message in (
        (t.request("r", []), "empty prompt"),
        (t.request("r", [9] * t.max_context), f"{t.max_context} prompt tokens"),
        (t.request("good", [9]), "already running"),
        (t.request("r", [9], max_new_tokens=0), "max_new_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            t.engine.submit([good, bad])
    assert t.engine.poll(t.moment) == []


def an_abort_keeps_the_sampled_tokens_and_leaves_the_others_alone(t):
    stays = [t.request(f"stays{i}", [9, 8], max_new_tokens=60) for i in range(3)]
    goes = t.request("goes", [9, 8, 7], max_new_tokens=150)
    t.engine.submit([goes, *stays])
    finished = list(t.engine.poll(t.moment))
    (gone,) = t.engine.abort(["goes", "never heard of"])
    assert (gone.id, gone.finish_reason) == ("goes", "abort")
    if gone.token_ids:
        t.check(goes, gone)
    assert t.engine.abort(["goes"]) == []
    done = {c.id: c for c in finished} | t.collect(3 - len(finished))
    for request in stays:
        assert len(done[request.id].token_ids) == 60
        t.check(request, done[request.id])


def an_abort_meets_the_engine_in_any_state_and_it_goes_on(t):
    equal = [t.request(f"equal{i}", [9, 8 + i], max_new_tokens=200) for i in range(4)]
    shared = [t.request(f"shared{i}", [5, 6], max_new_tokens=200) for i in range(3)]
    later = [t.request(f"later{i}", [4, 3], max_new_tokens=200) for i in range(3)]
    requests = {request.id: request for request in (*equal, *shared, *later)}
    done, stopped = {}, {}

    def poll():
        done.update({completion.id: completion for completion in t.engine.poll(t.moment)})

    def abort(*names):
        met = {completion.id: completion for completion in t.engine.abort(names)}
        assert all(completion.finish_reason == "abort" for completion in met.values())
        assert met.keys() <= set(names) - done.keys() - stopped.keys()
        if t.engine.lockstep:  # elsewhere one may have ended meanwhile
            assert met.keys() == set(names) & requests.keys() - done.keys() - stopped.keys()
        stopped.update(met)

    assert t.engine.abort([]) == t.engine.abort(["never heard of"]) == []
    t.engine.submit([t.request("unborn", [9], max_new_tokens=200)])
    assert len(t.engine.abort(["unborn"])) == 1
    t.engine.submit([*equal, *shared])
    poll()
    # Of rows of one length the first goes, and one of those that share their prompt, which is named twice.
    abort("equal0", "shared1", "shared1")
    abort("equal0", "shared1")
    poll()
    t.update(50)
    abort("equal2")  # before anything was drawn under the new weights
    poll()
    abort("shared0")
    poll()
    done |= t.collect(7 - len(done) - len(stopped))
    t.engine.submit(later)
    poll()
    abort(*requests)  # all that run, and those that ended long ago
    done |= t.collect(10 - len(done) - len(stopped))
    assert done.keys().isdisjoint(stopped)
    for completion in (*done.values(), *stopped.values()):
        if completion.token_ids:
            t.check(requests[completion.id], completion)
    assert all(len(completion.token_ids) == 200 for completion in done.values())
    assert len(t.run([t.request("equal0", [9, 8])])["equal0"].token_ids) == 8  # an id may come again


def after_each_weight_update_log_probs_are_those_of_the_new_weights(t):
    before = None
    for seed in range(3):
        t.update(seed)
        requests = [t.request(f"r{i}", [9, 8, *range(7, 8 + i)], temperature=(1.0, 0.7)[i % 2]) for i in range(4)]
        done = t.run(requests)
        for request in requests:
            assert set(done[request.id].versions) == {t.engine.version}
            t.check(request, done[request.id])
        assert done["r0"].logprobs != before
        before = done["r0"].logprobs


def responses_on_their_way_go_on_under_new_weights_and_each_token_is_right_under_its_own(t):
    # On a busy machine all of them may begin after the updates, or end before.
    assert any(_meet_updates(t, name) for name in "abcd"), "no response met an update"


def _meet_updates(t, name):
    """Whether a response of these has tokens of several versions; all are right."""
    first = t.engine.version
    # The longest prompts are in the prefix cache of the old weights, which mustn't be read under new ones.
    prompts = [[9, 8], list(range(7, 60)), list(range(7, 60)), [5] * 100]
    requests = [t.request(f"{name}{i}", prompts[i % 4], max_new_tokens=80, temperature=0.9) for i in range(8)]
    t.engine.submit(requests)
    done = {}
    for seed in range(3):
        done.update({c.id: c for c in t.engine.poll(t.moment)})
        t.update(100 + seed)
    done.update(t.collect(8 - len(done)))
    for request in requests:
        completion = done[request.id]
        assert len(completion.token_ids) == 80
        assert list(completion.versions) == sorted(completion.versions)
        assert set(completion.versions) <= set(range(first, first + 4))
        t.check(request, completion)
    return any(len(set(c.versions)) > 1 for c in done.values())


def many_requests_at_once_of_all_lengths_come_back_complete(t):
    requests = [
        t.request(f"r{i}", [7 + (i * k) % 50 for k in range(1 + (i * 7) % 90)], max_new_tokens=1 + (i * 13) % 40)
        for i in range(200)
    ]
    done = t.run(requests)
    for i, request in enumerate(requests):
        assert len(done[request.id].token_ids) == request.params.max_new_tokens
        if i % 20 == 0:
            t.check(request, done[request.id])


def memory_stays_flat_over_many_updates(t):
    def resident():
        process = psutil.Process()
        return sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) >> 20

    sizes = []
    for number in range(50):
        version = t.engine.version + 1
        t.engine.update_weights(version, ((n, v.detach()) for n, v in named_tensors(t.model)))
        t.weights = {version: next(iter(t.weights.values()))}
        if number in (10, 49):
            t.run([t.request(f"r{i}", [9, 8, i]) for i in range(4)])
            sizes.append(resident())
    t.weights = {}
    t.remember()
    assert sizes[1] - sizes[0] < 48, f"MiB of all processes after 11 and 50 updates: {sizes}"


def an_engine_that_slept_works_after_it_woke_and_got_weights(t):
    t.engine.sleep()
    t.engine.wake(["weights"])
    t.update(7)
    t.engine.wake(["kv_cache"])
    request = t.request("r", range(7, 60))
    t.check(request, t.run([request])["r"])


def changes_alone_bring_an_engine_to_the_weights_that_all_of_them_would(t):
    copies, base = (WeightCopy(), WeightCopy()), ""
    weights = lambda: ((n, v.detach()) for n, v in named_tensors(t.model))  # noqa: E731
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for tensor in list(t.model.parameters())[step % 2 :: 2]:
                tensor[torch.rand(tensor.shape, generator=generator) < 0.1] *= 1.5
        version, found = t.engine.version + 1, []
        with by_shared_memory(version, weights, copies, Delta(f"v{version}", base)) as incoming:
            t.engine.update_weights(version, incoming)
        assert step == 0 or incoming.summary().moved < 0.4 * incoming.summary().bytes
        base = f"v{version}"
        t.remember()
        for name in ("changes", "all"):
            request = t.request(f"{name} {step}", range(7, 40), temperature=0.0, max_new_tokens=12)
            found.append(t.run([request])[request.id])
            t.check(request, found[-1])
            version += 1
            t.engine.update_weights(version, weights())
            t.remember()
        assert found[0].token_ids == found[1].token_ids
        assert found[0].logprobs == found[1].logprobs


CASES = [
    log_probs_are_those_of_transformers_at_every_temperature,
    truncated_and_penalised_draws_report_the_log_probs_of_that_draw,
    a_seed_repeats_a_response_and_another_one_doesnt,
    sampled_frequencies_follow_the_models_distribution,
    responses_end_at_the_end_of_sequence_unless_they_ignore_it,
    responses_end_at_stop_tokens_and_stop_strings,
    responses_end_where_the_context_is_full,
    malformed_requests_are_refused_before_anything_is_queued,
    an_abort_keeps_the_sampled_tokens_and_leaves_the_others_alone,
    an_abort_meets_the_engine_in_any_state_and_it_goes_on,
    after_each_weight_update_log_probs_are_those_of_the_new_weights,
    changes_alone_bring_an_engine_to_the_weights_that_all_of_them_would,
    responses_on_their_way_go_on_under_new_weights_and_each_token_is_right_under_its_own,
    many_requests_at_once_of_all_lengths_come_back_complete,
    an_engine_that_slept_works_after_it_woke_and_got_weights,
    memory_stays_flat_over_many_updates,
]


def a_wrong_weight_update_is_refused_and_leaves_no_stale_engine(t, kind):
    """Ends an engine that isn't lockstep. `kind`: foreign, missing, or shape."""
    weights = {name: tensor.detach() for name, tensor in named_tensors(t.model)}
    name = next(n for n in weights if "k_proj.weight" in n)
    if kind == "missing":
        del weights[name]
    else:
        weights["extra" if kind == "foreign" else name] = torch.zeros(1)
    message = {"foreign": "'extra', which the engine's model doesn't have", "missing": name, "shape": "has shape"}[kind]
    with pytest.raises(ValueError, match=message):
        t.engine.update_weights(t.engine.version + 1, iter(weights.items()))
    if not t.engine.lockstep:
        with pytest.raises(EngineDied, match=message):
            t.engine.poll(5.0)


def a_killed_process_ends_the_engine_within_seconds(t, process):
    """`process`: id of one of the engine's processes."""
    t.engine.submit([t.request(f"r{i}", [9, 8], max_new_tokens=150) for i in range(4)])
    psutil.Process(process).kill()
    start = time.monotonic()
    with pytest.raises(EngineDied):
        t.collect(4, seconds=60)
    assert time.monotonic() - start < 30
    t.engine.close()
    with pytest.raises(EngineDied):
        t.engine.submit([t.request("r", [9])])


def ids(case):
    return case.__name__
