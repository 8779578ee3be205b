"""The rotation leaves scores alone, undoes itself; a static mean takes what is far from zero."""

from __future__ import annotations

import pytest
import torch

from autoq import codec
from autoq.formats.catalog import kv_format
from autoq.formats.rotation import block_of, rotate
from autoq.measure.cache_statistics import CacheStatistics


@pytest.mark.parametrize("head_dim", [64, 80, 96, 100, 128, 256, 2])
def test_scores_are_unchanged_and_rotating_twice_is_nothing(head_dim: int) -> None:
    q, k = torch.randn(2, 3, 41, head_dim, generator=torch.Generator().manual_seed(0)).unbind(0)
    torch.testing.assert_close(rotate(q) @ rotate(k).transpose(1, 2), q @ k.transpose(1, 2), rtol=1e-5, atol=1e-5 * head_dim**0.5)
    torch.testing.assert_close(rotate(rotate(k)), k, rtol=1e-5, atol=1e-5)
    assert head_dim % block_of(head_dim) == 0


def test_a_channel_far_from_zero_costs_less_around_its_mean() -> None:
    x = torch.randn(2, 2, 200, 64, generator=torch.Generator().manual_seed(1))
    x[..., 5] += 30.0
    known = CacheStatistics().with_values(x).calibration()
    errors = {
        name: float((codec.fake_quantize_cache(x, kv_format(name), known) - x).square().mean())
        for name in ("nvfp4", "nvfp4_affine", "fp8", "fp8_affine")
    }
    assert errors["nvfp4_affine"] < 0.2 * errors["nvfp4"]
    assert errors["fp8_affine"] < 0.9 * errors["fp8"]
