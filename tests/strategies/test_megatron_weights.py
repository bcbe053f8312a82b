"""The table of weights: segments by hand, every stored form of a checkpoint, what is refused, what is frozen."""

from __future__ import annotations

import shutil

import pytest
import torch
from megatron_cases import MODELS, build_case, build_part, joined, play_models
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("megatron.core")

from roll.configs.catalog.family_table import FAMILIES
from roll.configs.schema.megatron_config import MegatronConfig
from roll.strategies.megatron.mapping import Segment, WeightTable


@pytest.fixture(scope="session")
def path_of(tmp_path_factory):
    """Folder of a tiny model of `MODELS`."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = build_case(tmp_path_factory.mktemp("weights") / "model", name)
        return made[name]

    return get


def config_of(path):
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


def table_of(path, **sizes):
    from roll.strategies.megatron.megatron_architecture import architecture

    return WeightTable(architecture(config_of(path)), **sizes)


def entry_of(table, parameter, layer=0):
    return next(entry for entry in table.layer(layer) if parameter in entry.parameters)


# --- segments --------------------------------------------------------------------------------------------------------


def test_queries_keys_and_values_are_interleaved_by_key_head(path_of):
    # 4 query heads and 2 key heads of 8 rows: rank 0 of 2 has query heads 0 and 1, key head 0, value head 0.
    entry = entry_of(table_of(path_of("llama"), tensor=2), "self_attention.linear_qkv.weight")
    assert entry.share(0, 2) == [Segment(0, 0, 16), Segment(1, 0, 8), Segment(2, 0, 8)]
    assert entry.share(1, 2) == [Segment(0, 16, 32), Segment(1, 8, 16), Segment(2, 8, 16)]


def test_more_ranks_than_key_heads_cut_a_group(path_of):
    entry = entry_of(table_of(path_of("llama"), tensor=4), "self_attention.linear_qkv.weight")
    assert entry.share(0, 4) == [Segment(0, 0, 16)]
    assert entry.share(1, 4) == [Segment(1, 0, 8), Segment(2, 0, 8)]


def test_each_rank_has_its_part_of_the_gate_above_its_part_of_the_up_projection(path_of):
    entry = entry_of(table_of(path_of("llama"), tensor=2), "mlp.linear_fc1.weight")
    assert entry.share(1, 2) == [Segment(0, 32, 64), Segment(1, 32, 64)]
    experts = entry_of(table_of(path_of("mixtral"), expert_tensor=2), "mlp.experts.linear_fc1.weight{expert}")
    assert experts.share(1, 2) == [Segment(0, 32, 64), Segment(0, 96, 128)]


def test_the_vocabulary_is_padded_with_zeros_on_the_last_rank(path_of):
    # 106 tokens over 4 ranks: 27 rows each, the last has 25 and 2 rows of nothing.
    entry = table_of(path_of("llama"), tensor=4).embedding
    assert entry.share(3, 4) == [Segment(0, 81, 106), Segment(None, 0, 2)]


def embedding_of(info, path, options):
    """This rank's rows of the embedding, loaded over something else."""
    from roll.strategies.megatron.megatron_weights import load_weights
    from roll.strategies.megatron.platform import cpu_platform

    with cpu_platform():
        chunks = build_part(info, path, MegatronConfig(**options))
        weight = chunks[0].embedding.word_embeddings.weight.data
        weight.fill_(torch.nan)
        load_weights(chunks, path)
    return weight


def test_padding_is_filled_with_zeros(ranks, path_of):
    path = path_of("llama")
    parts = ranks.run(embedding_of, 4, path, {"tensor_model_parallel_size": 4})
    whole = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(torch.cat(parts), torch.cat([whole, torch.zeros(2, 32)]))


# --- stored forms ----------------------------------------------------------------------------------------------------


