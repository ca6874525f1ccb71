"""The conversion of a beam search's result from the core's form to the user's."""

from __future__ import annotations

from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.output.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from sidestep.ipc.params.beam_search_params import BeamSearchParams
from sidestep.ipc.transport.messages import Beam, FinishReason, unpack_ids


def beam_search_output(
    output: RequestOutput, beams: list[Beam], params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchOutput:
    """Return the result of a beam search; output: the request's last output."""
    completion = output.outputs[0]
    cut_short = completion.stop_reason if completion.finish_reason == "abort" else None
    sequences = [
        _sequence(beam, output.prompt_token_ids, params, tokenizer, cut_short) for beam in beams
    ]
    output.metrics.num_generation_tokens = sum(
        len(s.tokens) - len(output.prompt_token_ids) for s in sequences
    )
    return BeamSearchOutput(
        output.request_id,
        output.prompt,
        output.prompt_token_ids,
        sequences,
        output.metrics,
        output.num_cached_tokens,
    )


def _sequence(
    beam: Beam,
    prompt: list[int],
    params: BeamSearchParams,
    tokenizer: Tokenizer,
    cut_short: int | str | None,
) -> BeamSearchSequence:
    tokens: list[int] = unpack_ids(beam.token_ids).tolist()
    if beam.reason is FinishReason.STOP and not params.include_stop_str_in_output:
        tokens = tokens[:-1]
    text = ""
    if tokenizer.has_texts:
        text = tokenizer.decode(tokens, skip_special_tokens=not params.include_stop_str_in_output)
    is_cut = cut_short is not None and beam.reason is not FinishReason.STOP
    return BeamSearchSequence(
        prompt + tokens,
        text,
        beam.logprob,
        beam.score,
        "abort" if is_cut else str(beam.reason),
        cut_short if is_cut else None,
    )
