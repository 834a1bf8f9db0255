"""CompactBatch: the tensors of one prefix tree.

A batch holds each row's token once, in the tree's depth-first order, and the index tables that the layers need: who
may attend to whom, which chunks the linear-attention kernel runs and where each starts, which rows a causal
convolution reads. Tables are built on first use and kept, so that all layers, and recomputation, share them.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from harts_hf.boundary import Boundary
from harts_hf.kernels.attention_layout import AttentionLayout
from harts_hf.kernels.chunk_layout import ChunkLayout
from harts_hf.kernels.conv_layout import ConvLayout
from harts_hf.layouts import make_chunk_layout
from harts_hf.planning.consumer_tree import ConsumerTree
from harts_hf.planning.rounds import RoundPlan, plan_rounds
from harts_hf.tree import PrefixTree, RowForest


class CompactBatch:
    """One prefix tree as tensors on one device: what a model computes in one forward.

    Row `r` predicts one token per child, so a scored token is a row `c` whose target is `token_ids[c]` and whose
    hidden state is that of `parent[c]`. Only rows that some trajectory scores are projected to the vocabulary.

    A batch of a sharing window starts from a boundary: the rows of its prefix are known and not computed. Layers then
    read them in front of their own. Known rows, and known scores, are numbered with the prefix's first.

    Args:
        tree ([`PrefixTree`] or [`ConsumerTree`]): the trajectories' prefix tree, or the known rows of a batch that
            starts from a boundary.
        scored (list of `np.ndarray` of bool, *optional*): per trajectory, of its length, which tokens' log-probs are
            wanted. The first token has no context, so its entry must be False. Defaults to all but the first.
        device (`torch.device`): where the tensors live.
        prefix_scored (`np.ndarray` of bool, *optional*): which tokens of the prefix have been scored.
        starts_from (`Boundary`, *optional*): where the layers read what they need of the prefix's rows.
        produces (`Boundary`, *optional*): where the layers put what consumers of this batch need.

    Attributes:
        tree, device, starts_from, produces: as given; the tree stays on the host.
        rows (list of `[length]`, int64 `np.ndarray`): known rows of each trajectory, root first.
        num_prefix_rows (`int`): p, known rows that are not computed; 0 without a boundary.
        token_ids (`[C]`, int64), position_ids (`[C]`, int64), counts (`[C]`, fp32): as in the tree, of the computed
            rows.
        score_parents (`[P]`, int64): row whose hidden state predicts the scored token, of the computed rows; with a
            prefix, of its last row and the computed rows.
        score_targets (`[P]`, int64): the scored token.

    Raises:
        ValueError: a mask is not as long as its trajectory, or scores its first token; the message names the
            trajectory.
    """

    def __init__(
        self,
        tree: PrefixTree | ConsumerTree,
        scored: Sequence[np.ndarray] | None = None,
        device: torch.device | str = "cpu",
        *,
        prefix_scored: np.ndarray | None = None,
        starts_from: Boundary | None = None,
        produces: Boundary | None = None,
    ):
        self.tree = tree
        self.device = torch.device(device)
        self.starts_from = starts_from
        self.produces = produces
        self.rows = tree.all_rows()
        self.num_prefix_rows = tree.prefix_rows if isinstance(tree, ConsumerTree) else 0
        first = self.num_prefix_rows
        is_scored = np.zeros(tree.num_rows, dtype=bool)
        if scored is None:
            is_scored[tree.parent >= 0] = True
        else:
            for i, (rows, mask) in enumerate(zip(self.rows, scored, strict=True)):
                if len(mask) != len(rows):
                    raise ValueError(f"trajectory {i}: its mask has {len(mask)} entries for {len(rows)} tokens")
                if mask[0]:
                    raise ValueError(f"trajectory {i}: its first token has no context, so it cannot be scored")
                is_scored[rows[mask]] = True
        if prefix_scored is not None:
            is_scored[:first] = prefix_scored
        score_rows = np.flatnonzero(is_scored)
        self._score_of_row = np.full(tree.num_rows, -1, dtype=np.int64)
        self._score_of_row[score_rows] = np.arange(len(score_rows))

        score_rows = score_rows[score_rows >= first]
        self.token_ids = self._tensor(tree.token_ids[first:])
        self.position_ids = self._tensor(tree.position_ids[first:])
        self.counts = self._tensor(tree.counts[first:]).float()
        self.score_parents = self._tensor(tree.parent[score_rows] - max(0, first - 1))
        self.score_targets = self._tensor(tree.token_ids[score_rows])
        self._attention: AttentionLayout | None = None
        self._rounds: dict[int, RoundPlan] = {}
        self._chunks: dict[tuple[int, tuple[int, ...]], ChunkLayout] = {}
        self._convs: dict[int, ConvLayout] = {}

    @property
    def num_rows(self) -> int:
        """C, the rows that are computed."""
        return self.tree.num_rows - self.num_prefix_rows

    @property
    def num_known_rows(self) -> int:
        """p + C, the rows that `rows` counts."""
        return self.tree.num_rows

    def scores(self, trajectory: int) -> np.ndarray:
        """Where the log-probs of one trajectory's tokens stand among the known scores, the prefix's and the batch's.

        Returns:
            `[length]`, int64 on the host: index into the scores; -1 where the token's log-prob is not computed.
        """
        return self._score_of_row[self.rows[trajectory]]

    def all_scores(self) -> np.ndarray:
        """`scores` of all trajectories, one after another: `[S]`, int64."""
        return self._score_of_row[np.concatenate(self.rows)]

    def attention_layout(self) -> AttentionLayout:
        """What each computed row may attend to: known rows."""
        if self._attention is None:
            self._attention = AttentionLayout(
                self._tensor(self.tree.subtree_end), self._tensor(self.tree.position_ids), self.num_prefix_rows
            )
        return self._attention

    def replayed_prefix_rows(self, chunk_size: int = 64) -> int:
        """Last rows of the prefix, fewer than a chunk, that linear attention runs again in front of the own rows."""
        return self.num_prefix_rows % chunk_size

    def round_plan(self, chunk_size: int = 64) -> RoundPlan:
        """Sequences, replay and rounds of the linear-attention layers."""
        if chunk_size not in self._rounds:
            self._rounds[chunk_size] = plan_rounds(self._linear_forest(chunk_size), chunk_size)
        return self._rounds[chunk_size]

    def planned_rounds(self) -> tuple[RoundPlan, ...]:
        """Round plans that the model has asked for: one for a hybrid model, none for a softmax model."""
        return tuple(self._rounds.values())

    def chunk_layout(self, chunk_size: int = 64, boundary_rows: Sequence[int] = ()) -> ChunkLayout:
        """Chunks of the linear-attention kernels, as tensors.

        Its rows are the replayed rows of the prefix and the computed ones.

        Args:
            chunk_size: tokens of a chunk, counted from each trajectory's start.
            boundary_rows: rows, each the last of a full chunk, after which the kernels return their states.

        Raises:
            ValueError: a boundary row is not the last of a full chunk, or is given twice.
        """
        key = chunk_size, tuple(boundary_rows)
        if key not in self._chunks:
            # A method of the batch would tie it and its layout in a cycle: tensors would wait for Python's collector.
            to_tensor = functools.partial(_to_tensor, device=self.device)
            self._chunks[key] = make_chunk_layout(
                self._linear_forest(chunk_size), self.round_plan(chunk_size), to_tensor, boundary_rows=key[1]
            )
        return self._chunks[key]

    def continued_roots(self, chunk_size: int = 64) -> int:
        """How many of the first roots of `chunk_layout` start from the state at the prefix's last chunk boundary."""
        if self.num_prefix_rows == 0:
            return 0
        if self.replayed_prefix_rows(chunk_size):
            return 1
        return int((self.tree.parent[self.num_prefix_rows :] == self.num_prefix_rows - 1).sum())

    def conv_layout(self, width: int) -> ConvLayout:
        """Rows that a causal convolution of `width` taps reads.

        They are the last `width - 1` rows of the prefix, or all if it is shorter, and the computed ones.
        """
        if width not in self._convs:
            first = max(0, self.num_prefix_rows - (width - 1))
            columns = [np.arange(first, self.num_known_rows)]
            for _ in range(width - 1):
                row = columns[-1]
                columns.append(np.where(row >= first, self.tree.parent[row], -1))
            ancestors = np.stack(columns[::-1], axis=1) - first
            self._convs[width] = ConvLayout(self._tensor(np.maximum(ancestors, -1)))
        return self._convs[width]

    def _linear_forest(self, chunk_size: int) -> RowForest:
        return self.tree.replay_forest(chunk_size) if isinstance(self.tree, ConsumerTree) else self.tree

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return _to_tensor(array, self.device)


