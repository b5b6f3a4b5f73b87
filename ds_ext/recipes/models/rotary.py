"""Rotary position embeddings (Su et al. 2021, arXiv 2104.09864) and their scaling for longer samples.

Feature i of the first half of the rotated features forms a pair with feature i of the second half, as in transformers.
Pair i of the token at position p is rotated by the angle p * frequency_i.

Shapes: B samples, S tokens, N heads, H head size, R rotated features of a head.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ds_ext.model.config import RopeScaling, TransformerConfig
from ds_ext.tensor_parallel import current_slice


def rotary_tables(
    config: TransformerConfig,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    starts_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, (S, R), or (B, 1, S, R) for positions that restart; of a slice for its positions.

    Args:
        dtype: that of the result; the angles are fp32.
        starts_BS: index of each token at which positions restart; None: positions are 0..S-1.
    """
    part = current_slice()
    first, total = (0, tokens) if part is None else (part.start, part.total)
    tables = _tables(config.rotary_size, config.rotary_base, config.rope_scaling, total, dtype, device)
    if starts_BS is None:
        cos_SR, sin_SR = tables
        return cos_SR[first : first + tokens], sin_SR[first : first + tokens]
    positions_BS = torch.arange(first, first + tokens, device=device) - starts_BS
    cos_BSR, sin_BSR = (table_SR[positions_BS] for table_SR in tables)
    return cos_BSR.unsqueeze(1), sin_BSR.unsqueeze(1)


def rotate(x_BNSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R features of every head by tables from :func:`rotary_tables`."""
    size = cos.size(-1)
    x_BNSR, tail = x_BNSH[..., :size], x_BNSH[..., size:]
    first_half, second_half = x_BNSR.chunk(2, -1)
    x_BNSR = x_BNSR * cos + torch.cat((-second_half, first_half), -1) * sin
    return torch.cat((x_BNSR, tail), -1) if tail.size(-1) else x_BNSR


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)  # autograd must be able to save the cached tables
def _tables(
    size: int,
    base: float,
    scaling: RopeScaling | None,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    frequencies_F, factor = frequencies(size, base, scaling)
    angles_SF = torch.arange(tokens, dtype=torch.float32)[:, None] * frequencies_F
    angles_SR = torch.cat((angles_SF, angles_SF), -1)
    cos_SR, sin_SR = ((f(angles_SR) * factor).to(device, dtype) for f in (torch.cos, torch.sin))
    return cos_SR, sin_SR


def frequencies(size: int, base: float, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """Return the fp32 frequencies of the ``size / 2`` pairs, in radians per token, and a factor of the tables."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    original = 1.0 / base**exponents
    if scaling is None:
        return original, 1.0
    if scaling.rope_type == "linear":
        return original / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(original, scaling), 1.0
    return _yarn(original, size, base, scaling), _yarn_factor(scaling)


def _llama3(original: Tensor, scaling: RopeScaling) -> Tensor:
    """Divide frequencies with few periods in the original length, and interpolate towards those with many."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    length = scaling.original_max_position_embeddings
    assert low is not None and high is not None and length is not None
    periods = length * original / (2 * math.pi)
    original_share = ((periods - low) / (high - low)).clamp(0, 1)
    return (1 - original_share) * original / scaling.factor + original_share * original


def _yarn(original: Tensor, size: int, base: float, scaling: RopeScaling) -> Tensor:
    """Divide frequencies by a ramp over the pairs (arXiv 2309.00071, section 3.2)."""
    length = scaling.original_max_position_embeddings
    assert length is not None

    def pair_index(periods: float) -> float:
        """Return the index of the pair that has this number of periods in the original length."""
        return size * math.log(length / (periods * 2 * math.pi)) / (2 * math.log(base))

    low = pair_index(scaling.beta_fast)
    high = pair_index(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float32) - low) / (high - low or 1e-3)
    scaled_share = ramp.clamp(0, 1)
    return scaled_share * original / scaling.factor + (1 - scaled_share) * original


def _yarn_factor(scaling: RopeScaling) -> float:
    """Return the factor of the rotated queries and keys (arXiv 2309.00071, section 3.4)."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def log_scale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return log_scale(scaling.mscale) / log_scale(scaling.mscale_all_dim)
    return log_scale(1.0)
