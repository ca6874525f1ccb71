"""Sampling of the next token on a GPU, without sorting and without the host.

It is kernels/ops/sampling.py in Triton. There are two kernels, whose grids follow from the padded
shapes alone, so that a CUDA graph can hold them:

1. `_score_tiles`, a program for each row and tile of the vocabulary, stores two numbers a tile. For
   greedy rows, and rows that draw from all tokens, they are its best score and that token. For a
   row with a filter, they are its best logit and its probability mass.
2. `_choose_tokens`, a program for each row, takes the best tile, or applies the filter and draws.

Draws are exponential races: argmax(logits / T - log E), E standard exponential, is argmin(E *
exp((best - logit) / T)). This needs one exponential function and one logarithm a token instead of
two logarithms.

The cost of a filtered row: one program's pass over a row of 152k bf16 logits takes 10 us or so (300
KB from L2 at 64 bytes a clock are 3 us; the rest are some 15 instructions a logit). Finding a
threshold takes several passes. There is no sort, but a bisection of the floats, as ordered
integers, with four counts or sums of probabilities in each pass. That makes 7 passes for bf16 and
twice that for float32. (A histogram of digits would take fewer passes of far more instructions: its
counters lie in shared memory, and nearly all logits hit the same few.) So a whole row is searched
only where it must be. Mostly, the first kernel's numbers of each tile bound the threshold from
below:

- top_k: k tiles hold a logit that is no less than the k-th best of the tiles' best ones;
- top_p: the tiles bound the mass below any value, so some tokens are left out for sure;
- min_p is itself a threshold.

The tokens above that bound, some tens or hundreds, lie in few tiles and are gathered in a few
steps. Up to _FEW of them are compared each with each, which settles their order, and all filters,
at once. Up to _CAPACITY are searched like a row. Only rows with more of them (flat distributions; a
top_k larger than the number of tiles) are searched as a whole.

All sums are computed in a fixed order and no float is added atomically: the same row gives the same
token every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.launch import cdiv, next_power_of_2
from sidestep.kernels.triton.sampling_filters_triton import (
    count_before,
    filter_and_race,
    filter_few,
    gather,
    nucleus_floor,
)
from sidestep.kernels.triton.sampling_logits_triton import (
    INFINITY,
    LOG2_E,
    NONE,
    finite,
    is_filtered,
    load_logits,
    parameters_of,
    to_key,
    weight_of,
)
from sidestep.kernels.triton.sampling_noise_triton import (
    exponential,
    exponential_of,
    noise_keys,
    uniform,
)

_TILE = 1024
"""Number of tokens that a program of the first kernel scores."""
_STEP = 8192
"""Number of tokens that the second kernel reads at a time; a multiple of _TILE."""
_CAPACITY = 8192
"""Largest number of tokens of a filtered row that are gathered."""
_FEW = 512
"""Largest number of tokens that are compared each with each."""

# The low bits of bf16 and fp16 in float32 form are zero, so a search among them has fewer steps.
_LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


class SamplingWords(NamedTuple):
    """Indices of a request's sampling parameters among the words of its slot."""

    temperature: int
    top_k: int
    top_p: int
    min_p: int
    temperature_last: int
    seed: int
    """Index of the low word; the high word follows."""


class Taken(NamedTuple):
    """Where the tokens of a step without drafts go, so that its slots have advanced past them."""

    last_sampled: Tensor
    num_computed: Tensor
    """int32 [S], of one stride: by slot, the token, and the number of tokens before it."""
    out_ids: Tensor
    """int32 [_, R] or wider, in any memory that the device can write."""


def scratch_size(rows: int, vocab: int) -> int:
    """Return the int32 elements of scratch that sample_tokens needs for logits [rows, vocab]."""
    return rows * (3 * next_power_of_2(cdiv(vocab, _TILE)) + 2 * _CAPACITY)