def _to_tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


class DataCollatorWithPrefixTree:
    """Collate trajectories into one compact batch, in the style of `DataCollatorWithFlattening`.

    Pass the result to a model with a tree forward, `model(**batch)`: it returns the mean loss over the trained tokens
    of all trajectories, as the expanded batch would give, and their log-probs. `Trainer` counts `labels` over its
    accumulation steps, so a plain `Trainer` fine-tunes on trees. Trained tokens come from `labels` (-100 is not
    trained) and `completion_mask`, each as far as it is given; without either, all tokens but the first are trained.

    Features: `input_ids` without padding, optional `labels` and `completion_mask` of the same length, and any further
    field. A field with one value per token is concatenated like `input_ids`; a number is stacked, one per trajectory.

    Returns a dict of tensors:
        `tree_input_ids` (`[S]`, int64): tokens of all trajectories, one after another;
        `labels` (`[S]`, int64): the same tokens, -100 where they are not trained;
        `tree_cu_seqlens` (`[N + 1]`, int64): where each trajectory starts;
        `input_ids`, `position_ids`, `counts` (`[1, C]`, int64): the rows of the prefix tree in depth-first order;
        and each further field: `[S]` per token or `[N]` per trajectory.

    Raises:
        ValueError: no feature, an empty or a padded trajectory, a field that another trajectory does not have, whose
            length is not that of `input_ids` or whose name the result uses, a mask that is not 0 or 1, or labels that
            are neither the token nor -100. The message names the trajectory.
        TypeError: ids that are not integers.
    """

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if not features:
            raise ValueError("a compact batch needs at least one trajectory, got none")
        features = [{name: value for name, value in feature.items() if value is not None} for feature in features]
        _require_same_fields(features)
        sequences = [_token_array(feature, i) for i, feature in enumerate(features)]
        masks = [
            _trained_mask(feature, ids, i) for i, (feature, ids) in enumerate(zip(features, sequences, strict=True))
        ]
        tree = PrefixTree.from_sequences(sequences)
        lengths = [len(ids) for ids in sequences]
        batch = {
            "tree_input_ids": torch.from_numpy(np.concatenate(sequences)),
            "labels": torch.from_numpy(np.where(np.concatenate(masks), np.concatenate(sequences), -100)),
            "tree_cu_seqlens": torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])),
            "input_ids": torch.from_numpy(tree.token_ids)[None],
            "position_ids": torch.from_numpy(tree.position_ids)[None],
            "counts": torch.from_numpy(tree.counts)[None],
        }
        taken = {"input_ids", "labels", "completion_mask", "attention_mask"}
        further = [name for name in features[0] if name not in taken]
        if used := sorted(batch.keys() & set(further)):
            raise ValueError(
                f"trajectory 0: fields {used} have the names of entries that the collator makes: leave them out"
            )
        for name in further:
            batch[name] = _collate_field(name, [feature[name] for feature in features], lengths)
        return batch


