"""What the small agents of the folders here start from: a random model, and solved episodes.

`prepare` of a configuration names a function below. It makes, unless they are there:

    pretrain                          a transformer of some ten thousand random parameters, with a tokenizer for the
                                      words that the game is told in
    actor_train.data_args.file_name   rows with `messages`: what the environment's own solver does, turn by turn; for a
                                      warm start only
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from roll.configs.parsing.loader import load_config
from roll.configs.schema.agentic_config import AgenticConfig
from roll.configs.schema.sft_config import SFTConfig
from roll.envs.base import Observation
from roll.envs.baselines import random_action
from roll.envs.env_registry import bare_env, build_env, env_spec
from roll.rollout.demonstrations import demonstrations
from roll.utils.seeding import stable_hash

EXAMPLES = Path(__file__).parent
EPISODES = 600
"""Rooms that are demonstrated."""
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>"]
WORD = r"\n|[^\W_]+|[^\s]"
"""A token: a word, a number, a sign, or the end of a line."""


def sokoban(config: SFTConfig) -> None:
    """Write what agentic_sokoban_cpu.yaml needs. Solutions are long: more layers see further ahead."""
    prepare(config, "sokoban", "agentic_sokoban_cpu", layers=4, episodes=3000)


def frozen_lake(config: SFTConfig) -> None:
    """Write what agentic_frozen_lake_cpu.yaml needs."""
    prepare(config, "frozen_lake", "agentic_frozen_lake_cpu")


def frozen_lake_8x8(config: SFTConfig) -> None:
    """Write what agentic_frozen_lake_8x8_cpu.yaml needs. Ways are long: more layers see further ahead."""
    prepare(config, "frozen_lake", "agentic_frozen_lake_8x8_cpu", layers=4, episodes=3000)


def slippery_frozen_lake(config: SFTConfig) -> None:
    """Write what agentic_frozen_lake_slippery_cpu.yaml needs."""
    prepare(config, "frozen_lake", "agentic_frozen_lake_slippery_cpu")


def frozen_lake_for_vllm(config: SFTConfig) -> None:
    """Write what agentic_frozen_lake_vllm_cpu.yaml needs: on a CPU vLLM takes no heads of fewer than 32 numbers."""
    prepare(config, "frozen_lake", "agentic_frozen_lake_cpu", heads=2)


def cliff_walking(config: SFTConfig) -> None:
    """Write what hubs/agentic_cliff_walking_cpu.yaml needs."""
    prepare(config, "hubs", "agentic_cliff_walking_cpu")


def minigrid(config: SFTConfig) -> None:
    """Write what hubs/agentic_minigrid_cpu.yaml needs."""
    prepare(config, "hubs", "agentic_minigrid_cpu")


def gem(config: SFTConfig) -> None:
    """Write what hubs/agentic_gem_cpu.yaml needs."""
    prepare(config, "hubs", "agentic_gem_cpu", rows=tower_moves)


def textarena(config: SFTConfig) -> None:
    """Write what hubs/agentic_textarena_cpu.yaml needs."""
    prepare(config, "hubs", "agentic_textarena_cpu", rows=tower_moves)


def nim_of_textarena(config: SFTConfig) -> None:
    """Write what self_play/agentic_nim_textarena_cpu.yaml needs: how to write a move, not which."""
    prepare(config, "self_play", "agentic_nim_textarena_cpu", rows=random_play)


def dial(config: AgenticConfig) -> None:
    """Write what custom_env/agentic_dial.yaml needs; it has no warm start: words are all that the model has."""
    model, texts = Path(config.pretrain or ""), list(random_texts(config, EPISODES))
    if not (model / "config.json").is_file():
        make_model(model, texts, config.seed)
        return
    known = json.loads((model / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    if unknown := sorted(words_in(texts) - known.keys()):
        raise ValueError(
            f"{model} was made for another game: it has no word for {', '.join(map(repr, unknown[:5]))}. Give the run "
            "another exp_name, or delete that folder"
        )


def prepare(
    config: SFTConfig,
    folder: str,
    name: str,
    *,
    heads: int = 16,
    layers: int = 2,
    episodes: int = EPISODES,
    rows: Callable[[AgenticConfig, int], Iterable[dict[str, Any]]] = demonstrations,
) -> None:
    """Make the demonstrations of so many episodes and the model for one game. Everything follows from the seed."""
    game = load_config(EXAMPLES / folder, name, [f"seed={config.seed}"])
    assert isinstance(game, AgenticConfig)
    (file,) = map(Path, config.actor_train.data_args.file_name)
    model = Path(config.pretrain or "")
    if file.is_file() and (model / "config.json").is_file():
        return
    shown = list(rows(game, episodes))
    write(file, shown)
    texts = [message["content"] for row in shown for message in row["messages"]]
    texts += [name for section in game.custom_envs.values() for name in section.action_lookup]
    make_model(model, texts, config.seed, heads=heads, layers=layers)


def tower_moves(config: AgenticConfig, episodes: int) -> Iterator[dict[str, Any]]:
    """Return rows of turns in which three disks are moved from tower A to tower C in seven moves."""
    (section,) = config.custom_envs.values()
    env = build_env(env_spec("game", section, config.train_env_manager, config.env_workers.python))
    observation: Observation | None = env.reset(0, {})
    rows = []
    for move in ("A C", "A B", "C B", "A C", "B A", "B C", "A C"):
        assert observation is not None, "the game ended before it was solved"
        said = next(name for name, action in section.action_lookup.items() if move in action)
        told = [{"role": "user", "content": observation.text}, {"role": "assistant", "content": said}]
        rows.append({"messages": told})
        result = env.step(said)
        observation = result.observation
    assert result.metrics["success"] == 1.0, "the game wasn't solved"
    env.close()
    return iter(rows * episodes)


def random_play(config: AgenticConfig, episodes: int) -> Iterator[dict[str, Any]]:
    """Yield rows of turns in which one of `action_lookup` is done at random, with the exchanges that a prompt shows."""
    for tag, section in config.custom_envs.items():
        spec = env_spec(tag, section, config.train_env_manager, config.env_workers.python)
        env, rng = build_env(spec), random.Random(config.seed)
        for seed in range(episodes):
            observation: Observation | None = env.reset(stable_hash(config.seed, "random-play", seed, bits=56), {})
            told: list[dict[str, str]] = []
            while observation is not None:
                said = rng.choice(list(section.action_lookup))
                told += [{"role": "user", "content": observation.text}, {"role": "assistant", "content": said}]
                earlier = section.history_length
                yield {"messages": told if earlier is None else told[-2 * earlier - 2 :]}
                observation = env.step(said).observation
        env.close()


def random_texts(config: AgenticConfig, episodes: int) -> Iterator[str]:
    """Yield what is read and said while the environments are played at random."""
    for tag, section in config.custom_envs.items():
        env = bare_env(env_spec(tag, section, config.train_env_manager, config.env_workers.python))
        rng = random.Random(0)
        yield from env.actions
        for seed in range(episodes):
            observation: Observation | None = env.reset(seed, {})
            for _ in range(section.max_steps):
                if observation is None:
                    break
                yield from (message.content for message in observation.messages)
                observation = env.step(random_action(env, rng)).observation


def write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write the rows as jsonl; the file is there whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    temporary.replace(file)


def make_model(folder: Path, texts: Iterable[str], seed: int, *, heads: int = 16, layers: int = 2) -> None:
    """Make a random model for the words of these texts. Many small heads find their way on a grid faster than few."""
    save_random_model(
        folder,
        make_tokenizer(texts),
        seed,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=1024,
        rope_theta=30.0,  # positions differ by few tokens here; the usual base makes them hard to tell apart
        initializer_range=0.1,
    )


def save_random_model(folder: Path, tokenizer: Any, seed: int, **shape: Any) -> None:
    """Write a random transformer for this tokenizer, with it; `shape` is of transformers' configuration of Qwen2."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **shape,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def words_in(texts: Iterable[str]) -> set[str]:
    """Return the tokens of these texts."""
    return {word for text in texts for word in re.findall(WORD, text)}


def make_tokenizer(texts: Iterable[str]) -> Any:
    """Return a tokenizer with a token for every word; spaces between words are dropped."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = words_in(texts) | {"\n", "system", "user", "assistant"}
    table = {word: i for i, word in enumerate([*SPECIAL, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token="<unk>"))
    spaces = pre_tokenizers.Split(Regex(" +"), "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([spaces, pre_tokenizers.Split(Regex(WORD), "isolated")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        chat_template=CHAT,
    )
