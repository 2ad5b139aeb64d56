"""Schedules for humming's GEMMs: the search, the file and the plugin, with stand-ins for the GPU, humming and vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from installed import installed  # noqa: F401
from typer.testing import CliRunner

from onptq.checkpoint.source import open_checkpoint
from onptq.cli import app
from onptq.errors import OnPTQError
from onptq.kernels.packets import SCALE_ROWS, empty_packet, unpacked
from onptq.progress import QuietReporter
from onptq.quantizer.norms import rms_norm
from onptq.quantizer.numerics import quantize_tokens
from onptq.schemes import Scheme

pytest.importorskip("onptq_vllm", reason="needs the package onptq-vllm: pip install ./packages/onptq-vllm")

from onptq_vllm.bench.published import find_published
from onptq_vllm.schedules import activations, plugin, table
from onptq_vllm.schedules.candidates import FEW_ROWS, candidates
from onptq_vllm.schedules.few_rows import is_launch
from onptq_vllm.schedules.search import LEAST, Span, search, search_rounding, spans
from onptq_vllm.schedules.shapes import joined, shapes_of
from onptq_vllm.schedules.table import END, Gemm, Schedule, Table, TunedSchedule, overlay
from onptq_vllm.schedules.tune import tune

NARROW = {"block_shape": [8, 128, 64], "warp_shape": [8, 32, 64], "num_stages": 4, "mma_type": "wgmma"}
WIDE = {"block_shape": [176, 128, 128], "warp_shape": [176, 16, 128], "num_stages": 4, "mma_type": "wgmma"}
GEMM = Gemm(64, 32, "int8", "uint4")


@dataclass
class StandInGemm:
    """Seconds by name; `own` is humming's."""

    times: Mapping[str, Mapping[int, float]]
    wrong: Sequence[str] = ()
    unbuilt: Sequence[str] = ()
    gemm: Gemm = GEMM
    builds: list[str] = field(default_factory=list)
    twins: Mapping[str, str] = field(default_factory=dict)
    roundings: Mapping[int, tuple[float, float] | None] = field(default_factory=dict)

    def own(self, rows: int) -> Schedule:
        return {"name": "own"}

    def candidates(self, rows: int) -> Iterable[Schedule]:
        return [{"name": name} for name in self.times if name != "own" and name not in self.twins.values()]

    def refined(self, schedules: Sequence[Schedule]) -> Iterable[Schedule]:
        return [{"name": self.twins[one["name"]]} for one in schedules if one["name"] in self.twins]

    def build(self, schedules: Sequence[Schedule]) -> list[Schedule]:
        self.builds += [one["name"] for one in schedules]
        return [one for one in schedules if one["name"] not in self.unbuilt]

    def right(self, schedule: Schedule, rows: int) -> bool:
        return schedule["name"] not in self.wrong

    def seconds(self, schedule: Schedule, rows: int) -> float:
        return self.times[schedule["name"]][rows]

    def rounding(self, way: str, rows: int) -> tuple[float, float] | None:
        return self.roundings.get(rows)


def test_each_number_of_rows_stands_for_those_above_its_half_or_the_one_before() -> None:
    assert spans([2, 1]) == [Span(0, 1, (1,)), Span(1, 2, (2,))]
    assert spans([1920, 2048]) == [Span(960, 1920, (1440, 1920)), Span(1920, 2048, (1921, 2048))]
    assert spans([2048, 1, 8]) == [Span(0, 1, (1,)), Span(4, 8, (6, 8)), Span(1024, 2048, (1536, 2048))]
    assert spans([16384, 8192])[-1] == Span(8192, END, (12288, 16384))
    assert spans([16384, 8192])[0].upto == 8192


