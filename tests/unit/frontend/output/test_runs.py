"""Several tokens of a request in one message: the end of a request at each place of such a run."""

from __future__ import annotations

import asyncio

import pytest

from sidestep import RequestOutputKind
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.outputs import RequestOutput
from sidestep.frontend.output.request_state import RequestState
from sidestep.ipc.transport.messages import FinishReason, VerifiedDrafts
from tests.unit.frontend.desk import Desk

LETTERS = "abcde"
PLACES = range(len(LETTERS))


def ids_of(tokenizer: Tokenizer, letters: str) -> list[int]:
    """Return a token for each letter."""
    return [tokenizer.encode(letter)[0] for letter in letters]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_token_at_each_place_is_hidden_and_the_tokens_before_it_are_not(
    desk: Desk, place: int, include: bool
) -> None:
    """The core cuts a run behind the stop token, so that it is the last one of its request."""
    tokens = ids_of(desk.tokenizer, LETTERS)[: place + 1]
    state = await desk.add(
        stop_token_ids=[tokens[-1]], include_stop_str_in_output=include, min_tokens=place
    )
    other = await desk.add()
    desk.say(
        *((0, token) for token in tokens),
        *((1, token) for token in tokens),
        reason=FinishReason.STOP,
        stop_reason=tokens[-1],
    )
    completion = (await state.next_output()).outputs[0]
    assert completion.text == LETTERS[: place + include]
    assert completion.token_ids == tokens and completion.stop_reason == tokens[-1]
    assert (await other.next_output()).outputs[0].text == LETTERS[: place + 1]


async def test_the_same_token_is_text_before_the_end_and_hidden_as_the_end(desk: Desk) -> None:
    """With min_tokens a stop token may be sampled before it may end the request."""
    (a, b) = ids_of(desk.tokenizer, "ab")
    state = await desk.add(stop_token_ids=[b], min_tokens=3)
    desk.say_run([b, a, b], reason=FinishReason.STOP, stop_reason=b)
    completion = (await state.next_output()).outputs[0]
    assert (completion.text, completion.token_ids) == ("ba", [b, a, b])


