"""The model's shape, its token stream and its training loop."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_python.corpus import Corpus
from tiny_python.vocabulary import END_OF_TEXT, TURN_END, VOCABULARY, chat_text

POSITIONS = 2048
SHORT_ROW = 512
"""Ids of a row in every second step: prompts stand at a row's start, so starts must not be rare."""
MATRIX_RATE = 5e-3
OTHER_RATE = 4e-3
MATRIX_DECAY = 0.1
OTHER_DECAY = 0.01
WARMUP = 0.03
CLIP = 1.0
VALIDATIONS = 12


@dataclass(frozen=True)
class Budget:
    """Limits of a training run, which ends at `steps` or after `seconds`, whichever is first.

    The learning rate follows the same clock.
    """

    steps: int
    seconds: float | None
    batch_tokens: int

    def progress(self, step: int, elapsed: float) -> float:
        """Return the share of the budget that is used; training ends at 1."""
        share = step / self.steps
        return max(share, elapsed / self.seconds) if self.seconds else share


@dataclass
class Tokens:
    """Token ids of each document."""

    train: list[Tensor]
    validation: list[Tensor]

    @property
    def train_count(self) -> int:
        """Number of tokens to train on."""
        return sum(len(document) for document in self.train)


@dataclass
class Outcome:
    """Figures of a finished training run."""

    steps: int
    tokens: int
    epochs: float
    seconds: float
    train_loss: float
    best_step: int
    best_loss: float


def model_config(tokenizer: Tokenizer) -> LlamaConfig:
    """Return the model's configuration.

    Heads have 64 dimensions and widths are multiples of 64, which suits GPU kernels.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        rope_theta=10000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=[end, tokenizer.token_to_id(TURN_END)],
        pad_token_id=end,
    )


def encode(tokenizer: Tokenizer, corpus: Corpus) -> Tokens:
    """Return every document as ids, each ended by the separator."""

    def ids(texts: list[str]) -> list[Tensor]:
        end = [tokenizer.token_to_id(END_OF_TEXT)]
        return [
            torch.tensor(item.ids + end, dtype=torch.int32)
            for item in tokenizer.encode_batch_fast(texts)
        ]

    chats = [chat_text(messages) for messages in corpus.conversations]
    return Tokens(train=ids(corpus.train + chats), validation=ids(corpus.validation))


def rows_in_order(documents: list[Tensor]) -> Tensor:
    """Return rows of POSITIONS + 1 ids, each starting on the last id of the one before."""
    return torch.cat(documents).unfold(0, POSITIONS + 1, POSITIONS)


def unindented_starts(stream: Tensor, tokenizer: Tokenizer) -> Tensor:
    """Return the indices at which a line without indentation starts, in order."""
    pieces = tokenizer.decode_batch(
        [[i] for i in range(tokenizer.get_vocab_size())], skip_special_tokens=False
    )
    breaks = torch.tensor(
        [piece == END_OF_TEXT or (piece != "" and piece.strip("\r\n") == "") for piece in pieces]
    )
    blank = torch.tensor([piece[:1].isspace() for piece in pieces])
    after_break = breaks[stream[:-1].long()]
    return (after_break & ~blank[stream[1:].long()]).nonzero().flatten() + 1


def shuffled_rows(
    documents: list[Tensor], length: int, tokenizer: Tokenizer, generator: torch.Generator
) -> Tensor:
    """Return one epoch's rows of `length` + 1 ids, from a new order of the documents.

    Each row is moved on to the next line without indentation, because a prompt starts at the left
    margin too. A model that saw `def` at a row's start with a method's indentation cut off would
    indent the body twice.
    """
    stream = torch.cat(
        [documents[i] for i in torch.randperm(len(documents), generator=generator).tolist()]
    )
    first = int(torch.randint(length, (), generator=generator))
    starts = unindented_starts(stream, tokenizer)
    indices = torch.searchsorted(starts, torch.arange(first, len(stream) - length, length))
    starts = starts[indices[indices < len(starts)]].unique()
    starts = starts[starts < len(stream) - length]
    starts = starts[torch.randperm(len(starts), generator=generator)]
    return stream[starts[:, None] + torch.arange(length + 1)]


def batches(
    documents: list[Tensor], rows: int, length: int, tokenizer: Tokenizer, seed: int
) -> Iterator[Tensor]:
    """Yield endless batches of `rows` rows; each epoch has its own order of documents and rows."""
    generator = torch.Generator().manual_seed(seed)
    spare = torch.empty(0, length + 1, dtype=torch.int32)
    while True:
        while len(spare) < rows:
            spare = torch.cat([spare, shuffled_rows(documents, length, tokenizer, generator)])
        yield spare[:rows]
        spare = spare[rows:]


def loss_of(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Return the mean loss in nats per token over the batch's rows."""
    inputs, targets = batch[:, :-1], batch[:, 1:].flatten()
    # Few CPUs have bfloat16 arithmetic; on the others autocast is slower than float32.
    with torch.autocast(
        batch.device.type, dtype=torch.bfloat16, enabled=batch.device.type == "cuda"
    ):
        logits = model(input_ids=inputs, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets)


