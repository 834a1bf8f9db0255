"""Checks of a dataset of trajectories: what is wrong is named with its trajectory and field before anything trains."""

from typing import Any, SupportsInt

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset

TRAJECTORY_COLUMNS = ("input_ids", "completion_mask", "reward", "group", "advantage", "old_log_probs")
_BATCH = 1000  # rows that are looked at together


def is_trajectory_dataset(dataset: Any) -> bool:
    """Whether a dataset holds finished trajectories rather than prompts.

    It has an `input_ids` column; prompts that carry one too have a `prompt` and no `completion_mask`.
    """
    columns = getattr(dataset, "column_names", None) or ()
    return "input_ids" in columns and ("completion_mask" in columns or "prompt" not in columns)


def refuse_unknown_columns(dataset: Any, name: str) -> None:
    """Raise if a streamed dataset does not know its columns, where nothing says that they are prompts.

    To read them would start the stream, which may be there only once.

    Raises:
        TypeError: says what prompts and trajectories need.
    """
    if isinstance(dataset, IterableDataset) and dataset.column_names is None:
        raise TypeError(
            f"{name} is streamed and does not know its columns: trajectories need a map-style datasets.Dataset, "
            "prompts need reward_funcs"
        )


def check_trajectory_dataset(dataset: Any, name: str, vocab_size: int, max_positions: int | None) -> None:
    """Raise unless every trajectory of the dataset can be trained on.

    Args:
        dataset: a dataset with an `input_ids` column.
        name (`str`): the trainer's argument, for the message.
        vocab_size (`int`): ids must be below it.
        max_positions (`int`, *optional*): longest trajectory that the model has positions for.

    Raises:
        TypeError: not a map-style dataset, or ids or masks that are not integers.
        ValueError: anything else; the message names the trajectory and the field.
    """
    if not isinstance(dataset, Dataset):
        raise TypeError(
            f"{name}: trajectories need a map-style datasets.Dataset, got {type(dataset).__name__}; groups are "
            "gathered over the whole set"
        )
    columns = dataset.column_names
    if "completion_mask" not in columns:
        raise ValueError(f"{name} has no completion_mask column: which tokens are trained? (1 = trained)")
    if "advantage" not in columns and not {"reward", "group"} <= set(columns):
        raise ValueError(f"{name} needs an advantage column, or a reward and a group column; it has {columns}")
    first = 0
    fields = [c for c in TRAJECTORY_COLUMNS if c in columns]
    for table in dataset.select_columns(fields).with_format("arrow").iter(_BATCH):
        _check_table(table, name, first, vocab_size, max_positions)
        first += len(table)


def _check_table(table: pa.Table, name: str, first: int, vocab_size: int, max_positions: int | None) -> None:
    def at(index: SupportsInt, field: str) -> str:
        return f"{name}, trajectory {first + int(index)}, {field}"

    ids, lengths = _flatten(table, "input_ids", at)
    if len(empty := np.flatnonzero(lengths == 0)):
        raise ValueError(f"{at(empty[0], 'input_ids')}: the trajectory is empty")
    _require_integers(ids, at(0, "input_ids"))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    if len(bad := np.flatnonzero((ids < 0) | (ids >= vocab_size))):
        raise ValueError(
            f"{at(owner[bad[0]], 'input_ids')}: token id {ids[bad[0]]} is out of the vocabulary of {vocab_size} tokens"
        )
    if max_positions is not None and len(long := np.flatnonzero(lengths > max_positions)):
        raise ValueError(
            f"{at(long[0], 'input_ids')}: {lengths[long[0]]} tokens, but the model has {max_positions} positions"
        )

    mask, mask_lengths = _flatten(table, "completion_mask", at)
    _require_same_lengths(mask_lengths, lengths, lambda i: at(i, "completion_mask"))
    if mask.dtype.kind not in "iub":
        raise TypeError(f"{at(0, 'completion_mask')}: must be integers 0 or 1, got {mask.dtype}")
    if len(bad := np.flatnonzero((mask != 0) & (mask != 1))):
        raise ValueError(f"{at(owner[bad[0]], 'completion_mask')}: must be 0 or 1, got {mask[bad[0]]}")
    starts = np.cumsum(lengths) - lengths
    if len(bad := np.flatnonzero(mask[starts])):
        raise ValueError(
            f"{at(bad[0], 'completion_mask')}: the first token has no context, so it cannot be trained; start with 0"
        )
    if len(single := np.flatnonzero(lengths < 2)):
        raise ValueError(f"{at(single[0], 'input_ids')}: one token alone has nothing to train")

    for field in ("advantage", "reward"):
        if field in table.column_names and not (field == "reward" and "advantage" in table.column_names):
            column = _column(table, field, at)
            if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
                raise TypeError(f"{at(0, field)}: must be a number, got {column.type}")
            values = column.to_numpy(zero_copy_only=False).astype(np.float64)
            if len(bad := np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max))):
                raise ValueError(f"{at(bad[0], field)}: must be a finite number in fp32, got {values[bad[0]]}")
    if "group" in table.column_names:
        kind = _column(table, "group", at).type
        if not (pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise TypeError(f"{at(0, 'group')}: must be an integer or a string, got {kind}")
    if "old_log_probs" in table.column_names:
        old, old_lengths = _flatten(table, "old_log_probs", at, fill=np.nan)
        _require_same_lengths(old_lengths, lengths, lambda i: at(i, "old_log_probs"))
        if old.dtype.kind not in "fiu":
            raise TypeError(f"{at(0, 'old_log_probs')}: must be numbers, got {old.dtype}")
        if len(bad := np.flatnonzero(~np.isfinite(old.astype(np.float64)) & (mask == 1))):
            position = bad[0] - starts[owner[bad[0]]]
            raise ValueError(
                f"{at(owner[bad[0]], 'old_log_probs')}: must be finite where completion_mask is 1, got {old[bad[0]]} "
                f"at token {position}"
            )


def _column(table: pa.Table, field: str, at) -> pa.Array:
    column = table.column(field).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if column.null_count:
        missing = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{at(missing, field)}: is missing")
    return column


def _flatten(table: pa.Table, field: str, at, fill: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Values of a list column, one trajectory after another, and the length of each.

    A missing entry becomes `fill`, or is refused without one.
    """
    column = _column(table, field, at)
    if pa.types.is_fixed_size_list(column.type):
        column = column.cast(pa.large_list(column.type.value_type))
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        raise TypeError(f"{at(0, field)}: must be a list with one entry per token, got {column.type}")
    values = column.flatten()
    lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    if values.null_count and fill is not None and pa.types.is_floating(values.type):
        values = values.fill_null(fill)
    if values.null_count:
        owner = np.repeat(np.arange(len(lengths)), lengths)
        missing = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]
        raise ValueError(f"{at(int(owner[missing]), field)}: has a missing entry")
    return values.to_numpy(zero_copy_only=False), lengths


def _require_integers(values: np.ndarray, where: str) -> None:
    if values.dtype.kind not in "iu":
        raise TypeError(f"{where}: token ids must be integers, got {values.dtype}")


def _require_same_lengths(lengths: np.ndarray, expected: np.ndarray, where) -> None:
    if len(bad := np.flatnonzero(lengths != expected)):
        raise ValueError(f"{where(bad[0])}: has {lengths[bad[0]]} entries for {expected[bad[0]]} token ids")
