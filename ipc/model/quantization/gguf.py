"""GGUF files, each of whose tensors states its own type."""

from __future__ import annotations

from sidestep.ipc.model.quantization.quant_config import QuantConfig
from sidestep.ipc.model.quantization.weight_scheme import QuantizationSpec, WeightScheme


def read_gguf(config: QuantConfig) -> QuantizationSpec:
    """Read what ipc/model/gguf makes of a file: the form of most of its matrices.

    Sizes are counted with it, so they are approximate for a file of several types.
    """
    kind = config.get("kind")
    scheme = WeightScheme(kind="int8", columns=16, offset=True)
    if kind is not None:
        scheme = WeightScheme(
            kind=kind, columns=config.whole("columns"), offset=config.flag("offset")
        )
    return QuantizationSpec(method="gguf", default=scheme)
