"""Work of a training step: rows, visible attention pairs and the matmul FLOPs that follow from them."""

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from harts_hf.batch import CompactBatch

H200_FLOPS = 989e12  # dense bf16, per second


@dataclass
class StepWork:
    """What forwards of a step compute.

    Attributes:
        rows (`int`): rows of all layers, padding left out.
        pairs (`int`): (query, key) pairs that are visible in one softmax layer, the query itself included.
        scored (`int`): rows that are projected to the vocabulary.
        replay_tokens (`int`): tokens that linear attention runs again, in one layer.
        rounds (`int`): rounds of linear attention.
    """

    rows: int = 0
    pairs: int = 0
    scored: int = 0
    replay_tokens: int = 0
    rounds: int = 0

    def add_batch(self, batch: CompactBatch) -> None:
        """Count a compact batch that has run."""
        self.rows += batch.num_rows
        self.pairs += int((batch.tree.position_ids[batch.num_prefix_rows :] + 1).sum())
        self.scored += len(batch.score_targets)
        for plan in batch.planned_rounds():
            self.replay_tokens += plan.replay_tokens + batch.replayed_prefix_rows(plan.chunk_size)
            self.rounds += plan.num_rounds

    def add_trajectories(self, lengths: np.ndarray, scored: int) -> None:
        """Count trajectories that have run on their own."""
        lengths = lengths.astype(np.int64)
        self.rows += int(lengths.sum())
        self.pairs += int((lengths * (lengths + 1) // 2).sum())
        self.scored += scored


@dataclass(frozen=True)
class ForwardFlops:
    """Matmul FLOPs of one forward of a `bailing_hybrid` model, two for each multiplication and addition.

    Left out: what linear attention computes inside of its kernels, norms, rotary embeddings, the router's choice.

    Attributes:
        row (`int`): linear layers, router, shared and chosen experts, of all layers, for each row.
        pair (`int`): scores and weighted values of all softmax layers, for each visible pair.
        scored (`int`): the projection to the vocabulary, for each scored token.
    """

    row: int
    pair: int
    scored: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ForwardFlops":
        config = model.config
        active = 0
        for name, parameter in model.model.layers.named_parameters():
            if ".experts." in name:  # [E, out, in]
                active += parameter.numel() * config.num_experts_per_tok // config.num_local_experts
            elif parameter.dim() == 2:
                active += parameter.numel()
        softmax_layers = list(config.layer_types).count("full_attention")
        pair = 2 * softmax_layers * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
        return cls(2 * active, pair, 2 * config.vocab_size * config.hidden_size)

    def model_flops(self, work: StepWork) -> float:
        """Forward and backward, three times the forward; the usual numerator of MFU."""
        return 3.0 * (self.row * work.rows + self.pair * work.pairs + self.scored * work.scored)

    def hardware_flops(self, work: StepWork) -> float:
        """What runs with full recomputation: four times the forward of layers and head; attention 4.5 times, for its
        backward makes the scores again."""
        return 4.0 * (self.row * work.rows + self.scored * work.scored) + 4.5 * self.pair * work.pairs
