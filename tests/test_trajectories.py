"""Training on given trajectories: equal to the stock trainer on the same data, resumable, strict about bad input."""

import contextlib
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, List, Value
from grpo_runs import gradient_error, metric_errors, save_checkpoint, train
from tiny_models import VOCAB
from trl import GRPOTrainer

from harts_hf import TreeGRPOTrainer
from harts_hf.trainers.trajectories import TrajectoryDatasetMixin, group_advantages
from harts_hf.trainers.trajectory_sampler import GroupedTrajectorySampler


class StockOnTrajectories(TrajectoryDatasetMixin, GRPOTrainer):
    """The stock trainer on the same data."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoint"), max_position_embeddings=256)


def step_wise_trajectories(num_episodes=4, with_old=False, seed=0) -> Dataset:
    """Step-wise samples: the samples of an episode nest; two turns an episode; groups of unequal size."""
    rng = np.random.default_rng(seed)
    rows = []
    for episode in range(num_episodes):
        tokens = rng.integers(2, VOCAB, 90)
        turns = [(20, 35), (50, 60), (75, 90)][: 2 + episode % 2]
        for start, end in turns:
            mask = np.zeros(end, dtype=int)
            mask[start:end] = 1
            mask[start + 3 : start + 5] = 0  # a hole inside the trained tokens
            rows.append(
                {
                    "input_ids": tokens[:end].tolist(),
                    "completion_mask": mask.tolist(),
                    "reward": float(rng.normal()),
                    "group": f"task {episode // 2}",
                    "old_log_probs": np.where(mask, -5 + 0.5 * rng.standard_normal(end), np.nan).tolist(),
                }
            )
    data = Dataset.from_list(rows)
    return data if with_old else data.remove_columns("old_log_probs")


def runs(checkpoint, folder, data, **options):
    given = {
        "trainer_options": {"train_dataset": data},
        "num_generations": 5,
        "per_device_train_batch_size": 5,
        **options,
    }
    stock = train(StockOnTrajectories, checkpoint, folder, **given)
    other = train(StockOnTrajectories, checkpoint, folder, **given, pad_to_multiple_of=64)
    tree = train(TreeGRPOTrainer, checkpoint, folder, **given, max_tokens_per_microbatch=100)
    return stock, other, tree


@pytest.mark.parametrize("with_old", [False, True])
@pytest.mark.parametrize("loss", [{"loss_type": "dapo"}, {"loss_type": "grpo", "beta": 0.1}])
def test_equals_stock(loss, with_old, checkpoint, tmp_path):
    stock, other, tree = runs(checkpoint, tmp_path, step_wise_trajectories(with_old=with_old), **loss)
    assert gradient_error(tree, stock) <= max(2 * gradient_error(other, stock), 1e-6)
    assert max(metric_errors(tree, stock).values()) <= max(2 * max(metric_errors(other, stock).values()), 1e-5)
    log = tree.logs[0]
    assert log["tree/rows"] < log["tree/expanded_tokens"]
    assert log["tree/compression"] == pytest.approx(log["tree/expanded_tokens"] / log["tree/rows"])


def test_old_log_probs_are_used(checkpoint, tmp_path):
    with_old, _, _ = runs(checkpoint, tmp_path, step_wise_trajectories(with_old=True), epsilon=0.01)
    assert with_old.logs[0]["clip_ratio/region_mean"] > 0.1


def test_resume_in_the_middle_of_an_epoch(checkpoint, tmp_path):
    data = step_wise_trajectories(num_episodes=16)
    options = {
        "trainer_options": {"train_dataset": data},
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 7,
        "shuffle_dataset": True,
        "learning_rate": 0.05,
        "max_tokens_per_microbatch": 100,
        "optim": "adamw_torch",
    }
    whole = train(TreeGRPOTrainer, checkpoint, tmp_path / "whole", **options)
    first = train(
        TreeGRPOTrainer,
        checkpoint,
        tmp_path / "cut",
        **{**options, "save_strategy": "steps", "save_steps": 3, "max_steps": 7},
    )
    assert first.trainer.state.epoch > 1  # 40 trajectories, 8 a step: 5 steps an epoch
    for checkpoint_step in (3, 6):  # in the middle of the first and of the second epoch
        resumed = train(
            TreeGRPOTrainer,
            checkpoint,
            tmp_path / f"resumed{checkpoint_step}",
            resume=str(tmp_path / "cut" / f"checkpoint-{checkpoint_step}"),
            **options,
        )
        for name, parameter in whole.parameters.items():
            assert torch.equal(resumed.parameters[name], parameter), f"{name} after resuming at step {checkpoint_step}"


@pytest.mark.parametrize("options", [{"num_iterations": 2}, {"steps_per_generation": 4}])
def test_resume_inside_a_generation_batch(options, checkpoint, tmp_path):
    """With given old log-probs the run goes on as if nothing had happened; without, the user is told."""
    options = {
        "num_generations": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 3,
        "shuffle_dataset": True,
        **options,
    }
    for with_old in (True, False):
        given = {"train_dataset": step_wise_trajectories(num_episodes=16, with_old=with_old)}
        whole = train(
            TreeGRPOTrainer, checkpoint, tmp_path / "w", None, given, save_strategy="steps", save_steps=1, **options
        )
        cut = str(tmp_path / "w" / "checkpoint-1")
        warned = pytest.warns(UserWarning, match="inside a generation batch")
        with contextlib.nullcontext() if with_old else warned:
            resumed = train(
                TreeGRPOTrainer, checkpoint, tmp_path / "r", None, given, resume=cut, quiet=with_old, **options
            )
        if with_old:
            assert all(torch.equal(resumed.parameters[n], p) for n, p in whole.parameters.items())


def test_evaluation_on_trajectories(checkpoint, tmp_path):
    data = step_wise_trajectories()
    logs = []
    for trainer_class in (StockOnTrajectories, TreeGRPOTrainer):
        run = train(
            trainer_class,
            checkpoint,
            tmp_path,
            trainer_options={"train_dataset": data, "eval_dataset": data},
            num_generations=5,
            per_device_train_batch_size=5,
            per_device_eval_batch_size=5,
            eval_strategy="steps",
            eval_steps=1,
        )
        logs.append([log for log in run.logs if "eval_loss" in log][0])
    assert logs[1]["eval_loss"] == pytest.approx(logs[0]["eval_loss"], rel=1e-4, abs=1e-6)
    assert logs[1]["eval_entropy"] == pytest.approx(logs[0]["eval_entropy"], rel=1e-4)


def _bad(**changes) -> Dataset:
    rows = [
        {
            "input_ids": [2, 3, 4, 5],
            "completion_mask": [0, 0, 1, 1],
            "advantage": 1.0,
            "group": "a",
            "old_log_probs": [None, None, -1.0, -1.0],
        }
        for _ in range(12)
    ]
    rows[7] = {**rows[7], **changes}
    return Dataset.from_list(rows)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"input_ids": [], "completion_mask": [], "old_log_probs": []}, "input_ids", "empty"),
        ({"completion_mask": [0, 0, 1, 1, 1]}, "completion_mask", "5 entries for 4 token ids"),
        ({"completion_mask": [0, 0, 2, 1]}, "completion_mask", "0 or 1"),
        ({"completion_mask": [1, 0, 1, 1]}, "completion_mask", "first token has no context"),
        ({"input_ids": [2, 3, 4, VOCAB]}, "input_ids", "vocabulary"),
        ({"input_ids": [2, -3, 4, 5]}, "input_ids", "vocabulary"),
        ({"advantage": math.nan}, "advantage", "finite"),
        ({"advantage": None}, "advantage", "missing"),
        ({"advantage": 1e300}, "advantage", "finite"),
        ({"group": None}, "group", "missing"),
        ({"old_log_probs": [0.0, 0.0, math.nan, -1.0]}, "old_log_probs", "finite.*token 2"),
        ({"old_log_probs": [0.0]}, "old_log_probs", "1 entries"),
        (
            {"input_ids": [3] * 300, "completion_mask": [0] + [1] * 299, "old_log_probs": [0.0] * 300},
            "input_ids",
            "300 tokens.*256 positions",
        ),
    ],
)
def test_bad_trajectory_is_named(changes, field, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=f"trajectory 7, {field}.*{message}"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, trainer_options={"train_dataset": _bad(**changes)})


def test_bad_columns_are_named(checkpoint, tmp_path):
    def start(data, error, match):
        with pytest.raises(error, match=match):
            train(TreeGRPOTrainer, checkpoint, tmp_path, trainer_options={"train_dataset": data})

    good = _bad()
    floats = Dataset.from_list([{"input_ids": [2.0, 3.5], "completion_mask": [0, 1], "advantage": 1.0}] * 8)
    start(floats, TypeError, "input_ids.*integers")
    start(good.remove_columns("completion_mask"), ValueError, "completion_mask")
    start(good.remove_columns("advantage"), ValueError, "advantage column, or a reward and a group")
    text = good.remove_columns("advantage").add_column("advantage", ["1"] * 12)
    start(text, TypeError, "advantage.*number")
    lists = good.remove_columns("group").add_column("group", [[1]] * 12)
    start(lists, TypeError, "group.*integer or a string")
    start(good.to_iterable_dataset(), TypeError, "map-style")
    start(IterableDataset.from_generator(lambda: iter(good)), TypeError, "map-style")

    def unread():
        raise AssertionError("the stream was started")
        yield

    start(IterableDataset.from_generator(unread), TypeError, "map-style")
    start(good.select(range(4)), ValueError, "4 trajectories, fewer than one optimizer step's batch of 8")
    start(
        good.add_column("bad", [1] * 12).remove_columns("input_ids").rename_column("bad", "input_ids"),
        TypeError,
        "list",
    )


def test_options_of_generation_are_refused(checkpoint, tmp_path):
    given = {"trainer_options": {"train_dataset": _bad()}}
    with pytest.raises(ValueError, match="mask_truncated_completions"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, **given, mask_truncated_completions=True)
    with pytest.raises(ValueError, match="one reward"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, **given, multi_objective_aggregation="normalize_then_sum")
    for option in ("use_vllm", "log_completions"):
        with pytest.raises(ValueError, match=option):
            train(TreeGRPOTrainer, checkpoint, tmp_path, **given, **{option: True})
    for name in ("reward_funcs", "rollout_func", "tools", "environment_factory"):
        with pytest.raises(ValueError, match=f"{name} would have no effect"):
            train(TreeGRPOTrainer, checkpoint, tmp_path, trainer_options={"train_dataset": _bad(), name: len})
    prompts = Dataset.from_dict({"prompt": ["x"]})
    with pytest.raises(ValueError, match="eval_dataset holds prompts"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, **given, eval_dataset=prompts)
    with pytest.raises(ValueError, match="vllm_importance_sampling_correction=False"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, **given, eval_dataset=prompts, use_vllm=True)


@pytest.mark.parametrize("layout", ["torch", "numpy", "fixed-size lists"])
def test_layout_of_the_dataset_does_not_matter(layout, checkpoint, tmp_path):
    data = _bad().remove_columns("advantage").add_column("reward", [float(i % 5) for i in range(12)])
    plain = train(TreeGRPOTrainer, checkpoint, tmp_path, trainer_options={"train_dataset": data})
    if layout == "fixed-size lists":
        ids = List(Value("int32"), length=4)
        other = data.cast_column("input_ids", ids)
    else:
        other = data.with_format(layout)
    run = train(TreeGRPOTrainer, checkpoint, tmp_path, trainer_options={"train_dataset": other})
    assert all(torch.equal(run.parameters[n], p) for n, p in plain.parameters.items())


def test_trajectories_left_out_are_counted():
    with pytest.warns(UserWarning, match="3 of 11 trajectories.*always the same"):
        GroupedTrajectorySampler(["a"] * 11, block=4, repeat=1, shuffle=False, seed=0)


def test_selected_rows_are_checked_by_their_own_index(checkpoint, tmp_path):
    data = _bad(advantage=math.nan).select([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 7])
    with pytest.raises(ValueError, match="trajectory 11, advantage"):
        train(TreeGRPOTrainer, checkpoint, tmp_path, trainer_options={"train_dataset": data})


def test_sampler_keeps_groups_together():
    groups = [i % 5 for i in range(23)]
    sampler = GroupedTrajectorySampler(groups, block=4, repeat=3, shuffle=True, seed=0)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        indices = list(sampler)
        assert len(indices) == len(sampler) == 5 * 4 * 3
        blocks = [indices[i : i + 4] for i in range(0, len(indices), 4)]
        assert all(blocks[i] == blocks[i - i % 3] for i in range(len(blocks)))
        once = [i for block in blocks[::3] for i in block]
        assert len(set(once)) == 20
        order = [groups[i] for i in once]
        assert sum(a != b for a, b in pairwise(order)) <= 4  # each group is one run
        epochs.append(indices)
    assert epochs[0] != epochs[1]
    sampler.set_epoch(0)
    assert list(sampler) == epochs[0]


def test_group_advantages_are_trls():
    rewards = [1.0, 2.0, 4.0, 5.0, 5.0, 7.0]
    groups = ["a", "b", "a", "b", "b", "c"]
    values = group_advantages(rewards, groups, "group")
    a = torch.tensor([1.0, 4.0], dtype=torch.float64)
    np.testing.assert_allclose(values[[0, 2]], ((a - a.mean()) / (a.std() + 1e-4)).numpy())
    assert values[5] == 0.0
    np.testing.assert_allclose(group_advantages(rewards, groups, "none")[[0, 2]], [-1.5, 1.5])
    batch = torch.tensor(rewards, dtype=torch.float64).std()
    np.testing.assert_allclose(
        group_advantages(rewards, groups, "batch")[[0, 2]], [-1.5 / (batch + 1e-4), 1.5 / (batch + 1e-4)]
    )


def test_unknown_scale_of_rewards_is_refused():
    with pytest.raises(ValueError, match="scale_rewards.*'groups'"):
        group_advantages([1.0, 2.0], ["a", "a"], "groups")
