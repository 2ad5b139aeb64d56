"""The proof at load: pairs that fold are kept, and pairs that only look as if they did are dropped and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import FAMILIES, Tiny
from method_models import short_responses
from naive import random_theta
from torch import Tensor, nn

from onptq.models.structure import PAIRS, PRODUCERS, Structure, find_structure
from onptq.quantizer.modules import QuantFollower, QuantNorm, Switch
from onptq.quantizer.policy import Policy
from onptq.quantizer.proof import prove
from onptq.quantizer.theta import Theta
from onptq.schemes import Scheme

CPU = torch.device("cpu")


def llama(tiny: Callable[[str], Tiny]) -> nn.Module:
    return tiny("llama").model(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pair_of_the_registered_families_folds(
    tiny: Callable[[str], Tiny], family: str, dtype: torch.dtype
) -> None:
    structure = find_structure(tiny(family).model(dtype))
    before = torch.get_rng_state()
    proven, unfolded = prove(structure)
    assert unfolded == ()
    assert [block.producers for block in proven.blocks] == [PRODUCERS] * len(structure.blocks)
    assert torch.equal(torch.get_rng_state(), before), "runs draw what they drew before"


@pytest.mark.parametrize("pair", PAIRS)
def test_a_wrong_producer_is_dropped_whichever_the_pair(tiny: Callable[[str], Tiny], pair: str) -> None:
    wrong = {"norm_qkv": "post_attention_layernorm", "norm_gate_up": "input_layernorm"}
    wrong |= {"v_o": "k_proj", "up_down": "gate_proj"}
    structure = find_structure(llama(tiny))
    blocks = [replace(block, producers=PRODUCERS | {pair: wrong[pair]}) for block in structure.blocks]
    proven, unfolded = prove(replace(structure, blocks=tuple(blocks)))
    assert [block.producers for block in proven.blocks] == [
        {name: producer for name, producer in PRODUCERS.items() if name != pair}
    ] * len(blocks)
    (sentence,) = unfolded
    assert sentence == (
        f"{wrong[pair]} -> {', '.join(PAIRS[pair][1])} does not fold in 2 of 2 layers, e.g. layers.0 (LlamaDecoderLayer): "
        "it is not smoothed there"
    )


class Gated(nn.Module):
    """An MLP whose output is gated by one more reader of the norm's output, as a shared expert's is."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.gate = nn.Linear(256, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[operator]
        return self.gate(x).sigmoid() * out  # type: ignore[no-any-return]


def test_a_matrix_that_follows_its_norm_is_scaled_with_the_consumers(tiny: Callable[[str], Tiny]) -> None:
    model = llama(tiny)
    structure = find_structure(model)
    for block in structure.blocks:
        block.module.mlp = Gated(block.module.mlp)  # type: ignore[arg-type]
    _, (sentence,) = prove(structure)
    assert "post_attention_layernorm -> gate_proj, up_proj does not fold in 2 of 2 layers" in sentence
    following = {"norm_gate_up": ("mlp.gate",)}
    blocks = tuple(replace(block, following=following) for block in structure.blocks)
    proven, unfolded = prove(replace(structure, blocks=blocks))
    assert unfolded == ()
    block, switch = proven.blocks[1], Switch()
    follower = QuantFollower(block.child("mlp.gate"), block, "mlp.gate", torch.float32, switch)
    u = torch.linspace(-1, 1, 256).requires_grad_()
    x, theta = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)), Theta({"layers.1.norm_gate_up": u})
    dense = follower(x)
    expected = follower.weight.double() * u.double().exp()
    switch.quantized = True
    follower.attach(theta)
    assert torch.allclose(follower(x / u.exp()), dense, atol=1e-5)
    assert torch.autograd.grad(follower(x).sum(), u)[0].abs().min() > 0, "smoothing learns through it"
    live = follower(x)
    follower.freeze(theta)
    assert torch.allclose(follower.folded().weight.double(), expected, atol=1e-6)
    assert follower.path == "layers.1.mlp.gate"
    assert torch.equal(follower(x), live)


class Unfoldable(nn.Module):
    """A norm that is neither linear in its weight nor in 1 + weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:]) * self.weight.sigmoid()


def test_a_norm_that_no_scale_folds_into_is_left_alone_in_the_one_layer_that_has_it(
    tiny: Callable[[str], Tiny],
) -> None:
    model = llama(tiny)
    layer = find_structure(model).blocks[1].module
    layer.post_attention_layernorm = Unfoldable(256)
    policy = Policy(model, Scheme.parse("W4A8"))
    (sentence,) = policy.unfolded
    assert "post_attention_layernorm -> gate_proj, up_proj does not fold in 1 of 2 layers, e.g. layers.1" in sentence
    assert isinstance(layer.post_attention_layernorm, Unfoldable)
    assert isinstance(layer.input_layernorm, QuantNorm)
    theta = random_theta(policy)
    assert "layers.0.norm_gate_up" in theta.smoothing
    assert "layers.1.norm_gate_up" not in theta.smoothing
    policy.freeze(theta)
    assert "layers.1.post_attention_layernorm" not in dict(policy.folded())


@pytest.mark.parametrize(
    "method",
    ["awq", "blockwise", "gptq", "masquant", "mbq", "qig", "search", "signround"],
)
def test_every_method_fits_a_model_with_a_pair_that_does_not_fold(tiny: Callable[[str], Tiny], method: str) -> None:
    from onptq import methods

    model = llama(tiny)
    find_structure(model).blocks[1].module.input_layernorm = Unfoldable(256)
    policy = Policy(model, Scheme.parse("W4A8"))
    prompts = tiny("llama").encode(policy, 1)
    few = {"steps": 2, "points": 2, "responses": short_responses(prompts)}
    options: dict[str, Any] = {name: value for name, value in few.items() if methods.accepts(method, name)}
    theta = methods.run(method, policy, prompts, lambda blocks: None, **options)
    assert "layers.1.norm_qkv" not in theta.smoothing
    assert theta.smoothing.keys() >= {"layers.0.norm_qkv", "layers.1.norm_gate_up", "layers.1.v_o"}


def test_a_norm_of_1_plus_weight_folds(tiny: Callable[[str], Tiny]) -> None:
    """Its weight becomes (1 + w) / s - 1."""
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    model = llama(tiny)
    layer = find_structure(model).blocks[1].module
    layer.post_attention_layernorm = GemmaRMSNorm(256)
    nn.init.normal_(layer.get_parameter("post_attention_layernorm.weight"), std=0.1)
    policy = Policy(model, Scheme.parse("W4A8"))
    assert policy.unfolded == ()
    theta = random_theta(policy)
    norm = policy.structure.blocks[1].child("post_attention_layernorm")
    assert isinstance(norm, QuantNorm)
    expected = (1 + norm.weight.double()) / theta.smoothing["layers.1.norm_gate_up"].double().exp() - 1
    assert torch.allclose(norm.fold(theta).weight.double(), expected, atol=1e-6)


def test_blocks_that_share_class_and_shapes_are_tried_once(tiny: Callable[[str], Tiny]) -> None:
    structure: Structure = find_structure(llama(tiny))
    runs = []
    for block in structure.blocks:
        block.module.register_forward_hook(lambda module, args, out, at=block.index: runs.append(at))  # type: ignore[misc]
    prove(structure)
    assert set(runs) == {0}
