"""The Triton sampler against the torch reference, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from sidestep.kernels.ops.sampling import mask_top_k_top_p_min_p, noise_bits, sample
from sidestep.kernels.triton import sampling_noise_triton, sampling_triton
from sidestep.kernels.triton.sampling_triton import (
    SamplingWords,
    Taken,
    sample_tokens,
    scratch_size,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILE, CAPACITY = sampling_triton._TILE, sampling_triton._CAPACITY
POISON = -77
WORDS, WIDTH = (
    SamplingWords(temperature=2, top_k=0, top_p=4, min_p=8, temperature_last=7, seed=5),
    9,
)
"""Places of the parameters in a slot's words, and how many words it has."""
# A filtered row takes the interpreter a third of a second.
MANY = 20 if DEVICE == "cuda" else 1
# In the interpreter, arithmetic with bf16 is wrong.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


@dataclass
class Rows:
    """A batch: R rows of logits with their parameters, in random slots, and padding behind them."""

    logits: Tensor
    temperature: list[float]
    top_k: list[int] = field(default_factory=list)
    top_p: list[float] = field(default_factory=list)
    min_p: list[float] = field(default_factory=list)
    temperature_last: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    padding: int = 0
    last_sampled: Tensor = field(init=False)
    num_computed: Tensor = field(init=False)
    out_ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = len(self.logits)
        self.top_k = self.top_k or [0] * rows
        self.top_p = self.top_p or [1.0] * rows
        self.min_p = self.min_p or [0.0] * rows
        self.temperature_last = self.temperature_last or [0] * rows
        self.seeds = self.seeds or [(i * 0x9E3779B97F4A7C15 + 5) % 2**63 for i in range(rows)]
        self.positions = self.positions or [3 * i for i in range(rows)]
        self.samples = self.samples or [1] * rows

    def expected(self) -> list[int]:
        """Return the reference's tokens of all rows."""
        t = torch.tensor(self.temperature)
        last = torch.tensor(self.temperature_last) != 0
        divisor = torch.where((t == 0) | last, 1.0, t)[:, None]
        logits = self.logits.cpu().float()
        kept = mask_top_k_top_p_min_p(
            logits / divisor,
            torch.tensor(self.top_k),
            torch.tensor(self.top_p),
            torch.tensor(self.min_p),
        )
        logits = torch.where((t == 0)[:, None], logits, kept * divisor)
        tokens = sample(logits, t, torch.tensor(self.seeds), torch.tensor(self.positions))
        expected: list[int] = tokens.tolist()
        return expected

    def run(self) -> list[int]:
        """Return the kernels' tokens, and check all other memory that they may or may not write."""
        rows, vocab = self.logits.shape
        padded, slots_in_all = rows + self.padding, 2 * rows + 3
        slots = torch.randperm(slots_in_all, generator=torch.Generator().manual_seed(rows))[:rows]

        def column(values: list[int]) -> Tensor:
            # The padding is poison: a slot of this value would be a fault.
            return torch.tensor(values + [10**9] * self.padding, dtype=torch.int32, device=DEVICE)

        parameters = torch.full((slots_in_all, WIDTH), 10**9, dtype=torch.int32)
        for name, values, dtype in (
            ("temperature", self.temperature, torch.float32),
            ("top_k", self.top_k, torch.int32),
            ("top_p", self.top_p, torch.float32),
            ("min_p", self.min_p, torch.float32),
            ("temperature_last", self.temperature_last, torch.int32),
            ("seed", self.seeds, torch.int64),
        ):
            words = torch.tensor(values, dtype=dtype).view(torch.int32)
            words = words.view(rows, dtype.itemsize // 4)
            first = getattr(WORDS, name)
            parameters[slots, first : first + words.shape[1]] = words

        # Rows lie further apart than they are long, with logits between them that would win.
        logits = torch.full((padded, vocab + 5), 1000.0, dtype=self.logits.dtype, device=DEVICE)[
            :, :vocab
        ]
        logits[:rows] = self.logits.to(DEVICE)
        progress = torch.full((slots_in_all, 3), POISON, dtype=torch.int32, device=DEVICE)
        self.num_computed, self.last_sampled = progress[:, 0], progress[:, 1]
        self.out_ids = torch.full((3, padded + 2), POISON, dtype=torch.int32, device=DEVICE)
        sample_tokens(
            logits,
            header=torch.tensor([rows, 1, POISON], dtype=torch.int32, device=DEVICE),
            slots=column(slots.tolist()),
            seq_lens=column(self.positions),
            samples=column(self.samples),
            parameters=parameters.to(DEVICE),
            words=WORDS,
            out=Taken(self.last_sampled, self.num_computed, self.out_ids),
            scratch=torch.full(
                (scratch_size(padded, vocab),), POISON, dtype=torch.int32, device=DEVICE
            ),
        )
        tokens = self.out_ids[1, :rows].tolist()
        wrote = torch.tensor(self.samples) != 0
        last = torch.full((slots_in_all,), POISON, dtype=torch.int32)
        last[slots[wrote]] = torch.tensor(tokens, dtype=torch.int32)[wrote]
        assert self.last_sampled.tolist() == last.tolist()
        lengths = torch.full((slots_in_all,), POISON, dtype=torch.int32)
        lengths[slots[wrote]] = torch.tensor(self.positions, dtype=torch.int32)[wrote]
        assert self.num_computed.tolist() == lengths.tolist()
        untouched = self.out_ids.clone()
        untouched[1, :rows] = POISON
        assert (untouched == POISON).all()
        assert all(
            (token == POISON) != bool(asked)
            for token, asked in zip(tokens, self.samples, strict=True)
        )
        return tokens


def random_logits(
    rows: int, vocab: int, dtype: torch.dtype = torch.float32, spread: float = 3.0
) -> Tensor:
    return (
        torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows * vocab)) * spread
    ).to(dtype)


