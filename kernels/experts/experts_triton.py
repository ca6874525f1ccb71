"""The products of a mixture of experts in Triton.

A pair is a token and one of its experts. For a few pairs, each is multiplied by itself
(few_pairs_triton.py), or by those of its expert where experts are in codes (coded_few_gluon.py,
coded_pairs_triton.py; on a Hopper GPU, one row by coded_row.py). For more, they are sorted by
expert, in tiles (sorted_pairs.py). Then a tile is multiplied at once: by grouped_pairs_triton.py,
or by coded_pairs_triton.py where experts are in codes. On a Hopper GPU, experts in 16 bits stream
by (streamed_pairs.py). For many pairs there, clusters of processors do it (clustered_pairs.py). A
last kernel adds each token's results.

With expert parallelism, the pairs of other ranks' experts have negative ids. They are not sorted,
read no matrix, and count as zero.

No value is added atomically: each sum has one order, whatever else is in the step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sidestep.kernels.cuda.compiler import compiles
from sidestep.kernels.cuda.launcher import runs_or_compiles
from sidestep.kernels.cuda.tile_maps import can_be_tiled
from sidestep.kernels.experts.choices_triton import decided
from sidestep.kernels.experts.clustered_pairs import PAIRS, memory_of, multiply_many, takes
from sidestep.kernels.experts.coded_pairs_triton import multiply_few_codes, multiply_sorted_codes
from sidestep.kernels.experts.coded_row import multiply_row, takes_row
from sidestep.kernels.experts.common.choice_triton import chosen_in_kernels
from sidestep.kernels.experts.common.expert_matrix import ExpertMatrix
from sidestep.kernels.experts.common.experts_config import (
    ClusterConfigs,
    CodedConfigs,
    FewConfigs,
    RegisterConfigs,
    SortedConfigs,
    StreamConfigs,
    coded_configs,
    few_configs,
    register_configs,
    sorted_configs,
    stream_configs,
    waiting_config,
)
from sidestep.kernels.experts.common.product_behind import ProductBehind
from sidestep.kernels.experts.common.sorted_pairs_triton import combine_pairs, sort_pairs
from sidestep.kernels.experts.expert_codes import Coding, ExpertCodes
from sidestep.kernels.experts.few_pairs_triton import multiply_few
from sidestep.kernels.experts.grouped_pairs_triton import multiply_grouped
from sidestep.kernels.experts.streamed_pairs import first_reads, multiply_streamed
from sidestep.kernels.gpu import gpu_of, is_hopper
from sidestep.kernels.ops.rms_norm import Begun, RmsNorm
from sidestep.kernels.ops.routing import Routed, Undecided
from sidestep.kernels.quantized.device_matrix import STEP

Configs = FewConfigs | SortedConfigs | StreamConfigs
InCodes = CodedConfigs | RegisterConfigs
_LEAST_OF_CLUSTERS, _LEAST_CODES_OF_CLUSTERS = 64, 48
"""Pairs of an expert, on average, from which on clusters multiply numbers in 16 bits, and codes."""
_LEAST_OF_EACH = 4
"""Pairs of an expert, on average, from which on nearly all experts have one."""
_MOST_WIDTH = 5 << 10
"""Inputs of eight pairs that the shared memory of all GPUs from Hopper on has room for."""


def few_pairs(rows: int, chosen: int, num_experts: int) -> bool:
    """Return whether each pair is multiplied by itself.

    Then no more matrices are read than there are, and nothing has to be sorted.
    """
    return rows * chosen <= num_experts


def read_first(
    x: Tensor,
    chosen: int,
    gate_up: ExpertMatrix | ExpertCodes,
    down: ExpertMatrix | ExpertCodes,
    num_experts: int,
) -> Tensor | None:
    """Return what the usual products of x [T, D] read first, to be asked for before; or None.

    num_experts: all that tokens choose from. See first_reads of streamed_pairs.py.
    """
    pairs, few = len(x) * chosen, few_pairs(len(x), chosen, num_experts)
    if few or isinstance(gate_up, ExpertCodes) or isinstance(down, ExpertCodes):
        return None
    # With fewer pairs, blocks may begin with other experts.
    known = pairs >= _LEAST_OF_EACH * num_experts
    if not known or _suits_clusters(x, pairs, gate_up, down):
        return None
    streamed = isinstance(_configs(x, pairs, gate_up, down, few=few), StreamConfigs)
    return first_reads(gate_up) if streamed else None


def multiply_experts(
    x: Tensor,
    routed: Routed | Undecided,
    gate_up: ExpertMatrix | ExpertCodes,
    down: ExpertMatrix | ExpertCodes,
    out: Tensor,
    *,
    add: bool,
    gelu: bool = False,
    clamped: tuple[float, float] | None = None,
    few: bool | None = None,
    some: bool = False,
    norm: RmsNorm | None = None,
    behind: ProductBehind | None = None,
    configs: Configs | InCodes | ClusterConfigs | None = None,
) -> Begun | None:
    """Write the weighted sum of each token's experts to out [T, D], or add it.

    x [T, D]; gate_up [E, 2 F, D], the gate's rows first; down [E, D, F]; all contiguous, and both
    of one type, or both in codes. routed: the experts of each row, or what they are chosen from:
    the kernels of a few pairs may choose themselves. clamped: alpha and limit of clamped_swiglu, if
    that is the activation. few: whether no pair is sorted; None for the usual choice. some: whether
    pairs may have negative ids, which add nothing. norm: the norm that the result goes through
    next. behind: the product of that norm, if it is known. configs: None for the usual ones. Return
    the part of that norm that was computed on the way, or all of it, or that product, or None. As
    of other products, it is not begun in float16.
    """
    if len(x) == 0:
        return None
    rows, chosen = len(x), routed.chosen
    few = few_pairs(rows, chosen, down.num_experts) if few is None else few
    activation = gelu, *(clamped or (None, None))
    begun = norm if x.dtype == torch.bfloat16 else None
    # Products that round their inputs to 8 bits compute the norm on the way.
    whole = None if isinstance(gate_up, ExpertCodes) and gate_up.coding.rounds else norm
    if configs is None and not few and _suits_clusters(x, rows * chosen, gate_up, down):
        configs = ClusterConfigs()
    if isinstance(configs, ClusterConfigs):
        known = decided(routed) if isinstance(routed, Undecided) else routed
        tiles = sort_pairs(known.ids, down.num_experts, PAIRS)
        results = multiply_many(x, chosen, tiles, gate_up, down, activation)
        return combine_pairs(results, known, out, add=add, some=some, norm=whole)
    if isinstance(gate_up, ExpertCodes):
        assert isinstance(down, ExpertCodes) and not isinstance(configs, Configs)
        coded = configs or configs_in_codes(x, chosen, gate_up, down, few=few)
        matrices = gate_up, down, activation
        of_row = coded if isinstance(coded, RegisterConfigs) and configs is None else None
        if of_row and not some and takes_row(x, routed, gate_up, down, of_row):
            return multiply_row(
                x, routed, out, *matrices, of_row, add=add, norm=begun, behind=behind
            )
        unsorted = isinstance(coded, RegisterConfigs) or not coded.in_tiles
        if isinstance(routed, Undecided) and not (
            rows == 1 and unsorted and chosen_in_kernels(routed)
        ):
            routed = decided(routed)
        if isinstance(coded, RegisterConfigs):
            # Not every version of Triton has its language.
            from sidestep.kernels.experts.coded_few_gluon import multiply_from_registers

            return multiply_from_registers(
                x, routed, out, *matrices, coded, add=add, some=some, norm=begun
            )
        if unsorted:
            return multiply_few_codes(
                x, routed, out, *matrices, coded, add=add, some=some, norm=begun
            )
        assert isinstance(routed, Routed)
        tiles = sort_pairs(routed.ids, down.num_experts, coded.pairs)
        results = multiply_sorted_codes(x, chosen, tiles, *matrices, coded)
    else:
        assert isinstance(down, ExpertMatrix) and not isinstance(configs, InCodes)
        found = configs or _configs(x, rows * chosen, gate_up, down, few=few)
        alone = rows == 1 and isinstance(found, FewConfigs)
        if isinstance(routed, Undecided) and not (alone and chosen_in_kernels(routed)):
            routed = decided(routed)
        if isinstance(found, FewConfigs):
            few_operands = gate_up, down, activation, found
            return multiply_few(x, routed, out, *few_operands, add=add, some=some, norm=begun)
        assert isinstance(routed, Routed)
        tiles = sort_pairs(routed.ids, down.num_experts, found.pairs)
        sorted_pairs = x, chosen, tiles, gate_up, down, activation
        if isinstance(found, StreamConfigs):
            results = multiply_streamed(*sorted_pairs, found)
        else:
            results = multiply_grouped(*sorted_pairs, found)
    return combine_pairs(results, routed, out, add=add, some=some, norm=whole)


def _suits_clusters(
    x: Tensor, pairs: int, gate_up: ExpertMatrix | ExpertCodes, down: ExpertMatrix | ExpertCodes
) -> bool:
    """Return whether clusters multiply as many pairs of these experts."""
    codes = isinstance(gate_up, ExpertCodes)
    least = _LEAST_CODES_OF_CLUSTERS if codes else _LEAST_OF_CLUSTERS
    many = pairs >= least * down.num_experts
    # Kernels count bytes of x in 32 bits.
    small = x.numel() * x.element_size() < 1 << 32
    return many and small and _suits_hopper(x, gate_up, down)


def _suits_hopper(
    x: Tensor, gate_up: ExpertMatrix | ExpertCodes, down: ExpertMatrix | ExpertCodes
) -> bool:
    """Return whether kernels in CUDA C++ multiply these experts."""
    here = is_hopper(x.device) and runs_or_compiles(x) and compiles()
    readable = x.dtype != torch.float32 and can_be_tiled(x, memory_of(gate_up), memory_of(down))
    return here and readable and takes(gate_up, down)


def configs_in_codes(
    x: Tensor, chosen: int, gate_up: ExpertCodes, down: ExpertCodes, *, few: bool
) -> InCodes:
    """Return the usual configurations for coded matrices."""
    (rows, width), inner_width = x.shape, gate_up.num_rows // 2
    # Inputs are copied in pieces of 16 bytes, those of eight pairs at once.
    aligned = width % 8 == 0 and inner_width % 8 == 0 and width <= _MOST_WIDTH
    readable = _in_registers(x, gate_up.coding) and _in_registers(x, down.coding)
    if few and aligned and readable:
        four_bits = gate_up.coding.kind in ("int4", "mxfp4")
        found = register_configs(rows, width, inner_width, chosen, four_bits=four_bits)
        if found is not None:
            return found
    return coded_configs(rows * chosen, down.num_experts, few=few)


def _in_registers(x: Tensor, coding: Coding) -> bool:
    """Return whether the kernels that take codes straight into registers read this coding."""
    gpu = gpu_of(x.device)
    types = (torch.bfloat16,) if coding.kind == "mxfp4" else (torch.bfloat16, torch.float16)
    capable = gpu is not None and gpu.capability >= 90
    return capable and x.dtype in types and coding.width % STEP == 0


def _configs(
    x: Tensor, pairs: int, gate_up: ExpertMatrix, down: ExpertMatrix, *, few: bool
) -> Configs:
    """Return the usual configurations for matrices in 16 bits."""
    if few:
        usual, gpu = few_configs(), gpu_of(x.device)
        chosen = pairs // len(x)
        waiting = waiting_config(len(x), gate_up.num_rows // 2, chosen)
        if waiting is None or gpu is None or gpu.capability < 90 or x.dtype == torch.float32:
            return usual
        return replace(usual, down=waiting)
    sizes = pairs, down.num_experts
    if _suits_hopper(x, gate_up, down):
        return stream_configs(*sizes)
    return sorted_configs(*sizes)
