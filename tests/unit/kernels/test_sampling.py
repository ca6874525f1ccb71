"""Sampling without random state.

The distribution is right, the token is the same in any batch, and filters are exact.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sidestep.kernels.ops.sampling import gumbel_noise, mask_top_k_top_p_min_p, noise_bits, sample


def draws(logits: Tensor, temperature: float, count: int, seed: int = 11) -> Tensor:
    """Count how often each token is drawn, at `count` positions of one seed."""
    positions = torch.arange(count)
    tokens = sample(
        logits.expand(count, -1),
        torch.full((count,), temperature),
        torch.full((count,), seed),
        positions,
    )
    return torch.bincount(tokens, minlength=logits.shape[-1])


def chi_square(observed: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * observed.sum()
    return float(((observed - expected).square() / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("seed", [0, 11, -5, 2**62])
def test_tokens_follow_softmax(temperature: float, seed: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20)
    observed = draws(logits, temperature, 20_000, seed)
    # 19 degrees of freedom: above 43.8 by chance once in a thousand; the seeds are fixed, so this
    # never flickers.
    assert chi_square(observed, (logits / temperature).softmax(-1)) < 43.8


def test_seeds_are_independent_of_each_other() -> None:
    """Neighbouring seeds at one position, as in a batch, are as good as one seed's positions."""
    torch.manual_seed(1)
    logits, count = torch.randn(20), 20_000
    tokens = sample(
        logits.expand(count, -1), torch.ones(count), torch.arange(count), torch.full((count,), 7)
    )
    assert chi_square(torch.bincount(tokens, minlength=20), logits.softmax(-1)) < 43.8


def test_noise_is_standard_gumbel_and_never_infinite_in_favour() -> None:
    noise = gumbel_noise(torch.arange(64), torch.arange(64) * 3, 4096).double()
    assert abs(float(noise.mean()) - 0.5772157) < 0.01
    assert abs(float(noise.var()) - torch.pi**2 / 6) < 0.02
    assert not noise.isnan().any()
    assert not (noise == torch.inf).any()


def neighbours(of: str, count: int) -> tuple[Tensor, Tensor]:
    """Return seeds and positions of `count` rows; one of the two grows by one from row to row."""
    steps, fixed = torch.arange(count), torch.full((count,), 1234)
    return (steps, fixed) if of == "seeds" else (fixed, steps)


def test_the_noise_of_a_seed_stays_what_it_is() -> None:
    """Fix the noise: a change of it changes the text of every seeded request."""
    bits = noise_bits(torch.tensor([0, 42, 2**63 - 1]), torch.tensor([0, 7, 100_000]), 152_000)
    assert bits[:, [0, 1, 151_999]].tolist() == [
        [3376722931, 4094217779, 3608794193],
        [1202792580, 1343471184, 3112822682],
        [1857432118, 1124711293, 1018888433],
    ]


@pytest.mark.parametrize("of", ["seeds", "positions"])
def test_bytes_of_the_noise_are_uniform(of: str) -> None:
    """Check the tokens of a row, and neighbouring rows for one token."""
    bits = noise_bits(*neighbours(of, 4096), 4096)
    for some in (
        bits[0],
        bits[1],
        bits[4095],
        bits[:, 0],
        bits[:, 1],
        bits[:, 4095],
        bits[:64, :64].flatten(),
    ):
        for byte in range(4):
            # 255 degrees of freedom: above 377 by chance once in a million.
            observed = torch.bincount((some >> 8 * byte) & 255, minlength=256)
            assert chi_square(observed, torch.full((256,), 1 / 256)) < 377


@pytest.mark.parametrize("of", ["seeds", "positions"])
def test_rows_of_neighbouring_seeds_and_positions_are_not_correlated(of: str) -> None:
    """Check rows and tokens in pairs, with each other or shifted by some tokens."""
    count = 4096
    noise = gumbel_noise(*neighbours(of, 64), count).double()
    # For n independent pairs the correlation is about 1 / sqrt(n); chance does not give 6 times
    # that.
    assert noise.corrcoef().fill_diagonal_(0).abs().max() < 6 / count**0.5
    for shift in (1, 2, 3, 8, 16, 17, 256, 1024):
        shifted = torch.cat([noise, noise.roll(shift, 1)]).corrcoef()[:64, 64:]
        assert shifted.abs().max() < 6 / count**0.5
    tokens = gumbel_noise(*neighbours(of, count), 64).double().T
    assert tokens.corrcoef().fill_diagonal_(0).abs().max() < 6 / count**0.5


