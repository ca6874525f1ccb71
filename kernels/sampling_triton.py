"""Choosing the next token on a GPU, without sorting and without the host: `kernels.sampling` in Triton.

Two kernels, whose grids follow from the padded shapes alone, so that a CUDA graph can hold them:

1. `_score_tiles`, a program for each row and tile of the vocabulary, leaves two numbers a tile: its best score and that
   token (greedy rows, and rows that draw from all tokens), or, for a row with a filter, its best logit and how much
   probability it holds.
2. `_choose_tokens`, a program for each row, takes the best tile, or applies the filter and draws.

Draws are exponential races: argmax(logits / T - log E), E standard exponential, is argmin(E * exp((best - logit) / T)),
which needs one exponential function and one logarithm a token instead of two logarithms.

What a filtered row costs. top_k and top_p keep all logits above a threshold (and the first of those that equal it), and
it is found by bisecting the floats, as ordered integers, with a count or a sum of probabilities in each step. Over a row
of 152k bf16 logits such a pass takes one multiprocessor 5 to 8 us (300 KB from L2 at 64 bytes a clock: 3 us; some 12
instructions a logit for three thresholds at once: 8 us at most), and two bits a pass make 8 of them for bf16, twice that
for float32. A histogram of digits would take fewer passes of far more instructions: its counters lie in shared memory,
where nearly all logits hit the same few. So the full passes are kept for rows that need them, which are few: what the
first kernel knows of each tile, at no cost, bounds the threshold from below,

- top_k: k tiles have a logit that is no less than the k-th best of the tiles' best ones;
- top_p: the tiles bound what lies below any value, so what is surely left out is known;
- min_p is itself a threshold,

and the tokens above that bound, mostly some tens or hundreds, are gathered in one pass (8 us). Then every step of the
search reads only them, in about half a microsecond. Rows whose bound lets through more than _CAPACITY tokens (flat
distributions; top_k larger than the number of tiles) are searched as a whole, in the same way.

All sums are taken in a fixed order and no float is added atomically: the same row gives the same token every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Tokens that a program of the first kernel scores."""
_STEP = 8192
"""Tokens that the second kernel reads at a time."""
_CAPACITY = 8192
"""Tokens of a filtered row that are gathered at most."""

# bf16 and fp16 leave the low bits of their float32 form zero: a search among them has as many steps less.
_LOW_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}

_NONE = tl.constexpr(2**31 - 1)
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LOG2_E = tl.constexpr(1.4426950408889634)


def scratch_size(rows: int, vocab: int) -> int:
    """int32 elements of scratch that sample_tokens needs for logits [rows, vocab]."""
    return rows * 2 * (triton.next_power_of_2(triton.cdiv(vocab, _TILE)) + min(vocab, _CAPACITY))


def sample_tokens(logits: Tensor, *, header: Tensor, slots: Tensor, seq_lens: Tensor, samples: Tensor,
                  temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, scratch: Tensor,
                  last_sampled: Tensor, out_ids: Tensor, pdl: bool = False) -> None:
    """Chooses a token for each row that samples, as `sample` over `mask_top_k_top_p_min_p` of kernels.sampling do.

    It is written to last_sampled[slot] and to out_ids[header[1], row]. Ties go to the lower id. NaN counts as minus
    infinity; a row without any finite logit gives some id of the vocabulary.

    logits [R, V] of any float type, each row contiguous. header int32: the number of rows that count, and the row of
    out_ids to write. int32 [R]: slots; seq_lens, the positions of the noise; samples, 0 where a row samples nothing.
    Tables by slot, [S]: temperature (0: greedy), top_p and min_p float32; top_k (0: all) and last_sampled int32; seed
    int64. scratch int32 [scratch_size(R, V)] or more, its content of no matter before or after. out_ids int32 [_, R] or
    wider, in any memory that the device can write. `pdl`: launch both kernels programmatically dependent.

    Raises ValueError if scratch is too small and KeyError if logits are of another type.
    """
    rows, vocab = logits.shape
    if scratch.numel() < scratch_size(rows, vocab):
        raise ValueError(f"scratch has {scratch.numel()} elements, {rows} rows need {scratch_size(rows, vocab)}")
    low_bits = _LOW_BITS[logits.dtype]
    tiles = triton.cdiv(vocab, _TILE)
    sizes = {"TILES": triton.next_power_of_2(tiles), "TILE": _TILE}
    options = {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}
    tables = (header, slots, seq_lens, samples, temperature, top_k, top_p, min_p, seed, scratch)
    _score_tiles[(rows, tiles)](logits, *tables, logits.stride(0), vocab, **sizes, num_warps=2, **options)
    _choose_tokens[(rows,)](
        logits, *tables, last_sampled, out_ids, logits.stride(0), out_ids.stride(0), vocab, **sizes,
        CAPACITY=min(vocab, _CAPACITY), STEP=_STEP, LOW_BITS=low_bits, num_warps=16, **options)


