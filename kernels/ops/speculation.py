"""Speculation on tables by slot: which drafts are accepted, and look-up of the next drafts.

A row of a step has Q query tokens: the token that its slot sampled last, then drafts. Each query is
sampled, so a draft is right if it equals the token sampled before it. All tokens up to the first
wrong draft count. The output is thus the same with and without drafts, whatever the sampling
parameters are.

Drafts are looked up in the slot's own tokens (prompt look-up; Saxena 2023): what followed the last
tokens when they occurred before may follow again.

These are the references of kernels/speculation, for tests and for devices without Triton. Tables
and columns are int32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTables:
    """Device tables with one row a slot, int32.

    S is the number of slots, K the most drafts of a slot, L the most tokens of a request. The
    kernels take the columns last_sampled, num_computed and num_drafts of any one stride, and so
    draft_limit and max_total.
    """

    last_sampled: Tensor
    """[S]: the token at position num_computed, which no step has computed yet."""
    num_computed: Tensor
    """[S]: tokens whose KV is in the cache."""
    drafts: Tensor
    """[S, K]: guesses of the tokens from position num_computed + 1 on."""
    num_drafts: Tensor
    """[S]: drafts that count."""
    tokens: Tensor
    """[S, L]: prompt and outputs by position, known up to position num_computed."""
    draft_limit: Tensor
    """[S]: most drafts that the slot may have, 0 to K."""
    max_total: Tensor
    """[S]: tokens at which the request ends at the latest; drafts lie below this position."""


@dataclass(frozen=True)
class AcceptedTokens:
    """The result of a step's rows, int32. The kernel writes one row of outer dimension B."""

    ids: Tensor
    """[B, R * Q]: at r * Q, the new tokens of row r, the last of which is no draft."""
    sizes: Tensor
    """[B, R]: new tokens of a row, 1 to Q."""
    drafts: Tensor
    """[B, R]: drafts that the row verified."""
    held: Tensor
    """[B, R]: drafts that the slot had; all of [B, R] have one stride."""
    hits: Tensor
    """[B, R]: drafts of the slot that are known to be right, also where fewer were verified."""


def accept(
    sampled: Tensor,
    *,
    valid: Tensor,
    slots: Tensor,
    starts: Tensor,
    marks: Tensor,
    tables: DraftTables,
    out: AcceptedTokens,
    out_row: int = 0,
) -> None:
    """Take the sampled tokens up to the first wrong draft, and advance the slots past them.

    For each row that is marked (marks is not 0) with a accepted drafts, in its slot: last_sampled
    becomes the last new token, num_computed start + a + 1, and num_drafts 0. The new tokens are
    stored in tokens, as far as they fit. Row `out_row` of each output is written.

    sampled [R * Q]: query j of row r gives the token at position starts[r] + j + 1, at r * Q + j.
    [R]: valid, 1 to Q, is one more than the drafts that the row verified; starts, the position of
    query 0; slots; marks. No two marked rows have the same slot.

    A draft behind the verified ones is compared too, with the token sampled in its place, if all
    drafts before it are right. So a step without drafts tells how the slot's first draft would
    have done.
    """
    rows = valid.shape[0]
    width = sampled.numel() // rows
    limit, longest = tables.drafts.shape[1], tables.tokens.shape[1]
    for row in torch.nonzero(marks).flatten().tolist():
        slot, start, verified = int(slots[row]), int(starts[row]), int(valid[row]) - 1
        tokens = sampled[row * width : row * width + verified + 1]
        drafts = tables.drafts[slot]
        accepted = int((tokens[:-1] == drafts[:verified]).long().cumprod(0).sum())
        size, hits = accepted + 1, accepted
        if accepted == verified < min(int(tables.num_drafts[slot]), limit):
            hits += int(tokens[accepted] == drafts[verified])
        out.ids[out_row, row * width : row * width + size] = tokens[:size]
        out.sizes[out_row, row] = size
        out.drafts[out_row, row] = verified
        out.held[out_row, row] = min(int(tables.num_drafts[slot]), limit)
        out.hits[out_row, row] = hits
        tables.last_sampled[slot] = tokens[accepted]
        tables.num_computed[slot] = start + size
        tables.num_drafts[slot] = 0
        room = max(0, min(size, longest - start - 1))
        tables.tokens[slot, start + 1 : start + 1 + room] = tokens[:room]


def find_drafts(
    tokens: Tensor, lengths: Tensor, min_match: int, max_match: int, num_drafts: int
) -> tuple[Tensor, Tensor]:
    """Return drafts [R, num_drafts] and how many count [R] (0 or num_drafts), both int32.

    A row's last n tokens are compared with every earlier place, for n from max_match down to
    min_match. The longest match wins, and the latest among equally long ones. The drafts are the
    tokens that follow it. Where the known tokens end, the drafts themselves continue them: behind a
    match at distance d from the end, the drafts repeat the last d tokens. Drafts that do not count
    are 0.

    tokens [R, L]: each row's first lengths[r] tokens (0 to L) are known.
    """
    rows, longest = tokens.shape
    place = torch.arange(longest, device=tokens.device)[None]
    last = lengths.long()[:, None] - 1
    alike = place < last
    matched = torch.zeros(rows, longest, dtype=torch.int64, device=tokens.device)
    for back in range(max_match):
        wanted = tokens.gather(1, (last - back).clamp(min=0))
        found = tokens.gather(1, (place - back).clamp(min=0).expand(rows, -1))
        alike = alike & (place >= back) & (found == wanted)
        matched += alike
    rank = torch.where(matched >= min_match, matched * longest + place, -1)
    best, _ = rank.max(1, keepdim=True)
    after = best.clamp(min=0) % longest + 1
    distance = (last + 1 - after).clamp(min=1)
    index = after + torch.arange(num_drafts, device=tokens.device) % distance
    drafts = tokens.gather(1, index.clamp(max=longest - 1))
    counts = torch.where(best >= 0, num_drafts, 0)
    return torch.where(best >= 0, drafts, 0).int(), counts[:, 0].int()


def look_up_drafts(
    slots: Tensor, marks: Tensor, tables: DraftTables, min_match: int, max_match: int
) -> None:
    """Set the drafts of each marked row's slot to what `find_drafts` finds in its tokens.

    Their number is limited by draft_limit, and so that the last one's position is below max_total.
    Drafts that do not count are left as they are, and so are slots of rows that are not marked.

    int32 [R]: slots; marks, 0 for rows that are not marked.
    """
    chosen = slots[marks != 0].long()
    if not len(chosen):
        return
    limit, longest = tables.drafts.shape[1], tables.tokens.shape[1]
    lengths = tables.num_computed[chosen] + 1
    lengths = torch.where(lengths <= longest, lengths, 0)
    drafts, counts = find_drafts(tables.tokens[chosen], lengths, min_match, max_match, limit)
    counts = torch.minimum(counts, tables.draft_limit[chosen])
    counts = torch.minimum(counts, tables.max_total[chosen] - lengths).clamp(min=0)
    counted = torch.arange(limit, device=slots.device) < counts[:, None]
    tables.drafts[chosen] = torch.where(counted, drafts, tables.drafts[chosen])
    tables.num_drafts[chosen] = counts