@pytest.mark.parametrize("of", ["token", "seed", "position"])
def test_one_bit_of_the_input_flips_half_of_the_noise(of: str) -> None:
    """Check the avalanche criterion.

    Any bit of the input flips any bit of the noise in half of all cases.
    """
    rows = 512
    generator = torch.Generator().manual_seed(8)
    seeds = torch.randint(0, 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**17, (rows,), generator=generator)
    vocab_size = 2**10 if of == "token" else 8
    bits = noise_bits(seeds, positions, vocab_size)
    for i in range({"token": 10, "seed": 63, "position": 17}[of]):
        if of == "token":
            flipped = bits[:, torch.arange(vocab_size) ^ (1 << i)]
        elif of == "seed":
            flipped = noise_bits(seeds ^ (1 << i), positions, vocab_size)
        else:
            flipped = noise_bits(seeds, positions ^ (1 << i), vocab_size)
        rates = torch.stack([((bits ^ flipped) >> j & 1).double().mean() for j in range(32)])
        assert (rates - 0.5).abs().max() < 6 * 0.5 / (rows * vocab_size / 2) ** 0.5


def test_a_row_is_the_same_in_any_batch_and_at_any_place_in_it() -> None:
    torch.manual_seed(2)
    logits = torch.randn(16, 331)
    temperature = torch.rand(16) + 0.3
    seeds, positions = torch.randint(-(2**62), 2**62, (16,)), torch.randint(0, 5000, (16,))
    together = sample(logits, temperature, seeds, positions)
    order = torch.randperm(16)
    assert torch.equal(
        sample(logits[order], temperature[order], seeds[order], positions[order]), together[order]
    )
    alone = [
        sample(logits[i : i + 1], temperature[i : i + 1], seeds[i : i + 1], positions[i : i + 1])
        for i in range(16)
    ]
    assert torch.equal(torch.cat(alone), together)


def test_temperature_zero_is_the_argmax_beside_rows_that_sample() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 50)
    temperature = torch.tensor([0.0, 1.0, 0.0, 5.0, 0.0, 0.7])
    tokens = sample(logits, temperature, torch.arange(6), torch.arange(6))
    assert torch.equal(tokens[temperature == 0], logits.argmax(-1)[temperature == 0])


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.zeros(10)
    logits[3:] = -torch.inf
    assert int(draws(logits, 1.0, 5000)[3:].sum()) == 0


def test_of_equal_logits_the_lower_ids_stay() -> None:
    equal = [0.0] * 40
    assert kept([-9.0, *equal, -9.0], top_k=3) == [1, 2, 3]
    assert kept([-9.0, *equal], top_p=0.06) == [1, 2, 3]
    assert kept([*equal, 1.0], top_k=2) == [0, 40]


def test_without_top_p_no_token_is_left_out() -> None:
    """The rounded sum of the probabilities before the last token reaches 1."""
    torch.manual_seed(5)
    assert len(kept((torch.randn(50_000) * 4).tolist())) == 50_000


def kept(logits: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    masked = mask_top_k_top_p_min_p(
        torch.tensor([logits]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p])
    )
    return masked[0].isfinite().nonzero().flatten().tolist()


LOGITS = [float(torch.tensor(p).log()) for p in (0.1, 0.4, 0.05, 0.3, 0.15)]


def test_top_k_keeps_the_most_probable() -> None:
    assert kept(LOGITS, top_k=2) == [1, 3]
    assert kept(LOGITS, top_k=1) == [1]
    assert kept(LOGITS, top_k=99) == kept(LOGITS) == [0, 1, 2, 3, 4]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert kept(LOGITS, top_p=0.39) == [1]
    assert kept(LOGITS, top_p=0.5) == [1, 3]
    assert kept(LOGITS, top_p=0.8) == [1, 3, 4]
    assert kept(LOGITS, top_p=1e-9) == [1]


def test_min_p_is_relative_to_the_most_probable() -> None:
    assert kept(LOGITS, min_p=0.3) == [1, 3, 4]
    assert kept(LOGITS, min_p=1.0) == [1]


def test_top_p_counts_only_what_top_k_left() -> None:
    # Between 0.4 and 0.3 alone the first has 0.571.
    assert kept(LOGITS, top_k=2, top_p=0.57) == [1]
    assert kept(LOGITS, top_k=2, top_p=0.58) == [1, 3]


def test_each_row_has_its_own_filter_and_kept_logits_are_unchanged() -> None:
    torch.manual_seed(4)
    logits = torch.randn(4, 37)
    masked = mask_top_k_top_p_min_p(
        logits,
        torch.tensor([1, 5, 0, 0]),
        torch.tensor([1.0, 1.0, 0.3, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.5]),
    )
    finite = masked.isfinite()
    assert torch.equal(masked[finite], logits[finite])
    assert finite.sum(-1)[:2].tolist() == [1, 5]
    probabilities = logits.softmax(-1)
    assert torch.equal(finite[3], probabilities[3] >= 0.5 * probabilities[3].max())
    assert probabilities[2][finite[2]].sum() >= 0.3
    assert probabilities[2][finite[2]].sum() - probabilities[2][finite[2]].min() < 0.3
