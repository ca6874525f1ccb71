"""Keys of vLLM's speculative_config that sidestep lacks, or has under another name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sidestep.ipc.common.errors import ValidationError
from sidestep.ipc.vllm.foreign import Foreign, translate

_LOOKUP = "drafts are looked up in a request's own tokens, by method 'ngram'"
_NO_MODEL = f"{_LOOKUP}, and no second model is loaded yet; leave it out"
_ADAPTIVE = "the number of drafts follows the measured times of steps (adaptive); leave it out"
_EXACT = "a draft is accepted if it is the token that is sampled in its place; leave it out"
_NO_SUFFIXES = f"{_LOOKUP}, and no tree of other requests' outputs is kept yet; leave it out"
_ONE_RATE = "synthetic_acceptance_rate is the probability at every position; give that"

SPECULATIVE_KEYS: dict[str, Foreign] = {
    "model": Foreign(_NO_MODEL, ("ngram", "[ngram]", "ngram_gpu")),
    "draft_tensor_parallel_size": Foreign(_NO_MODEL, (1,)),
    "tensor_parallel_size": Foreign(_NO_MODEL, (1,)),
    "quantization": Foreign(_NO_MODEL),
    "max_model_len": Foreign(_NO_MODEL),
    "revision": Foreign(_NO_MODEL),
    "code_revision": Foreign(_NO_MODEL),
    "draft_load_config": Foreign(_NO_MODEL),
    "kv_cache_dtype": Foreign(_NO_MODEL, ("auto",)),
    "attention_backend": Foreign(_NO_MODEL),
    "moe_backend": Foreign(_NO_MODEL),
    "enforce_eager": Foreign(_NO_MODEL, (False,)),
    "disable_padded_drafter_batch": Foreign(_NO_MODEL, (False,)),
    "parallel_drafting": Foreign(_NO_MODEL, (False,)),
    "draft_sample_method": Foreign(_NO_MODEL, ("greedy",)),
    "speculative_token_tree": Foreign("the drafts of a row are a chain, not a tree; leave it out"),
    "disable_by_batch_size": Foreign(_ADAPTIVE),
    "num_speculative_tokens_per_batch_size": Foreign(_ADAPTIVE),
    "rejection_sample_method": Foreign(_EXACT, ("standard",)),
    "acceptance_method": Foreign(_EXACT, ("rejection_sampler",)),
    "posterior_threshold": Foreign(_EXACT),
    "posterior_alpha": Foreign(_EXACT),
    "disable_logprobs": Foreign("each token has the logprobs that are asked for", (False,)),
    "synthetic_acceptance_rates": Foreign(_ONE_RATE),
    "synthetic_acceptance_length": Foreign(_ONE_RATE),
    "suffix_decoding_max_tree_depth": Foreign(_NO_SUFFIXES, (24,)),
    "suffix_decoding_max_cached_requests": Foreign(_NO_SUFFIXES, (10000,)),
    "suffix_decoding_max_spec_factor": Foreign(_NO_SUFFIXES, (1.0,)),
    "suffix_decoding_min_token_prob": Foreign(_NO_SUFFIXES, (0.1,)),
}
"""Keys by vLLM's names. None of them is a key of ours."""

METHOD_WORDS = {"ngram_gpu": "ngram", "[ngram]": "ngram"}
"""Values of `method`, by vLLM's words for them."""

NO_METHODS: dict[str, str] = {
    **dict.fromkeys(
        ("draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash"),
        f"is not there: {_LOOKUP}, and no second model is loaded yet",
    ),
    "suffix": f"is not there: {_LOOKUP}, and no tree of other requests' outputs is kept yet",
}
"""Values of `method` that vLLM has and sidestep lacks, and what there is here."""


def translate_speculation(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a speculative_config by our names, without those that ask for nothing.

    Raises ValidationError, which names the key, for a key or a method without a meaning here.
    """
    ours = translate(given, SPECULATIVE_KEYS)
    method = ours.get("method", "ngram")
    if method is None:
        del ours["method"]
    elif isinstance(method, str):
        if method in NO_METHODS:
            raise ValidationError("method", f"{method!r} {NO_METHODS[method]}")
        if method in METHOD_WORDS:
            ours["method"] = METHOD_WORDS[method]
    return ours