def load_from(info, path, sources, options):
    """What comes out of a model into which each source went, or the error."""
    from transformers import AutoModelForCausalLM

    from roll.strategies.megatron.megatron_weights import load_weights, stream_weights
    from roll.strategies.megatron.platform import cpu_platform

    answers = []
    with cpu_platform():
        chunks = build_part(info, path, MegatronConfig(**options))
        for source in sources:
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.fill_(torch.nan)
            if source == "module":
                source = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
            try:
                load_weights(chunks, source)
                answers.append({name: tensor.clone() for name, tensor in stream_weights(chunks)})
            except ValueError as error:
                answers.append(str(error))
    return answers


def same(mine, theirs):
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen2_moe"])
def test_one_file_several_files_and_a_module_give_the_same(ranks, path_of, name, tmp_path):
    from transformers import AutoModelForCausalLM

    path = path_of(name)
    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    if name != "llama":
        assert any(".experts.0." in key for key in load_file(path / "model.safetensors")), "experts are stored apart"
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for answers in ranks.run(load_from, 2, path, [path, tmp_path, "module"], options):
        for weights in answers:
            assert same(weights, dict(model.named_parameters()))


def test_a_gguf_file_is_loaded_by_transformers(ranks, path_of, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = path_of("llama untied")
    config, weights = config_of(path), load_file(path / "model.safetensors")
    file = write_gguf(gguf, tmp_path / "tiny.gguf", config, weights)
    [[mine]] = ranks.run(load_from, 1, path, [str(file)], {})
    assert same(mine, weights)


def write_gguf(gguf, file, config, weights):
    """A llama in llama.cpp's format, which pairs neighbouring rows of queries and keys in the rotation."""
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in weights.items():
        if "q_proj" in name or "k_proj" in name:
            heads = len(tensor) // config.head_dim
            tensor = tensor.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class Stacked(nn.Module):
    """The parameters of Megatron's own grouped layer: all experts of a rank, transposed, in one matrix."""

    def __init__(self, experts, hidden, width):
        super().__init__()
        self.weight1 = nn.Parameter(torch.empty(hidden, experts * 2 * width))
        self.weight2 = nn.Parameter(torch.empty(experts * width, hidden))


class Grouped(nn.Module):
    """The parameters of Transformer Engine's grouped layer: a numbered matrix per expert."""

    def __init__(self, experts, hidden, width):
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Module(), nn.Module()
        for i in range(experts):
            self.linear_fc1.register_parameter(f"weight{i}", nn.Parameter(torch.empty(2 * width, hidden)))
            self.linear_fc2.register_parameter(f"weight{i}", nn.Parameter(torch.empty(hidden, width)))


def play_experts(info, path, form):
    """Round trip through a model whose expert layers keep their parameters in another form."""
    from roll.strategies.megatron.megatron_weights import load_weights, stream_weights
    from roll.strategies.megatron.platform import cpu_platform

    options = MegatronConfig(expert_model_parallel_size=2)
    with cpu_platform():
        chunks = build_part(info, path, options)
        for layer in chunks[0].decoder.layers:
            layer.mlp.experts = form(2, 32, 64)
        load_weights(chunks, path)
        second = {name: p.detach() for name, p in chunks[0].decoder.layers[0].mlp.experts.named_parameters()}
        return {name: tensor.clone() for name, tensor in stream_weights(chunks)}, second


def test_experts_in_one_matrix(ranks, path_of):
    from transformers import AutoModelForCausalLM

    path = path_of("mixtral")
    theirs = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    (mine, _), (_, parameters) = ranks.run(play_experts, 2, path, Stacked)
    assert same(mine, theirs)
    # GroupedMLP computes x @ weight1.view(experts, hidden, -1)[i]; rank 1 has experts 2 and 3.
    last = parameters["weight1"].view(2, 32, 128)[1]
    assert torch.equal(last.T, theirs["model.layers.0.mlp.experts.gate_up_proj"][3])


def test_experts_in_numbered_matrices(ranks, path_of):
    from transformers import AutoModelForCausalLM

    path = path_of("mixtral")
    theirs = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    (mine, _), (_, parameters) = ranks.run(play_experts, 2, path, Grouped)
    assert same(mine, theirs)
    assert torch.equal(parameters["linear_fc2.weight1"], theirs["model.layers.0.mlp.experts.down_proj"][3])


# --- value models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"pipeline_model_parallel_size": 2}])
def test_a_value_model_has_the_backbone_and_begins_with_values_of_0(ranks, path_of, options):
    from transformers import AutoModel

    path = path_of("llama untied")
    theirs = dict(AutoModel.from_pretrained(path).named_parameters())
    results = ranks.run(play_models, 2 if options else 1, [path], options, "value")
    for [(weights, _)] in results:
        assert same(weights, theirs)
    values, _ = joined([result[0] for result in results], packed=False)
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.zeros_like(values))