def check(rows: Rows) -> None:
    assert rows.run() == rows.expected()


@triton.jit  # type: ignore[untyped-decorator]  # Triton's language has no Python types
def _bits(seeds, positions, out, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]  # nor it
    row = tl.program_id(0)
    first, second = sampling_noise_triton.noise_keys(tl.load(seeds + row), tl.load(positions + row))
    ids = tl.arange(0, VOCAB)
    tl.store(
        out + row * VOCAB + ids, sampling_noise_triton.noise_bits(first, second, ids).to(tl.int64)
    )


def test_noise_is_bit_for_bit_that_of_the_reference() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, -5, 123456789012345678])
    positions = torch.tensor([0, 2**31 - 1, 7, 1, 99999])
    out = torch.empty(5, 4096, dtype=torch.int64, device=DEVICE)
    _bits[(5,)](seeds.to(DEVICE), positions.int().to(DEVICE), out, 4096)
    assert torch.equal(out.cpu(), noise_bits(seeds, positions, 4096))


@pytest.mark.parametrize("vocab", [1, 2, 1000, TILE - 1, TILE, TILE + 1, CAPACITY + 1])
def test_greedy_sampled_and_filtered_rows_side_by_side(vocab: int) -> None:
    check(
        Rows(
            random_logits(5, vocab),
            [0.0, 1.0, 0.7, 2.0, 0.0],
            top_k=[0, 0, 5, 0, 3],
            top_p=[1.0, 1.0, 0.8, 1.0, 0.5],
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.01, 0.7, 1.0, 2.0])
def test_draws_from_all_tokens(temperature: float, dtype: torch.dtype) -> None:
    rows = 12 * MANY
    check(Rows(random_logits(rows, 3000, dtype), [temperature] * rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_whether_or_not_there_are_as_many_tiles(dtype: torch.dtype) -> None:
    top_k = [1, 2, 3, 4, 50, 2999, 3000, 10**9] * MANY
    check(Rows(random_logits(len(top_k), 3000, dtype), [1.5] * len(top_k), top_k=top_k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_top_p(dtype: torch.dtype) -> None:
    top_p = [1e-6, 0.1, 0.5, 0.9, 0.9, 0.99] * MANY
    check(
        Rows(
            random_logits(len(top_p), 3000, dtype),
            [2.0, 1.4, 0.5, 0.9, 2.0, 1.0] * MANY,
            top_p=top_p,
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_min_p(dtype: torch.dtype) -> None:
    min_p = [1e-4, 0.02, 0.3, 1.0] * MANY
    check(Rows(random_logits(len(min_p), 3000, dtype), [0.5, 0.9, 1.4, 2.0] * MANY, min_p=min_p))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_filters_together(spread: float, dtype: torch.dtype) -> None:
    """Combine pairs of filters and all three, so that each one is the stricter in some rows."""
    top_k, top_p, min_p = (
        list(column) * MANY
        for column in zip(
            (3, 0.6, 0.0),
            (40, 0.95, 0.0),
            (40, 0.6, 0.02),
            (3, 0.95, 0.5),
            (0, 0.6, 0.02),
            (0, 0.95, 0.5),
            (3, 1.0, 0.02),
            (40, 1.0, 0.5),
            strict=True,
        )
    )
    check(
        Rows(
            random_logits(len(top_k), 3000, dtype, spread),
            [0.8] * len(top_k),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_a_large_vocabulary(spread: float, dtype: torch.dtype) -> None:
    """Put frequent tokens side by side, as vocabularies do.

    Some tiles then hold many of the likely tokens.
    """
    rows = 4 * MANY
    logits = random_logits(rows, 20_001, spread=spread) - 1.5 * torch.arange(1, 20_002).log()
    check(
        Rows(
            logits.to(dtype),
            [1.0] * rows,
            top_k=[20, 0, 15, 0] * MANY,
            top_p=[0.95, 0.9, 1.0, 0.99] * MANY,
        )
    )


def test_rows_of_which_too_many_tokens_may_stay_to_gather_them() -> None:
    """Use almost flat logits, so that hardly a token can be left out beforehand."""
    check(
        Rows(
            random_logits(3, CAPACITY + 3000, spread=0.05),
            [1.0] * 3,
            top_k=[0, 9000, 0],
            top_p=[0.95, 0.9, 1.0],
            min_p=[0.0, 0.0, 0.8],
        )
    )


@pytest.mark.parametrize(
    ("vocab", "spread"),
    [(3000, 3.0), (10_000, 1.0), (CAPACITY + 3000, 0.05)],
    ids=["steep", "usual", "flat"],
)
def test_temperature_last(vocab: int, spread: float) -> None:
    """Give each row's filters and temperature to two rows, the second with temperature_last.

    Few tokens of a steep row may stay, more of a usual one are gathered, and a flat one is searched
    as a whole; so is any row whose top_k is larger than the number of tiles.
    """
    temperature, top_k, top_p, min_p = (
        [value for value in column for _ in range(2)] * MANY
        for column in zip(
            (2.0, 20, 1.0, 0.0),
            (2.0, 0, 0.5, 0.0),
            (2.0, 900, 0.5, 0.0),
            (0.4, 0, 0.9, 0.0),
            (2.0, 0, 1.0, 0.02),
            (0.4, 800, 1.0, 0.02),
            (0.01, 40, 0.9, 0.02),
            (1.7, 0, 1.0, 0.0),
            (0.0, 3, 0.5, 0.5),
            strict=True,
        )
    )
    rows = len(temperature)
    check(
        Rows(
            random_logits(rows, vocab, spread=spread),
            temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            temperature_last=[0, 1] * (rows // 2),
        )
    )


@pytest.mark.parametrize("equals", [10, 1000, CAPACITY + 500])
def test_of_equal_logits_the_first_stay(equals: int) -> None:
    """Cover few equal logits, some, and too many.

    Few are compared each with each, and some are gathered.
    """
    logits = torch.full((10, 10_000), -30.0)
    token_ids = (
        torch.randperm(10_000, generator=torch.Generator().manual_seed(equals))[:equals]
        .sort()
        .values
    )
    logits[:, token_ids] = 7.0
    # All but two of the rows keep three tokens. The probabilities before these sum to 0, 1 and 2
    # parts of the 2.5 that top_p asks for.
    rows = Rows(
        logits,
        [0.0] + [2.0] * 9,
        top_k=[0, 1, 3, 3, 0, 0, 0, 5, 5, 5],
        top_p=[1.0, 1.0, 1.0, 1.0] + [2.5 / equals] * 3 + [0.5] * 3,
    )
    tokens = rows.run()
    assert tokens[:2] == [int(token_ids[0])] * 2
    assert len(set(tokens)) > 1 and set(tokens) <= set(token_ids[:3].tolist())
    assert tokens == rows.expected()


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.full((2, 40), -0.0)
    logits[:, 20:] = 0.0
    assert Rows(logits, [0.0, 1.0], top_k=[0, 1]).run() == [0, 0]


def test_padded_rows_and_rows_that_do_not_sample_write_nothing() -> None:
    rows = Rows(
        random_logits(5, 3000),
        [0.0, 1.0, 1.0, 0.0, 1.0],
        top_k=[0, 0, 4, 0, 4],
        samples=[1, 0, 0, 0, 1],
        padding=3,
    )
    tokens, expected = rows.run(), rows.expected()
    assert tokens == [expected[0], POISON, POISON, POISON, expected[4]]


def test_a_batch_of_padding_alone() -> None:
    rows = Rows(random_logits(0, 10), [], padding=2)
    assert rows.run() == []


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_a_row_without_sense_still_gives_an_id_of_the_vocabulary(value: float) -> None:
    rows = Rows(
        torch.full((5, 3000), value),
        [0.0] + [0.7] * 4,
        top_k=[0, 0, 5, 0, 5],
        top_p=[1.0, 1.0, 1.0, 0.9, 0.9],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.1],
    )
    assert all(0 <= token < 3000 for token in rows.run())
    rows.logits = random_logits(5, 3000)
    rows.logits[:, 1400] = value
    tokens = rows.run()
    if value > 0:
        assert tokens == [1400] * 5
    else:
        rows.logits[:, 1400] = -torch.inf
        assert tokens == rows.expected()


def test_tokens_masked_out_are_never_drawn() -> None:
    logits = torch.full((4, 3000), -torch.inf)
    logits[:, 1234] = -5.0
    logits[:, 2345] = -5.0
    rows = Rows(logits, [1.0] * 4, top_k=[0, 0, 9, 9], top_p=[1.0, 0.9, 1.0, 0.9])
    assert set(rows.run()) <= {1234, 2345}
    check(rows)


def test_a_row_is_the_same_in_any_batch() -> None:
    rows = Rows(random_logits(4, 3000), [0.9] * 4, top_k=[0, 2, 2, 0], top_p=[1.0, 1.0, 0.8, 0.8])
    together = rows.run()
    for i in range(4):
        alone = Rows(
            rows.logits[i : i + 1],
            [0.9],
            top_k=[rows.top_k[i]],
            top_p=[rows.top_p[i]],
            seeds=[rows.seeds[i]],
            positions=[rows.positions[i]],
        )
        assert alone.run() == together[i : i + 1]


def chi_square(tokens: Tensor, logits: Tensor) -> float:
    """Return chi-square of the tokens' frequencies against softmax(logits)."""
    expected = logits.double().softmax(-1) * len(tokens)
    return float(
        ((torch.bincount(tokens, minlength=len(logits)) - expected).square() / expected).sum()
    )


@triton.jit  # type: ignore[untyped-decorator]  # Triton's language has no Python types
def _draws(logits, out, V: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]  # nor
    seeds, ids = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    first, second = sampling_noise_triton.noise_keys(
        seeds.to(tl.int64), tl.full([ROWS], 9, tl.int32)
    )
    time = sampling_noise_triton.exponential(first[:, None], second[:, None], ids[None, :])
    tl.store(out + seeds, tl.argmin(time * tl.exp(-tl.load(logits + ids))[None, :], 1))


def test_the_noise_of_thousands_of_seeds_draws_from_softmax() -> None:
    logits = random_logits(1, 16, spread=1.0)[0]
    out = torch.empty(8192, dtype=torch.int32, device=DEVICE)
    _draws[(64,)](logits.to(DEVICE), out, 16, 128)
    # 15 degrees of freedom: above 37.7 by chance once in a thousand. The seeds are fixed.
    assert chi_square(out.cpu(), logits) < 37.7


@pytest.mark.skipif(DEVICE == "cpu", reason="as many rows take the interpreter minutes")
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_of_thousands_of_rows_follow_softmax(filtered: bool) -> None:
    """Vary the seeds of a batch, for four tokens in two tiles; the filter keeps three."""
    count = 5000
    logits = torch.full((3000,), -torch.inf)
    token_ids = torch.tensor([7, 500, TILE, TILE + 1])
    logits[token_ids] = torch.tensor([0.0, 1.0, 0.5, -1.0])
    tokens = Rows(
        logits.expand(count, -1),
        [0.8] * count,
        top_k=[3 * filtered] * count,
        seeds=list(range(count)),
        positions=[9] * count,
    ).run()
    kept = token_ids[:3] if filtered else token_ids
    draws = torch.tensor([kept.tolist().index(token) for token in tokens])
    # 2 and 3 degrees of freedom.
    assert chi_square(draws, logits[kept] / 0.8) < (13.8 if filtered else 16.3)


def test_too_small_a_scratch_is_refused() -> None:
    column = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="scratch has 9"):
        sample_tokens(
            torch.zeros(1, 10),
            header=column,
            slots=column,
            seq_lens=column,
            samples=column,
            parameters=column[None],
            words=WORDS,
            scratch=torch.zeros(9, dtype=torch.int32),
            out=column,
        )
