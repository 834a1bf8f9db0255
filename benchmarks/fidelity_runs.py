"""The runs that fidelity.py compares: the stock model on every trajectory alone, and tree forwards of the same.

A run keeps, on the host, what the tokens to be compared left: final hidden states and chosen experts, and for a
microbatch with a loss its value and gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from chunks_at_forks import without_replay
from forward_record import record_forwards
from gradient_samples import GradientSamples
from handoff_steps import LAYOUTS, Chain, plan_chain
from rollout_steps import RolloutStep
from torch.utils.checkpoint import checkpoint

from harts_hf.batch import CompactBatch
from harts_hf.execution import ForwardOptions, Trajectory, forward_plan
from harts_hf.models.enable import disable_tree_forward, enable_tree_forward
from harts_hf.tree import PrefixTree

HEAD_TOKENS = 4096  # tokens whose logits exist at once in the stock run's loss


@dataclass(frozen=True, eq=False)
class Run:
    """What one way of computing left of T tokens.

    Attributes:
        hidden (`[T, D]`): states that predict the next token, in the model's dtype.
        experts (`[T, L, k]`, int16): as in `ForwardRecord`.
        loss (`float`, *optional*): of the microbatch.
        gradients (dict of `[n]`, fp32, *optional*): a sample of each parameter's, see `GradientSamples`.
    """

    hidden: torch.Tensor
    experts: torch.Tensor
    loss: float | None = None
    gradients: dict[str, torch.Tensor] | None = None


def run_chains(model, chains: Sequence[Chain], depths: Sequence[int]) -> Iterator[tuple[str, Run]]:
    """Forwards of the trajectories' own tokens, those behind the prefix, without gradients.

    Yields:
        "expanded": each trajectory alone; "expanded, batches of two": the two of a chain as a batch, with the stock
        model both times. Then tree forwards: "depth 0", and "{layout}, depth {d}, {with or without} replay".
    """
    model.eval()
    disable_tree_forward(model)
    yield "expanded", _stock_chains(model, chains, batch_size=1)
    yield "expanded, batches of two", _stock_chains(model, chains, batch_size=2)
    enable_tree_forward(model)
    if 0 in depths:
        yield "depth 0", _tree_chains(model, chains, LAYOUTS[0], 0)
    for layout in LAYOUTS:
        for depth in depths:
            if depth:
                yield chain_run(layout, depth, True), _tree_chains(model, chains, layout, depth)
                with without_replay(model):
                    run = _tree_chains(model, chains, layout, depth)
                yield chain_run(layout, depth, False), run


def chain_run(layout: str, depth: int, replay: bool) -> str:
    """The name of a run of `run_chains`."""
    return f"{layout}, depth {depth}, {'with' if replay else 'without'} replay" if depth else "depth 0"


def chain_targets(chains: Sequence[Chain]) -> torch.Tensor:
    """`[T]`, int64: the tokens that the states of a run of `run_chains` predict."""
    return torch.from_numpy(np.concatenate([s[c.cuts[-1] + 1 :] for c in chains for s in c.sequences]))


@torch.no_grad()
def _stock_chains(model, chains: Sequence[Chain], batch_size: int) -> Run:
    hidden, experts = [], []
    for chain in chains:
        own = slice(chain.cuts[-1], -1)
        ids = torch.from_numpy(np.stack(chain.sequences)).to(model.device)
        for batch in ids.split(batch_size):
            with record_forwards(model) as record:
                model(input_ids=batch, use_cache=False, logits_to_keep=1)
            for found, values in ((hidden, record.hidden), (experts, record.experts)):
                found += [x[own].cpu() for x in values.unflatten(0, batch.shape)]
    return Run(torch.cat(hidden), torch.cat(experts))


@torch.no_grad()
def _tree_chains(model, chains: Sequence[Chain], layout: str, depth: int) -> Run:
    hidden, experts = [], []
    for chain in chains:
        cut = chain.cuts[-1]
        sequences, plan = plan_chain(chain, layout, depth)
        trajectories = [Trajectory(s, np.arange(len(s)) > cut) for s in sequences]
        options = ForwardOptions(with_entropies=False)
        found = {}
        with record_forwards(model) as record:
            for result in forward_plan(model, plan, trajectories, options, model.device):
                for i, trajectory in enumerate(result.microbatch.trajectories):
                    if trajectory < len(chain.sequences):
                        own = result.batch.rows[i][cut:-1] - result.batch.num_prefix_rows
                        rows = torch.from_numpy(own).to(model.device)
                        found[trajectory] = record.hidden[rows].cpu(), record.experts[rows].cpu()
        hidden += [found[i][0] for i in range(len(chain.sequences))]
        experts += [found[i][1] for i in range(len(chain.sequences))]
    return Run(torch.cat(hidden), torch.cat(experts))


def run_microbatch(model, step: RolloutStep, seed: int) -> Iterator[tuple[str, Run]]:
    """Forward and backward of one microbatch; the runs hold all tokens that predict another.

    The loss is that of GRPO at old log-probs near the current ones: minus the sum over scored tokens of ratio times
    advantage times log-prob, over their number; the ratios are exp(0.1 z), z normal with the seed.

    Yields:
        "expanded": the stock model on each trajectory alone, gradients of all added in fp32; then "tree".
    """
    rng = np.random.default_rng(seed)
    weights = []
    for trajectory, advantage in zip(step.trajectories, step.advantages, strict=True):
        ratios = np.exp(0.1 * rng.standard_normal(int(trajectory.scored.sum())))
        weights.append(torch.from_numpy(-advantage * ratios / step.num_scored).float().to(model.device))
    model.train()
    disable_tree_forward(model)
    yield "expanded", _stock_microbatch(model, step, weights)
    enable_tree_forward(model)
    yield "tree", _tree_microbatch(model, step, weights)


def microbatch_targets(step: RolloutStep) -> torch.Tensor:
    """`[T]`, int64: the tokens that the states of a run of `run_microbatch` predict."""
    return torch.from_numpy(np.concatenate([s[1:] for s in step.sequences]))


def _stock_microbatch(model, step: RolloutStep, weights: list[torch.Tensor]) -> Run:
    hidden, experts, total = [], [], 0.0
    with GradientSamples(model) as gradients:
        for trajectory, weight in zip(step.trajectories, weights, strict=True):
            ids = torch.from_numpy(trajectory.token_ids).to(model.device)
            with record_forwards(model) as record:
                model(input_ids=ids[None], use_cache=False, logits_to_keep=1)
            hidden.append(record.hidden[:-1].detach().cpu())
            experts.append(record.experts[:-1].cpu())
            scored = torch.from_numpy(np.flatnonzero(trajectory.scored)).to(model.device)
            log_probs = _stock_log_probs(model, record.hidden[scored - 1], ids[scored])
            loss = (log_probs * weight).sum()
            loss.backward()
            total += loss.item()
    return Run(torch.cat(hidden), torch.cat(experts), total, gradients.sums)


def _stock_log_probs(model, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probs `[n]`, fp32, from the logits of the model's own head."""

    def log_probs(states, ids):
        return -F.cross_entropy(model.lm_head(states).float(), ids, reduction="none")

    chunks = zip(hidden.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True)
    return torch.cat([checkpoint(log_probs, *chunk, use_reentrant=False) for chunk in chunks])


def _tree_microbatch(model, step: RolloutStep, weights: list[torch.Tensor]) -> Run:
    scored = [t.scored for t in step.trajectories]
    batch = CompactBatch(PrefixTree.from_sequences(step.sequences), scored, model.device)
    with GradientSamples(model) as gradients:
        with record_forwards(model) as record:
            output = model(harts_batch=batch, with_entropies=False)
        rows = torch.from_numpy(np.concatenate([rows[:-1] for rows in batch.rows]))
        hidden, experts = record.hidden.detach().cpu()[rows], record.experts.cpu()[rows]
        scores = np.concatenate([batch.scores(i)[mask] for i, mask in enumerate(scored)])
        loss = (output.log_probs[torch.from_numpy(scores).to(model.device)] * torch.cat(weights)).sum()
        loss.backward()
    return Run(hidden, experts, loss.item(), gradients.sums)
