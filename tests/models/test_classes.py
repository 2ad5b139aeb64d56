"""Transformers classes that no file describes: found by structure, prepared by their own processors, quantized as any other.

The published table of supported models is held against what is covered here (tests/test_docs.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import Tiny
from model_tables import published_types
from naive import Scene, random_theta, without_ties
from random_classes import CLASSES, write_class
from torch import nn
from transformers.utils import is_torchvision_available

import onptq
from onptq.check.probes import probe_prompt
from onptq.checkpoint.folder import read_folder
from onptq.checkpoint.load import load_model, load_policy
from onptq.checkpoint.names import find_decoder
from onptq.checkpoint.source import Source, find_source
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare, head_fits
from onptq.engine.agreement import check_agreement
from onptq.engine.prefixes import Prefixes
from onptq.errors import OnPTQError
from onptq.evaluate.attribution import _margins
from onptq.methods.linears import dense_weight
from onptq.methods.rtn import rtn
from onptq.models import family_of
from onptq.models.decoder import Tokens
from onptq.models.processing import PromptProcessor
from onptq.models.structure import PRODUCERS, find_structure
from onptq.progress import QuietReporter
from onptq.quantizer.modules import QuantLinear
from onptq.quantizer.proof import prove
from onptq.quantizer.theta import Theta, log_scales_in, log_scales_out
from onptq.quantizer.weights import smoothed
from onptq.recipe import Recipe
from onptq.run import final_theta
from onptq.schemes import Scheme

HORIZON, VISITED = 3, 2
TORCHVISION = (
    pytest.mark.torchvision,
    pytest.mark.skipif(not is_torchvision_available(), reason="its processor needs torchvision"),
)


def images_need_torchvision() -> bool:
    """Whether this version of transformers loads no image processor at all without it, as 5.17."""
    try:
        return not callable(transformers.AutoImageProcessor.from_pretrained)
    except ImportError:
        return True


STATES = (pytest.mark.skipif(not hasattr(transformers.Cache, "get_conv_state"), reason="its class is too old"),)


def known(name: str) -> Any:
    return pytest.param(name, marks=STATES) if name == "qwen3_5" else name


NAMES = [
    pytest.param(name, marks=TORCHVISION)
    if made.torchvision or ("image" in made.modalities and images_need_torchvision())
    else known(name)
    for name, made in CLASSES.items()
]
SHORT = {
    "scheme": "W4A8",
    "rounds": 1,
    "data.prompts": 3,
    "data.holdout": 1,
    "follow.max_tokens": 4,
    "init": "smoothquant",
    "calibrate.codes": "free",
    "calibrate.epochs": 1,
    "calibrate.batch": 2,
    "calibrate.keep": "last",
    "compute.device": "cpu",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    known: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in known:
            folder = write_class(name, tmp_path_factory.mktemp(name))
            source = find_source(folder)
            known[name] = Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))
        return known[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_everything_outside_the_decoder_is_left_alone_and_every_pair_of_it_folds(
    name: str, made: Callable[[str], Tiny]
) -> None:
    tiny, expected = made(name), CLASSES[name]
    family = tiny.source.family
    assert family.derived
    assert family.modalities == expected.modalities
    assert set(re.findall(r"\w{2,}", " ".join(family.towers))) >= set(expected.towers)
    policy = tiny.policy("W4A16")
    assert len(policy.unfolded) == len(expected.unfolded)
    assert all(map(str.startswith, policy.unfolded, expected.unfolded))
    patterns = [re.compile(pattern.removeprefix("re:")) for pattern in family.ignore]
    inside = next(path for path, module in policy.model.named_modules() if module is policy.structure.decoder)
    on_disk = find_decoder(tiny.source.checkpoint.tensors, family.ignore, family.linears)
    at_run_time = [path for path, module in policy.model.named_modules() if isinstance(module, nn.Linear)]
    assert len(at_run_time) > 1 or not expected.towers, "a tower has linears"
    outside = [*at_run_time, *(name for name in tiny.source.checkpoint.modules if not name.startswith(on_disk.prefix))]
    for path in outside:
        assert path == "image_newline" or any(pattern.match(path) for pattern in patterns), path
    for prefix in (f"{inside}.", on_disk.prefix, "language_model.model."):  # the last is a server's
        for linear in on_disk.linears:
            assert not any(pattern.match(prefix + linear) for pattern in patterns), (prefix, linear)


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_sees_what_the_class_sees_and_branches_as_it_would(name: str, made: Callable[[str], Tiny]) -> None:
    """The forward of transformers over everything again, for every state and branch, is the oracle."""
    with without_ties():
        scenery = Scene(made(name), "W4A16", torch.float32, ordinals=(0, 4, 7))
        policy = scenery.policy
        lengths = {ordinal: one.length for ordinal, one in scenery.inputs.items()}
        trajectories = [scenery.rollout(ordinal, VISITED) for ordinal in scenery.ordinals]
        prefixes = Prefixes(
            policy, scenery.encoded(policy), max_tokens=VISITED, batch_tokens=3 * max(lengths.values()) + 9
        )
        states = compare(prefixes, trajectories)
        for row in range(len(states)):
            expected = scenery.state(int(states.prompt[row]), int(states.t[row]))
            assert (states.reference[row], states.quantized[row]) == (expected.reference, expected.quantized)
            assert states.kl[row] == pytest.approx(expected.kl, abs=1e-5)
        found = branch(prefixes, trajectories, states, horizon=HORIZON, everywhere=True)
        for row in np.linspace(0, len(states) - 1, 3).round().astype(int):
            fork = scenery.fork(int(states.prompt[row]), int(states.t[row]), HORIZON)
            assert found.consequence[row] == pytest.approx(fork.consequence(HORIZON, ()), abs=1e-5)


def test_the_norm_behind_the_attention_is_no_producer_where_the_mlp_has_one_of_its_own(
    made: Callable[[str], Tiny],
) -> None:
    """Gemma 3's post_attention_layernorm has the usual name, but its output goes to the residual stream."""
    structure = find_structure(load_model(made("gemma3").source, torch.float32, torch.device("cpu")))
    assert {block.producers["norm_gate_up"] for block in structure.blocks} == {"pre_feedforward_layernorm"}
    wrong = tuple(replace(block, producers=PRODUCERS) for block in structure.blocks)
    proven, (sentence,) = prove(replace(structure, blocks=wrong))
    assert "post_attention_layernorm -> gate_proj, up_proj does not fold in 3 of 3 layers" in sentence
    assert all("norm_gate_up" not in block.producers for block in proven.blocks)


