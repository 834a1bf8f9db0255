"""Bytes that a sharing window keeps alive."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WindowMemory:
    """x

    Attributes:
        max_bytes: x
    """

    max_bytes: int
    row_bytes: int
    boundary_bytes: int

    @property
    def max_prefix_tokens(self) -> int:
        """Longest prefix whose window fits `max_bytes`; 0 if not even an empty one does."""
        return max(0, (self.max_bytes - self.boundary_bytes) // self.row_bytes)
