"""`sidestep eval` against transformers in float32, and its life: interrupted, resumed, failed."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, processors

from sidestep import EngineArgs, ValidationError
from sidestep.frontend.evaluation import run
from sidestep.frontend.evaluation.command import evaluate
from sidestep.frontend.evaluation.state import State
from sidestep.frontend.evaluation.units import Result
from sidestep.frontend.main import main
from sidestep.frontend.options.eval_options import EvalArgs
from tests.e2e.models import load_reference, write_model

LETTERS = "abcdefghijklmno"
"""Texts' letters; with <s> they are a vocabulary of 16 tokens, all of which logprobs report."""
TEXT = "".join(LETTERS[(7 * i * i + 3 * i + i // 9) % 15] for i in range(150))
CONTEXT, STRIDE = 48, 20
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": 1}


def write_letters(folder: Path, letters: str = LETTERS, begins: bool = False) -> None:
    """Write a tokenizer with a token for each letter. begins: <s> goes before every text."""
    vocab = {letter: number for number, letter in enumerate(letters)} | {"<s>": 15}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>"])
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 15)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(TEXT)
    return str(file)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return two models of one vocabulary, and the first with a token before every text."""
    found = {}
    for name, family in (("one", "llama-gqa"), ("two", "qwen2"), ("begins", "llama-gqa")):
        folder = tmp_path_factory.mktemp(name)
        write_letters(folder, begins=name == "begins")
        found[name] = write_model(family, folder, vocab_size=16)
    return found


@cache
@torch.inference_mode()
def reference(folder: str, begins: bool) -> torch.Tensor:
    """Return the log-probabilities before each counted token, [T, V], one forward pass a token.

    Each token has the context that the documentation describes.
    """
    model = load_reference(folder)
    ids = [LETTERS.index(letter) for letter in TEXT]
    room = CONTEXT - begins
    rows = []
    for place in range(0 if begins else 1, len(ids)):
        later = max(0, math.ceil((place + 1 - room) / STRIDE))
        start = max(0, min(len(ids), room + later * STRIDE) - room)
        prompt = [15] * begins + ids[start:place]
        rows.append(model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1))
    return torch.stack(rows)


def true_nll(folder: str, begins: bool = False) -> float:
    """Return the negative log likelihood of the text by transformers."""
    values = reference(folder, begins)
    ids = torch.tensor([LETTERS.index(letter) for letter in TEXT])[-len(values) :]
    return -float(values.gather(1, ids[:, None]).sum())


def eval_args(text: str, **options: Any) -> EvalArgs:
    return EvalArgs(text=text, context=CONTEXT, stride=STRIDE, **options)


def test_perplexity_and_divergence_equal_those_of_transformers(
    folders: dict[str, str], text: str
) -> None:
    report = evaluate(
        eval_args(text, against=folders["two"], kl_tokens=16),
        EngineArgs(model=folders["one"], **ENGINE),
    )
    for role, name in (("model", "one"), ("against", "two")):
        found = report.figures[role]["perplexity"]
        nll = true_nll(folders[name])
        assert found["nll"] == pytest.approx(nll, rel=1e-4)
        assert found["perplexity"] == pytest.approx(math.exp(nll / 149), rel=1e-4)
        assert (found["tokens"], found["uncounted_tokens"], found["windows"]) == (149, 1, 7)
    p, q = reference(folders["two"], False), reference(folders["one"], False)
    found = report.figures["comparison"]
    true = float((p.exp() * (p - q)).sum(1).mean())
    assert found["kl_divergence"] == pytest.approx(true, rel=1e-4)
    assert found["kl_remaining_mass"] == 0
    assert found["top1_agreement"] == float((p.argmax(1) == q.argmax(1)).double().mean())
    increase = math.exp((true_nll(folders["one"]) - true_nll(folders["two"])) / 149) - 1
    assert found["perplexity_increase"] == pytest.approx(increase, rel=1e-3)


def test_a_token_before_every_text_begins_each_window(folders: dict[str, str], text: str) -> None:
    """The first token of the text then has a prediction, and counts."""
    report = evaluate(eval_args(text), EngineArgs(model=folders["begins"], **ENGINE))
    found = report.figures["model"]["perplexity"]
    assert found["nll"] == pytest.approx(true_nll(folders["begins"], True), rel=1e-4)
    assert (found["tokens"], found["uncounted_tokens"]) == (150, 0)


def test_models_with_other_tokens_are_refused(
    folders: dict[str, str], text: str, tmp_path: Path
) -> None:
    model = EngineArgs(model=folders["one"], **ENGINE)
    with pytest.raises(ValidationError, match="^against: .* begins a text with the tokens"):
        evaluate(eval_args(text, against=folders["begins"]), model)
    write_letters(tmp_path, letters="".join(reversed(LETTERS)))
    write_model("llama-gqa", tmp_path, vocab_size=16)
    with pytest.raises(ValidationError, match="^against: .* has other token ids .* token 0 on"):
        evaluate(eval_args(text, against=str(tmp_path)), model)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also in a test run that ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupted_run_goes_on_and_computes_nothing_twice(
    folders: dict[str, str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    args = eval_args(text, against=folders["two"], state=str(path))
    model = EngineArgs(model=folders["one"], max_num_seqs=1, **ENGINE)
    add = State.add

    def add_then_interrupt(state: State, key: str, result: Result) -> None:
        add(state, key, result)
        if key == "against/perplexity/window 2":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(State, "add", add_then_interrupt)
    monkeypatch.setattr(run, "MOST_AT_ONCE", 1)  # so that no further window ends with it
    with pytest.raises(KeyboardInterrupt):
        evaluate(args, model)
    monkeypatch.setattr(State, "add", add)
    before = path.read_bytes()
    assert before.count(b"\n") == 12, "the options, two devices and nine windows"
    resumed = evaluate(args, model)
    assert path.read_bytes().startswith(before)
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()[1:]]
    assert len(keys) == len(set(keys)) == 16, "a device and seven windows of each model"

    monkeypatch.setattr(run, "start_engine", lambda arguments: pytest.fail("an engine starts"))
    again = evaluate(args, model)
    assert again.figures == resumed.figures
    for role, name in (("model", "one"), ("against", "two")):
        nll = resumed.figures[role]["perplexity"]["nll"]
        assert nll == pytest.approx(true_nll(folders[name]), rel=1e-4)
    monkeypatch.undo()
    path.write_bytes(before.replace(b"1 threads", b"64 threads"))
    with pytest.raises(ValidationError, match="^state: holds results of cpu .64 threads"):
        evaluate(args, model)
    with pytest.raises(ValidationError, match="^state: .* stride was 20, and is 10"):
        evaluate(replace(args, stride=10), model)


def command(*words: str) -> int:
    return main(["eval", "--device", "cpu", "--dtype", "float32", "--cpu-threads", "1", *words])


def test_a_model_against_itself_in_other_batches_and_chunks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The bundled model and text, as they are without options."""
    other = {"max_num_seqs": 1, "max_num_batched_tokens": 96}
    words = ["--against-options", json.dumps(other), "--min-top1", "0.999", "--max-kl", "1e-6"]
    folder = EngineArgs().model
    assert command("--against", folder, *words, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    ours, others = (report["figures"][role]["perplexity"] for role in ("model", "against"))
    assert ours["perplexity"] == pytest.approx(others["perplexity"], rel=1e-5)
    assert report["figures"]["comparison"]["kl_divergence"] == pytest.approx(0, abs=1e-6)
    assert report["figures"]["comparison"]["top1_agreement"] == pytest.approx(1, abs=1e-3)
    assert report["model"] == report["against"] == folder and report["failed"] == []
    assert report["options"]["context"] == 1024 and report["options"]["stride"] == 512


def test_limits_that_are_not_kept_give_status_1_and_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        '{"prompt": "import", "answer": "[a-z]", "match": "regex", "max_tokens": 4}\n'
        '{"messages": [{"role": "user", "content": "Hello!"}], "answer": "No."}\n'
    )
    prompts = tmp_path / "prompts.jsonl"
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    prompts.write_text(f'{{"prompt": "a", "schema": {schema}}}\n')
    words = ["--tasks", str(tasks), "--json-prompts", str(prompts), "--needle", "96"]
    limits = ["--min-exact", "0.5", "--min-needle", "1", "--min-json-free", "1"]
    assert command(*words, *limits, "--needle-depths", "0,100", "--max-tokens", "24") == 1
    out, err = capsys.readouterr()
    assert [line for line in err.splitlines() if line.startswith("sidestep eval: ")] == [
        "sidestep eval: needle recall at 96 is 0, below --min-needle 1",
        "sidestep eval: json valid_free is 0, below --min-json-free 1",
    ]
    table = {line[:26].strip(): line[26:].strip() for line in out.splitlines()[2:]}
    assert table["tasks right"] == "0.5" and out.endswith("\nwrong tasks: line 2\n")
