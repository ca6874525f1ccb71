"""Whole models with recurrent layers give transformers' logits, however their prompts are cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sidestep.executor.attention.base import AttentionSetup, StepBatch
from sidestep.executor.attention.rotary import RotaryTable
from sidestep.executor.attention.torch_backend import TorchAttention
from sidestep.executor.layers.gated_delta import RecurrentStep, new_delta_state
from sidestep.executor.models.decoder import (
    DecoderForCausalLM,
    attention_shape,
    distinct_ropes,
    layers_of,
)
from sidestep.executor.models.model_loading import load_model, model_class
from sidestep.executor.parallel.parallel_state import LoneRank, Parallel
from sidestep.executor.runner.host_tables import HostTables
from sidestep.executor.runner.input_batch import make_batch
from sidestep.executor.runner.runner import WorkerArgs
from sidestep.ipc.common import registry
from sidestep.ipc.common.errors import EngineStartError
from sidestep.ipc.config_sections import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from sidestep.ipc.model.layer_spec import attention_of, recurrent_of
from sidestep.ipc.model.layer_split import split_layers, stage_of
from sidestep.ipc.model.model_size import layers_size, num_parameters
from sidestep.ipc.model.model_spec import ModelSpec, load_model_spec
from tests.counting_weights import CountingWeights
from tests.recurrent.models import ARCHITECTURES, KINDS, write_model
from tests.recurrent.state_rows import make_rows
from tests.unit.executor.steps import Request, make_step

CPU = torch.device("cpu")
LONGEST, BLOCK = 128, 16


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the families."""
    for name, family in ARCHITECTURES.items():
        monkeypatch.setitem(registry.MODELS, name, family)
    with torch.inference_mode():
        yield


def load(path: str) -> tuple[ModelSpec, DecoderForCausalLM]:
    args = WorkerArgs(
        rank=0,
        spec=load_model_spec(path),
        model=ModelConfig(),
        cache=CacheConfig(),
        parallel=ParallelConfig(),
        scheduler=SchedulerConfig(),
        max_model_len=LONGEST,
    )
    return args.spec, load_model(args, Parallel(), torch.float32, CPU)


