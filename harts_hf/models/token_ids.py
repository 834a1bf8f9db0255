"""Whether a model can run the tokens of a tree."""

from harts_hf.tree import PrefixTree


def check_token_ids(tree: PrefixTree, config) -> None:
    """Raise unless the model can run the tree.

    Args:
        config: the model's text config; `vocab_size` and, where it has one, `max_position_embeddings` are read.

    Raises:
        ValueError: an id is not in the vocabulary, or a trajectory has more tokens than the model has positions; the
            message names the trajectory.
    """
    longest = int(tree.lengths.argmax())
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and tree.lengths[longest] > positions:
        raise ValueError(
            f"trajectory {longest} has {tree.lengths[longest]} tokens, the model has {positions} positions "
            "(max_position_embeddings)"
        )
    row = int(tree.token_ids.argmax())
    if tree.token_ids[row] >= config.vocab_size:
        trajectory = next(i for i, rows in enumerate(tree.all_rows()) if row in rows)
        raise ValueError(
            f"trajectory {trajectory}: token id {tree.token_ids[row]} at position {tree.position_ids[row]} is out of "
            f"the vocabulary of {config.vocab_size} tokens"
        )
