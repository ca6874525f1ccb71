"""The parts that a frontend needs before it serves: tokenizer, channels to the replicas, seed."""

from __future__ import annotations

import logging

from sidestep.frontend.input.no_tokenizer import NoTokenizer
from sidestep.frontend.input.tokenizer import Tokenizer
from sidestep.frontend.placement.placer import Placer
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config import EngineConfig
from sidestep.ipc.processes.core_args import Invitation
from sidestep.ipc.transport.channels import FrontendChannel
from sidestep.ipc.transport.owner_line import GuestEnd

logger = logging.getLogger(__name__)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """Return the tokenizer that an engine of this configuration has; raises EngineStartError."""
    if config.tokenizer_path is None:
        return NoTokenizer(config.spec.vocab_size)
    tokenizer = Tokenizer(config.tokenizer_path)
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    tokenizer.prepare_chats()
    return tokenizer


def open_channels(
    config: EngineConfig, invitation: Invitation | None, placer: Placer
) -> tuple[dict[int, tuple[FrontendChannel, int]], GuestEnd | None]:
    """Return a channel to each replica, with this frontend's number there, and the line.

    The frontend that starts the engine has number 0, and no line to an owner. Raises
    EngineStartError if the engine that sent the invitation has ended.
    """
    channels: dict[int, tuple[FrontendChannel, int]] = {}
    if invitation is None:
        for replica in range(config.parallel.data_parallel_size):
            channels[replica] = FrontendChannel(placer.new_address()), 0
        return channels, None
    line = GuestEnd(invitation.line)
    try:
        for seat in invitation.seats:
            channels[seat.replica] = FrontendChannel(seat.address), seat.client
    except EngineStartError:
        for channel, _ in channels.values():
            channel.close()
        line.close()
        raise
    return channels, line


def seed_of_frontend(config: EngineConfig, invitation: Invitation | None) -> str | None:
    """Return the text that the seeds of this frontend's requests are derived from.

    None without the option `seed`. Each frontend of an engine has another text, so that no two of
    them draw the same seeds.
    """
    seed = config.frontend.seed
    return (
        None
        if seed is None
        else f"{seed}:{invitation.seats[0].client if invitation is not None else 0}"
    )


def warn_of_shorter_length(config: EngineConfig, max_model_len: int) -> None:
    """Log one line if the KV cache holds less than the model's longest request."""
    if max_model_len < config.max_model_len:
        logger.warning(
            "max_model_len is %d, which is what the KV cache holds; the model's own "
            "limit is %d (kv_cache_memory_bytes gives the cache more memory)",
            max_model_len,
            config.max_model_len,
        )
