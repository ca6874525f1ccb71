"""Fields that vLLM's parameter classes have and ours lack, and the conversion of given values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from sidestep.ipc.common.errors import UnknownNameError
from sidestep.ipc.common.options import did_you_mean
from sidestep.ipc.vllm.foreign import Foreign, translate

_NO_BEAMS = (
    "beam search is a call of its own: LLM.beam_search(prompts, BeamSearchParams(beam_width=4))"
)
_MARKED_PROMPT = "prompt_logprobs gives those of all of the prompt's tokens"

SAMPLING_FIELDS: dict[str, Foreign] = {
    "guided_decoding": Foreign(
        "is structured_outputs here, with StructuredOutputsParams of the same fields"
    ),
    "logits_processors": Foreign(
        "are named when the engine starts, by its option logits_processors=['module:Class'], "
        "and get a request's values by extra_args"
    ),
    "use_beam_search": Foreign(_NO_BEAMS, (False,)),
    "length_penalty": Foreign(_NO_BEAMS, (1.0, 1)),
    "early_stopping": Foreign(_NO_BEAMS, (False,)),
    "truncate_prompt_tokens": Foreign(
        "prompts are never cut silently; cut the token ids and give those"
    ),
    "flat_logprobs": Foreign("log-probabilities are a list of one dict for each token", (False,)),
    "spaces_between_special_tokens": Foreign(
        "the tokenizer's own spaces are kept; leave it out", (True,)
    ),
    "skip_clone": Foreign("parameters are frozen and never copied; leave it out", (False, True)),
    "skip_reading_prefix_cache": Foreign(
        "prompt_logprobs does without cached prefixes; others give the same output with them",
        (False,),
    ),
    "stream_interval": Foreign("is an option of the engine here: EngineArgs(stream_interval=...)"),
    "prompt_logprob_token_ids": Foreign(_MARKED_PROMPT),
    "prompt_logprob_start": Foreign(_MARKED_PROMPT, (0,)),
    "logprob_token_ids": Foreign("logprobs gives those of the most probable tokens, at most 20"),
    "thinking_token_budget": Foreign(
        "reasoning has no budget of its own yet; max_tokens bounds the whole output"
    ),
    "watermarking": Foreign("outputs are not watermarked; leave it out"),
    "routed_experts_prompt_start": Foreign(
        "the experts of a token are not returned; leave it out", (0,)
    ),
    "trace_decode_token_ids": Foreign("get_step_records tells of each step; leave it out"),
}
"""Fields of vLLM's SamplingParams, of several versions."""

STRUCTURE_FIELDS: dict[str, Foreign] = {
    "disable_fallback": Foreign(
        "one library (llguidance) holds outputs to a form; leave it out", (False, True)
    ),
    "disable_additional_properties": Foreign(
        "write 'additionalProperties': false into the schema", (False,)
    ),
    "whitespace_pattern": Foreign(
        "disable_any_whitespace=True leaves white space out; there is no pattern for it"
    ),
    "backend": Foreign(
        "one library (llguidance) holds outputs to a form; leave it out", ("auto", "guidance")
    ),
}
"""Fields of vLLM's StructuredOutputsParams."""

_EACH_TOKEN = "a prompt has one vector; vectors of its tokens are not made"

POOLING_FIELDS: dict[str, Foreign] = {
    "activation": Foreign("is use_activation here", same_as="use_activation"),
    "softmax": Foreign("is use_activation here", same_as="use_activation"),
    "truncate_prompt_tokens": SAMPLING_FIELDS["truncate_prompt_tokens"],
    "step_tag_id": Foreign(_EACH_TOKEN),
    "returned_token_ids": Foreign(_EACH_TOKEN),
    "requires_token_ids": Foreign("outputs have their prompt_token_ids; leave it out", (False,)),
    "skip_reading_prefix_cache": Foreign(
        "the result is the same with cached prefixes; leave it out", (False,)
    ),
}
"""Fields of vLLM's PoolingParams, of several versions."""

_TABLES = {
    "SamplingParams": SAMPLING_FIELDS,
    "StructuredOutputsParams": STRUCTURE_FIELDS,
    "PoolingParams": POOLING_FIELDS,
}


class ParamsMeta(msgspec.StructMeta):
    """The metaclass of structs that users make.

    It knows vLLM's fields, and names an unknown or an assigned field in its error. Decoding a
    message does not use `__call__`.
    """

    def __init__(cls, *args: Any, **options: Any) -> None:
        super().__init__(*args)
        # It is set here because frozen structs would override one in the class's body.
        cls.__setattr__ = _refuse_assignment  # type: ignore[method-assign, assignment]

    if not TYPE_CHECKING:  # type checkers see the classes' own fields only

        def __call__(cls, *args: Any, **given: Any) -> Any:
            """Make a struct. Raises ValidationError, which names the field."""
            ours = translate(given, _TABLES.get(cls.__name__, {}))
            for name in ours:
                if name not in cls.__struct_fields__:
                    hint = did_you_mean(name, cls.__struct_fields__)
                    raise UnknownNameError(name, f"is not a field of {cls.__name__}{hint}")
            return super().__call__(*args, **ours)


def _refuse_assignment(self: object, name: str, value: object) -> None:
    kind = type(self).__name__
    raise AttributeError(
        f"{kind} is frozen: `params = params.clone({name}=...)` makes a copy with another value"
    )


def plain(value: Any) -> Any:
    """Return numbers and lists of numpy and torch as Python's own, in lists and dicts too.

    Return other values as they are.
    """
    if hasattr(value, "tolist") and hasattr(value, "dtype"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    return value
