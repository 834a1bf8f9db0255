"""Log-probs and entropies of trajectories from one forward over their prefix tree."""

from collections.abc import Sequence

import torch

from harts_hf.batch import CompactBatch
from harts_hf.models.causal_lm import causal_lm_of
from harts_hf.models.enable import has_tree_forward
from harts_hf.models.token_ids import check_token_ids
from harts_hf.tree import PrefixTree


def tree_logprobs(
    model, sequences: Sequence, *, temperature: float = 1.0
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs and entropies of every token of every trajectory, each shared token computed once.

    Equals, for each trajectory alone, `log_softmax(model(ids).logits / temperature)` at the next tokens. The result
    carries the autograd graph; the gradient of a shared row is the sum over its trajectories.

    Args:
        model: a causal LM with a tree forward (`enable_tree_forward`), or a PEFT model around one.
        sequences: list of 1-D integer arrays or lists, in any order.
        temperature (`float`): the logits are divided by it; > 0.

    Returns:
        `(log_probs, entropies)`: lists; entry `i` is fp32 of shape `[len_i - 1]`, on the model's device.

    Raises:
        RuntimeError: the model has no tree forward.
        ValueError, TypeError: a sequence is empty, not integer, has an id out of the vocabulary or is longer than the
            model's positions; the message names it.
    """
    if not has_tree_forward(model):
        raise RuntimeError("the model has no tree forward: call enable_tree_forward(model) first")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    tree = PrefixTree.from_sequences(sequences)
    base = causal_lm_of(model)
    check_token_ids(tree, base.config.get_text_config())
    batch = CompactBatch(tree, device=base.device)
    output = model(harts_batch=batch, temperature=temperature)
    log_probs, entropies = [], []
    for i in range(tree.num_trajectories):
        index = torch.from_numpy(batch.scores(i)[1:]).to(base.device)
        log_probs.append(output.log_probs[index])
        entropies.append(output.entropies[index])
    return log_probs, entropies
