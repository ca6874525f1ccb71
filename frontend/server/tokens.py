"""/tokenize and /detokenize: the model's tokenizer, as users of vLLM reach it."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.server.body import decode
from sidestep.frontend.server.chat import render
from sidestep.frontend.server.chat_protocol import ChatMessage
from sidestep.frontend.server.errors import refused
from sidestep.frontend.server.fields import Natural
from sidestep.frontend.server.protocol import Text, Tokens
from sidestep.frontend.server.service import Service


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt: whether it gets the tokens that the model puts around every text; true if not given."""
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to /detokenize."""

    model: str | None = None
    tokens: list[Natural]


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class TokenizeRoute:
    """Text or messages to token ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request, body: bytes) -> Response:
        service, request = self._service, decode(body, _tokenize)
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise refused("prompt", "either prompt or messages is required, and not both")
        if request.messages is not None:
            if request.add_special_tokens is not None:
                raise refused("add_special_tokens", "has a meaning only with prompt: templates write them themselves")
            text, special = render(service, request, None), False
        else:
            if request.chat_template_kwargs is not None:
                raise refused("chat_template_kwargs", "has a meaning only with messages")
            text, special = request.prompt or "", request.add_special_tokens is not False
        ids = await service.llm.tokenize(text, add_special_tokens=special)
        made = Tokens(count=len(ids), max_model_len=service.llm.max_model_len, tokens=ids)
        if request.return_token_strs:
            fast = service.llm.get_tokenizer().fast
            made.token_strs = [fast.id_to_token(i) or "" for i in ids]
        return Response(msgspec.json.encode(made), media_type="application/json")


class DetokenizeRoute:
    """Token ids to text, special tokens included."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request, body: bytes) -> Response:
        request = decode(body, _detokenize)
        self._service.check_model(request.model)
        tokenizer = self._service.llm.get_tokenizer()
        if max(request.tokens, default=0) >= tokenizer.vocab_size:
            raise refused("tokens", f"{max(request.tokens)} is not a token id: the model has {tokenizer.vocab_size}")
        text = tokenizer.decode(request.tokens, skip_special_tokens=False)
        return Response(msgspec.json.encode(Text(text)), media_type="application/json")
