"""One GEMM by humming on a GPU: built with any schedule, checked, and timed with weights that are not in the cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from os import cpu_count
from typing import Any

import torch
from torch import Tensor

from onptq.kernels.grid import code_range
from onptq_vllm.linears.humming import PADDED_COLUMNS, PADDED_OUTPUTS, check_device, codes_with_padded_scales
from onptq_vllm.schedules.activations import Way, time_rounding
from onptq_vllm.schedules.candidates import candidates, early
from onptq_vllm.schedules.captured import captured_seconds
from onptq_vllm.schedules.few_rows import SINCE, FewRows, is_launch, launches, plain_gemm
from onptq_vllm.schedules.table import Gemm, Schedule

COLD = 4  # copies of the weight take so many times the L2 cache, so that each call reads its own from memory
REPLAY, RATE = 2e-3, 1e15  # seconds of a captured graph, at about so many operations a second
OTHER, BETWEEN_CALLS = 1024, 64  # of a small kernel between GEMMs: values, and calls by which it is timed
EARLY_SINCE = (9, 0)  # compute capability from which there is programmatic dependent launch
BIAS = 0.05  # smaller than the sums, so that it does not hide them
TOLERANCE = 2**-7  # of the largest value: sums are rounded to 16 bits, and again after they are scaled


class HummingGemm:
    """A GEMM with random codes; `activation_bits` is 16 or 8, `group` 0 or the columns of a weight group."""

    def __init__(
        self, outputs: int, inputs: int, weight_bits: int, activation_bits: int, group: int, dtype: torch.dtype
    ) -> None:
        device = torch.device("cuda")
        check_device(device, dtype, inputs)
        from humming import ops  # type: ignore[import-not-found, import-untyped, unused-ignore]
        from humming.layer import HummingLayer  # type: ignore[import-not-found, import-untyped, unused-ignore]

        self.device, self.dtype, self.activation_bits = device, dtype, activation_bits
        layer = HummingLayer(
            shape_n=outputs,
            shape_k=inputs,
            weight_config={"dtype": f"int{weight_bits}"} | ({"group_size": group} if group else {}),
            input_config={"dtype": "int8"} if activation_bits == 8 else None,
            pad_n_to_multiple=PADDED_OUTPUTS,
            pad_k_to_multiple=PADDED_COLUMNS,
            has_bias=True,
            torch_dtype=dtype,
        ).to(device)
        low, high = code_range(weight_bits)
        codes = torch.randint(0, high - low + 1, (outputs, inputs), device=device, dtype=torch.int32)
        scale = (torch.rand(outputs, inputs // group if group else 1, device=device) * 1e-3 + 1e-4).to(dtype)
        bias = (BIAS * torch.randn(outputs, device=device)).to(dtype)
        tensors = {"weight": ops.pack_weight(codes, weight_bits), "weight_scale": scale, "bias": bias}
        self.codes, self.low, self.scale, self.bias = codes.to(torch.uint8), low, scale, bias
        layer.load_from_tensors(tensors)
        layer.transform()
        self.layer, self.config = layer, layer.humming_config
        self.gemm = Gemm.of(self.config)
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        copies = -(-COLD * cache_bytes // layer.weight.nbytes)
        self.weights = [layer.weight.data.clone() for _ in range(max(2, copies))]
        # In a model another kernel lies between two GEMMs: they cannot overlap, and must not here.
        self.other = torch.ones(OTHER, device=device)
        self.between = captured_seconds(lambda call: self.other.neg_(), BETWEEN_CALLS)
        self._inputs: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._exact: dict[int, Tensor] = {}

    def inputs(self, rows: int) -> tuple[Tensor, Tensor | None]:
        if rows not in self._inputs:
            x = torch.randn(rows, self.layer.shape_k, device=self.device).to(self.dtype)
            self._inputs[rows] = (
                (x, None) if self.activation_bits == 16 else codes_with_padded_scales(x, self.activation_bits)
            )
        return self._inputs[rows]

    def exact(self, rows: int) -> Tensor:
        """The result in float32, rounded once. Those of the last two numbers of rows are cached."""
        if rows not in self._exact:
            self._exact = dict(list(self._exact.items())[-1:]) | {rows: self._multiply_in_float32(rows)}
        return self._exact[rows]

    def _multiply_in_float32(self, rows: int) -> Tensor:
        x, scale = self.inputs(rows)
        levels = (self.codes.float() + self.low).view(*self.scale.shape, -1)
        weight = levels * self.scale.float()[..., None]
        values = x.float() if scale is None else x.float() * scale
        return (values @ weight.flatten(1).T + self.bias.float()).to(self.dtype)

    def own(self, rows: int) -> Schedule:
        from humming.tune import get_heuristics_config  # type: ignore[import-not-found, import-untyped, unused-ignore]

        schedule: Schedule = json.loads(json.dumps(get_heuristics_config(self.config, shape_m=rows)))
        return schedule

    def candidates(self, rows: int) -> Iterable[Schedule]:
        yield from candidates(rows, self.own(rows), self.gemm.outputs, self.activation_bits)
        plain = plain_gemm(self.config.to_str())  # None where it is padded
        if plain is not None and torch.cuda.get_device_capability(self.device) >= SINCE:
            yield from launches(plain, rows)

    def refined(self, schedules: Sequence[Schedule]) -> Iterable[Schedule]:
        if torch.cuda.get_device_capability(self.device) >= EARLY_SINCE:
            yield from (early(one) for one in schedules if not is_launch(one))

    def build(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        from humming.kernel.humming import HummingKernel  # type: ignore[import-not-found, import-untyped, unused-ignore]

        text = self.config.to_str()

        def prepare(schedule: Schedule) -> Schedule | None:
            try:
                if is_launch(schedule):
                    self._few_rows(schedule)
                else:
                    HummingKernel.prepare_kernels(text, None, json.dumps(schedule), self.device.index or 0)
            except Exception:  # humming's checks, the compiler or the driver refuse a schedule that does not fit
                return None
            return schedule

        with ThreadPoolExecutor(cpu_count()) as pool:
            return [one for one in pool.map(prepare, schedules) if one is not None]

    def right(self, schedule: Schedule, rows: int) -> bool:
        expected = self.exact(rows)
        try:
            result = self._multiply(self.weights[0], rows, schedule)
        except RuntimeError:  # built, but the driver does not give it that much shared memory
            return False
        return bool((result - expected).abs().max() <= TOLERANCE * expected.abs().max())  # False for a NaN

    def seconds(self, schedule: Schedule, rows: int) -> float:
        operations = 2 * rows * self.gemm.outputs * self.gemm.inputs
        calls = max(1, min(len(self.weights), int(REPLAY * RATE / operations)))

        def multiply(call: int) -> None:
            self.other.neg_()
            self._multiply(self.weights[call], rows, schedule)

        return captured_seconds(multiply, calls) - self.between

    def _multiply(self, weight: Tensor, rows: int, schedule: Schedule) -> Tensor:
        from humming.forward import humming_forward  # type: ignore[import-not-found, import-untyped, unused-ignore]

        inputs, scale = self.inputs(rows)
        layer: Any = self.layer
        if is_launch(schedule):
            return self._few_rows(schedule)(inputs, weight, layer.weight_scale, layer.bias)
        result: Tensor = humming_forward(
            self.config,
            inputs=inputs,
            weight=weight,
            weight_scale=layer.weight_scale,
            bias=layer.bias,
            input_scale=scale,
            locks=layer.locks,
            tuning_config=json.dumps(schedule),
        )
        return result

    def _few_rows(self, launch: Schedule) -> FewRows:
        with torch.cuda.device(self.device):
            return FewRows.of(self.gemm, launch)

    def rounding(self, way: Way, rows: int) -> tuple[float, float] | None:
        return time_rounding(way, self.config, rows, self.gemm.inputs, self.dtype)
