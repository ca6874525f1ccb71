"""The methods of transformers' tokenizers that scripts call, for the engine's tokenizer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, Self, overload

from tokenizers import Tokenizer as FastTokenizer

from sidestep.frontend.input.template_files import Message
from sidestep.frontend.vllm.vllm_names import RefusesTokenizerMethods, takes_vllm_arguments


class Encoding(dict[str, Any]):
    """The result of calling a tokenizer, with `input_ids` and `attention_mask`.

    Both are items and attributes; for several texts they are lists of lists.
    """

    @property
    def input_ids(self) -> Any:
        """The token ids."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """A one for each token id: nothing is padded."""
        return self["attention_mask"]


class TokenizerMethods(RefusesTokenizerMethods):
    """The methods that need only a tokenizer's `encode`, `decode` and `render_chat`.

    Names and defaults are those of transformers.
    """

    fast: FastTokenizer
    _special_tokens: Mapping[str, str]

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text; see Tokenizer."""

    @abstractmethod
    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; see Tokenizer."""

    @abstractmethod
    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation as text; see Tokenizer."""

    @takes_vllm_arguments
    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> Encoding:
        """Return the token ids of one text or several, which are neither cut nor padded."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        several = [self.encode(one, add_special_tokens) for one in text]
        return Encoding(input_ids=several, attention_mask=[[1] * len(ids) for ids in several])

    def __await__(self) -> Generator[None, None, Self]:
        """Return the tokenizer itself, so that scripts may await the engine's `get_tokenizer()`."""
        yield from ()
        return self

    def batch_decode(
        self, sequences: Iterable[Sequence[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """Return the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text as the vocabulary writes them."""
        return [
            self.fast.id_to_token(token) or ""
            for token in self.encode(text, add_special_tokens=False)
        ]

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens and their ids."""
        return dict(self.fast.get_vocab())

    @property
    def vocab(self) -> dict[str, int]:
        """All tokens and their ids."""
        return self.get_vocab()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return the id of a token, or of each; None for one that does not exist."""
        if isinstance(tokens, str):
            return self.fast.token_to_id(tokens)
        return [self.fast.token_to_id(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Return the token of an id, or of each; None for one that does not exist."""
        if isinstance(ids, int):
            return self.fast.id_to_token(ids)
        return [self.fast.id_to_token(token) for token in ids]

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        return_dict: Literal[True],
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> Encoding: ...

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str: ...

    @takes_vllm_arguments
    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> str | list[int] | Encoding:
        """Return the prompt of a conversation: token ids, an Encoding (return_dict), or text.

        The template gets the other `variables`. Raises ValidationError when the model has no
        template or the template refuses the messages.
        """
        text = self.render_chat(conversation, **{"add_generation_prompt": False, **variables})
        if not tokenize:
            return text
        made = self(text, add_special_tokens=False)  # the template writes the special tokens itself
        return made if return_dict else list(made.input_ids)

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Texts of the special tokens that have a role, by the role, such as 'eos_token'."""
        return dict(self._special_tokens)

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the special tokens that have a role."""
        return list(dict.fromkeys(self._special_tokens.values()))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of the special tokens that have a role."""
        return [
            token
            for text in self.all_special_tokens
            if (token := self.fast.token_to_id(text)) is not None
        ]

    def _special_id(self, role: str) -> int | None:
        text = self._special_tokens.get(role)
        return None if text is None else self.fast.token_to_id(text)

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token."""
        return self._special_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the end-of-sequence token."""
        return self._special_id("eos_token")

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token."""
        return self._special_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the beginning-of-sequence token."""
        return self._special_id("bos_token")

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token, which nothing here uses."""
        return self._special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token."""
        return self._special_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for text that the vocabulary lacks."""
        return self._special_id("unk_token")

    @property
    def is_fast(self) -> bool:
        """True: this is a tokenizer of the library `tokenizers`."""
        return True