@pytest.fixture(scope="module")
def lending(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Gemma 4 as E2B is: the last layers borrow keys and values, and all have inputs of their own."""
    return find_source(write_class("gemma4_e2b", tmp_path_factory.mktemp("lending")))


def test_values_that_later_layers_borrow_are_not_smoothed_into_one_o_proj(lending: Source) -> None:
    """Without the norm behind v the pair folds wherever nobody else reads the values."""
    model = load_model(lending, torch.float32)
    blocks = find_structure(model).blocks
    assert [(block.lends, block.borrows) for block in blocks] == [
        (False, False),
        *[(True, False)] * 2,
        *[(False, True)] * 3,
    ]
    for block in blocks:
        block.module.self_attn.v_norm = nn.Identity()  # type: ignore[union-attr]
    proven, (sentence,) = prove(find_structure(model))
    assert sentence.startswith("v_proj -> o_proj does not fold in 2 of 6 layers, e.g. layers.1 ")
    assert ["v_o" in block.producers for block in proven.blocks] == [True, *[False] * 5]


def test_gradients_reach_keys_and_values_through_all_layers_that_borrow_them(lending: Source) -> None:
    """Blocks that run again in the backward pass give the gradients of one graph of all."""
    policy = load_policy(lending, "W4A8", device="cpu", dtype="float32")
    ids = torch.randint(0, 500, (1, 9), generator=torch.Generator().manual_seed(0))
    tokens = Tokens(policy.embed(ids), torch.arange(9)[None, None], None)
    gradients = []
    for checkpointed in (False, True):
        theta = random_theta(policy)
        for u in theta.smoothing.values():
            u.requires_grad_()
        policy.attach(theta)
        with policy.speaking("Q"):
            policy.run(tokens, checkpointed=checkpointed).square().sum().backward()
        gradients.append({key: u.grad for key, u in theta.smoothing.items()})
    for key, expected in gradients[0].items():
        again = gradients[1][key]
        assert expected is not None, key
        assert again is not None, key
        assert torch.allclose(again, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max())), key


def test_capped_logits_are_capped_in_every_measure(lending: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(lending, "W4A16", device="cpu", dtype="float32")
    hidden = 3 * torch.randn(4, policy.structure.width, generator=torch.Generator().manual_seed(0))
    plain = policy.structure.head(policy.structure.decoder.norm(hidden))  # type: ignore[operator]
    logits = policy.logits(hidden)
    assert plain.abs().max() > 3
    assert torch.allclose(logits, 3 * torch.tanh(plain / 3), atol=1e-6)
    top = logits.topk(2).indices.numpy()
    states: Any = SimpleNamespace(reference=top[:, 0], competitor=top[:, 1])
    expected = logits.gather(-1, torch.from_numpy(top))
    assert torch.allclose(_margins(policy, hidden, states), expected[:, 0] - expected[:, 1], atol=1e-5)
    monkeypatch.setenv("ONPTQ_KERNELS", "on")
    assert not head_fits(policy, hidden, hidden), "kernels know no cap"


class Interrupted(QuietReporter):
    """A reporter that stops the run where a phase begins."""

    def phase(self, name: str, total: int | None = None, unit: str = "") -> Any:
        if name.startswith("Calibrate"):
            raise KeyboardInterrupt
        return super().phase(name, total, unit)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_cycle_that_was_interrupted_ends_in_a_checkpoint_that_transformers_reloads_exactly(
    name: str, made: Callable[[str], Tiny], tmp_path: Path
) -> None:
    tiny, recipe = made(name), Recipe.preset("risk", SHORT)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        onptq.quantize(tiny.folder, out, calibration=tiny.manifest, recipe=recipe, reporter=Interrupted())
    summary = onptq.quantize(tiny.folder, out, calibration=tiny.manifest, recipe=recipe).summary
    assert summary["rounds"]
    assert summary["verification"]["max_abs_difference"] == 0.0
    assert len(summary["unfolded"]) == len(CLASSES[name].unfolded)
    assert all(check["passed"] for check in summary["verification"]["checks"] if check["name"] in ("reload", "schemes"))

    processor = PromptProcessor.from_folder(out, tiny.source.family, tiny.source.config)
    inputs = processor(probe_prompt(tiny.source.family.modalities)).tensors
    media = {"image": "pixel_values", "audio": "input_features"}
    assert all(media[kind] in inputs for kind in tiny.source.family.modalities - {"text"})
    policy = tiny.policy("W4A8")
    policy.freeze(Theta.load(final_theta(out, 1)))
    loaded = getattr(transformers, tiny.source.family.model_class).from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode(), policy.speaking("Q"):
        expected = policy.model(**inputs, use_cache=False).logits
        logits = loaded.to(torch.float32).eval()(**inputs, use_cache=False).logits
    assert torch.equal(logits, expected)
    assert not torch.equal(logits, tiny.policy("W4A8").model(**inputs, use_cache=False).logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, made in CLASSES.items() if made.model_type not in published_types()])
def test_the_shapes_of_the_default_config_of_transformers_fit(name: str) -> None:
    """Published sizes as far as transformers' own defaults are those of a published checkpoint; no weight is made."""
    config = transformers.AutoConfig.for_model(CLASSES[name].model_type)
    settings = config.to_dict()
    settings.get("text_config", settings).update(CLASSES[name].published)
    config = type(config).from_dict(settings)
    family = family_of(config.to_dict())  # runs all layers on shapes alone
    with torch.device("meta"):
        structure = find_structure(getattr(transformers, family.model_class)(config))
    assert len(structure.blocks) == config.get_text_config().num_hidden_layers > 2
    theta = Theta.rtn(structure.blocks, Scheme.parse("W4A8"), "meta")
    for block in (structure.blocks[0], structure.blocks[-1]):
        assert len(block.producers) >= 3
        for linear in block.linears:
            weight = dense_weight(block, linear)
            folded = smoothed(weight, log_scales_in(theta, block, linear), log_scales_out(theta, block, linear))
            assert folded.shape == weight.shape


# --- what is refused, and when -----------------------------------------------------------------------------------------


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    folder = write_class("internvl", tmp_path / "model")
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(
        OnPTQError, match=r"InternVLForConditionalGeneration cannot be used without torchvision: pip install"
    ):
        PromptProcessor.from_folder(folder, find_source(folder).family, find_source(folder).config)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gemma3n", r"Gemma3n"),
        ("llama4", r"Llama4TextDecoderLayer\) lacks mlp\.gate_proj, mlp\.up_proj, mlp\.down_proj"),
        ("mamba", "mamba"),
        ("t5", "no class of model_type 't5' that writes text"),
    ],
)
def test_a_class_without_the_structure_is_refused_by_its_layers_and_what_they_lack(
    model_type: str, reason: str
) -> None:
    config = transformers.AutoConfig.for_model(model_type).to_dict()
    with pytest.raises(OnPTQError, match=reason):
        family_of(config)


