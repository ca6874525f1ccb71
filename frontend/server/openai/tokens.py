"""Routes /tokenize and /detokenize: the model's tokenizer, as in vLLM's API."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from sidestep.frontend.server.openai.chat_protocol import ChatMessage, template_messages
from sidestep.frontend.server.openai.prompt import PromptOptions, render
from sidestep.frontend.server.schemas.fields import Natural
from sidestep.frontend.server.schemas.protocol import Text, Tokens
from sidestep.frontend.server.service.service import Service
from sidestep.frontend.server.transport.errors import refused


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds the model's special tokens to a prompt; true if not given."""
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a request to /detokenize."""

    model: str | None = None
    tokens: list[Natural]


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


class TokenizeRoute:
    """Route that converts text or messages to token ids."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request, body: bytes) -> Response:
        """Answer with the token ids of a prompt or of messages. Raises ApiError."""
        service, size = self._service, len(body)
        request = await service.large.decode(body, _tokenize)
        service.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise refused("prompt", "either prompt or messages is required, and not both")
        if request.messages is not None:
            if request.add_special_tokens is not None:
                raise refused(
                    "add_special_tokens",
                    "has a meaning only with prompt: templates write them themselves",
                )
            text, special = await service.large.run(size, _render, service, request), False
        else:
            for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
                if getattr(request, name) is not None:
                    raise refused(name, "has a meaning only with messages")
            text, special = request.prompt or "", request.add_special_tokens is not False
        field = "prompt" if request.messages is None else "messages"
        ids = await service.tokenize(field, text, add_special_tokens=special, must_fit=False)
        return await service.large.run(size, self._answer, ids, request.return_token_strs is True)

    def _answer(self, ids: list[int], with_strings: bool) -> Response:
        made = Tokens(count=len(ids), max_model_len=self._service.llm.max_model_len, tokens=ids)
        if with_strings:
            fast = self._service.llm.get_tokenizer().fast
            made.token_strs = [fast.id_to_token(i) or "" for i in ids]
        return Response(msgspec.json.encode(made), media_type="application/json")


def _render(service: Service, request: TokenizeRequest) -> str:
    """Return the prompt of a conversation. Raises ApiError and ValidationError."""
    return render(
        service,
        template_messages(request.messages or []),
        PromptOptions(
            variables=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        ),
    )


class DetokenizeRoute:
    """Route that converts token ids to text, with special tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request, body: bytes) -> Response:
        """Answer with the text of token ids. Raises ApiError."""
        large = self._service.large
        request = await large.decode(body, _detokenize)
        self._service.check_model(request.model)
        return await large.run(len(body), self._answer, request)

    def _answer(self, request: DetokenizeRequest) -> Response:
        tokenizer = self._service.llm.get_tokenizer()
        if max(request.tokens, default=0) >= tokenizer.vocab_size:
            raise refused(
                "tokens",
                f"{max(request.tokens)} is not a token id: the model has {tokenizer.vocab_size}",
            )
        text = tokenizer.decode(request.tokens, skip_special_tokens=False)
        return Response(msgspec.json.encode(Text(text)), media_type="application/json")
