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

import torch
import triton
import triton.language as tl
from torch import Tensor

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

_NONE = tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_SOME = tl.constexpr(1e-30)
_LOG2_E = tl.constexpr(1.4426950408889634)


def scratch_size(rows: int, vocab: int) -> int:
    """Return the int32 elements of scratch that sample_tokens needs for logits [rows, vocab]."""
    return rows * (3 * triton.next_power_of_2(triton.cdiv(vocab, _TILE)) + 2 * _CAPACITY)


def sample_tokens(
    logits: Tensor,
    *,
    header: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    samples: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    scratch: Tensor,
    last_sampled: Tensor,
    out_ids: Tensor,
    pdl: bool = False,
) -> None:
    """Choose a token for each row that samples.

    It is the token that `sample` over `mask_top_k_top_p_min_p` of kernels/ops/sampling.py chooses.
    It is written to last_sampled[slot] and to out_ids[header[1], row]. Ties go to the lower id. NaN
    counts as minus infinity; a row without any finite logit gives some id of the vocabulary.

    logits [R, V] of any float type, each row contiguous. header int32: the number of rows that
    count, and the row of out_ids to write. int32 [R]: slots; seq_lens, the positions of the noise;
    samples, 0 where a row samples nothing. Tables by slot, [S]: temperature (0: greedy), top_p and
    min_p float32; top_k (0: all) and last_sampled int32; seed int64. scratch int32 [scratch_size(R,
    V)] or more, of any content before and after. out_ids int32 [_, R] or wider, in any memory that
    the device can write. `pdl`: launch both kernels with programmatic dependent launch.

    Raises ValueError if scratch is too small and KeyError if logits are of another type.
    """
    rows, vocab = logits.shape
    if scratch.numel() < scratch_size(rows, vocab):
        raise ValueError(
            f"scratch has {scratch.numel()} elements, {rows} rows need {scratch_size(rows, vocab)}"
        )
    low_bits = _LOW_BITS[logits.dtype]
    tiles = triton.cdiv(vocab, _TILE)
    sizes = {"TILES": triton.next_power_of_2(tiles), "TILE": _TILE}
    options = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    tables = (header, slots, seq_lens, samples, temperature, top_k, top_p, min_p, seed, scratch)
    _score_tiles[(rows, tiles)](
        logits, *tables, logits.stride(0), vocab, **sizes, num_warps=2, **options
    )
    _choose_tokens[(rows,)](
        logits,
        *tables,
        last_sampled,
        out_ids,
        logits.stride(0),
        out_ids.stride(0),
        vocab,
        **sizes,
        CAPACITY=_CAPACITY,
        FEW=_FEW,
        STEP=_STEP,
        LOW_BITS=low_bits,
        num_warps=16,
        **options,
    )


# --- Noise


@triton.jit
def _mix(x):
    """Return the SplitMix64 finaliser of a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise_keys(seed, position):
    """Return a row's two uint32 keys, from its int64 seed and int32 position."""
    keys = _mix(
        _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    )
    return keys.to(tl.uint32), (keys >> 32).to(tl.uint32)