def test_the_fastest_that_is_right_everywhere_is_chosen() -> None:
    times = {
        "own": {6: 1.0, 8: 1.0},
        "good": {6: 0.8, 8: 0.7},
        "better": {6: 0.6, 8: 0.6},
        "wrong": {6: 0.1, 8: 0.1},
        "unbuilt": {6: 0.1, 8: 0.1},
        "slower at six": {6: 1.01, 8: 0.1},
    }
    (tuned,) = search(StandInGemm(times, ["wrong"], ["unbuilt"]), [8])
    assert tuned.schedule == {"name": "better"}
    assert (tuned.above, tuned.upto) == (4, 8)
    assert tuned.seconds == {"6": (1.0, 0.6), "8": (1.0, 0.6)}
    assert tuned.speedup == pytest.approx(1 / 0.6)


def test_the_fastest_are_refined_and_so_is_hummings_own() -> None:
    times = {"own": {1: 1.0}, "good": {1: 0.8}, "good, early": {1: 0.7}, "own, early": {1: 0.5}}
    twins = {"own": "own, early", "good": "good, early"}
    (tuned,) = search(StandInGemm(times, twins=twins), [1])
    assert tuned.schedule == {"name": "own, early"}
    (tuned,) = search(StandInGemm(times, ["own, early"], twins=twins), [1])
    assert tuned.schedule == {"name": "good, early"}
    (tuned,) = search(StandInGemm(times, ["own, early"], ["good, early"], twins=twins), [1])
    assert tuned.schedule == {"name": "good"}


def test_a_gain_that_may_be_chance_does_not_replace_hummings_own() -> None:
    times = {"own": {1: 1.0}, "hardly": {1: 1 - LEAST / 2}}
    assert search(StandInGemm(times), [1]) == []


@pytest.mark.parametrize(
    ("roundings", "taken"),
    [
        ({1: (5e-6, 5.8e-6), 8: (2.0, 1.0)}, True),
        ({1: (1.0, 1.0), 8: (1.0, 1.0)}, True),
        ({1: (5e-6, 6.2e-6), 8: (2.0, 1.0)}, False),
        ({1: (1.0, 1.2), 8: (2.0, 1.0)}, False),
        ({1: None, 8: (2.0, 1.0)}, False),
    ],
)
def test_one_kernel_computes_and_rounds_where_it_is_right_and_never_slower(roundings: Any, taken: bool) -> None:
    seconds = search_rounding(StandInGemm({}, roundings=roundings), "gated", [8, 1])
    assert seconds == ({"1": roundings[1], "8": roundings[8]} if taken else {})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["normed", "attended", "gated"])