def sample_tokens(
    logits: Tensor,
    *,
    header: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    samples: Tensor,
    parameters: Tensor,
    words: SamplingWords,
    scratch: Tensor,
    out: Tensor | Taken,
    pdl: bool = False,
) -> None:
    """Choose a token for each row that samples.

    It is the token that `sample` over `mask_top_k_top_p_min_p` of kernels/ops/sampling.py chooses.
    Ties go to the lower id. NaN counts as minus infinity; a row without any finite logit gives some
    id of the vocabulary.

    logits [R, V] of any float type, each row contiguous. header int32: the number of rows that
    count, and the row of the output. int32 [R]: slots; seq_lens, the positions of the noise;
    samples, 0 where a row samples nothing. parameters int32 [S, W]: by slot, the bits of
    temperature (0: greedy), top_p and min_p (float32), top_k (0: all), temperature_last (not 0: the
    filters see temperature 1) and seed (int64), at the indices `words`. scratch int32
    [scratch_size(R, V)] or more, of any content before and after. out: int32 [R] for the tokens
    alone; or tables, if the slots advance at once: then tokens go to last_sampled[slot] and
    out_ids[header[1], row], and seq_lens to num_computed[slot]. `pdl`: launch both kernels with
    programmatic dependent launch.

    Raises ValueError if scratch is too small and KeyError if logits are of another type.
    """
    rows, vocab = logits.shape
    if scratch.numel() < scratch_size(rows, vocab):
        raise ValueError(
            f"scratch has {scratch.numel()} elements, {rows} rows need {scratch_size(rows, vocab)}"
        )
    low_bits = _LOW_BITS[logits.dtype]
    tiles = cdiv(vocab, _TILE)
    options = {
        "WORDS": parameters.stride(0),
        "PLACES": tuple(words),
        "TILES": next_power_of_2(tiles),
        "TILE": _TILE,
        **({"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}),
    }
    inputs = (header, slots, seq_lens, samples, parameters, scratch)
    _score_tiles[(rows, tiles)](logits, *inputs, logits.stride(0), vocab, num_warps=2, **options)
    taken = out if isinstance(out, Taken) else Taken(out, out, out)
    _choose_tokens[(rows,)](
        logits,
        *inputs,
        *taken,
        logits.stride(0),
        taken.last_sampled.stride(0),
        taken.out_ids.stride(0),
        vocab,
        CAPACITY=_CAPACITY,
        FEW=_FEW,
        STEP=_STEP,
        LOW_BITS=low_bits,
        TAKES=isinstance(out, Taken),
        num_warps=16,
        **options,
    )


# --- The first kernel


@triton.jit
def _score_tiles(
    logits,
    header,
    slots,
    seq_lens,
    samples,
    parameters,
    scratch,
    row_stride,
    vocab,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    logits += row.to(tl.int64) * row_stride
    # All that waits for no other number is loaded at once: a program is short beside a load.
    x = load_logits(logits, ids, inside)
    wanted, slot = tl.load(samples + row), tl.load(slots + row)
    position = tl.load(seq_lens + row)
    if (row >= tl.load(header)) | (wanted == 0):
        return
    t, filter_t, k, p, m, seed = parameters_of(slot, parameters, WORDS, PLACES)
    score = tl.max(x, 0)
    if t > 0:
        best = finite(score)
        if is_filtered(t, k, p, m, vocab):
            weights = weight_of(x, best, LOG2_E / filter_t)
            second = tl.sum(weights, 0).to(tl.int32, bitcast=True)
        else:
            keys = noise_keys(seed, position)
            shortest, second = _first_of_race(logits, ids, inside, x, best, LOG2_E / t, keys)
            score = best / t - tl.log(shortest)
    else:
        second = tl.min(tl.where(inside & (x == score), ids, NONE), 0)
    target = scratch + row * 3 * TILES + tile
    tl.store(target, score.to(tl.int32, bitcast=True))
    tl.store(target + TILES, second)


@triton.jit
def _first_of_race(logits, ids, inside, x, best, scale, keys):
    """Return the least time of a tile's tokens, and that token. x: their logits.

    An exponential variate takes more instructions than all else, and it is larger than the uniform
    one that it is made of. So times with the uniform ones are shorter, and nearly always all but
    one of these are longer than the time of the first.
    """
    u = uniform(keys[0], keys[1], ids)
    weights = tl.exp2((best - x) * scale)
    bounds = tl.where(inside, u * weights, INFINITY)
    least = tl.min(bounds, 0)
    first = tl.min(tl.where(inside & (bounds == least), ids, NONE), 0)
    logit = load_logits(logits, first, first != NONE)
    shortest = exponential(keys[0], keys[1], first) * tl.exp2((best - logit) * scale)
    # The margin is above the rounding of variates and products.
    others = (bounds <= shortest * 1.000002) & (ids != first)
    if tl.max(others.to(tl.int32), 0) > 0:
        times = tl.where(inside, exponential_of(u) * weights, INFINITY)
        shortest = tl.min(times, 0)
        first = tl.min(tl.where(inside & (times == shortest), ids, NONE), 0)
    return shortest, first


# --- The second kernel


@triton.jit
def _choose_tokens(
    logits,
    header,
    slots,
    seq_lens,
    samples,
    parameters,
    scratch,
    last_sampled,
    num_computed,
    out_ids,
    row_stride,
    slot_stride,
    out_stride,
    vocab,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    STEP: tl.constexpr,
    LOW_BITS: tl.constexpr,
    TAKES: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(header):
        return
    if tl.load(samples + row) == 0:
        return
    # 1. Load the row's parameters and the first kernel's results.
    slot = tl.load(slots + row)
    t, filter_t, k, p, m, seed = parameters_of(slot, parameters, WORDS, PLACES)
    tiles = tl.cdiv(vocab, TILE)
    tile = tl.arange(0, TILES)
    present = tile < tiles
    known = scratch + row * 3 * TILES
    scores = known.to(tl.pointer_type(tl.float32), bitcast=True)
    score = tl.load(scores + tile, mask=present, other=-INFINITY)
    second = tl.load(known + TILES + tile, mask=present, other=0)
    top = tl.max(score, 0)
    if is_filtered(t, k, p, m, vocab):
        # 2. For a row with a filter, find a floor below which no token stays, if one is known.
        k = tl.where(k < vocab, k, 0)
        best = finite(top)
        scale = LOG2_E / filter_t
        race_scale = LOG2_E / t
        mass = tl.sum(second.to(tl.float32, bitcast=True) * weight_of(score, best, scale), 0)
        minimum = tl.where(m > 0, best + tl.minimum(tl.log(m) * filter_t, 0.0), -INFINITY)
        floor = tl.full((), -INFINITY, tl.float32)
        if k > 0:
            if k <= tiles:
                better, _ = count_before(scores, tiles, score, tile, best, scale, 32)
                floor = tl.max(tl.where(better == k - 1, score, -INFINITY), 0)
        elif p < 1:
            # The margin covers the rounding of float32 sums.
            budget = tl.maximum(1 - p - 4e-6, 0.0) * mass
            floor = nucleus_floor(scores, scores + TILES, tiles, budget, best, scale, TILE, 32)
        # Where top_p follows top_k, the tokens that min_p leaves out still count among the k.
        if (k == 0) | (p >= 1):
            floor = tl.maximum(floor, minimum)
        # 3. Gather the tokens that are not below it, from the tiles that hold some of them.
        first_key, second_key = noise_keys(seed, tl.load(seq_lens + row))
        logits += row.to(tl.int64) * row_stride
        ids = scratch + tl.num_programs(0) * 3 * TILES + row.to(tl.int64) * 2 * CAPACITY
        values = (ids + CAPACITY).to(tl.pointer_type(tl.float32), bitcast=True)
        number = CAPACITY + 1
        if floor > -INFINITY:
            listed = (score >= floor).to(tl.int32)
            tl.store(known + 2 * TILES + tl.cumsum(listed, 0) - 1, tile, mask=listed != 0)
            # The next steps read values that other threads of this program wrote.
            tl.debug_barrier()
            number = gather(
                logits,
                values,
                ids,
                known + 2 * TILES,
                tl.sum(listed, 0),
                floor,
                vocab,
                CAPACITY,
                TILE,
                STEP // TILE,
            )
            tl.debug_barrier()
        # 4. Apply the filters and choose the token.
        low = to_key(floor, LOW_BITS)
        high = to_key(best, LOW_BITS) + 1
        if number <= FEW:
            token = filter_few(
                values,
                ids,
                number,
                k,
                p,
                minimum,
                mass,
                best,
                scale,
                race_scale,
                first_key,
                second_key,
                FEW,
            )
        elif number <= CAPACITY:
            token = filter_and_race(
                values,
                ids,
                number,
                low,
                high,
                k,
                p,
                minimum,
                mass,
                best,
                scale,
                race_scale,
                first_key,
                second_key,
                True,
                LOW_BITS,
                2048,
            )
        else:
            token = filter_and_race(
                logits,
                ids,
                vocab,
                low,
                high,
                k,
                p,
                minimum,
                mass,
                best,
                scale,
                race_scale,
                first_key,
                second_key,
                False,
                LOW_BITS,
                STEP,
            )
    else:
        token = tl.min(tl.where(present & (score == top), second, NONE), 0)
    token = tl.minimum(token, vocab - 1)
    if TAKES:
        # It is what accept_triton does where there are no drafts.
        place = slot.to(tl.int64) * slot_stride
        tl.store(last_sampled + place, token)
        tl.store(num_computed + place, tl.load(seq_lens + row))
        tl.store(out_ids + tl.load(header + 1) * out_stride + row, token)
    else:
        tl.store(out_ids + row, token)
