"""Layouts of an array with the same values. Tests compare results for a strided argument with results for its
contiguous copy."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def _strided(tensor: Tensor) -> Tensor:
    """Returns every other element of the last axis of a larger array."""
    buffer = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    buffer[..., ::2] = tensor
    return buffer[..., ::2]


def _sliced(tensor: Tensor) -> Tensor:
    """Returns the middle of a larger array, along every axis."""
    buffer = tensor.new_zeros([size + 3 for size in tensor.shape])
    inside = buffer[tuple(slice(1, size + 1) for size in tensor.shape)]
    inside.copy_(tensor)
    return inside


def _at_an_odd_offset(tensor: Tensor) -> Tensor:
    """Returns a contiguous array that starts at the second element of its storage, not at a multiple of 16 bytes."""
    buffer = tensor.new_zeros(tensor.numel() + 1)
    inside = buffer[1:].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def _transposed(tensor: Tensor) -> Tensor:
    """Returns an array that is stored with its axes in reverse order."""
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def _expanded(tensor: Tensor) -> Tensor:
    """Returns an array that repeats one value or one row with a stride of 0."""
    return tensor[:1].expand_as(tensor)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "strided": _strided,
    "sliced": _sliced,
    "odd offset": _at_an_odd_offset,
    "transposed": _transposed,
    "expanded": _expanded,
}


def layouts_of(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the array in each layout that is not contiguous."""
    for name, make in LAYOUTS.items():
        made = make(tensor.detach())
        if made.stride() != tensor.contiguous().stride() or made.data_ptr() % 16:
            yield name, made


def contiguous_copy(tensor: Tensor) -> Tensor:
    return torch.clone(tensor, memory_format=torch.contiguous_format)
