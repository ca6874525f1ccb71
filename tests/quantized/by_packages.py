"""Matrices that compressed-tensors and bitsandbytes themselves have encoded and decoded."""

from __future__ import annotations

from typing import Any

import bitsandbytes
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from torch import Tensor

from tests.quantized.written import Encoded, Encoder, seeded

functional: Any = bitsandbytes.functional  # without types

PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def scheme_of(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, targets: list[str]
) -> QuantizationScheme:
    """Return a group of matrices, in the package's own words."""
    return QuantizationScheme(
        targets=targets,
        weights=QuantizationArgs(**weights),
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
        format=form,
    )


def config_of(
    *groups: QuantizationScheme, ignore: list[str] | None = None, form: str | None = None
) -> dict[str, Any]:
    """Return what the package writes into config.json."""
    whole: Any = QuantizationConfig(
        config_groups={f"group_{i}": group for i, group in enumerate(groups)},
        ignore=["lm_head"] if ignore is None else ignore,
        format=form or groups[0].format,
        quantization_status="compressed",
    )
    stated: dict[str, Any] = whole.model_dump(mode="json")
    return stated


def compressed(scheme: QuantizationScheme, dtype: torch.dtype = torch.float32) -> Encoder:
    """Return an encoder of a group's matrices. dtype: of the scales."""
    assert scheme.weights is not None
    args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(scheme.format)

    def encode(name: str, weight: Tensor) -> Encoded:
        tensors = {"weight": weight.to(dtype), **_scales(name, weight, args, dtype)}
        made = compressor.compress(tensors, scheme)
        numbers = compressor.decompress(made, scheme)["weight"]
        if scheme.input_activations is not None and scheme.input_activations.dynamic is False:
            made["input_scale"] = torch.tensor([0.02])
        return Encoded(made, numbers.float().detach())

    return encode


def _scales(
    name: str, weight: Tensor, args: QuantizationArgs, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return scales that differ from group to group, and zeros."""
    (rows, columns), draw = weight.shape, seeded(name)
    high, wide = 1, 1
    if args.strategy != "tensor":
        high = rows
    if args.strategy in ("group", "tensor_group"):
        assert args.group_size is not None
        wide = -(-columns // args.group_size)
    if args.strategy == "block":
        assert args.block_structure is not None
        high, wide = (-(-n // b) for n, b in zip(weight.shape, args.block_structure, strict=True))
    largest = {("int", 8): 127, ("int", 4): 7, ("float", 8): 448, ("float", 4): 6}
    size = weight.abs().max() / largest[args.type, args.num_bits]
    scales = size * (0.6 + 0.4 * torch.rand(high, wide, generator=draw))
    found = {"weight_scale": scales.to(dtype)}
    if args.type == "float" and args.num_bits == 4 and args.group_size == 32:
        found["weight_scale"] = scales.log2().floor().exp2().to(dtype)
    elif args.strategy == "tensor_group":
        found["weight_global_scale"] = torch.tensor([300.0])
        found["weight_scale"] = (scales * 300).to(torch.float8_e4m3fn).to(dtype)
    if args.strategy == "tensor":
        found["weight_scale"] = found["weight_scale"].reshape(1)
    if not args.symmetric:
        middle = 1 << (args.num_bits - 1)
        zeros = torch.randint(-middle, middle, (high, wide), generator=draw)
        found["weight_zero_point"] = zeros.to(torch.int8)
    return found


def four_bits(kind: str, *, nested: bool = False, size: int = 64) -> Encoder:
    """Return an encoder of bitsandbytes' nf4 or fp4. nested: whether scales are quantized."""

    def encode(name: str, weight: Tensor) -> Encoded:
        codes, state = functional.quantize_4bit(
            weight, blocksize=size, compress_statistics=nested, quant_type=kind
        )
        numbers = functional.dequantize_4bit(codes, state)
        tensors = {f"weight.{end}": one for end, one in state.as_dict(packed=True).items()}
        return Encoded({"weight": codes, **tensors}, numbers.float())

    return encode


def eight_bits(name: str, weight: Tensor) -> Encoded:
    """Encode as bitsandbytes' Linear8bitLt is saved."""
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    numbers = codes.float() * scales.float()[:, None] / 127
    one = functional.int8_vectorwise_dequant(codes, scales)
    torch.testing.assert_close(one.float(), numbers, rtol=1e-3, atol=1e-6)
    form = torch.tensor(0, dtype=torch.uint8)
    return Encoded({"weight": codes, "SCB": scales, "weight_format": form}, numbers)


def bitsandbytes_config(four: str | None = None) -> dict[str, Any]:
    """Return what transformers writes. four: kind of four bits; None for int8."""
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": four is not None,
        "load_in_8bit": four is None,
        "bnb_4bit_quant_type": four or "fp4",
        "bnb_4bit_compute_dtype": "float32",
        "bnb_4bit_use_double_quant": False,
        "llm_int8_skip_modules": None,
        "llm_int8_threshold": 6.0,
    }