def test_wrong_codes_of_activations_show(way: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    maker = activations._maker(way)
    inputs = tuple(one.to(dtype) for one in maker.draw(5, 96))

    def is_right(packet: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        return activations._is_right(replace(maker, packet=lambda *one: packet(maker.plain(*one)[0])), inputs, 96)

    def without_scales(values: torch.Tensor) -> torch.Tensor:
        packet = packed(values)
        unpacked(packet, 96)[1].fill_(torch.nan)
        return packet

    assert is_right(packed)
    assert not is_right(lambda values: packed(1.1 * values))
    assert not is_right(lambda values: packed(values.flip(0)))
    assert not is_right(without_scales)
    if way == "normed":
        x, stream, gain = inputs
        normed, total = maker.plain(*inputs)
        assert torch.equal(total, x + stream)
        torch.testing.assert_close(normed, rms_norm(x + stream, gain, activations.EPS), rtol=0.02, atol=0.02)


def test_every_linear_of_a_layer_has_a_way_of_computing_its_activations() -> None:
    assert activations.WAYS.keys() == joined(64, 96, 4, 2, 16).keys()


def test_a_schedule_is_built_once_for_all_spans() -> None:
    bench = StandInGemm({"own": {1: 1.0, 2: 1.0}, "other": {1: 0.5, 2: 0.5}})
    assert len(search(bench, [1, 2])) == 2
    assert bench.builds == ["other"]


def test_tuned_intervals_replace_hummings() -> None:
    own = [(0, 8, {"a": 1}), (8, 2048, {"b": 1}), (2048, END, {"c": 1})]
    tuned = [
        TunedSchedule(1024, 4096, {"new": 1}, {"2048": (2.0, 1.0)}),
        TunedSchedule(0, 1, {"one": 1}, {"1": (2.0, 1.0)}),
    ]
    assert overlay(own, tuned) == [
        [0, 1, {"one": 1}],
        [1, 8, {"a": 1}],
        [8, 1024, {"b": 1}],
        [1024, 4096, {"new": 1}],
        [4096, END, {"c": 1}],
    ]
    assert overlay(own, []) == [list(interval) for interval in own]


def test_every_number_of_rows_has_the_tuned_schedule_or_else_hummings() -> None:
    random = Random(0)
    for _ in range(300):
        cuts = sorted(random.sample(range(1, 12), 3))
        own = [(above, upto, {"own": above}) for above, upto in zip((0, *cuts), (*cuts, 12), strict=True)]
        ends = sorted(random.sample(range(13), 3))  # of two spans that touch
        tuned = [TunedSchedule(a, b, {"tuned": a}, {"1": (2.0, 1.0)}) for a, b in pairwise(ends)]
        tuned = random.sample(tuned, random.randint(1, 2))
        intervals = overlay(own, tuned)
        chosen = {rows: schedule for above, upto, schedule in intervals for rows in range(above + 1, upto + 1)}
        for rows in range(1, 13):
            (theirs,) = [schedule for above, upto, schedule in own if above < rows <= upto]
            ours = [one.schedule for one in tuned if one.above < rows <= one.upto]
            assert chosen[rows] == (ours or [theirs])[0]
        assert [upto for _, upto, _ in intervals[:-1]] == [above for above, _, _ in intervals[1:]]
        assert all(above < upto for above, upto, _ in intervals)


@pytest.mark.parametrize("outputs", [3584, 4608, 37888])
@pytest.mark.parametrize(("rows", "own"), [(1, NARROW), (FEW_ROWS, NARROW), (2048, WIDE)])
def test_candidates_fit_the_weight_and_differ(outputs: int, rows: int, own: dict[str, Any]) -> None:
    schedules = list(candidates(rows, own, outputs, 8 if own is WIDE else 16))
    assert len({json.dumps(one, sort_keys=True) for one in schedules}) == len(schedules) > 20
    for one in schedules:
        columns = one["block_shape"][1] * one.get("multi_cast_size_a", 1)
        assert outputs % columns == 0
        assert all(block % warp == 0 for block, warp in zip(one["block_shape"], one["warp_shape"], strict=True))
        assert one.keys() >= own.keys()


def test_the_shapes_are_those_that_servers_join() -> None:
    dims = find_published("qwen2.5-vl-7b").dims
    shapes = joined(dims.hidden, dims.ffn, dims.heads, dims.kv_heads, dims.head_dim)
    assert shapes["qkv_proj"] == (4608, 3584)
    assert shapes["gate_up_proj"] == (37888, 3584)
    text = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    assert shapes_of({"text_config": text}) == joined(64, 96, 4, 2, 16)
    assert shapes_of({"text_config": text | {"head_dim": 32}})["o_proj"] == (64, 128)


def test_a_checkpoint_is_tuned_and_its_table_read_again(tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def make(*arguments: Any) -> StandInGemm:
        calls.append(arguments)
        outputs, inputs = arguments[:2]
        times, gemm = {"own": {1: 2.0}, "new": {1: 1.0}}, Gemm(outputs, inputs, "int8", "uint4")
        return StandInGemm(times, gemm=gemm, roundings={1: (2.0, 1.0)})

    source, out = open_checkpoint("zoo:qwen2.5-vl"), tmp_path / "deep" / "tuned.json"
    shapes = shapes_of(source.config)
    path, tuned, rounding = tune(source, Scheme.parse("W4A8"), "float16", [1], out, QuietReporter(), make)
    assert path == out
    assert tuned.keys() == shapes.keys()
    assert calls == [(*shape, 4, 8, 0, torch.float16) for shape in shapes.values()]
    again = Table.read(out)
    key = str(Gemm(*shapes["qkv_proj"], "int8", "uint4"))
    assert again.gemms[key] == tuned["qkv_proj"] == [TunedSchedule(0, 1, {"name": "new"}, {"1": (2.0, 1.0)})]
    assert rounding == {name: {"1": (2.0, 1.0)} for name in shapes}
    assert again.rounding == {str(Gemm(*shape, "int8", "uint4")): {"1": (2.0, 1.0)} for shape in shapes.values()}
    again.gemms["another"] = []
    again.write(out)
    tune(source, Scheme.parse("W4A8"), "float16", [1], out, QuietReporter(), make)
    assert "another" in Table.read(out).gemms  # entries of another checkpoint stay
    assert not tune(source, Scheme.parse("W4A16"), "float16", [1], tmp_path / "16.json", QuietReporter(), make)[2]


def test_a_table_of_another_gpu_is_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "tuned.json"
    Table("Another", "one").write(out)
    with pytest.raises(OnPTQError, match="was tuned on Another with humming one"):
        tune(
            open_checkpoint("zoo:qwen2.5-vl"),
            Scheme.parse("W4A8"),
            "float16",
            [1],
            out,
            QuietReporter(),
            lambda *arguments: StandInGemm({}),
        )


@pytest.mark.parametrize(
    ("scheme", "dtype", "message"), [("W4A6", "float16", "W4A6"), ("W4A8", "int4", "expected one of")]
)
def test_a_scheme_or_dtype_that_cannot_be_tuned_is_refused(scheme: str, dtype: str, message: str) -> None:
    with pytest.raises(OnPTQError, match=message):
        tune(open_checkpoint("zoo:qwen2.5-vl"), Scheme.parse(scheme), dtype, [1], None, QuietReporter())


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tuned.json").write_text("{}")
    with pytest.raises(OnPTQError, match=r"cannot read schedules from .*tuned\.json"):
        Table.read(tmp_path / "tuned.json")


@pytest.mark.parametrize("schedule", [{"a": "1; }"}, {"a b": 1}, {"a": [1, "{{x}}"]}, {"a": 1.5}, {"a": {"b": 1}}])
def test_a_schedule_with_more_than_numbers_and_words_is_refused(schedule: dict[str, Any], tmp_path: Path) -> None:
    """A schedule becomes part of a kernel's source."""
    Table("GPU", "one", {"gemm": [TunedSchedule(0, 1, schedule, {"1": (2.0, 1.0)})]}).write(tmp_path / "tuned.json")
    with pytest.raises(OnPTQError, match="cannot read schedules"):
        Table.read(tmp_path / "tuned.json")


def test_the_file_is_one_for_each_gpu_and_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONPTQ_CACHE", str(tmp_path))
    monkeypatch.delenv(table.FILE, raising=False)
    assert table.table_path("NVIDIA H200", "0.1.17") == tmp_path / "schedules" / "nvidia-h200-humming-0.1.17.json"
    assert not table.tables_exist()
    Table("NVIDIA H200", "0.1.17").write(table.table_path("NVIDIA H200", "0.1.17"))
    assert table.tables_exist()
    monkeypatch.setenv(table.FILE, str(tmp_path / "own.json"))
    assert table.table_path("NVIDIA H200", "0.1.17") == tmp_path / "own.json"


@pytest.mark.usefixtures("installed")
def test_the_command_needs_a_gpu_and_a_quantized_checkpoint(tmp_path: Path) -> None:
    import onptq
    from onptq.recipe import Recipe

    recipe = Recipe.preset("risk", {"method": "rtn", "scheme": "W4A8"})
    onptq.quantize("zoo:qwen2.5-vl", tmp_path / "W4A8", recipe=recipe, verify=False)
    done = CliRunner().invoke(app, ["tune", str(tmp_path / "W4A8"), "--dtype", "float16"])
    assert done.exit_code == 2
    assert "no CUDA GPU" in done.output
    done = CliRunner().invoke(app, ["tune", "zoo:qwen2.5-vl"])
    assert done.exit_code == 2
    assert "has no quantization that can be tuned" in done.output


def stand_in(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> None:
    """Modules with these contents, and the packages around them."""
    for path, values in contents.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name, value in values.items():
            monkeypatch.setattr(sys.modules[path], name, value, raising=False)


@pytest.fixture
def heuristics(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A stand-in for humming's choice of schedules, and a table for one GEMM."""

    class DeviceHeuristics:
        @classmethod
        def get_configs(cls, layer_config: Any, use_f16_accum: bool = False, use_batch_invariant: bool = False) -> Any:
            return [[0, END, {"own": cls.__name__}]]

    class Hopper(DeviceHeuristics):
        pass

    stand_in(monkeypatch, {"humming.tune.base": {"DeviceHeuristics": DeviceHeuristics}})
    monkeypatch.setattr(plugin, "find_spec", lambda name: object())
    monkeypatch.setattr(plugin, "version", lambda name: "0.1.17")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setenv(table.FILE, str(tmp_path / "tuned.json"))
    plugin.tuned_here.cache_clear()
    tuned = [TunedSchedule(0, 1, {"new": 1}, {"1": (2.0, 1.0)})]
    gemm = str(Gemm(64, 32, "int8", "uint4"))
    Table("GPU", "0.1.17", {gemm: tuned}, {gemm: {"1": (2.0, 1.0)}}).write(tmp_path / "tuned.json")
    yield Hopper
    plugin.tuned_here.cache_clear()


def layer(outputs: int = 64, num_experts: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        shape_n=outputs, shape_k=32, a_dtype="int8", b_dtype="uint4", weight_scale_group_size=0, num_experts=num_experts
    )


def test_the_plugin_overlays_the_tuned_schedules_and_nothing_else(heuristics: Any) -> None:
    for _ in range(2):  # vLLM may call it more than once
        plugin.register()
    own = [[0, END, {"own": "Hopper"}]]
    assert heuristics.get_configs(layer_config=layer()) == [[0, 1, {"new": 1}], [1, END, {"own": "Hopper"}]]
    assert heuristics.get_configs(layer_config=layer(outputs=128)) == own
    assert heuristics.get_configs(layer_config=layer(num_experts=8)) == own
    assert heuristics.get_configs(layer_config=layer(), use_batch_invariant=True) == own
    assert heuristics.get_configs(layer_config=layer(), use_f16_accum=True) == own


def test_a_broken_table_leaves_humming_as_it_is(
    heuristics: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tuned.json").write_text("{")
    plugin.register()
    assert heuristics.get_configs(layer_config=layer()) == [[0, END, {"own": "Hopper"}]]
    assert "cannot read schedules" in caplog.text


def test_a_table_of_another_gpu_leaves_humming_as_it_is(
    heuristics: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Another")
    plugin.register()
    assert heuristics.get_configs(layer_config=layer()) == [[0, END, {"own": "Hopper"}]]
    assert "was tuned on GPU with humming 0.1.17; expected a file for Another, humming 0.1.17" in caplog.text


class Linear:
    """A linear like vLLM's, with a kernel of its own; it returns a pair of output and bias."""

    def __init__(self, kernel: Any, outputs: int, inputs: int) -> None:
        self.kernel, self.outputs, self.inputs = kernel, outputs, inputs
        kernel.process_weights_after_loading(self)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.kernel.apply_weights(self, x), None


def packed(values: torch.Tensor) -> torch.Tensor:
    """The packet of the codes by plain PyTorch."""
    rows, width = values.shape
    packet = empty_packet(rows, width, values)
    for one, computed in zip(unpacked(packet, width), quantize_tokens(values, 8), strict=True):
        one.copy_(computed)
    return packet


@dataclass
class Server:
    """A stand-in for vLLM's Qwen blocks and humming's rounding. `calls` records norms and roundings in order."""

    version: str
    added: int = 0  # columns
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        server = self

        class HummingLinearKernel:
            def process_weights_after_loading(self, layer: Any) -> None:
                self.config = SimpleNamespace(
                    shape_n=layer.outputs,
                    shape_k=layer.inputs,
                    a_dtype="int8",
                    b_dtype="uint4",
                    weight_scale_group_size=0,
                    pad_shape_k=server.added,
                )
                if server.version == "0.26":
                    layer.humming_metas = {"": self.config}
                else:
                    self.layer_config = self.config
                self.weight = torch.linspace(-1, 1, layer.outputs * layer.inputs).view(layer.outputs, layer.inputs)

            def apply_weights(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
                codes, _, scale = sys.modules["humming.forward"].may_process_input(self.config, inputs=x)
                return codes.float() * scale @ self.weight.T

        class RMSNorm:
            weight, variance_epsilon = torch.nn.Parameter(torch.linspace(0.5, 2, 16)), 1e-5

            def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
                server.calls.append("norm")
                total = x if residual is None else x + residual
                normed = rms_norm(total, self.weight.data, self.variance_epsilon)
                return normed if residual is None else (normed, total)

        class Attention:
            def __init__(self) -> None:
                self.qkv_proj, self.o_proj = (Linear(HummingLinearKernel(), *shape) for shape in ((48, 16), (16, 16)))

            def __call__(self, positions: Any, hidden_states: torch.Tensor) -> torch.Tensor:
                q, k, v = self.qkv_proj(hidden_states)[0].chunk(3, -1)
                return self.o_proj(q * k + v)[0]

        class Qwen2MLP:
            def __init__(self) -> None:
                self.gate_up_proj = Linear(HummingLinearKernel(), 64, 16)
                self.down_proj = Linear(HummingLinearKernel(), 16, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                gate, up = self.gate_up_proj(x)[0].chunk(2, -1)
                return self.down_proj(torch.nn.functional.silu(gate) * up)[0]

            def __call__(self, x: torch.Tensor) -> torch.Tensor:
                return self.forward(x)

        class Qwen2DecoderLayer:
            def __init__(self) -> None:
                self.self_attn, self.mlp = Attention(), Qwen2MLP()
                self.input_layernorm = self.post_attention_layernorm = RMSNorm()

            def forward(self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
                if residual is None:
                    x, residual = self.input_layernorm(hidden_states), hidden_states
                else:
                    x, residual = self.input_layernorm(hidden_states, residual)
                x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
                return self.mlp(x), residual

        class Qwen3DecoderLayer:
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                return hidden_states

        self.kernel, self.mlp, self.layer, self.other = (
            HummingLinearKernel,
            Qwen2MLP,
            Qwen2DecoderLayer,
            Qwen3DecoderLayer,
        )

    def may_process_input(self, config: Any, inputs: torch.Tensor, **options: Any) -> Any:
        self.calls.append("humming")
        codes, scale = quantize_tokens(inputs, 8)
        return codes, None, scale

    def _packet(self, name: str, values: torch.Tensor) -> torch.Tensor:
        self.calls.append(name)
        return packed(values)

    def token_codes(self, x: torch.Tensor) -> torch.Tensor:
        return self._packet("tokens", x)

    def gated_codes(self, pairs: torch.Tensor) -> torch.Tensor:
        gate, up = pairs.chunk(2, -1)
        return self._packet("gated", torch.nn.functional.silu(gate) * up)

    def normed_codes(self, x: torch.Tensor, stream: torch.Tensor, gain: torch.Tensor, eps: float) -> Any:
        return self._packet("normed", rms_norm(x + stream, gain, eps)), x + stream

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        models = "vllm.model_executor.models"
        humming = "vllm.model_executor.kernels.linear.mixed_precision.humming"
        stand_in(
            monkeypatch,
            {
                "humming.forward": {"may_process_input": self.may_process_input},
                humming: {"HummingLinearKernel": self.kernel},
                f"{models}.qwen2": {"Qwen2MLP": self.mlp, "Qwen2DecoderLayer": self.layer},
                f"{models}.qwen3": {"Qwen3DecoderLayer": self.other},
                "onptq_vllm.kernels.tokens": {"operator": lambda: self.token_codes},
                "onptq_vllm.kernels.gated": {"operator": lambda: self.gated_codes},
                "onptq_vllm.kernels.normed": {"operator": lambda: self.normed_codes},
            },
        )
        monkeypatch.setattr(sys.modules["humming"], "forward", sys.modules["humming.forward"], raising=False)


SHAPES = {"qkv": (48, 16), "o": (16, 16), "gate_up": (64, 16), "down": (16, 32)}
APART = ["norm", "humming", "humming", "norm", "humming", "humming"]


@pytest.mark.parametrize("version", ["0.26", "0.32"])
@pytest.mark.parametrize(
    ("chosen", "first", "second"),
    [
        ("", APART, APART),
        (
            "qkv o gate_up down",
            ["norm", "tokens", "tokens", "normed", "gated"],
            ["normed", "tokens", "normed", "gated"],
        ),
        ("qkv", ["norm", "tokens", *APART[2:]], ["normed", *APART[2:]]),
        ("gate_up", [*APART[:3], "normed", "humming"], [*APART[:3], "normed", "humming"]),
        ("down", [*APART[:5], "gated"], [*APART[:5], "gated"]),
    ],
)
def test_the_inputs_of_a_gemm_are_rounded_where_they_are_computed(
    heuristics: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    version: str,
    chosen: str,
    first: list[str],
    second: list[str],
) -> None:
    """In two blocks, the first without a residual stream. The results are those of separate rounding."""
    rounding: dict[str, Mapping[str, tuple[float, float]]] = {
        str(Gemm(*SHAPES[name], "int8", "uint4")): {"1": (2.0, 1.0)} if name in chosen.split() else {}
        for name in SHAPES
    }
    Table("GPU", "0.1.17", {}, rounding).write(tmp_path / "tuned.json")
    server = Server(version)
    server.install(monkeypatch)

    def run() -> Any:
        blocks = server.layer(), server.layer()
        x, stream = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), None
        for block in blocks:
            x, stream = block.forward(None, x, stream)
        return x, stream

    expected = run()
    assert server.calls == APART + APART
    for _ in range(2):
        plugin.register()
    server.calls.clear()
    assert all(map(torch.equal, run(), expected))
    assert server.calls == first + second
    assert "norms do not round: unsupported Qwen3DecoderLayer in this version of vLLM" in caplog.text


def test_layers_with_padded_columns_are_rounded_by_humming(
    heuristics: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Table("GPU", "0.1.17", {}, {"16x32 int8xuint4": {"1": (2.0, 1.0)}}).write(tmp_path / "tuned.json")
    server = Server("0.32", added=8)
    server.install(monkeypatch)
    plugin.register()
    server.mlp().forward(torch.ones(3, 16))
    assert server.calls == ["humming", "humming"]


def test_a_layer_refuses_columns_of_neither_activations_nor_a_packet(
    heuristics: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Table("GPU", "0.1.17", {}, {"16x32 int8xuint4": {"1": (2.0, 1.0)}}).write(tmp_path / "tuned.json")
    server = Server("0.32")
    server.install(monkeypatch)
    plugin.register()
    down = server.mlp().down_proj
    with pytest.raises(ValueError, match="32 inputs got 20 columns: expected 32 of activations or 12 of a packet"):
        down(torch.ones(3, 20))


def test_an_unsupported_vllm_rounds_by_humming(heuristics: Any, caplog: pytest.LogCaptureFixture) -> None:
    plugin.register()
    assert "activations are rounded by humming" in caplog.text
    assert heuristics.get_configs(layer_config=layer())[0] == [0, 1, {"new": 1}]


def test_packets_pass_through_compiled_code() -> None:
    """With any number of rows, and without a copy of the codes."""

    def multiply(packet: torch.Tensor) -> torch.Tensor:
        codes, scale = unpacked(packet.view(-1, packet.shape[-1]), 32)
        return codes.float() * scale

    compiled = torch.compile(multiply, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 3, 8):
        x = torch.randn(rows, 32).half()
        packet = empty_packet(rows, 32, x)
        codes, scale = unpacked(packet, 32)
        expected = quantize_tokens(x, 8)
        codes.copy_(expected[0])
        scale.copy_(expected[1])
        assert codes.data_ptr() == packet.data_ptr()
        assert packet.shape[-1] != x.shape[-1]
        assert packet.nbytes >= codes.nbytes + scale.element_size() * SCALE_ROWS
        assert torch.equal(compiled(packet), expected[0].float() * expected[1].float())


def test_vllm_compiles_again_after_a_change_of_the_table(
    heuristics: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    variables: dict[str, Any] = {}
    stand_in(monkeypatch, {"vllm.envs": {"environment_variables": variables}})
    monkeypatch.setattr(sys.modules["vllm"], "envs", sys.modules["vllm.envs"], raising=False)
    plugin.register()
    (key,) = variables.values()
    first = key()
    assert first == (tmp_path / "tuned.json").read_text()
    Table("GPU", "0.1.17").write(tmp_path / "tuned.json")
    plugin.tuned_here.cache_clear()  # another process
    assert key() != first


def test_launches_of_few_rows_are_not_given_to_humming(heuristics: Any, tmp_path: Path) -> None:
    launch = {"kernel": "few_rows", "warps": 8, "cluster": 4, "depth": 2}
    tuned = [TunedSchedule(0, 1, launch, {"1": (2.0, 1.0)}), TunedSchedule(1, 8, {"new": 1}, {"8": (2.0, 1.0)})]
    Table("GPU", "0.1.17", {str(GEMM): tuned}).write(tmp_path / "tuned.json")
    plugin.register()
    own = {"own": "Hopper"}
    assert heuristics.get_configs(layer_config=layer()) == [[0, 1, own], [1, 8, {"new": 1}], [8, END, own]]


@pytest.mark.slow
def test_without_humming_the_plugin_changes_nothing(heuristics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    own = heuristics.get_configs.__func__
    monkeypatch.setattr(plugin, "find_spec", lambda name: None)
    plugin.register()
    assert heuristics.get_configs.__func__ is own


def test_without_a_table_the_plugin_changes_nothing(
    heuristics: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server("0.32")
    server.install(monkeypatch)
    monkeypatch.delenv(table.FILE)
    monkeypatch.setenv("ONPTQ_CACHE", str(tmp_path / "empty"))
    own = heuristics.get_configs.__func__, server.mlp.forward, server.layer.forward
    plugin.register()
    assert own == (heuristics.get_configs.__func__, server.mlp.forward, server.layer.forward)
    assert sys.modules["humming.forward"].may_process_input == server.may_process_input


@pytest.mark.slow
@pytest.mark.skipif(find_spec("humming") is not None, reason="humming is installed here")
def test_without_humming_the_plugin_imports_nothing_heavy(tmp_path: Path) -> None:
    """In a process of its own, with a table of some GPU."""
    program = (
        "import sys\nfrom onptq_vllm.schedules.plugin import register\nregister()\n"
        "assert not {'humming', 'vllm', 'transformers', 'triton'} & sys.modules.keys(), sys.modules.keys()"
    )
    Table("GPU", "0.1.17").write(tmp_path / "tuned.json")
    environment = os.environ | {table.FILE: str(tmp_path / "tuned.json")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("installed")
def test_vllm_finds_the_plugin() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="onptq_vllm")
    assert entry.load() is plugin.register


def test_the_published_tables_are_read() -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    tuned = Table.read(results / "h200-schedules-w4a16.json")
    assert tuned.device == "NVIDIA H200"
    assert tuned.gemms[str(Gemm(37888, 3584, "float16", "uint4"))][0].speedup > 1.3
    few = Table.read(results / "h200-schedules-few-rows.json").gemms.values()
    assert all(is_launch(one.schedule) and one.speedup > 1.4 for spans in few for one in spans)
