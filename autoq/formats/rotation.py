"""The normalized Hadamard rotation along head_dim, which spreads an outlier channel over its neighbours."""

from __future__ import annotations

from functools import lru_cache

import torch


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., head_dim] rotated, in its dtype; rotating twice gives x back.

    The matrix is Sylvester's, divided by the root of its size, over blocks of the largest power of two that divides head_dim. It is
    symmetric and orthogonal, so that products of two rotated vectors are those of the vectors.
    """
    head_dim = x.shape[-1]
    size = block_of(head_dim)
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (head_dim // size, size))
    rotated: torch.Tensor = wide @ _hadamard(size).to(wide)
    return rotated.flatten(-2).to(x.dtype)


def block_of(head_dim: int) -> int:
    """Return the largest power of two that divides head_dim: how many channels are rotated together."""
    return head_dim & -head_dim


@lru_cache(maxsize=16)
def _hadamard(size: int) -> torch.Tensor:
    matrix: torch.Tensor = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.div(size**0.5)
