"""Pictures in the prompts of `hf_infer`: what is sampled is what the trainer scores, and never of another picture.

All in float32 (`dtype: fp32`, the default of `ModelArgs`).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from picture_cases import SMALL, TALL, WIDE, noise, picture_batch, tokens_of
from tiny_pictures import PICTURE_FAMILIES, build_tiny_picture_model
from train_contract import LOSS, build, make_spec

from roll.configs.schema.strategy_config import HfInferConfig
from roll.configs.schema.worker_config import ModelArgs
from roll.strategies.base import EngineSettings, Request, SamplingParams
from roll.strategies.engines.hf.hf_infer import build as build_engine
from roll.strategies.engines.responses import ResponseRules
from roll.types.batch import TokenBatch
from roll.utils.seeding import stable_hash

PROMPTS = {
    "two": ([20, 21, None, 22, 23, None, 24, 25], [WIDE, SMALL]),
    "text": ([30, 31, 32], []),
    "one": ([40, None, 41, 42], [WIDE]),
    "tall": ([50, 51, 52, None, 53], [TALL]),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made: dict[str, Path] = {}

    def of(family: str = "qwen2_vl") -> Path:
        if family not in made:
            made[family] = build_tiny_picture_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return of


def engine_of(folder, **settings):
    options = {"max_running_requests": 8, "max_sequence_length": 512, "seed": 0, **settings}
    return build_engine(ModelArgs(model_name_or_path=str(folder)), HfInferConfig(), EngineSettings(**options))


def request(folder, name, ids, shown, **params):
    tokens = tokens_of(folder)
    expanded = tokens.expand([tokens.place if i is None else i for i in ids], shown)
    params = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 1.0, **params}
    key = stable_hash(name.partition("/")[0], bits=128)
    return Request(
        id=name, prompt_ids=tuple(expanded), params=SamplingParams(**params), seed=key, pictures=tuple(shown)
    )


def play(engine, requests):
    """Name -> completion."""
    engine.submit(requests)
    done = []
    while len(done) < len(requests):
        done += engine.poll(4)
    return {completion.id: completion for completion in done}


def as_batch(requests, completions) -> TokenBatch:
    """What was sampled, as the trainer gets it."""
    rows = [(r.prompt_ids, completions[r.id].token_ids) for r in requests]
    lengths = torch.tensor([len(prompt) + len(answer) for prompt, answer in rows])
    acting = torch.cat([torch.arange(n) >= len(prompt) for n, (prompt, _) in zip(lengths.tolist(), rows, strict=True)])
    names = tuple(r.id for r in requests)
    return TokenBatch(
        row_ids=names,
        group_ids=names,
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        token_ids=torch.tensor([token for prompt, answer in rows for token in (*prompt, *answer)]),
        action_mask=acting,
        loss_mask=acting,
        advantages=torch.ones(int(lengths.sum())),
        pictures=tuple(r.pictures for r in requests),
    )


def mismatch(strategy, requests, completions):
    """Largest difference of the trainer's log-probs and the engine's."""
    batch = as_batch(requests, completions)
    scored = strategy.forward(batch, ("logprobs",)).require("logprobs")[batch.action_mask]
    sampled = torch.tensor([p for r in requests for p in completions[r.id].logprobs])
    return float((scored - sampled).abs().max())


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_what_is_sampled_is_what_the_trainer_scores_before_and_after_a_sync_of_another_tower(folder_of, family):
    folder = folder_of(family)
    engine, strategy = engine_of(folder), build(make_spec(folder, training={"learning_rate": 0.05}))
    requests = [request(folder, name, *prompt) for name, prompt in PROMPTS.items()]
    before = play(engine, requests)
    assert mismatch(strategy, requests, before) < 1e-4
    batch = as_batch(requests, before)
    old = {name: tensor.clone() for name, tensor in strategy.named_weights()}
    for _ in range(2):
        strategy.train_step(batch, LOSS)
    new = dict(strategy.named_weights())
    assert any(not torch.equal(old[name], new[name]) for name in new if name.startswith("model.visual.blocks."))
    assert mismatch(strategy, requests, before) > 1e-3
    engine.update_weights(1, strategy.named_weights())
    after = play(engine, requests)
    assert mismatch(strategy, requests, after) < 1e-4


def test_a_weight_update_in_the_middle_of_a_response_reads_its_pictures_again(folder_of):
    folder = folder_of()
    engine, strategy = engine_of(folder), build(make_spec(folder, training={"learning_rate": 0.05}))
    requests = [request(folder, name, *prompt) for name, prompt in PROMPTS.items()]
    strategy.train_step(as_batch(requests, play(engine, requests)), LOSS)
    engine.submit(requests)
    assert engine.poll(2) == []
    engine.update_weights(1, strategy.named_weights())
    done = {completion.id: completion for completion in engine.poll(20)}
    assert all(completion.versions == (0, 0, 1, 1, 1, 1) for completion in done.values())
    batch = as_batch(requests, done)
    scored = strategy.forward(batch, ("logprobs",)).require("logprobs")[batch.action_mask].view(len(requests), 6)
    sampled = torch.tensor([done[r.id].logprobs for r in requests])
    assert float((scored - sampled)[:, 2:].abs().max()) < 1e-4
    assert float((scored - sampled)[:, :2].abs().max()) > 1e-4


def test_prompts_of_the_same_tokens_that_show_other_pictures_are_told_apart(folder_of):
    folder = folder_of()
    engine, strategy = engine_of(folder), build(make_spec(folder))
    other = noise(84, 56, seed=7)
    requests = [
        request(folder, f"same/{i}", [40, None, 41, 42], [picture]) for i, picture in enumerate((WIDE, other, WIDE))
    ]
    assert len({r.prompt_ids for r in requests}) == 1
    done = play(engine, requests)
    assert done["same/0"].logprobs != done["same/1"].logprobs
    assert done["same/0"].logprobs == done["same/2"].logprobs
    assert mismatch(strategy, requests, done) < 1e-4


def test_a_picture_is_computed_once_for_a_group_and_for_prompts_that_show_it(folder_of):
    folder = folder_of()
    engine = engine_of(folder, max_running_requests=16)
    patches: list[int] = []
    engine._model.model.visual.register_forward_pre_hook(lambda _, inputs: patches.append(len(inputs[0])))
    group = [request(folder, f"group{i}", [40, None, 41, 42], [WIDE]) for i in range(8)]
    play(engine, [*group, request(folder, "another", [44, None, 45], [WIDE])])
    assert patches == [tokens_of(folder).patches(WIDE)]
    assert engine._pictures._marked == []


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_beginnings_are_shared_up_to_a_place_inside_of_a_picture(folder_of, family):
    folder = folder_of(family)
    engine, strategy = engine_of(folder), build(make_spec(folder))
    begin = [20 + i % 60 for i in range(200)]
    requests = [
        request(folder, "long", [*begin, None, 30, 31, *range(32, 50)], [WIDE]),
        request(folder, "short", [*begin, None, 30], [WIDE]),
        request(folder, "other", [*begin, None, 30, 33], [noise(84, 56, seed=7)]),
        request(folder, "none", [*begin, 34], []),
    ]
    widths: list[int] = []
    forward = engine._pictures.forward

    def counted(model, contexts, width, cache):
        widths.append(width)
        return forward(model, contexts, width, cache)

    engine._pictures.forward = counted
    done = play(engine, requests)
    assert len(widths) == 2
    assert widths[1] < 200 < widths[0] + 1
    assert mismatch(strategy, requests, done) < 1e-4


def test_an_engine_that_gets_pictures_in_another_order_is_found(folder_of):
    folder = folder_of()
    engine, strategy = engine_of(folder), build(make_spec(folder))
    whole = request(folder, "two", [20, None, 21, None, 22, 23], [WIDE, noise(84, 56, seed=7)])
    planted = dataclasses.replace(whole, pictures=whole.pictures[::-1])  # of one size: the tokens fit all the same
    done = play(engine, [planted])
    assert mismatch(strategy, [planted], done) < 1e-4
    assert mismatch(strategy, [whole], done) > 1e-3


def test_an_engine_that_keeps_features_over_a_weight_update_is_found(folder_of, monkeypatch):
    folder = folder_of()
    requests = [request(folder, name, *prompt) for name, prompt in PROMPTS.items()]
    honest, strategy = engine_of(folder), build(make_spec(folder, training={"learning_rate": 0.05}))
    before = play(honest, requests)
    planted = engine_of(folder)
    tower, kept = planted._model.model.get_image_features, {}

    def cached(pixels, grid, **options):
        key = float(pixels.sum())
        kept[key] = kept[key] if key in kept else tower(pixels, grid, **options)
        return kept[key]

    monkeypatch.setattr(planted._model.model, "get_image_features", cached)
    assert play(planted, requests)["two"].logprobs == before["two"].logprobs
    for _ in range(2):
        strategy.train_step(as_batch(requests, before), LOSS)
    for engine in (honest, planted):
        engine.update_weights(1, strategy.named_weights())
    assert mismatch(strategy, requests, play(honest, requests)) < 1e-4
    assert mismatch(strategy, requests, play(planted, requests)) > 1e-3


def test_no_place_is_ever_sampled(folder_of):
    folder = folder_of()
    engine = engine_of(folder, max_running_requests=64)
    ids, shown = PROMPTS["one"]
    hot = {"temperature": 50.0, "max_new_tokens": 40, "repetition_penalty": 1.3}
    done = play(engine, [request(folder, f"hot{i}", ids, shown, **hot) for i in range(30)])
    said = {token for completion in done.values() for token in completion.token_ids}
    assert len(said) > 80  # nearly uniform over 110 tokens
    assert not said & set(tokens_of(folder).forbidden)


def test_prompts_that_do_not_fit_their_pictures_are_refused(folder_of, tiny_model):
    folder = folder_of()
    engine = engine_of(folder)
    whole = request(folder, "two", *PROMPTS["two"])
    for shown in ((), (WIDE,), (WIDE, noise(112, 56)), (WIDE, SMALL, SMALL)):
        with pytest.raises(ValueError, match="request 'two': its prompt doesn't fit its pictures: "):
            engine.submit([dataclasses.replace(whole, pictures=shown)])
    with pytest.raises(ValueError, match="request 'two' shows pictures, and this engine gives its model none"):
        engine_of(tiny_model).submit([dataclasses.replace(whole, prompt_ids=(1, 2))])
    with pytest.raises(ValueError, match="request 'two' shows pictures"):
        ResponseRules(frozenset(), 512).check(whole, set())
    assert len(picture_batch(tokens_of(folder), [PROMPTS["two"]])) == 1
