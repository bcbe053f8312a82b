"""The agentic pipeline's configuration: each mistake gives one clear error; derived values; what `--check` says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from refused import check_refused, refusals
from tiny_models import build_tiny_model

from roll.configs.checks.endpoint_checks import endpoint_notes
from roll.configs.checks.prerequisites import check_prerequisites
from roll.configs.errors import ConfigError
from roll.configs.parsing.loader import load_config
from roll.configs.rules.validate import warnings_of

LAKE = "custom_envs.lake"
TRAIN = "train_env_manager"
VAL = "val_env_manager"
METHOD = "reward_normalization.method"

JOB = {
    "pipeline": "agentic",
    "executor": "inline",
    "max_steps": 2,
    "pretrain": "model",
    "rollout_batch_size": 16,
    "prompt_length": 32,
    "response_length": 16,
    "custom_envs": {
        "lake": {"env_type": "frozen_lake-v1"},
        "room": {"env_type": "sokoban-v1", "env_config": {"dim_room": 6}},
    },
    "train_env_manager": {"num_env_groups": 4, "group_size": 4},
    "val_env_manager": {"num_env_groups": 3, "group_size": 2},
    "adv_estimator": "reinforce",
    "eval_steps": 1,
    "actor_train": {"training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}},
}


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a sound `job.yaml` and its model's config.json; also the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 64}))
    return tmp_path


GAME = "+custom_envs.game={env_type: nim-v1"
SECOND = "custom_envs.game.roles.second"

REFUSED = [
    # id, overrides, fragments of the one violation's text, and its path unless it is the last override's key
    # environments
    ("no environment", ["~custom_envs", "+custom_envs={}", f"{VAL}=null", "eval_steps=0"],
     ["at least one environment", "env_type: sokoban-v1"], "custom_envs"),
    ("a tag with a slash", ["custom_envs={a/b: {env_type: sokoban-v1}}"], ["without slashes"], "custom_envs.a/b"),
    ("an environment without a type", ["custom_envs={a: {max_steps: 2}}"], ["required"], "custom_envs.a.env_type"),
    ("a pattern that isn't one", [f"{LAKE}.action_pattern='(['"], ["a regular expression;"]),
    ("a pattern without a group", [f"{LAKE}.action_pattern='answer'"],
     ["with a group (...)", "<answer>(.*?)</answer>"]),
    ("an empty thinking tag", [f"{LAKE}.thinking_tags=['<think>','']"], ["aren't empty"]),
    ("one thinking tag", [f"{LAKE}.thinking_tags=['<think>']"], ["</think>"]),
    ("equal thinking tags", [f"{LAKE}.thinking_tags=['|','|']"], ["two different texts"]),
    ("nothing between actions", [f"{LAKE}.max_actions_per_step=2", f"{LAKE}.action_separator=' '"],
     ["more than blanks", '"||"']),
    ("one name of two actions", [f"{LAKE}.action_lookup={{up: Up, UP: Down}}"], ["['up', 'UP']", "keep one of them"]),
    ("a turn beyond a response", [f"{LAKE}.max_tokens_per_step=17"],
     ["at most response_length (16)", "raise response_length"]),
    ("an unknown name in the system message", [f"{LAKE}.system_template='{{instruction}}'"],
     ["did you mean 'instructions'", "{max_steps}", "{{instruction}}"]),
    ("an unknown name in a turn", [f"{LAKE}.turn_template='{{observation}} {{turn}}'"],
     ["got '{turn}'", "{steps_left}"]),
    ("a turn without an observation", [f"{LAKE}.turn_template='go on {{{{observation}}}}'"],
     ["would not see what happens"]),
    ("a window on a whole context", [f"{LAKE}.history_length=2"], ["sample_unit=step"]),
    ("an empty window that is carried", [f"{LAKE}.history_length=0", "sample_unit=concat"],
     ["at least 1", "sample_unit=step"], f"{LAKE}.history_length"),
    # managers
    ("half a group", ["rollout_batch_size=18"], ["18 episodes / 4 per group", "rollout_batch_size=16 or 20"]),
    ("less than a group", ["rollout_batch_size=3"], ["fix: rollout_batch_size=4"]),
    ("too few episodes per environment", ["rollout_batch_size=48", f"{TRAIN}.max_traj_per_env=2"],
     ["a step of 12 groups; 4 env groups x 2 = 8", "max_traj_per_env=3, or -1"]),
    ("no episode per environment", [f"{TRAIN}.max_traj_per_env=0"], ["-1 for no limit"]),
    ("an unknown tag", [f"{TRAIN}.tags=[lak]"], ["did you mean 'lake'", "lake, room"]),
    ("an unknown tag in validation", [f"{VAL}.tags=[room,roam]"], ["did you mean 'room'"]),
    ("a tag twice", [f"{TRAIN}.tags=[lake,lake]"], ["each tag once", "num_groups_partition"]),
    ("a partition that doesn't add up", [f"{TRAIN}.num_groups_partition=[1,2]"],
     ["2 tags", "num_env_groups (4); 1 + 2 = 3"]),
    ("a partition of other tags", [f"{TRAIN}.num_groups_partition=[1,2,1]"], ["a number for each of the 2 tags"]),
    ("a negative part", [f"{TRAIN}.num_groups_partition=[5,-1]"], ["5 + -1 = 4"]),
    ("more tags than groups", [f"{VAL}.num_env_groups=1"], ["one group for every tag", f"{VAL}.num_env_groups=2"]),
    ("a reward for a lost format", [f"{TRAIN}.format_penalty=0.5"], ["0 or less", f"{TRAIN}.format_penalty=-0.5"]),
    ("a reward for invalid actions", [f"{VAL}.invalid_action_penalty=1"], ["added to the reward"]),
    ("an empty band of rewards",
     [f"{TRAIN}.group_filter={{type: mean_filter, filter_args: {{threshold_down: 1, threshold_up: 0}}}}"],
     ["every group is dropped"], f"{TRAIN}.group_filter.filter_args.threshold_down"),
    ("a filter in validation", [f"{VAL}.group_filter={{type: std_filter}}"], ["counts every"]),
    ("redundancy in validation", [f"{VAL}.group_size_redundancy=1"], ["expected 0"]),
    ("half a group of validation", ["val_batch_size=5"], ["5 episodes / 2", "val_batch_size=4 or 6"]),
    ("a size of no validation", ["val_batch_size=4", f"{VAL}=null", "eval_steps=0"],
     [f"with {VAL}", "add that section"], "val_batch_size"),
    ("a validation beyond its environments", ["val_batch_size=20", f"{VAL}.max_traj_per_env=3"],
     ["10 groups; 3 env groups x 3 = 9", "max_traj_per_env=4, or -1"]),
    ("responses per prompt in validation", [f"{VAL}.generating_args.num_return_sequences=4"],
     ["group_size (2)", "remove it"]),
    ("responses per prompt", ["actor_infer.generating_args.num_return_sequences=8"], [f"{TRAIN}.group_size (4)"]),
    ("a group of one, compared", [f"{TRAIN}.group_size=1"], ["at least 2", "reward_normalization compares"]),
    ("a group of one, filtered",
     [f"{TRAIN}.group_size=1", f"{METHOD}=identity", f"{TRAIN}.group_filter.type=std_filter"], ["std_filter"],
     f"{TRAIN}.group_size"),
    ("validation of nothing", [f"{VAL}=null"], [f"with {VAL}", "add that section"], "eval_steps"),
    # 4 per device x 3 accumulation x 1 rank = 12; 4 groups x 4 episodes = 16 = 12 + 4.
    ("a mini-batch that doesn't divide", ["actor_train.training_args.gradient_accumulation_steps=3"],
     ["= 12 doesn't divide", "4 groups x 4 episodes = 16", "remainder 4", "rollout_batch_size=12 or 24"],
     "actor_train.training_args"),
    # credit
    ("normalised twice", ["adv_estimator=grpo"], ["identity with adv_estimator grpo", f"{METHOD}=identity"], METHOD),
    ("a baseline twice", ["adv_estimator=reinforce_plus_plus_baseline"], ["compares the members of a group"], METHOD),
    ("a greedy response to an episode", ["adv_estimator=remax"], ["several turns", "=reinforce"]),
    ("lambda by tokens, discount by turns",
     ["adv_estimator=vapo", "discount_over=turn", "critic.training_args.per_device_train_batch_size=8"],
     ["goes by the number of tokens"], "discount_over"),
    ("turns that nobody discounts", ["adv_estimator=grpo", f"{METHOD}=identity", "discount_over=turn"],
     ["doesn't discount by gamma", "adv_estimator=gae"]),
    ("a clip that nothing reads", ["adv_estimator=step_reinforce", "reward_clip=1"],
     ["null with adv_estimator step_reinforce", "advantage_clip"]),
    ("whitening that nothing reads", ["adv_estimator=step_reinforce", "whiten_rewards=true"],
     ["false with adv_estimator step_reinforce"]),
    ("a clip before gigpo normalises", ["adv_estimator=gigpo", "reward_clip=1"],
     ["null with adv_estimator gigpo", "advantage_clip"]),
    ("the other discount", ["adv_estimator=gigpo", "gamma=0.9"], ["step_reward_gamma=0.9, and remove gamma"]),
    ("a ratio that the loss hasn't", ["ratio_type=segment", "policy_loss=gspo"],
     ["acts only with policy_loss ppo or decoupled_ppo, and policy_loss is gspo", "policy_loss=ppo"], "ratio_type"),
    ("a stop string that ends an action", ["~custom_envs.room",
                                           "actor_infer.generating_args.stop_strings=['</answer>']",
                                           "actor_infer.generating_args.include_stop_str_in_output=false"],
     ["'</answer>'", "which ends a response"]),
    ("processes said twice", [f"{TRAIN}.max_env_num_per_worker=4", "env_workers.world_size=2"],
     ["train_env_manager.max_env_num_per_worker says", "keep one"]),
    ("a name of other templates", [f"{LAKE}.turn_template='{{observation}} {{turn_idx}}'"], ["write {step}"]),
    # roles
    ("no places to change", [f"{GAME}, swap_roles: true}}"], ["acts only with roles"], "custom_envs.game.swap_roles"),
    ("the policy in every place", [f"{GAME}, swap_roles: true, roles: {{first: {{player: policy}}}}}}"],
     ["has no effect: the policy plays every role"], "custom_envs.game.swap_roles"),
    ("a service without an address", [f"{GAME}, roles: {{second: {{player: endpoint, model: old}}}}}}"],
     ["the address of the service that plays the role", "http://localhost:8000/v1"], f"{SECOND}.endpoint"),
    ("a service without a model", [f"{GAME}, roles: {{second: {{player: endpoint, endpoint: 'http://a/v1'}}}}}}"],
     ["the model's name at the endpoint"], f"{SECOND}.model"),
    ("an address for a script", [f"{GAME}, roles: {{second: {{player: random, endpoint: 'http://a/v1'}}}}}}"],
     ["acts only with player endpoint", "player is random"], f"{SECOND}.endpoint"),
    ("options of no class", [f"{GAME}, roles: {{second: {{player_config: {{mistakes: 0.5}}}}}}}}"],
     ["acts only without player policy or endpoint"], f"{SECOND}.player_config"),
    # words of other frameworks
    ("a manager's class", [f"{LAKE}.env_manager_cls=x.TrajEnvManager"],
     ["sample_unit", "trajectory for TrajEnvManager"]),
    ("a worker's class", [f"{TRAIN}.worker_cls=x.Worker"], ["env_workers.world_size"]),
    ("data of the engine", ["actor_infer.data_args.template=native"], ["remove it: tasks are environments"],
     "actor_infer.data_args"),
    ("a kind of checkpoint", ["checkpoint_config.type=file_system"], ["checkpoint_config.output_dir"]),
    ("gigpo without either part", ["adv_estimator=gigpo", "episode_reward_weight=0", "step_reward_weight=0"],
     ["every advantage is 0", "episode_reward_weight=1"], "episode_reward_weight"),
    ("GAE without a critic", ["adv_estimator=gae"], ["add a critic section"], "critic"),
    ("an unknown grouping", ["reward_normalization.grouping=trajgroup"], ["did you mean 'traj_group'"]),
    ("pictures of nothing", ["render_save_dir=pictures"], ["log_val_generations=4"]),
    ("pictures of no validation", ["render_save_dir=pictures", "log_val_generations=4", f"{VAL}=null", "eval_steps=0"],
     ["acts only with val_env_manager"], "render_save_dir"),
    # warm start
    ("two models to start from", ["warm_start=first.yaml"], ["out of the pretrain of its own file"], "pretrain"),
    ("a model instead of the warm one",
     ["pretrain=null", "warm_start=first.yaml", "actor_train.model_args.model_name_or_path=model"], ["or warm_start"]),
]  # fmt: skip


@refusals(REFUSED)
def test_a_mistake_gives_one_clear_error(play, overrides, path, fragments):
    check_refused(play, overrides, path, [*fragments, "fix: "])


UNKNOWN = [
    (f"{LAKE}.env_typ=a", f"{LAKE}.env_typ", "did you mean 'env_type'"),
    (f"{TRAIN}.group_siz=4", f"{TRAIN}.group_siz", "did you mean 'group_size'"),
    (f"{TRAIN}.generating_args.temperature=1", f"{TRAIN}.generating_args.temperature", f"{VAL}.generating_args"),
    (f"{VAL}.num_env_group=4", f"{VAL}.num_env_group", "did you mean 'num_env_groups'"),
    (f"{VAL}.group_filter.std_threshold=1", f"{VAL}.group_filter.std_threshold", "filter_args.std_threshold"),
    ("env_workers.timeout=4", "env_workers.timeout", "did you mean 'timeout_s'"),
    ("reward_normalization.group=tags", "reward_normalization.group", "did you mean 'grouping'"),
    ("group_size=4", "group_size", f"{TRAIN}.group_size or {VAL}.group_size"),
    ("history_length=2", "history_length", "custom_envs.<name>.history_length"),
]


@pytest.mark.parametrize(("override", "path", "fragment"), UNKNOWN)
def test_an_unknown_key_of_each_section_is_refused(play, override, path, fragment):
    check_refused(play, [override], path, [fragment])


OFFLINE = "rlvr, distill, sft, dpo and reward_model"
ELSEWHERE = [
    ("rewards={}", "remove it: a key of pipeline: rlvr and distill; environments give the rewards"),
    ("num_return_sequences_in_group=4", "a key of pipeline: rlvr and distill; write train_env_manager.group_size"),
    ("validation={}", f"a key of pipeline: {OFFLINE}; write val_env_manager"),
    ("global_template=plain", "a key of pipeline: rlvr and distill; see custom_envs.<tag>.system_template"),
    ("reward_model={}", "a key of pipeline: rlvr"),
    ("train_on=all", "a key of pipeline: sft"),
    ("actor_train.data_args={file_name: train.jsonl}", f"a key of pipeline: {OFFLINE}; tasks are environments"),
    ("num_train_epochs=1", f"a key of pipeline: {OFFLINE}; environments have no epochs, write max_steps"),
    ("truncation=filter", f"a key of pipeline: {OFFLINE}; a context that is too long ends its episode"),
    ("reward_retries=5", "a key of pipeline: rlvr and distill; a failed environment ends its episode"),
    ("overlong_shaping={buffer: 4}", "a key of pipeline: rlvr and distill; it knows the limit of one response"),
    ("reward_norm=group", "a key of pipeline: rlvr and distill; see reward_normalization"),
    ("use_reward_scaling=true", "a key of pipeline: rlvr and distill; see reward_normalization"),
]


@pytest.mark.parametrize(("override", "fragment"), ELSEWHERE)
def test_a_key_of_another_pipeline_is_named_as_one(play, override, fragment):
    check_refused(play, [override], override.split("=")[0], [fragment])


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("custom_envs", ""),
        ("val_env_manager", "see validation"),
        ("reward_normalization", "see reward_norm"),
        ("sample_unit", ""),
        ("discount_over", ""),
        ("warm_start", ""),
    ],
)
def test_an_agentic_key_elsewhere_is_named_as_one(job, key, hint):
    check_refused(job, [f"{key}={{}}"], key, ["remove it: a key of pipeline: agentic", hint])


SOUND = [
    *(["adv_estimator=" + name, f"{METHOD}=identity"] for name in ("grpo", "rloo", "opo", "gpg")),
    *(["adv_estimator=" + name, "discount_over=turn"] for name in ("reinforce", "reinforce_plus_plus")),
    ["adv_estimator=gae", "discount_over=turn", "critic.training_args.per_device_train_batch_size=8"],
    ["adv_estimator='mine.py:credit'", "discount_over=turn"],
    ["adv_estimator=gigpo", "step_reward_weight=0", "advantage_clip=5"],
    ["adv_estimator=reinforce", "whiten_rewards=true", "reward_clip=5"],
    ["adv_estimator=step_reinforce", f"{TRAIN}={{num_env_groups: 4, group_size: 1}}"],
    ["ratio_type=segment", "policy_loss=decoupled_ppo"],
    [f"{LAKE}.history_length=0", "sample_unit=step"],
    [f"{LAKE}.turn_template='{{{{turn}}}} {{observation}} {{ }}'", f"{LAKE}.system_template=null"],
    ["error_max_len_clip=true", "error_max_len_threshold=40"],
]


@pytest.mark.parametrize("overrides", SOUND, ids=str)
def test_what_belongs_together_is_taken(play, overrides):
    assert warnings_of(load_config(play, "job", overrides)) == []


def test_processes_follow_from_what_one_holds(play):
    # 4 groups x (4 + 1) episodes, 6 to a process: 4 processes; 3 x 2 validation episodes need fewer.
    sizes = [f"{TRAIN}.max_env_num_per_worker=6", f"{TRAIN}.group_size_redundancy=1", f"{VAL}.max_env_num_per_worker=5"]
    workers = load_config(play, "job", sizes).env_processes
    assert (workers.world_size, workers.max_env_num_per_worker, workers.room) == (4, 6, 24)
    few = load_config(play, "job", ["env_workers.world_size=2", "env_workers.max_env_num_per_worker=3"])
    assert few.env_processes == few.env_workers
    assert warnings_of(few) == [
        "train_env_manager wants 16 episodes at once, and environment processes have room for 6 (2 x 3): "
        "the others wait"
    ]


def test_weights_that_nothing_reads_are_named(play):
    (warning,) = warnings_of(load_config(play, "job", ["step_reward_gamma=0.5"]))
    assert warning == "step_reward_gamma 0.5 does nothing: adv_estimator reinforce doesn't read it"


def test_a_key_below_a_reference_is_not_put_in_its_place(play):
    job = {**JOB, "ice": JOB["custom_envs"]["lake"], "custom_envs": {"lake": "${ice}"}}
    (play / "job.yaml").write_text(yaml.safe_dump(job))
    check_refused(play, ["custom_envs.lake.max_steps=5"], "custom_envs.lake.max_steps",
                  ["custom_envs.lake is ${ice}, which this would replace", "ice.max_steps=5"])  # fmt: skip
    assert load_config(play, "job", ["ice.max_steps=5"]).custom_envs["lake"].max_steps == 5


def test_a_file_without_a_pipeline_is_told_which_one_it_looks_like(play):
    (play / "job.yaml").write_text(yaml.safe_dump({key: value for key, value in JOB.items() if key != "pipeline"}))
    check_refused(play, [], "pipeline", ["add pipeline: agentic"])


def test_derived_values_follow_from_the_managers(play):
    config = load_config(play, "job", [f"{TRAIN}.num_env_groups=5", f"{VAL}.tags=room", f"{TRAIN}.max_traj_per_env=2"])
    assert (config.group_size, config.groups_per_step, config.redundancy, config.max_open_groups) == (4, 4, 0, 5)
    assert (config.tags_of(config.train_env_manager), config.partition_of(config.train_env_manager)) == (
        ("lake", "room"),
        (3, 2),
    )
    assert (config.tags_of(config.val_env_manager), config.partition_of(config.val_env_manager)) == (("room",), (3,))
    assert (config.validation_groups, config.validation_chunk) == (3, 3)
    assert config.task_budget == 10  # 5 environments x 2, less than 10 x 4 groups
    assert load_config(play, "job", ["val_batch_size=10"]).validation_groups == 5
    assert load_config(play, "job").task_budget == 40
    parts = load_config(play, "job", [f"{TRAIN}.num_groups_partition=[1,3]"])
    assert parts.partition_of(parts.train_env_manager) == (1, 3)


def test_the_plan_speaks_of_groups_and_episodes(play):
    plan = load_config(play, "job", [f"{TRAIN}.group_size=2"]).batch
    assert plan.explain().splitlines()[0] == "8 groups x 2 episodes = 16 episodes per step"
    assert "16 / 8 = 2 mini-batches, x 1 pass = 2 optimizer steps per step" in plan.explain()


def test_a_warm_start_makes_the_model(play):
    config = load_config(play, "job", ["pretrain=null", "warm_start=first.yaml", "output_dir=out"])
    assert config.model_path("actor_infer") == "out/warm_start/hf_model" == str(config.warm_model_path)
    with pytest.raises(ConfigError, match=r"warm_start.*a configuration file that exists"):
        check_prerequisites(config)
    (play / "first.yaml").write_text("pipeline: sft\n")
    check_prerequisites(config)  # the model isn't there yet, and need not be


def test_one_turn_is_a_warning_for_what_credits_turns(play):
    one = [f"custom_envs.{tag}.max_steps=1" for tag in ("lake", "room")]
    assert "every episode is one turn" in warnings_of(load_config(play, "job", ["adv_estimator=gigpo", *one]))[0]
    assert warnings_of(load_config(play, "job", ["adv_estimator=gigpo", one[0]])) == []


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        (f"{LAKE}.max_steps", "0", ">= 1"),
        (f"{TRAIN}.invalid_action_penalty", "nan", "finite"),
        ("env_workers.world_size", "0", ">= 1"),
        ("env_workers.max_env_num_per_worker", "0", ">= 1"),
        ("env_workers.timeout_s", "0", "> 0"),
        ("env_workers.memory_limit_mb", "0", ">= 64"),
    ],
)
def test_numbers_out_of_range_are_refused(play, key, value, expected):
    check_refused(play, [f"{key}={value}"], key, [expected])


CHECKS = [
    ([f"{LAKE}.env_type=frozenlake-v1"], ["custom_envs.lake.env_type", "did you mean 'frozen_lake-v1'"]),
    ([f"{LAKE}.env_config.sise=5"], ["custom_envs.lake.env_config.sise", "did you mean 'size'"]),
    ([f"{LAKE}.env_config.size=1", "custom_envs.room.env_config.dim_room=2"],
     ["2 problems with environments", "size: got 1", "dim_room: got"]),
    ([f"+{LAKE}.roles={{first: {{player: random}}}}"], ["custom_envs.lake.roles.first", "a single agent plays it"]),
    (["custom_envs.lake={env_type: nim-v1, roles: {firstt: {player: random}}}"],
     ["roles.firstt: nim-v1 has no such role; it has first, second", "did you mean 'first'"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "fragments"), CHECKS, ids=[str(row[0]) for row in CHECKS])
def test_environments_are_checked_before_anything_starts(play, overrides, fragments):
    from roll.envs.env_registry import EnvLoadError, check_envs

    config = load_config(play, "job", overrides)
    with pytest.raises(EnvLoadError) as caught:
        check_envs(config)
    for fragment in fragments:
        assert fragment in str(caught.value)
    # Each is said once, though training and validation both play it.
    assert str(caught.value).count("custom_envs.lake") == 1


def test_a_player_of_ones_own_is_looked_for_and_its_options_are_compared_without_importing_it(play):
    (play / "mine.py").write_text("raise RuntimeError\nclass Mine:\n    def __init__(self, *, depth=1): ...\n")

    def checked(player: str) -> None:
        check_prerequisites(load_config(play, "job", [f"{GAME}, roles: {{second: {player}}}}}"]))

    checked("{player: 'mine.py:Mine', player_config: {depth: 2}}")
    with pytest.raises(ConfigError, match=rf"{SECOND}\.player_config\.dept.*did you mean 'depth'"):
        checked("{player: 'mine.py:Mine', player_config: {dept: 2}}")
    with pytest.raises(ConfigError, match=rf"{SECOND}\.player: .*a class 'Yours' in mine.py; it has Mine"):
        checked("{player: 'mine.py:Yours'}")


def test_a_service_that_plays_a_role_is_looked_for_when_a_configuration_is_checked(play, monkeypatch):
    monkeypatch.delenv("OLD_KEY", raising=False)
    role = "{player: endpoint, endpoint: 'http://127.0.0.1:9/v1', model: old, api_key_env: OLD_KEY}"
    notes = "\n".join(endpoint_notes(load_config(play, "job", [f"{GAME}, roles: {{second: {role}}}}}"])))
    assert f"{SECOND}.api_key_env: the environment variable OLD_KEY is not set here" in notes
    assert f"{SECOND}.endpoint: 127.0.0.1:9 can't be reached" in notes


def test_an_environment_in_no_module_is_refused_with_its_key(play):
    with pytest.raises(ConfigError, match=r"custom_envs\.lake\.env_type.*package\.module:name or path/to/file"):
        check_prerequisites(load_config(play, "job", [f"{LAKE}.env_type=':X'"]))


def test_only_environments_that_are_played_are_checked(play):
    from roll.envs.env_registry import check_envs

    broken = f"{LAKE}.env_type=frozenlake-v1"
    check_envs(load_config(play, "job", [broken, f"{TRAIN}.tags=room", f"{VAL}.tags=room"]))
    check_envs(load_config(play, "job", [broken, "val_only=true", f"{VAL}.tags=room"]))
    # What makes files comes first; then they can't be asked for here.
    check_envs(load_config(play, "job", [f"{LAKE}.env_config.size=1", "prepare='make.py:files'"]))


def test_the_command_checks_environments(play, capsys, checks_start_no_process):
    import runpy

    build_tiny_model(play / "model")  # the command looks at tokenizer and weights, too

    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "start_pipeline.py"))["main"]
    job = ["--config_path", str(play), "--config_name", "job", "--check"]
    assert main(job) == 0
    assert "4 groups x 4 episodes = 16 episodes per step" in capsys.readouterr().out
    assert main([*job, f"{LAKE}.env_config.sise=5"]) == 2
    assert "has no such argument" in capsys.readouterr().err


def test_the_estimator_may_be_written_with_its_options(play):
    config = load_config(play, "job", ["adv_estimator={name: reinforce, gamma: 0.5}"])
    assert config.adv_estimator == "reinforce"
    assert config.estimator_options == {"gamma": 0.5}