@pytest.mark.parametrize("place", PLACES)
async def test_the_last_token_of_a_grammar_is_text_at_each_place(desk: Desk, place: int) -> None:
    tokens = ids_of(desk.tokenizer, LETTERS)[: place + 1]
    state = await desk.add()
    desk.say_run(tokens, reason=FinishReason.STOP, completes_grammar=True)
    assert (await state.next_output()).outputs[0].text == LETTERS[: place + 1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_at_each_place_drops_the_rest_of_the_run(
    desk: Desk, place: int, include: bool
) -> None:
    tokens = ids_of(desk.tokenizer, LETTERS)
    state = await desk.add(stop=LETTERS[place], include_stop_str_in_output=include)
    other = await desk.add()
    desk.say(*((0, token) for token in tokens), *((1, token) for token in tokens))
    output = await state.next_output()
    completion = output.outputs[0]
    assert completion.text == LETTERS[: place + include]
    assert completion.token_ids == tokens[: place + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", LETTERS[place])
    assert output.metrics.num_generation_tokens == place + 1, "usage counts what was told"
    assert output.finished and desk.aborted == [0]
    assert (await other.next_output()).outputs[0].text == LETTERS


@pytest.mark.parametrize("place", PLACES)
async def test_a_stop_string_wins_over_an_end_that_the_core_found_later_in_the_run(
    desk: Desk, place: int
) -> None:
    tokens = ids_of(desk.tokenizer, LETTERS)
    state = await desk.add(stop=LETTERS[place])
    desk.say_run(tokens, reason=FinishReason.LENGTH)
    completion = (await state.next_output()).outputs[0]
    assert (completion.text, completion.finish_reason) == (LETTERS[:place], "stop")
    assert completion.token_ids == tokens[: place + 1]


@pytest.mark.parametrize("split", range(1, len(LETTERS)))
async def test_a_stop_string_may_span_two_runs(desk: Desk, split: int) -> None:
    tokens = ids_of(desk.tokenizer, LETTERS)
    state = await desk.add(stop="bcd", output_kind=RequestOutputKind.DELTA)
    desk.say_run(tokens[:split])
    desk.say_run(tokens[split:])
    completion = (await state.next_output()).outputs[0]
    assert (completion.text, completion.stop_reason) == ("a", "bcd")
    assert completion.token_ids == tokens[:4]


@pytest.mark.parametrize("least", range(len(LETTERS) + 1))
async def test_min_tokens_lets_a_stop_string_pass_within_a_run(desk: Desk, least: int) -> None:
    """Each token counts by itself, as if it had come alone."""
    tokens = ids_of(desk.tokenizer, LETTERS)
    together = await desk.add(stop=list(LETTERS), min_tokens=least)
    alone = await desk.add(stop=list(LETTERS), min_tokens=least)
    desk.say_run(tokens)
    for token in tokens:
        desk.say((1, token))
    texts = [(await state.next_output()).outputs[0].text for state in (together, alone)]
    assert texts[0] == texts[1] == LETTERS[:least]
    assert together.is_finished == (least < len(LETTERS))


@pytest.mark.parametrize("place", PLACES)
async def test_max_tokens_at_each_place_ends_with_the_run(desk: Desk, place: int) -> None:
    tokens = ids_of(desk.tokenizer, LETTERS)[: place + 1]
    state = await desk.add(max_tokens=place + 1)
    desk.say_run(tokens, reason=FinishReason.LENGTH)
    output = await state.next_output()
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == (LETTERS[: place + 1], "length")
    assert completion.token_ids == tokens and output.finished


def logprob_of(place: int) -> float:
    """Return a logprob that 32 bits can hold."""
    return -0.25 * (place + 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("by", ["text", "core"])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_logprobs_are_those_of_the_told_tokens(
    desk: Desk, place: int, by: str, kind: RequestOutputKind
) -> None:
    """A step has the logprobs of all tokens that it accepted, also behind the end."""
    tokens = ids_of(desk.tokenizer, LETTERS)
    stop = LETTERS[place] if by == "text" else None
    state = await desk.add(logprobs=0, output_kind=kind, stop=stop)
    told = tokens if by == "text" else tokens[: place + 1]
    desk.say_with_logprobs(
        [(0, token) for token in told],
        [(0, token, logprob_of(i)) for i, token in enumerate(tokens)],
        **({} if by == "text" else {"reason": FinishReason.STOP}),
    )
    completion = (await state.next_output()).outputs[0]
    assert completion.token_ids == tokens[: place + 1] and completion.logprobs is not None
    assert [list(each) for each in completion.logprobs] == [[t] for t in tokens[: place + 1]]
    values = [logprob_of(i) for i in range(place + 1)]
    assert completion.cumulative_logprob == sum(values)
    assert [each[t].logprob for each, t in zip(completion.logprobs, tokens, strict=False)] == values


async def test_deltas_of_runs_carry_the_logprobs_of_their_tokens(desk: Desk) -> None:
    tokens = ids_of(desk.tokenizer, LETTERS)
    state = await desk.add(logprobs=0, output_kind=RequestOutputKind.DELTA)
    seen = []
    for run in ([0], [1, 2, 3], [4]):
        desk.say_with_logprobs(
            [(0, tokens[i]) for i in run], [(0, tokens[i], logprob_of(i)) for i in run]
        )
        completion = (await state.next_output()).outputs[0]
        assert completion.token_ids == [tokens[i] for i in run]
        assert len(completion.logprobs or ()) == len(run)
        seen.append(completion.cumulative_logprob)
    assert seen == [-0.25, -2.5, -3.75]


async def read_all(state: RequestState) -> list[RequestOutput]:
    outputs = [await state.next_output()]
    while not outputs[-1].finished:
        outputs.append(await state.next_output())
    return outputs


async def test_an_interval_counts_tokens_and_not_messages(desk: Desk) -> None:
    state = await desk.add(stream_interval=3, output_kind=RequestOutputKind.DELTA)
    reader = asyncio.create_task(read_all(state))
    for run in ([1], [2, 3], [4, 5], [6], [7], [8, 9, 10, 11]):
        for _ in range(5):
            await asyncio.sleep(0)
        desk.say_run(run)
    for _ in range(5):
        await asyncio.sleep(0)
    desk.say_run([12], reason=FinishReason.LENGTH)
    taken = [output.outputs[0].token_ids for output in await reader]
    assert taken == [[1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11], [12]]


async def test_a_run_is_one_output_and_wakes_its_reader_once(desk: Desk) -> None:
    state = await desk.add(output_kind=RequestOutputKind.DELTA)
    desk.say_run([70, 71, 72])
    output = await state.next_output()
    assert output.outputs[0].token_ids == [70, 71, 72] and not state.has_news()
    assert output.metrics.first_token_ts == output.metrics.last_token_ts


async def test_tokens_of_several_requests_in_one_message_do_not_mix(desk: Desk) -> None:
    states = [await desk.add() for _ in range(3)]
    desk.say((2, 70), (2, 71), (0, 72), (1, 73), (1, 74), (1, 75))
    assert [(await state.next_output()).outputs[0].token_ids for state in states] == [
        [72],
        [73, 74, 75],
        [70, 71],
    ]


async def test_the_metrics_of_a_request_that_the_core_ends_tell_its_drafts(desk: Desk) -> None:
    state = await desk.add(output_kind=RequestOutputKind.DELTA)
    desk.say_run([70, 71])
    metrics = (await state.next_output()).metrics
    assert metrics.num_draft_tokens is None and metrics.acceptance_length is None
    drafts = VerifiedDrafts(num_drafts=4, num_draft_tokens=12, num_accepted_tokens=6)
    desk.say_run([72], reason=FinishReason.LENGTH, drafts=drafts)
    metrics = (await state.next_output()).metrics
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (4, 12, 6)
    assert metrics.acceptance_length == 2.5


async def test_drafts_are_unknown_where_the_text_ends_a_request(desk: Desk) -> None:
    state = await desk.add(stop="b")
    desk.say_run(ids_of(desk.tokenizer, "abc"))
    metrics = (await state.next_output()).metrics
    assert metrics.num_draft_tokens is None and metrics.acceptance_length is None
