"""CostModel: what a microbatch costs, in row equivalents."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True)
class CostModel:
    """Work of a microbatch as rows plus, optionally, visible attention pairs plus replay plus producers.

    The work of a set of trajectories in lexicographic order is the sum of `prefix_work(length)` minus the sum of
    `shared_work(lcp)` over neighbours, as compact work is. Each term is rounded to whole row equivalents, so plans
    depend on integers alone. The defaults count rows. `harts-hf calibrate` measures the coefficients on a device.

    Attributes:
        row (`float`): cost of one row; 1.0 by definition of the unit.
        pair (`float`): cost of one visible (query row, key row) pair, in rows. A row at position `t` sees `t + 1`
            rows.
        replay (`float`): cost of one replayed row, in rows, at most `row`: a fork at position `p` replays
            `p mod chunk_size` rows for each child but one.
        chunk_size (`int`): chunk of the linear attention, in tokens.
        producer (`float`): cost of a sharing window beside its rows, in rows: its producer is a forward and backward
            of its own, and a short one takes as long as the host needs to launch its kernels.
    """

    row: float = 1.0
    pair: float = 0.0
    replay: float = 0.0
    chunk_size: int = 64
    producer: float = 0.0

    def __post_init__(self):
        is_sound = self.row > 0 and self.pair >= 0 and 0 <= self.replay <= self.row and self.producer >= 0
        if not is_sound or self.chunk_size < 1:
            raise ValueError(
                f"coefficients need row > 0, pair and producer >= 0, 0 <= replay <= row, chunk_size >= 1: {self}"
            )

    @cached_property
    def counts_rows(self) -> bool:
        """Work equals compact work, but for what producers cost beside their rows."""
        return self.row == 1.0 and self.pair == 0.0 and self.replay == 0.0

    def prefix_work(self, tokens):
        """Work of the first `tokens` rows of a path; an int or an int64 array, returned likewise."""
        if self.counts_rows:
            return tokens
        return _round(self.row * tokens + self.pair * (tokens * (tokens + 1) / 2))

    def shared_work(self, lcp):
        """Work that two neighbours in one microbatch save by sharing `lcp` rows: the prefix's work less the replay."""
        if self.counts_rows:
            return lcp
        return self.prefix_work(lcp) - self.replay_work(lcp)

    def replay_work(self, depth):
        """Work of the rows that a sequence starting at `depth` replays."""
        if self.replay == 0.0:
            return depth * 0
        return _round(self.replay * (depth % self.chunk_size))

    @property
    def producer_work(self) -> int:
        """Work of opening a window, beside its producer's rows."""
        return round(self.producer)

    def describe(self) -> str:
        """The coefficients, for reports."""
        producer = f" + {self.producer:g} a window" if self.producer else ""
        if self.counts_rows:
            return f"rows{producer}"
        return f"{self.row:g} rows + {self.pair:g} visible pairs + {self.replay:g} replayed rows{producer}"


def _round(value):
    if isinstance(value, np.ndarray):
        return np.rint(value).astype(np.int64)
    return round(value)