class Sequences:
    """Sequences of one model, each in a slot and a state row of the same number."""

    def __init__(self, spec: ModelSpec, model: DecoderForCausalLM, tokens: list[Tensor]) -> None:
        self._model, self._tokens, self._done = model, tokens, [0] * len(tokens)
        mixers = attention_of(spec.layers)
        self._attention = TorchAttention(
            AttentionSetup(
                shape=attention_shape(spec, Parallel(), stage_of((spec.num_layers,), 0)),
                num_blocks=len(tokens) * LONGEST // BLOCK,
                block_size=BLOCK,
                dtype=torch.float32,
                device=CPU,
                rotary=[
                    RotaryTable(rope, head_dim, LONGEST, CPU)
                    for rope, head_dim in distinct_ropes(mixers)
                ],
                norm_eps=spec.norm.eps,
                max_rows=len(tokens),
            )
        )
        self._states = [
            new_delta_state(delta, len(tokens), Parallel(), torch.float32, CPU)
            for delta in recurrent_of(spec.layers)
        ]
        self._tables = HostTables(len(tokens), LONGEST, BLOCK)

    def step(self, counts: dict[int, int]) -> dict[int, Tensor]:
        """Return the logits of some next tokens of each sequence."""
        order = sorted(counts, key=lambda slot: counts[slot] > 1)
        per_slot = LONGEST // BLOCK
        new = {slot: Request([1] * LONGEST, 1) for slot in order if self._done[slot] == 0}
        blocks = {slot: list(range(slot * per_slot, (slot + 1) * per_slot)) for slot in new}
        step = make_step([(slot, counts[slot], blocks.get(slot, [])) for slot in order], new)
        self._tables.apply(step)
        batch = make_batch(self._tables, step, BLOCK)
        self._attention.begin_step(
            StepBatch(
                positions=torch.from_numpy(batch.positions),
                slot_mapping=torch.from_numpy(batch.slot_mapping),
                host=batch,
                rows=None,
            )
        )
        begin = [slot if self._done[slot] else -1 for slot in order]
        rows = make_rows([counts[slot] for slot in order], begin, order)
        parts = [self._tokens[s][self._done[s] : self._done[s] + counts[s]] for s in order]
        recurrent = RecurrentStep(self._states, rows)
        logits = self._model(torch.cat(parts), self._attention, None, None, recurrent)
        for slot in order:
            self._done[slot] += counts[slot]
        sizes = [counts[slot] for slot in order]
        return dict(zip(order, logits.split(sizes), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_ragged_steps_give_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    path, reference = write_model(kind, tmp_path)
    tokens = [torch.randint(0, 97, (length,)) for length in (100, 20, 75)]
    sequences = Sequences(*load(path), tokens)
    made: dict[int, list[Tensor]] = {0: [], 1: [], 2: []}
    steps = [{0: 70, 1: 5}, {0: 1, 1: 1, 2: 66}, {0: 20, 1: 13, 2: 1}, {0: 9, 1: 1, 2: 8}]
    for counts in steps:
        for slot, logits in sequences.step(counts).items():
            made[slot].append(logits)
    for slot, sequence in enumerate(tokens):
        expected = reference(sequence[None]).logits[0]
        got = torch.cat(made[slot])
        torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-4)
        assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Let torch cut tensors, which it does by the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5"])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(kind: str, tmp_path: Path) -> None:
    spec, model = load(write_model(kind, tmp_path)[0])
    tokens = [torch.randint(0, 97, (100,)) for _ in range(3)]
    together, alone = (Sequences(spec, model, tokens) for _ in range(2))
    for counts in ({0: 70, 1: 6}, {0: 3, 1: 1, 2: 90}, {0: 1, 1: 9, 2: 1}):
        made = together.step(counts)
        for slot, count in counts.items():
            assert torch.equal(alone.step({slot: count})[slot], made[slot])


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_stages_read_what_the_specification_says(kind: str, tmp_path: Path) -> None:
    config = KINDS[kind][1]()
    config.architectures = [KINDS[kind][0].__name__]
    config.save_pretrained(tmp_path)
    spec = load_model_spec(str(tmp_path))
    build = model_class(spec.architecture)
    for ranks in (1, 2):
        assert all(one.fits(ranks) for one in spec.divided)
        for layers in ((spec.num_layers,), split_layers(spec, 2)):
            for index in range(len(layers)):
                stage, weights = stage_of(layers, index), CountingWeights()
                own, parallel = layers_of(spec, stage), LoneRank(0, ranks)
                build(spec, weights, parallel, stage)
                # The vocabulary has an odd size, and rank 0's part has no padding.
                assert weights.count == num_parameters(
                    spec, ranks, own, first=stage.is_first, last=stage.is_last
                )
                shape = attention_shape(spec, parallel, stage)
                kept = layers_size(spec, ranks, own).kv_per_token
                assert shape.kv_layout(torch.float32, 8).block_bytes == 8 * 4 * kept


def rewrite(path: str, changes: dict[str, str], more: dict[str, Tensor]) -> None:
    """Give tensors of a checkpoint other names by their beginnings, and add some."""
    file = Path(path) / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        found = next((one for one in changes if name.startswith(one)), "")
        tensors[changes.get(found, "") + name.removeprefix(found)] = tensor
    save_file(tensors | more, file)


def test_a_checkpoint_that_also_reads_images(tmp_path: Path) -> None:
    """Its language model has a name of its own; the rest, and further heads, are not read."""
    path, _ = write_model("qwen3_5", tmp_path)
    tokens = [torch.arange(30)]
    expected = Sequences(*load(path), tokens).step({0: 30})[0]
    others = {"model.visual.blocks.0.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    rewrite(path, {"model.": "model.language_model."}, others)
    config = Path(path) / "config.json"
    text = json.loads(config.read_text())
    name = "Qwen3_5ForConditionalGeneration"
    config.write_text(json.dumps({"architectures": [name], "text_config": text}))
    assert torch.equal(Sequences(*load(path), tokens).step({0: 30})[0], expected)
    rewrite(path, {}, {"model.language_model.new.weight": torch.ones(2)})
    with pytest.raises(EngineStartError, match="model.new.weight"):
        load(path)