# --- Noise -----------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x):
    """The finaliser of SplitMix64, of a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _noise_keys(seed, position):
    """A row's two uint32 keys, from its int64 seed and int32 position."""
    keys = _mix(_mix(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15)
    return keys.to(tl.uint32), (keys >> 32).to(tl.uint32)


@triton.jit
def _noise_bits(first_key, second_key, ids):
    """uint32, the same as kernels.sampling.noise_bits."""
    x = ids.to(tl.uint32) ^ first_key
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = (x ^ (x >> 11) ^ second_key) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def _exponential(first_key, second_key, ids):
    """-log(1 - u), a standard exponential variate for each token, with a relative error of 2e-7.

    The library's logarithm of 1 + x has no form in Triton, and the noise that wins comes from small u, where 1 - u has
    no precision left. So: 1 - u = 2^e (1 + m) with m in [-1/4, 1/2], where m, like u, is exact if u is small (e = 0),
    and log(1 + m) = m + m^2 q(m) with the minimax polynomial q. If u rounds to 1 the result is 88, not infinity.
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


# --- Logits ----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(values, offsets, inside):
    """As float32; NaN, and what is not inside, as minus infinity."""
    x = tl.load(values + offsets, mask=inside, other=-_INFINITY).to(tl.float32)
    return tl.maximum(x, -_INFINITY)


@triton.jit
def _finite(x):
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@triton.jit
def _weight(x, best, scale):
    """exp((x - best) / T), at most 1. `scale` is log2(e) / T here and below; best is finite."""
    return tl.exp2(tl.minimum((x - best) * scale, 0.0))


@triton.jit
def _to_key(value, LOW_BITS: tl.constexpr):
    """An int64 in the order of the floats, without the low bits that the logits' type has not."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS).to(tl.int64)


@triton.jit
def _from_key(key, LOW_BITS: tl.constexpr):
    """The float32 of a key."""
    bits = (key << LOW_BITS).to(tl.int32)
    bits = tl.where(bits < 0, bits | ((1 << LOW_BITS) - 1), bits)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _is_filtered(t, k, p, min_p, vocab):
    return (t > 0) & (((k > 0) & (k < vocab)) | (p < 1) | (min_p > 0))


# --- The first kernel ------------------------------------------------------------------------------------------------


@triton.jit
def _score_tiles(logits, header, slots, seq_lens, samples, temperature, top_k, top_p, min_p, seed, scratch, row_stride,
                 vocab, TILES: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(header):
        return
    if tl.load(samples + row) == 0:
        return
    slot = tl.load(slots + row).to(tl.int64)
    t = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    m = tl.load(min_p + slot)
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
    target = scratch + row * 2 * TILES + tile
    tl.store(target, score.to(tl.int32, bitcast=True))
    tl.store(target + TILES, second)


# --- The search for a filter's threshold -----------------------------------------------------------------------------


@triton.jit
def _cuts(low, high, WAYS: tl.constexpr):
    """WAYS keys between low and high, which are at least two apart; some are equal if there are not as many."""
    return low + tl.maximum((high - low) * (1 + tl.arange(0, WAYS)) // (WAYS + 1), 1)


@triton.jit
def _measures(values, count, floors, best, scale, MASS: tl.constexpr, WAYS: tl.constexpr, STEP: tl.constexpr):
    """For each of [WAYS] finite floors, how many logits are not below it, or how much these weigh."""
    sums = tl.zeros([WAYS, STEP], tl.float32)
    for start in tl.range(0, count, STEP):
        offsets = start + tl.arange(0, STEP)[None, :]
        x = _load(values, offsets, offsets < count)
        weight = _weight(x, best, scale) if MASS else 1.0
        sums += tl.where(x >= floors[:, None], weight, 0.0)
    return tl.sum(sums, 1)


@triton.jit
def _threshold(values, count, target, low, high, best, scale, MASS: tl.constexpr, LOW_BITS: tl.constexpr,
               WAYS: tl.constexpr, STEP: tl.constexpr):
    """The largest key in [low, high) from which up there is a measure of `target`, or low; and the measure above it.

    Nothing is as high as `high`. A sum of fewer of the same floats, in the same order, is never larger, so that the
    measures fall from one floor to the next in spite of rounding.
    """
    above = 0.0
    while high - low > 1:
        cuts = _cuts(low, high, WAYS)
        measures = _measures(values, count, _from_key(cuts, LOW_BITS), best, scale, MASS, WAYS, STEP)
        reached = measures >= target
        low = tl.max(tl.where(reached, cuts, low), 0)
        high = tl.min(tl.where(reached, high, cuts), 0)
        above = tl.maximum(above, tl.max(tl.where(reached, 0.0, measures), 0))
    return low, above


@triton.jit
def _nucleus_floor(tile_best, tile_mass, tile_weight, budget, low, high, best, scale, TILE: tl.constexpr,
                   LOW_BITS: tl.constexpr, WAYS: tl.constexpr):
    """The largest key of which it is sure that the tokens below it weigh no more than `budget`.

    Below a value lies all of a tile whose best logit is below it, and of another tile at most all but its best token,
    and at most as much as if all its tokens were just below the value.
    """
    rest = tl.maximum(tile_mass - tile_weight, 0.0)
    while high - low > 1:
        cuts = _cuts(low, high, WAYS)
        floors = _from_key(cuts, LOW_BITS)
        most = TILE * _weight(floors, best, scale)
        below = tl.where(tile_best[None, :] < floors[:, None], tile_mass[None, :],
                         tl.minimum(rest[None, :], most[:, None]))
        sure = tl.sum(below, 1) <= budget
        low = tl.max(tl.where(sure, cuts, low), 0)
        high = tl.min(tl.where(sure, high, cuts), 0)
    return low


@triton.jit
def _gather(row, values, ids, floor, vocab, CAPACITY: tl.constexpr, STEP: tl.constexpr):
    """Writes the first CAPACITY logits from `floor` up, and their ids, in the order of these; counts all of them."""
    count = 0
    for start in tl.range(0, vocab, STEP):
        offsets = start + tl.arange(0, STEP)
        x = _load(row, offsets, offsets < vocab)
        taken = (x >= floor).to(tl.int32)
        number = tl.sum(taken, 0)
        if number > 0:
            place = count + tl.cumsum(taken, 0) - 1
            fits = (taken != 0) & (place < CAPACITY)
            tl.store(values + place, x, mask=fits)
            tl.store(ids + place, offsets, mask=fits)
        count += number
    return count


# --- The second kernel -----------------------------------------------------------------------------------------------


@triton.jit
def _race(values, ids, count, threshold, room, minimum, best, scale, first_key, second_key, GATHERED: tl.constexpr,
          STEP: tl.constexpr):
    """Draws among the logits above `threshold`, the first `room` of those that equal it, none of them below `minimum`.
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
        kept = inside & (x >= minimum) & ((x > threshold) | ((tied != 0) & (before.to(tl.float32) < room)))
        time = _exponential(first_key, second_key, token) * tl.exp2((best - x) * scale)
        faster = kept & ((time < shortest) | (winner == _NONE))
        shortest = tl.where(faster, time, shortest)
        winner = tl.where(faster, token, winner)
        num_tied += tl.sum(tied, 0)
    return tl.min(tl.where(shortest == tl.min(shortest, 0), winner, _NONE), 0)


@triton.jit
def _filter_and_race(values, ids, count, low, high, k, p, minimum, mass, best, scale, first_key, second_key,
                     GATHERED: tl.constexpr, LOW_BITS: tl.constexpr, WAYS: tl.constexpr, STEP: tl.constexpr):
    """Draws what the filters keep of `count` logits, outside of which there is nothing that they keep.

    low, high: keys between which the logits lie (high is above all). mass: the weight of all of the row.
    """
    room = tl.full((), _INFINITY, tl.float32)
    if k > 0:
        low, above = _threshold(values, count, k, low, high, best, scale, False, LOW_BITS, WAYS, STEP)
        room = k - above
        next_up = tl.full([1], 0.0, tl.float32) + _from_key(low + 1, LOW_BITS)
        mass = tl.sum(_measures(values, count, next_up, best, scale, True, 1, STEP), 0)
        mass += room * _weight(_from_key(low, LOW_BITS), best, scale)
    if p < 1:
        # Never 0, so that the best token stays.
        target = tl.maximum(p * mass, 1e-30)
        cut, above = _threshold(values, count, target, low, high, best, scale, True, LOW_BITS, WAYS, STEP)
        # Of the tokens that weigh as much as this one, those stay before which there is less than the target.
        fitting = tl.ceil((target - above) / _weight(_from_key(cut, LOW_BITS), best, scale))
        room = tl.where(cut > low, fitting, tl.minimum(fitting, room))
        low = cut
    return _race(values, ids, count, _from_key(low, LOW_BITS), room, minimum, best, scale, first_key, second_key,
                 GATHERED, STEP)


@triton.jit
def _choose_tokens(logits, header, slots, seq_lens, samples, temperature, top_k, top_p, min_p, seed, scratch,
                   last_sampled, out_ids, row_stride, out_stride, vocab, TILES: tl.constexpr, TILE: tl.constexpr,
                   CAPACITY: tl.constexpr, STEP: tl.constexpr, LOW_BITS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row >= tl.load(header):
        return
    if tl.load(samples + row) == 0:
        return
    # 1. The row's parameters, and what the first kernel left.
    slot = tl.load(slots + row).to(tl.int64)
    t = tl.load(temperature + slot)
    k = tl.load(top_k + slot)
    p = tl.load(top_p + slot)
    m = tl.load(min_p + slot)
    tiles = tl.cdiv(vocab, TILE)
    tile = tl.arange(0, TILES)
    present = tile < tiles
    source = scratch + row * 2 * TILES + tile
    score = tl.load(source, mask=present, other=0).to(tl.float32, bitcast=True)
    score = tl.where(present, score, -_INFINITY)
    second = tl.load(source + TILES, mask=present, other=0)
    top = tl.max(score, 0)
    if _is_filtered(t, k, p, m, vocab):
        # 2. A row with a filter: a floor below which nothing stays.
        k = tl.where(k < vocab, k, 0)
        best = _finite(top)
        scale = _LOG2_E / t
        weight = tl.where(present, _weight(score, best, scale), 0.0)
        tile_mass = second.to(tl.float32, bitcast=True) * weight
        mass = tl.sum(tile_mass, 0)
        minimum = tl.where(m > 0, best + tl.minimum(tl.log(m) * t, 0.0), -_INFINITY)
        low = _to_key(tl.full((), -_INFINITY, tl.float32), LOW_BITS)
        high = _to_key(best, LOW_BITS) + 1
        floor = low
        if k > 0:
            if k <= tiles:
                scores = (scratch + row * 2 * TILES).to(tl.pointer_type(tl.float32), bitcast=True)
                floor, _ = _threshold(scores, tiles, k, low, high, best, scale, False, LOW_BITS, 16, TILE)
        elif p < 1:
            # The margin is for what sums in float32 leave uncertain.
            budget = tl.maximum(1 - p - 4e-6, 0.0) * mass
            floor = _nucleus_floor(score, tile_mass, weight, budget, low, high, best, scale, TILE, LOW_BITS, 16)
        # Where top_p follows top_k, what min_p leaves out still counts among the k.
        if (k == 0) | (p >= 1):
            floor = tl.maximum(floor, _to_key(minimum, LOW_BITS))
        # 3. What is not below it.
        first_key, second_key = _noise_keys(tl.load(seed + slot), tl.load(seq_lens + row))
        logits += row.to(tl.int64) * row_stride
        ids = scratch + tl.num_programs(0) * 2 * TILES + row.to(tl.int64) * 2 * CAPACITY
        values = (ids + CAPACITY).to(tl.pointer_type(tl.float32), bitcast=True)
        count = tl.cast(vocab, tl.int32)
        gathered = False
        if floor > low:
            number = _gather(logits, values, ids, _from_key(floor, LOW_BITS), vocab, CAPACITY, STEP)
            gathered = number <= CAPACITY
            # What follows reads what other threads of this program wrote.
            tl.debug_barrier()
            count = tl.where(gathered, number, vocab)
        # 4. The thresholds, and the token.
        if gathered:
            token = _filter_and_race(values, ids, count, floor, high, k, p, minimum, mass, best, scale, first_key,
                                     second_key, True, LOW_BITS, 16, TILE)
        else:
            token = _filter_and_race(logits, ids, count, floor, high, k, p, minimum, mass, best, scale, first_key,
                                     second_key, False, LOW_BITS, 4, STEP)
    else:
        token = tl.min(tl.where(present & (score == top), second, _NONE), 0)
    token = tl.minimum(token, vocab - 1)
    tl.store(last_sampled + slot, token)
    tl.store(out_ids + tl.load(header + 1) * out_stride + row, token)
