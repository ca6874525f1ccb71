"""Sampling of the next token, for a whole batch at once and without any random state.

A token is argmax(logits / T + Gumbel noise), which is a draw from softmax(logits / T) (Gumbel-max;
Maddison et al. 2014). The noise is a hash of (seed, position, token id), so a row's token depends
on the row's own logits, seed and position alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_LOW = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """Return the SplitMix64 finaliser (Steele et al. 2014) of x, int64.

    int64 arithmetic wraps; masks make the shifts logical.
    """
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def noise_bits(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return 32 random bits for each token, int64 [R, V], from int64 seeds [R] and positions [R].

    64-bit products are slow on a GPU, so only a row's two keys are made with them. A token's bits
    come from the 32-bit mixer with three products and the least bias that Wellons' search found
    (2018, "Prospecting for hash functions"). One key goes in before the mixer and the other before
    its second product, so rows with equal first keys still differ. All arithmetic is on integers,
    so every device and kernels/triton/sampling_triton.py get the same bits.
    """
    # With seed 0 and position 0 the keys are not 0.
    keys = _mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN)[:, None]
    x = torch.arange(vocab_size, device=seeds.device) ^ (keys & _LOW)
    x ^= x >> 17
    x *= 0xED5AD4BB
    x &= _LOW
    x ^= x >> 11
    x ^= (keys >> 32) & _LOW
    x *= 0xAC4C1B51
    x &= _LOW
    x ^= x >> 15
    x *= 0x31848BAB
    x &= _LOW
    x ^= x >> 14
    return x


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Return standard Gumbel noise, float32 [R, V], from int64 seeds [R] and positions [R]."""
    uniform = (noise_bits(seeds, positions, vocab_size).float() + 0.5) * 2.0**-32
    # -log(1 - u) is an exponential variate. Its small values, which win, are exact. u may round to
    # 1: the variate is then infinite, the noise minus infinity, and the token is never chosen.
    return torch.log1p(-uniform).neg_().log_().neg_()


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return draws from softmax(logits / temperature), int64 [R]; the argmax if temperature is 0.

    logits float32 [R, V]; temperature float32 [R]; seeds, positions int64 [R].
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    noise = gumbel_noise(seeds, positions, logits.shape[-1])
    return torch.where(greedy[:, None], logits, scaled + noise).argmax(-1)


def mask_top_k_top_p_min_p(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the logits with -inf for the tokens that each row's filters leave out.

    The filters keep the top_k most probable tokens (0: all), then the smallest set of these tokens
    whose probability reaches top_p, then those at least min_p times as probable as the best one.
    At least one token stays. Among equally probable tokens the lower ids stay.

    logits float32 [R, V], already divided by the temperature; top_k int64 [R]; top_p, min_p float32
    [R].
    """
    vocab_size = logits.shape[-1]
    values, order = logits.sort(stable=True, dim=-1, descending=True)
    rank = torch.arange(vocab_size, device=logits.device)
    keep = rank < torch.where(top_k > 0, top_k, vocab_size)[:, None]
    probs = values.masked_fill(~keep, -torch.inf).softmax(-1)
    # A token stays if the tokens before it do not reach top_p yet. Rounded sums may reach 1 before
    # the last token, which must not leave it out where there is no top_p.
    keep &= (probs.cumsum(-1) - probs < top_p[:, None]) | (top_p >= 1)[:, None]
    keep &= probs >= min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(-1, order, keep), -torch.inf)
