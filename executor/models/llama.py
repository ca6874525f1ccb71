"""Llama 2 and 3, and models that share their architecture."""

from __future__ import annotations

from sidestep.executor.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """The shared decoder; ModelSpec says what is particular to this family."""