def compact_batch_from_features(features: dict[str, torch.Tensor], device: torch.device) -> CompactBatch:
    """The compact batch of a [`DataCollatorWithPrefixTree`] dict, on `device`.

    Reads `tree_input_ids`, `labels` and `tree_cu_seqlens`.
    """
    bounds = list(itertools.pairwise(features["tree_cu_seqlens"].tolist()))
    tokens = features["tree_input_ids"].cpu().numpy()
    mask = features["labels"].cpu().numpy() != -100
    sequences = [tokens[start:end] for start, end in bounds]
    return CompactBatch(PrefixTree.from_sequences(sequences), [mask[start:end] for start, end in bounds], device)


def _require_same_fields(features: list[dict[str, Any]]) -> None:
    for i, feature in enumerate(features):
        if feature.keys() != features[0].keys():
            raise ValueError(
                f"trajectory {i} has fields {sorted(feature)}, but trajectory 0 has {sorted(features[0])}"
            )


def _token_array(feature: dict[str, Any], index: int) -> np.ndarray:
    ids = np.asarray(feature["input_ids"])
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"trajectory {index}: input_ids must be a non-empty list of ids, got shape {ids.shape}")
    if ids.dtype.kind not in "iu":
        raise TypeError(f"trajectory {index}: input_ids must be integers, got {ids.dtype}")
    if not np.all(feature.get("attention_mask", 1)):
        raise ValueError(f"trajectory {index}: attention_mask has zeros; give its input_ids without padding")
    return ids.astype(np.int64)


def _trained_mask(feature: dict[str, Any], ids: np.ndarray, index: int) -> np.ndarray:
    """Which tokens all given fields train: `[length]`, bool."""
    mask = np.ones(len(ids), dtype=bool)
    mask[0] = False  # no context: a causal model's shifted loss never trains the first token
    for name in ("labels", "completion_mask"):
        if name not in feature:
            continue
        values = np.asarray(feature[name])
        if values.shape != ids.shape:
            raise ValueError(f"trajectory {index}: {name} has shape {values.shape} for {len(ids)} token ids")
        trained = values != -100 if name == "labels" else values == 1
        if name == "labels" and (values != ids)[trained].any():
            raise ValueError(f"trajectory {index}: labels must equal input_ids or be -100; a row has one next token")
        if name == "completion_mask" and (bad := values[~trained & (values != 0)]).size:
            raise ValueError(f"trajectory {index}: completion_mask must be 0 or 1, got {bad[0]}")
        mask &= trained
    return mask


def _collate_field(name: str, values: list, lengths: list[int]) -> torch.Tensor:
    if np.ndim(values[0]) == 0:
        return torch.tensor(values)
    for i, (value, length) in enumerate(zip(values, lengths, strict=True)):
        if np.shape(value) != (length,):
            raise ValueError(f"trajectory {i}: {name} has shape {np.shape(value)} for {length} token ids")
    return torch.cat([torch.as_tensor(value) for value in values])