@torch.inference_mode()
def validation_loss(
    model: LlamaForCausalLM, rows: Tensor, device: torch.device, limit: int | None = None
) -> float:
    """Return the mean loss in nats per token at full length."""
    model.eval()
    losses = []
    for batch in rows[:limit].split(16 if device.type == "cuda" else 1):
        losses.append(loss_of(model, batch.to(device, torch.long)).item() * len(batch))
    model.train()
    return math.fsum(losses) / len(rows[:limit])


def optimizers(model: LlamaForCausalLM, device: torch.device) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, and AdamW for the embedding and the norms.

    Muon is not made for the latter.
    """
    embedding = model.get_input_embeddings().weight
    matrices = [p for p in model.parameters() if p.ndim == 2 and p is not embedding]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": [embedding], "weight_decay": OTHER_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(
            matrices, lr=MATRIX_RATE, weight_decay=MATRIX_DECAY, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, lr=OTHER_RATE, betas=(0.9, 0.95), fused=device.type == "cuda"),
    ]


def set_rate(steppers: list[torch.optim.Optimizer], progress: float) -> None:
    """Set the learning rates: linear warm-up, then linear decay to nothing."""
    factor = min(progress / WARMUP, (1 - progress) / (1 - WARMUP))
    for stepper, rate in zip(steppers, (MATRIX_RATE, OTHER_RATE), strict=True):
        for group in stepper.param_groups:
            group["lr"] = rate * max(factor, 1e-4)


def train(
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    tokens: Tokens,
    budget: Budget,
    seed: int,
    device: torch.device,
) -> Outcome:
    """Train the model in place.

    The model gets the weights of the step with the lowest validation loss.
    """
    rows = max(1, budget.batch_tokens // POSITIONS)
    long_rows = batches(tokens.train, rows, POSITIONS, tokenizer, seed)
    short_rows = batches(
        tokens.train, rows * POSITIONS // SHORT_ROW, SHORT_ROW, tokenizer, seed + 1
    )
    held_out = rows_in_order(tokens.validation)
    limit = None if device.type == "cuda" else 4  # a full pass is slow on a CPU
    steppers = optimizers(model, device)
    best: dict[str, Tensor] = {}
    best_loss, best_step, next_check = math.inf, 0, 1 / VALIDATIONS
    recent: list[Tensor] = []
    train_loss = math.nan
    model.train()
    start, step, progress = time.monotonic(), 0, 0.0
    while progress < 1:
        set_rate(steppers, progress)
        batch = next(short_rows if step % 2 else long_rows).to(device, torch.long)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad(set_to_none=True)
        recent.append(loss.detach())
        step += 1
        progress = budget.progress(step, time.monotonic() - start)
        if progress >= min(next_check, 1.0):
            next_check += 1 / VALIDATIONS
            train_loss = torch.stack(recent).mean().item()
            recent.clear()
            checked = validation_loss(model, held_out, device, limit)
            elapsed = time.monotonic() - start
            print(
                f"step {step}: train {train_loss:.4f}, validation {checked:.4f}, {elapsed:.0f} s",
                flush=True,
            )
            if checked < best_loss:
                best_loss, best_step = checked, step
                best = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    seen = step * rows * POSITIONS
    seconds = time.monotonic() - start
    return Outcome(step, seen, seen / tokens.train_count, seconds, train_loss, best_step, best_loss)
