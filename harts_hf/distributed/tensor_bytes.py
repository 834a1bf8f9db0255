"""A dict of tensors as one buffer of bytes, and back."""

from typing import Any

import torch

_ALIGNMENT = 16  # bytes: a view of any dtype may start there

Layout = dict[str, Any]  # name -> (dtype, shape) of a tensor, or another value as it is


def layout_of(values: dict[str, Any]) -> Layout:
    """What a receiver has to know of the dict before its bytes arrive; picklable."""
    return {
        name: (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def num_bytes(layout: Layout) -> int:
    """Size of the buffer that [`pack`] makes of a dict with this layout."""
    return sum(_padded(*entry) for entry in layout.values() if _is_tensor(entry))


def pack(values: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The tensors of a dict, one after another: `[num_bytes]`, uint8, on `device`."""
    layout = layout_of(values)
    buffer = torch.zeros(num_bytes(layout), dtype=torch.uint8, device=device)
    for name, part in _parts(layout, buffer).items():
        part.copy_(values[name])
    return buffer


def unpack(layout: Layout, buffer: torch.Tensor) -> dict[str, Any]:
    """The dict that was packed, in its order; its tensors are views of the buffer."""
    parts = _parts(layout, buffer)
    return {name: parts.get(name, entry) for name, entry in layout.items()}


def _parts(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    parts, start = {}, 0
    for name, entry in layout.items():
        if _is_tensor(entry):
            dtype, shape = entry
            used = torch.Size(shape).numel() * dtype.itemsize
            parts[name] = buffer[start : start + used].view(dtype).view(shape)
            start += _padded(dtype, shape)
    return parts


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], torch.dtype)


def _padded(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    used = torch.Size(shape).numel() * dtype.itemsize
    return -(-used // _ALIGNMENT) * _ALIGNMENT