# --- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_missing_unknown_or_of_another_shape_is_named(ranks, path_of, tmp_path):
    path, sources, odd = path_of("mixtral"), [], "model.layers.1.self_attn.o_proj.weight"
    stored = load_file(path / "model.safetensors")
    lost = next(key for key in stored if "layers.2" in key and ".experts.1." in key and "w3" in key)
    for name, changed in {
        "lost": {key: value for key, value in stored.items() if key != lost},
        "added": {**stored, "model.layers.0.self_attn.sinks": torch.zeros(4)},
        "odd": {**stored, odd: torch.zeros(32, 31)},
    }.items():
        (tmp_path / name).mkdir()
        save_file(changed, tmp_path / name / "model.safetensors")
        sources.append(tmp_path / name)
    [[missing, unknown, shape]] = ranks.run(load_from, 1, path, sources, {})
    assert "lack 1 tensors: layers.2.mlp.experts.1.up_proj.weight" in missing
    assert "layers.0.self_attn.sinks" in unknown
    assert "'layers.1.self_attn.o_proj.weight' has shape (32, 31)" in shape
    assert "(32, 32)" in shape


# --- freezing --------------------------------------------------------------------------------------------------------


def play_freeze(info, path, prefixes):
    """Trainable parameters left, or the error."""
    from roll.strategies.megatron.megatron_weights import freeze
    from roll.strategies.megatron.platform import cpu_platform

    with cpu_platform():
        chunks = build_part(info, path, MegatronConfig(), trains=True)
        try:
            freeze(chunks, prefixes)
        except ValueError as error:
            return str(error)
    return {name for name, parameter in chunks[0].named_parameters() if parameter.requires_grad}


def test_prefixes_freeze_what_transformers_calls_so(ranks, path_of):
    path = path_of("llama")
    [left] = ranks.run(play_freeze, 1, path, ("model.embed_tokens", "model.layers.0.", "model.layers.1.mlp"))
    assert "embedding.word_embeddings.weight" not in left
    assert not any(name.startswith("decoder.layers.0.") for name in left)
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in left
    assert "decoder.layers.1.mlp.linear_fc1.weight" not in left


def test_half_a_fused_parameter_cannot_be_frozen(ranks, path_of):
    path = path_of("llama")
    [error] = ranks.run(play_freeze, 1, path, ("model.layers.0.self_attn.q_proj",))
    assert "not only model.layers.0.self_attn.q_proj.weight" in error
    [error] = ranks.run(play_freeze, 1, path, ("layers.0",))
    assert "no parameter begins with 'layers.0'" in error


def test_every_model_of_these_tests_is_a_supported_family():
    assert {family for family, _ in MODELS.values()} == {name for name, family in FAMILIES.items() if family.megatron}


def test_a_torn_file_is_named_with_the_way_out(path_of, tmp_path):
    from roll.strategies.megatron.source import open_weights

    folder = tmp_path / "torn"
    shutil.copytree(path_of("llama"), folder)
    file = folder / "model.safetensors"
    for content in (file.read_bytes()[:-100], b"", b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"{file} is no whole safetensors file .*; get the model again"):
            open_weights(folder).__enter__()