@triton.jit
def _noise_bits(first_key, second_key, ids):
    """Return uint32 bits, the same as kernels.ops.sampling.noise_bits."""
    x = ids.to(tl.uint32) ^ first_key
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11) ^ second_key) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _exponential(first_key, second_key, ids):
    """Return -log(1 - u), a standard exponential variate for each token.

    Its relative error is 2e-7. The library's logarithm of 1 + x has no form in Triton, and the
    noise that wins comes from small u, where 1 - u has no precision left. So 1 - u is written as
    2^e (1 + m) with m in [-1/4, 1/2], where m, like u, is exact if u is small (e = 0). Then log(1 +
    m) = m + m^2 q(m) with the minimax polynomial q. If u rounds to 1 the result is 88, not
    infinity.
    """
    u = (_noise_bits(first_key, second_key, ids).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = 1.0 - u
    exponent = (rest.to(tl.int32, bitcast=True) - 0x3F400000) & -0x800000
    scale = (0x3F800000 - exponent).to(tl.float32, bitcast=True)
    m = tl.fma(-u, scale, scale - 1.0)
    q = tl.fma(m, 0.05413246899843216, -0.12067367136478424)
    q = tl.fma(q, m, 0.14983916282653809)
    q = tl.fma(q, m, -0.1682281196117401)
    q = tl.fma(q, m, 0.19977077841758728)
    q = tl.fma(q, m, -0.24993441998958588)
    q = tl.fma(q, m, 0.3333354890346527)
    q = tl.fma(q, m, -0.5000005960464478)
    return -tl.fma((exponent >> 23).to(tl.float32), 0.6931471805599453, tl.fma(q, m * m, m))


# --- Logits


@triton.jit
def _load(values, offsets, inside):
    """Return values as float32, with minus infinity for NaN and for elements outside."""
    x = tl.load(values + offsets, mask=inside, other=-_INFINITY).to(tl.float32)
    return tl.maximum(x, -_INFINITY)


@triton.jit
def _finite(x):
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@triton.jit
def _weight(x, best, scale):
    """Return exp((x - best) / T), at most 1; `scale` is log2(e) / T and best is finite."""
    return tl.exp2(tl.minimum((x - best) * scale, 0.0))


@triton.jit
def _to_key(value, LOW_BITS: tl.constexpr):
    """Return an int64 in the order of the floats, without low bits that the logits' type lacks."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS).to(tl.int64)


@triton.jit
def _from_key(key, LOW_BITS: tl.constexpr):
    """Return the float32 of a key."""
    bits = (key << LOW_BITS).to(tl.int32)
    bits = tl.where(bits < 0, bits | ((1 << LOW_BITS) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _parameters(row, slots, temperature, top_k, top_p, min_p):
    """Return a row's slot, and the sampling parameters of its request."""
    slot = tl.load(slots + row).to(tl.int64)
    return (
        slot,
        tl.load(temperature + slot),
        tl.load(top_k + slot),
        tl.load(top_p + slot),
        tl.load(min_p + slot),
    )


@triton.jit
def _is_filtered(t, k, p, min_p, vocab):
    return (t > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (min_p > 0))


# --- The first kernel


@triton.jit
def _score_tiles(
    logits,
    header,
    slots,
    seq_lens,
    samples,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    scratch,
    row_stride,
    vocab,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
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
    slot, t, k, p, m = _parameters(row, slots, temperature, top_k, top_p, min_p)
    tile = tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    inside = ids < vocab
    x = _load(logits + row.to(tl.int64) * row_stride, ids, inside)
    score = tl.max(x, 0)
    if t > 0:
        best = _finite(score)
        scale = _LOG2_E / t
        if _is_filtered(t, k, p, m, vocab):
            second = tl.sum(_weight(x, best, scale), 0).to(tl.int32, bitcast=True)
        else:
            first_key, second_key = _noise_keys(tl.load(seed + slot), tl.load(seq_lens + row))
            time = _exponential(first_key, second_key, ids) * tl.exp2((best - x) * scale)
            time = tl.where(inside, time, _INFINITY)
            shortest = tl.min(time, 0)
            second = tl.min(tl.where(inside & (time == shortest), ids, _NONE), 0)
            score = best / t - tl.log(shortest)
    else:
        second = tl.min(tl.where(inside & (x == score), ids, _NONE), 0)
    target = scratch + row * 3 * TILES + tile
    tl.store(target, score.to(tl.int32, bitcast=True))
    tl.store(target + TILES, second)


# --- Filters: what may stay


@triton.jit
def _before(values, count, x, index, best, scale, CHUNK: tl.constexpr):
    """Return the number of `values` before each of x, and their weight.

    x is found at `index` in `values`. A value is before x if it is higher, or as high and at a
    lower index. The results for an x that is not in `values` have no meaning.
    """
    number = tl.zeros(x.shape, tl.int32)
    mass = tl.zeros(x.shape, tl.float32)
    for start in tl.range(0, count, CHUNK):
        other = start + tl.arange(0, CHUNK)[:, None]
        y = _load(values, other, other < count)
        first = (y > x[None, :]) | ((y == x[None, :]) & (other < index[None, :]))
        number += tl.sum(first.to(tl.int32), 0)
        mass += tl.sum(tl.where(first, _weight(y, best, scale), 0.0), 0)
    return number, mass


@triton.jit
def _nucleus_floor(
    scores, masses, tiles, budget, best, scale, TILE: tl.constexpr, CHUNK: tl.constexpr
):
    """Return a value below which the tokens surely weigh no more than `budget`, or minus infinity.

    A tile whose best logit is below the value lies below it as a whole. Any other tile has at most
    the mass of all but its best token below it, and at most as much as if all its tokens were just
    below the value. 256 values are tried, e^(1/8) apart in weight.
    """
    floors = best - tl.arange(0, 256) * (0.125 * _LOG2_E / scale)
    most = TILE * _weight(floors, best, scale)
    below = tl.zeros([256], tl.float32)
    for start in tl.range(0, tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)[:, None]
        score = tl.load(scores + tile, mask=tile < tiles, other=-_INFINITY)
        weight = _weight(score, best, scale)
        mass = tl.load(masses + tile, mask=tile < tiles, other=0.0) * weight
        rest = tl.minimum(tl.maximum(mass - weight, 0.0), most[None, :])
        below += tl.sum(tl.where(score < floors[None, :], mass, rest), 0)
    return tl.max(tl.where(below <= budget, floors, -_INFINITY), 0)


@triton.jit
def _gather(
    row,
    values,
    ids,
    tile_list,
    count,
    floor,
    vocab,
    CAPACITY: tl.constexpr,
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Write the first CAPACITY logits of the listed tiles that reach `floor`, and their ids.

    Both are written in the order of the ids. Return how many such logits there are in all.
    """
    number = 0
    for start in tl.range(0, count, GROUP):
        index = start + tl.arange(0, GROUP)
        tile = tl.load(tile_list + index, mask=index < count, other=0)
        offsets = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = _load(row, offsets, (index < count)[:, None] & (offsets < vocab))
        taken = (x >= floor).to(tl.int32)
        numbers = tl.sum(taken, 1)
        place = number + (tl.cumsum(numbers, 0) - numbers)[:, None] + tl.cumsum(taken, 1) - 1
        fits = (taken != 0) & (place < CAPACITY)
        tl.store(values + place, x, mask=fits)
        tl.store(ids + place, offsets, mask=fits)
        number += tl.sum(numbers, 0)
    return number


# --- Filters: the search for a threshold


@triton.jit
def _measures(
    values, count, floors, best, scale, MASS: tl.constexpr, WAYS: tl.constexpr, STEP: tl.constexpr
):
    """Return for each of [WAYS] finite floors the number, or weight, of the logits not below it."""
    sums = tl.zeros([WAYS, STEP], tl.float32)
    for start in tl.range(0, count, STEP):
        offsets = start + tl.arange(0, STEP)[None, :]
        x = _load(values, offsets, offsets < count)
        weight = _weight(x, best, scale) if MASS else 1.0
        sums += tl.where(x >= floors[:, None], weight, 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _threshold(
    values,
    count,
    target,
    low,
    high,
    best,
    scale,
    MASS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Return the largest key in [low, high) at or above which the measure is `target`, or low.

    Also return the measure above it. No logit is as high as `high`. A sum of fewer of the same
    floats, in the same order, is never larger, so the measures fall from one cut to the next in
    spite of rounding.
    """
    above = 0.0
    while high - low > 1:
        # There are four cuts, some of them equal if there are fewer keys.
        cuts = low + tl.maximum((high - low) * (1 + tl.arange(0, 4)) // 5, 1)
        measures = _measures(values, count, _from_key(cuts, LOW_BITS), best, scale, MASS, 4, STEP)
        reached = measures >= target
        low = tl.max(tl.where(reached, cuts, low), 0)
        high = tl.min(tl.where(reached, high, cuts), 0)
        above = tl.maximum(above, tl.max(tl.where(reached, 0.0, measures), 0))
    return low, above


@triton.jit
def _race(
    values,
    ids,
    count,
    threshold,
    room,
    minimum,
    best,
    scale,
    first_key,
    second_key,
    GATHERED: tl.constexpr,
    STEP: tl.constexpr,
):
    """Draw a token among the logits above `threshold` and the first `room` of those that equal it.

    None of them is below `minimum`.
    """
    shortest = tl.full([STEP], _INFINITY, tl.float32)
    winner = tl.full([STEP], _NONE, tl.int32)
    num_tied = 0
    for start in tl.range(0, count, STEP):
        offsets = start + tl.arange(0, STEP)
        inside = offsets < count
        x = _load(values, offsets, inside)
        token = tl.load(ids + offsets, mask=inside, other=0) if GATHERED else offsets
        tied = (inside & (x == threshold)).to(tl.int32)
        before = num_tied + tl.cumsum(tied, 0) - tied
        kept = (
            inside
            & (x >= minimum)
            & ((x > threshold) | ((tied != 0) & (before.to(tl.float32) < room)))
        )
        time = _exponential(first_key, second_key, token) * tl.exp2((best - x) * scale)
        faster = kept & ((time < shortest) | (winner == _NONE))
        shortest = tl.where(faster, time, shortest)
        winner = tl.where(faster, token, winner)
        num_tied += tl.sum(tied, 0)
    return tl.min(tl.where(shortest == tl.min(shortest, 0), winner, _NONE), 0)


@triton.jit
def _filter_and_race(
    values,
    ids,
    count,
    low,
    high,
    k,
    p,
    minimum,
    mass,
    best,
    scale,
    first_key,
    second_key,
    GATHERED: tl.constexpr,
    LOW_BITS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Draw a token among those that the filters keep of `count` logits.

    The filters keep no token outside of these. low, high: keys between which the logits lie (high
    is above all). mass: the weight of the whole row.
    """
    room = tl.full((), _INFINITY, tl.float32)
    if k > 0:
        low, above = _threshold(values, count, k, low, high, best, scale, False, LOW_BITS, STEP)
        room = k - above
        next_up = tl.full([1], 0.0, tl.float32) + _from_key(low + 1, LOW_BITS)
        mass = tl.sum(_measures(values, count, next_up, best, scale, True, 1, STEP), 0)
        mass += room * _weight(_from_key(low, LOW_BITS), best, scale)
    if p < 1:
        # The target is never 0, so that the best token stays.
        target = tl.maximum(p * mass, _SOME)
        cut, above = _threshold(values, count, target, low, high, best, scale, True, LOW_BITS, STEP)
        # Among the tokens that weigh as much as this one, those stay whose preceding weight is less
        # than the target.
        fitting = tl.ceil((target - above) / _weight(_from_key(cut, LOW_BITS), best, scale))
        room = tl.where(cut > low, fitting, tl.minimum(fitting, room))
        low = cut
    return _race(
        values,
        ids,
        count,
        _from_key(low, LOW_BITS),
        room,
        minimum,
        best,
        scale,
        first_key,
        second_key,
        GATHERED,
        STEP,
    )


@triton.jit
def _filter_few(
    values, ids, count, k, p, minimum, mass, best, scale, first_key, second_key, FEW: tl.constexpr
):
    """Do the same as _filter_and_race for no more than FEW logits, all at once."""
    place = tl.arange(0, FEW)
    kept = place < count
    x = _load(values, place, kept)
    token = tl.load(ids + place, mask=kept, other=0)
    number, mass_before = _before(values, count, x, place, best, scale, 32)
    if k > 0:
        kept = kept & (number < k)
        mass = tl.sum(tl.where(kept, _weight(x, best, scale), 0.0), 0)
    kept = kept & (x >= minimum)
    if p < 1:
        kept = kept & (mass_before < tl.maximum(p * mass, _SOME))
    time = _exponential(first_key, second_key, token) * tl.exp2((best - x) * scale)
    time = tl.where(kept, time, _INFINITY)
    return tl.min(tl.where(kept & (time == tl.min(time, 0)), token, _NONE), 0)


# --- The second kernel


@triton.jit
def _choose_tokens(
    logits,
    header,
    slots,
    seq_lens,
    samples,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    scratch,
    last_sampled,
    out_ids,
    row_stride,
    out_stride,
    vocab,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    STEP: tl.constexpr,
    LOW_BITS: tl.constexpr,
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
    slot, t, k, p, m = _parameters(row, slots, temperature, top_k, top_p, min_p)
    tiles = tl.cdiv(vocab, TILE)
    tile = tl.arange(0, TILES)
    present = tile < tiles
    known = scratch + row * 3 * TILES
    scores = known.to(tl.pointer_type(tl.float32), bitcast=True)
    score = tl.load(scores + tile, mask=present, other=-_INFINITY)
    second = tl.load(known + TILES + tile, mask=present, other=0)
    top = tl.max(score, 0)
    if _is_filtered(t, k, p, m, vocab):
        # 2. For a row with a filter, find a floor below which no token stays, if one is known.
        k = tl.where(k < vocab, k, 0)
        best = _finite(top)
        scale = _LOG2_E / t
        mass = tl.sum(second.to(tl.float32, bitcast=True) * _weight(score, best, scale), 0)
        minimum = tl.where(m > 0, best + tl.minimum(tl.log(m) * t, 0.0), -_INFINITY)
        floor = tl.full((), -_INFINITY, tl.float32)
        if k > 0:
            if k <= tiles:
                better, _ = _before(scores, tiles, score, tile, best, scale, 32)
                floor = tl.max(tl.where(better == k - 1, score, -_INFINITY), 0)
        elif p < 1:
            # The margin covers the rounding of float32 sums.
            budget = tl.maximum(1 - p - 4e-6, 0.0) * mass
            floor = _nucleus_floor(scores, scores + TILES, tiles, budget, best, scale, TILE, 32)
        # Where top_p follows top_k, the tokens that min_p leaves out still count among the k.
        if (k == 0) | (p >= 1):
            floor = tl.maximum(floor, minimum)
        # 3. Gather the tokens that are not below it, from the tiles that hold some of them.
        first_key, second_key = _noise_keys(tl.load(seed + slot), tl.load(seq_lens + row))
        logits += row.to(tl.int64) * row_stride
        ids = scratch + tl.num_programs(0) * 3 * TILES + row.to(tl.int64) * 2 * CAPACITY
        values = (ids + CAPACITY).to(tl.pointer_type(tl.float32), bitcast=True)
        number = CAPACITY + 1
        if floor > -_INFINITY:
            listed = (score >= floor).to(tl.int32)
            tl.store(known + 2 * TILES + tl.cumsum(listed, 0) - 1, tile, mask=listed != 0)
            # The next steps read values that other threads of this program wrote.
            tl.debug_barrier()
            number = _gather(
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
        low = _to_key(floor, LOW_BITS)
        high = _to_key(best, LOW_BITS) + 1
        if number <= FEW:
            token = _filter_few(
                values, ids, number, k, p, minimum, mass, best, scale, first_key, second_key, FEW
            )
        elif number <= CAPACITY:
            token = _filter_and_race(
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
                first_key,
                second_key,
                True,
                LOW_BITS,
                2048,
            )
        else:
            token = _filter_and_race(
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
                first_key,
                second_key,
                False,
                LOW_BITS,
                STEP,
            )
    else:
        token = tl.min(tl.where(present & (score == top), second, _NONE), 0)
    token = tl.minimum(token, vocab - 1)
    tl.store(last_sampled + slot, token)
    tl.store(out_ids + tl.load(header + 1) * out_stride + row, token)