def test_a_class_whose_forward_does_more_than_its_layers_is_refused(tmp_path: Path) -> None:
    """Granite multiplies embeddings and divides logits outside of its layers."""
    from onptq.checkpoint.load import load_policy

    folder = write_class("granite", tmp_path)
    source = find_source(folder)
    processor = PromptProcessor.from_folder(folder, source.family, source.config)
    policy = load_policy(source, "W4A16", device="cpu")
    from onptq.data.manifest import load_manifest

    with pytest.raises(OnPTQError, match=r"GraniteForCausalLM computes more than its decoder's layers, norm and head"):
        check_agreement(policy, processor, load_manifest(folder / "prompts.jsonl"))


def test_a_processor_that_takes_audio_in_another_way_is_refused(tmp_path: Path) -> None:
    """Voxtral's prompts are made by mistral-common, from a tokenizer of its own."""
    source = find_source(write_class("voxtral", tmp_path))
    assert source.family.by_processor == ("audio",)
    with pytest.raises(OnPTQError, match=r"VoxtralProcessor takes no audio beside a text, as those of Voxtral"):
        PromptProcessor.from_folder(source.folder, source.family, source.config)


@pytest.mark.skipif(not hasattr(transformers, "Molmo2Config"), reason="transformers is older than 5.20")
def test_a_checkpoint_that_stores_its_layers_under_other_names_is_refused(tmp_path: Path) -> None:
    """Molmo 2 stores q, k and v in one tensor, which transformers renames and splits when it loads them."""
    folder = write_class("molmo2", tmp_path)
    assert family_of(read_folder(folder).config).modalities == {"text", "image"}
    with pytest.raises(
        OnPTQError,
        match=r"Molmo2ForConditionalGeneration stores its layers under other names, such as \S*att\S*; expected "
        r"layers\.0\.self_attn\.q_proj",
    ):
        find_source(folder)


def test_a_config_of_a_million_layers_is_not_built() -> None:
    config = transformers.AutoConfig.for_model("mistral").to_dict() | {"num_hidden_layers": 10**6}
    with pytest.raises(OnPTQError, match="1,000,000 layers; expected at most 1,000"):
        family_of(config)


def test_a_fused_linear_takes_groups_and_one_tensor_scale(made: Callable[[str], Tiny]) -> None:
    policy = load_policy(made("phi3").source, "NVFP4", device="cpu", dtype="float32")
    policy.freeze(rtn(policy))
    for block in policy.structure.blocks:
        for name in block.linears:
            linear = block.child(name)
            assert isinstance(linear, QuantLinear)
            folded, rows = linear.folded(), len(linear.weight)
            assert folded.scale.shape == (rows, linear.in_features // 16)
            assert folded.tensor_scale is not None
            assert folded.input_scale is not None
