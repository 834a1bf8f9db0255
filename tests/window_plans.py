"""Plans with sharing windows for tests, made by hand and at random, and steps that run them."""

import contextlib

import numpy as np
import torch

from harts_hf import enable_tree_forward
from harts_hf.execution import ForwardOptions, Trajectory, train_plan
from harts_hf.planning.consumer_tree import place_on_prefix
from harts_hf.planning.plan import Microbatch, StepPlan, Window
from harts_hf.tree import PrefixTree


def tokens(rng, n, vocab=260):
    """Random ids that are neither padding nor EOS."""
    return rng.integers(2, vocab, n)


def window_plan(sequences, groups, windows=()):
    """A plan for one replica.

    Args:
        sequences: the step's trajectories.
        groups: (trajectories, index of their window or None) of each microbatch, in order.
        windows: (trajectory, prefix_tokens, parent) of each window.
    """
    microbatches, consumers = [], [[] for _ in windows]
    for slot, (members, window) in enumerate(groups):
        members = sorted(members, key=lambda i: (sequences[i].tolist(), i))
        rows = {tuple(sequences[i][: k + 1]) for i in members for k in range(len(sequences[i]))}
        if window is not None:
            owner, length, _ = windows[window]
            prefix = sequences[owner][:length]
            places = {i: place_on_prefix(sequences[i], prefix) for i in members}
            apart = {tuple(sequences[i][: k + 1]) for i in members if places[i] < 0 for k in range(len(sequences[i]))}
            own = {
                tuple(sequences[i][: k + 1])
                for i in members
                if places[i] == length
                for k in range(length, len(sequences[i]))
            }
            microbatches.append(Microbatch(tuple(members), len(own) + len(apart), window))
        else:
            microbatches.append(Microbatch(tuple(members), len(rows)))
        above = window
        while above is not None:
            consumers[above].append(slot)
            above = windows[above][2]
    made = tuple(
        Window(owner, length, 0, tuple(slots), parent)
        for (owner, length, parent), slots in zip(windows, consumers, strict=True)
    )
    return StepPlan(tuple((m,) for m in microbatches), sum(map(len, sequences)), made)


def random_window_step(rng, handoff, num_consumers, nested=None):
    """Trajectories around a prefix of `handoff` tokens, and a plan whose consumers share it.

    Some end inside of the prefix, part from it, or have nothing to do with it. With `nested`, another window of so
    many more tokens lies inside of the first, for the last half of the consumers.
    """
    trunk = tokens(rng, handoff + (nested or 0))
    sequences, groups = [], []
    windows = [(0, handoff, None)] + ([(0, len(trunk), 0)] if nested else [])
    inner_from = num_consumers // 2 if nested else num_consumers
    for consumer in range(num_consumers):
        window = 1 if consumer >= inner_from else 0
        base = trunk[: windows[window][1]]
        members = []

        def add(sequence, members=members):
            members.append(len(sequences))
            sequences.append(sequence)

        stem = np.concatenate([base, tokens(rng, int(rng.integers(1, 40)))])
        for _ in range(int(rng.integers(1, 4))):
            cut = int(rng.integers(len(base), len(stem) + 1))
            add(np.concatenate([stem[:cut], tokens(rng, int(rng.integers(1, 70)))]))
        if rng.random() < 0.5:
            add(sequences[members[0]])
        if rng.random() < 0.5:  # a step-wise sample that ends inside the prefix, or where it does
            add(base[: int(rng.integers(1, len(base) + 1))])
        if rng.random() < 0.4:
            add(np.concatenate([base[: int(rng.integers(0, len(base)))], [1], tokens(rng, 20)]))
        groups.append((members, window))
    # A trajectory that starts with the whole prefix names it.
    windows = [(groups[-1][0][0], length, parent) for _, length, parent in windows]
    if rng.random() < 0.5:
        groups.insert(int(rng.integers(0, 2)) * len(groups), ([len(sequences)], None))
        sequences.append(tokens(rng, 50))
    return sequences, window_plan(sequences, groups, windows)


def step_loss(log_probs, entropies, seed):
    """A loss that weighs each token of one trajectory differently, and couples them as a sequence-level ratio does."""
    generator = torch.Generator().manual_seed(seed)
    if len(log_probs) == 0:
        return log_probs.sum()
    weights = torch.randn(2, len(log_probs), generator=generator).to(log_probs.device)
    return (log_probs * weights[0]).sum() + (entropies * weights[1]).sum() + 5 * (log_probs.mean() / 2).exp()


def gradients_of(model):
    """Gradients of every parameter, which are then dropped."""
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def run_step(model, plan, sequences, after=lambda result: None, loss=None, scored=None, **options):
    """Run a plan; returns the gradients and each trajectory's log-probs of its scored tokens, by default all."""
    enable_tree_forward(model)
    scored = scored or [np.arange(len(s)) > 0 for s in sequences]
    trajectories = [Trajectory(np.asarray(s), mask) for s, mask in zip(sequences, scored, strict=True)]
    log_probs = {}

    def default_loss(result):
        total = result.output.log_probs[:0].sum()
        for i, trajectory in enumerate(result.microbatch.trajectories):
            at = torch.from_numpy(result.batch.scores(i)[scored[trajectory]])
            log_probs[trajectory] = result.output.log_probs[at].detach()
            total = total + step_loss(result.output.log_probs[at], result.output.entropies[at], trajectory)
        return total

    model.zero_grad()
    train_plan(
        model,
        plan,
        trajectories,
        ForwardOptions(**options),
        model.device,
        loss=loss or default_loss,
        backward=lambda scalar: scalar.backward(),
        defer_sync=contextlib.nullcontext,
        after=after,
    )
    return gradients_of(model), [log_probs.get(i) for i in range(len(sequences))]


def one_microbatch(sequences):
    """The plan that runs everything at once."""
    tree = PrefixTree.from_sequences(sequences)
    return StepPlan(((Microbatch(tuple(tree.sorted_order.tolist()), tree.num_rows),),), tree.num_tokens)
