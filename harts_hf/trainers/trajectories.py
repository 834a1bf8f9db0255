"""Train on trajectories that were generated elsewhere: a dataset of token ids instead of prompts.

One row of the `datasets.Dataset` is one trajectory, a whole episode or one step of it (a step-wise sample). Nothing is
generated and no reward function is called; batches reach the trainer in TRL's own layout, so every loss works.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import nanstd, pad, use_adapter

from .guards import refuse_generation_options, refuse_generators
from .trajectory_columns import (
    TRAJECTORY_COLUMNS,
    check_trajectory_dataset,
    is_trajectory_dataset,
    refuse_unknown_columns,
)
from .trajectory_sampler import GroupedTrajectorySampler

if TYPE_CHECKING:
    from trl.trainer.grpo_trainer import GRPOTrainer

    class _Trainer(GRPOTrainer):
        """What the mixin stands before, with the types of what is set: Trainer's own are wider."""

        accelerator: Any
        args: Any
        eval_dataset: Any
        model: Any
        pad_to_multiple_of: int | None
        ref_model: Any
        shuffle_dataset: bool
        train_dataset: Any
else:
    _Trainer = object


class TrajectoryDatasetMixin(_Trainer):
    """
    Lets a [`~trl.GRPOTrainer`] train on given trajectories. [`TreeGRPOTrainer`] has it; `class Stock(
    TrajectoryDatasetMixin, GRPOTrainer)` is the stock trainer on the same data.

    A `train_dataset` or `eval_dataset` with an `input_ids` column is taken as trajectories. Columns:

        - `input_ids` (list of `int`): prompt, sampled tokens and environment tokens, as the model saw them.
        - `completion_mask` (list of `int`): 1 for each trained token, of the same length. The first token has no
          context and must be 0.
        - `reward` (`float`) and `group` (`int` or `str`): advantages are computed as [`~trl.GRPOTrainer`] does
          (`scale_rewards`), over all trajectories of a group, of which there may be any number; or
        - `advantage` (`float`): used as it is.
        - `old_log_probs` (list of `float`, *optional*): log-prob of each token under the policy that sampled it, of
          the same length; read where `completion_mask` is 1.

    Trajectories of one group are kept together, so that they share their prefixes within a step; `shuffle_dataset`
    shuffles the order of the groups. `per_device_train_batch_size` times `gradient_accumulation_steps` trajectories
    make an optimizer step. `num_generations` has no meaning here, but TRL still asks that it divides that number. What
    does not fill a last batch of an epoch is left out of that epoch, with a warning.

    Raises:
        TypeError, ValueError: a dataset with an `input_ids` column that cannot be trained on; the message names the
            trajectory and the field ([`check_trajectory_dataset`]).
        ValueError: an option of generation or scoring that would have no effect; the message names it.
    """

    def __init__(self, model, reward_funcs=None, args=None, train_dataset=None, eval_dataset=None, *rest, **kwargs):
        self._trains_on_trajectories = is_trajectory_dataset(train_dataset)
        if self._trains_on_trajectories:
            evaluated = eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]
            generates = any(dataset is not None and not is_trajectory_dataset(dataset) for dataset in evaluated)
            if args is not None:
                refuse_generation_options(args, generates)
            if not generates:
                names = ("tools", "rollout_func", "environment_factory")
                refuse_generators({"reward_funcs": reward_funcs, **{name: kwargs.get(name) for name in names}})
                reward_funcs = _given_rewards  # TRL asks for a source of rewards
            elif reward_funcs is None:
                raise ValueError("eval_dataset holds prompts, so reward_funcs is needed to score what is generated")
        if reward_funcs is None and kwargs.get("environment_factory") is None:  # which may give rewards
            refuse_unknown_columns(train_dataset, "train_dataset")
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, *rest, **kwargs)
        config = self.accelerator.unwrap_model(self.model).config.get_text_config()
        self.train_dataset = self._with_advantages(self.train_dataset, "train_dataset", config)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {
                name: self._with_advantages(dataset, f"eval_dataset['{name}']", config)
                for name, dataset in self.eval_dataset.items()
            }
        else:
            self.eval_dataset = self._with_advantages(self.eval_dataset, "eval_dataset", config)

    def _with_advantages(self, dataset, name: str, config):
        if not is_trajectory_dataset(dataset):
            return dataset
        check_trajectory_dataset(dataset, name, config.vocab_size, getattr(config, "max_position_embeddings", None))
        if "advantage" not in dataset.column_names:
            columns = dataset.with_format(None)
            advantages = group_advantages(columns["reward"][:], columns["group"][:], self.scale_rewards)
            dataset = dataset.add_column("advantage", advantages.tolist())
        return dataset

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if "input_ids" not in self._signature_columns:
            self._signature_columns = [*self._signature_columns, *TRAJECTORY_COLUMNS]

    def _get_train_sampler(self, dataset=None):
        if not self._trains_on_trajectories:
            return super()._get_train_sampler(dataset)
        dataset = self.train_dataset if dataset is None else dataset
        has_groups = "group" in dataset.column_names
        return GroupedTrajectorySampler(
            dataset.with_format(None)["group"][:] if has_groups else list(range(len(dataset))),
            block=self.args.generation_batch_size,
            repeat=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
        )

    def _get_eval_sampler(self, eval_dataset):
        if is_trajectory_dataset(eval_dataset):
            return torch.utils.data.SequentialSampler(eval_dataset)
        return super()._get_eval_sampler(eval_dataset)

    def _prepare_inputs(self, generation_batch):
        if not (self._trains_on_trajectories and self.model.training):
            return super()._prepare_inputs(generation_batch)
        # TRL shuffles a generation batch by the global generator, which a run that resumes inside one has lost.
        generation = self._step // (self.args.steps_per_generation * self.num_iterations)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(np.random.SeedSequence((self.args.seed, generation)).generate_state(1)[0]))
            return super()._prepare_inputs(generation_batch)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if "input_ids" not in inputs[0]:
            return super()._generate_and_score_completions(inputs)
        mode = "train" if self.model.training else "eval"
        batch = self._pad_trajectories(inputs)
        loss_mask = batch["completion_mask"] * batch["tool_mask"]
        batch["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum()
        self._add_log_probs(batch, mode)
        self._log_trajectories(inputs, batch, mode)
        return batch

    def _pad_trajectories(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """TRL's layout: the prompt is what stands before the first trained token."""
        starts = [_completion_start(x["completion_mask"]) for x in inputs]

        def padded(field: str, part: str, value, dtype) -> torch.Tensor:
            pieces = [
                torch.tensor([value if t is None else t for t in _part(x[field], start, part)], dtype=dtype)
                for x, start in zip(inputs, starts, strict=True)
            ]
            side = "left" if part == "prompt" else "right"
            return pad(pieces, value, padding_side=side, pad_to_multiple_of=self.pad_to_multiple_of).to(
                self.accelerator.device
            )

        def ones(part: str) -> torch.Tensor:
            pieces = [
                torch.ones(start if part == "prompt" else len(x["input_ids"]) - start, dtype=torch.long)
                for x, start in zip(inputs, starts, strict=True)
            ]
            side = "left" if part == "prompt" else "right"
            return pad(pieces, 0, padding_side=side, pad_to_multiple_of=self.pad_to_multiple_of).to(
                self.accelerator.device
            )

        pad_id = self._tokenizer.pad_token_id
        batch = {
            "prompt_ids": padded("input_ids", "prompt", pad_id, torch.long),
            "prompt_mask": ones("prompt"),
            "completion_ids": padded("input_ids", "completion", pad_id, torch.long),
            "completion_mask": ones("completion"),
            "tool_mask": padded("completion_mask", "completion", 1, torch.long),
            "advantages": torch.tensor(
                [x["advantage"] for x in inputs], dtype=torch.float32, device=self.accelerator.device
            ),
        }
        if inputs[0].get("old_log_probs") is not None:
            old = padded("old_log_probs", "completion", 0.0, torch.float32)
            batch["old_per_token_logps"] = torch.where(batch["tool_mask"].bool(), old, 0.0)
        return batch

    def _add_log_probs(self, batch: dict[str, torch.Tensor], mode: str) -> None:
        """Add what TRL computes before training: the reference's log-probs and, where needed, the old policy's."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        width = batch["completion_ids"].shape[1]
        batch_size = self.args.per_device_train_batch_size if mode == "train" else self.args.per_device_eval_batch_size

        def log_probs(model) -> torch.Tensor:
            return self._get_per_token_logps_and_entropies(model, ids, mask, width, batch_size=batch_size)[0]

        generate_every = self.args.steps_per_generation * self.num_iterations
        # A batch that lasts over several optimizer steps outlives the policy that starts it.
        outlives_policy = self.args.gradient_accumulation_steps % generate_every != 0
        with torch.no_grad(), disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if outlives_policy and "old_per_token_logps" not in batch:
                batch["old_per_token_logps"] = log_probs(self.model)
            if self.beta == 0.0:
                return
            if self.ref_model is not None:
                batch["ref_per_token_logps"] = log_probs(self.ref_model)
            else:
                model = self.accelerator.unwrap_model(self.model)
                with use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None):
                    batch["ref_per_token_logps"] = log_probs(self.model)

    def _log_trajectories(self, inputs: list[dict[str, Any]], batch: dict[str, torch.Tensor], mode: str) -> None:
        metrics = self._metrics[mode]
        gather = self.accelerator.gather
        tokens = gather(batch["prompt_mask"].sum() + (batch["completion_mask"] * batch["tool_mask"]).sum()).sum()
        if mode == "train":
            self.state.num_input_tokens_seen += tokens.item()
        metrics["num_tokens"] = [self.state.num_input_tokens_seen]
        lengths = gather((batch["completion_mask"] * batch["tool_mask"]).sum(dim=1)).float()
        metrics["completions/mean_length"].append(lengths.mean().item())
        metrics["completions/min_length"].append(lengths.min().item())
        metrics["completions/max_length"].append(lengths.max().item())
        if all(x.get("reward") is not None for x in inputs):
            rewards = gather(
                torch.tensor([x["reward"] for x in inputs], dtype=torch.float32, device=self.accelerator.device)
            )
            metrics["reward"].append(rewards.mean().item())
            metrics["reward_std"].append(rewards.std().item() if len(rewards) > 1 else 0.0)


def group_advantages(rewards: list[float], groups: list, scale_rewards: str) -> np.ndarray:
    """Advantages as TRL computes them, for groups of any size.

    Args:
        rewards: one per trajectory.
        groups: group of each trajectory.
        scale_rewards (`str`): "group" or "batch" divides by the standard deviation (plus 1e-4) over the group or over
            all trajectories; "none" does not.

    Returns:
        `[N]`, fp64. A group of one has advantage 0.

    Raises:
        ValueError: `scale_rewards` is none of these.
    """
    reward = torch.tensor(rewards, dtype=torch.float64)
    _, index = np.unique(np.array([str(g) for g in groups]), return_inverse=True)
    advantages = torch.empty_like(reward)
    batch_std = nanstd(reward) if len(reward) > 1 else torch.zeros(())
    by_group = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
    for members in map(torch.from_numpy, by_group):
        own = reward[members]
        centred = own - own.mean()
        if scale_rewards == "group":
            centred = centred / ((nanstd(own) if len(own) > 1 else 0.0) + 1e-4)
        elif scale_rewards == "batch":
            centred = centred / (batch_std + 1e-4)
        elif scale_rewards != "none":
            raise ValueError(f"scale_rewards must be 'group', 'batch' or 'none', got {scale_rewards!r}")
        advantages[members] = centred
    return advantages.numpy()


def _completion_start(mask: list[int]) -> int:
    """Index of the first trained token; of the last token where none is trained."""
    return next((t for t, trained in enumerate(mask) if trained), len(mask) - 1)


def _part(tokens: list, start: int, part: str) -> list:
    return tokens[:start] if part == "prompt" else tokens[start:]


def _given_rewards(**kwargs):
    raise RuntimeError("rewards are given by the dataset")
