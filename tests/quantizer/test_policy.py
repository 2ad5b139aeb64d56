"""Policy: one set of weights speaks as D, untouched, and as Q, which is D rounded and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import FAMILIES, MULTIMODAL, Tiny, in_turn
from naive import extended, make_policy, random_theta
from torch import Tensor, nn

from onptq.cycle.branch import branch
from onptq.cycle.calibrate import calibrate
from onptq.cycle.compare import compare
from onptq.cycle.follow import follow
from onptq.cycle.risk import score, select
from onptq.engine.prefixes import Prefixes
from onptq.models.processing import ModelInputs
from onptq.models.structure import LINEARS, NORMS, find_structure
from onptq.quantizer.modules import Frozen, Live, QuantLinear, QuantNorm
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.recipe import CalibrateConfig, RiskConfig, SelectConfig
from onptq.schemes import Scheme

RICH = 2  # this prompt has a picture where the model takes pictures, and a sound where it takes sounds
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def inputs_of(tiny: Tiny, ordinal: int = RICH) -> ModelInputs:
    inputs = tiny.inputs(ordinal)
    assert set(inputs.modality.tolist()) == set(range(len(tiny.source.family.modalities)))
    return inputs


@torch.no_grad()
def logits(model: nn.Module, inputs: ModelInputs) -> Tensor:
    out: Tensor = model(**extended(inputs, (5, 60, 200)), use_cache=False).logits
    return out


def speak(policy: Policy, side: str, inputs: ModelInputs) -> Tensor:
    with policy.speaking(side):  # type: ignore[arg-type]
        return logits(policy.model, inputs)


# --- D ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dtype"), in_turn(FAMILIES, DTYPES), ids=str)
def test_dense_logits_are_those_of_the_model_before_it_was_wrapped(
    tiny: Callable[[str], Tiny], family: str, dtype: torch.dtype
) -> None:
    inputs, model = inputs_of(tiny(family)), tiny(family).model(dtype)
    before = logits(model, inputs)
    policy = Policy(model, Scheme.parse("W4A8"), storage=tiny(family).source.storage())
    assert torch.equal(logits(model, inputs), before), "a policy that nobody asked to speak speaks as D"
    assert torch.equal(speak(policy, "D", inputs), before)
    theta = random_theta(policy)
    policy.attach(theta)
    assert torch.equal(speak(policy, "D", inputs), before)
    policy.freeze(theta, keep="floats")
    quantized = speak(policy, "Q", inputs)
    assert not torch.equal(quantized, before)
    assert torch.equal(speak(policy, "D", inputs), before), "after Q has spoken"


@pytest.mark.parametrize("family", MULTIMODAL)
def test_dense_logits_survive_a_round_of_the_cycle(tiny: Callable[[str], Tiny], family: str) -> None:
    inputs, policy = inputs_of(tiny(family)), tiny(family).policy("W4A8")
    before = speak(policy, "D", inputs)
    weights = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    prompts = tiny(family).encode(policy, 3)
    theta = Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.freeze(theta)
    prefixes = Prefixes(policy, prompts, max_tokens=3)
    trajectories = follow(prefixes)
    states = branch(prefixes, trajectories, compare(prefixes, trajectories), horizon=2)
    states = select(score(states, RiskConfig()), SelectConfig(budget=4))
    assert states.critical.any()
    moved = calibrate(policy, prompts, trajectories, states, theta, CalibrateConfig(epochs=1)).theta
    assert any(not torch.equal(moved.smoothing[key], theta.smoothing[key]) for key in theta.smoothing)
    assert torch.equal(speak(policy, "D", inputs), before)
    policy.freeze(moved)
    assert torch.equal(speak(policy, "D", inputs), before)
    for name, parameter in policy.model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
        assert parameter.grad is None


# --- Q ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "dtype"), in_turn(FAMILIES, DTYPES), ids=str)
def test_q_with_sixteen_bits_everywhere_is_d(tiny: Callable[[str], Tiny], family: str, dtype: torch.dtype) -> None:
    inputs, policy = inputs_of(tiny(family)), make_policy(tiny(family), "W16A16", dtype)
    dense, theta = speak(policy, "D", inputs), Theta.rtn(policy.structure.blocks, policy.scheme)
    policy.freeze(theta)
    assert torch.equal(speak(policy, "Q", inputs), dense)
    policy.attach(theta)
    assert torch.equal(speak(policy, "Q", inputs), dense)


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    in_turn(
        ["W8A8", "W4A16", "W4A16-g128", "W4A16-g128-asym", "W4A16-asym", "W4A8-g32", "W4A6", "W3A5", "W16A8"], DTYPES
    ),
    ids=str,
)
def test_the_training_graph_computes_what_it_folds_to(
    tiny: Callable[[str], Tiny], scheme: str, dtype: torch.dtype
) -> None:
    """The same smoothed, clipped weights twice: as a differentiable graph and as integers."""
    inputs, policy = inputs_of(tiny("qwen2.5-vl")), make_policy(tiny("qwen2.5-vl"), scheme, dtype)
    theta = random_theta(policy)
    policy.attach(theta)
    live = speak(policy, "Q", inputs)
    policy.freeze(theta)
    folded = speak(policy, "Q", inputs)
    assert torch.equal(folded, live)
    policy.freeze(theta, keep="floats")
    assert torch.equal(speak(policy, "Q", inputs), folded)
    assert torch.equal(speak(policy, "Q", inputs), folded), "from the weights kept by the forward before"


@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_alone_changes_nothing_but_the_last_digits(tiny: Callable[[str], Tiny], family: str) -> None:
    """All four pairs cancel, grouped heads, biases and gains included, when nothing is rounded."""
    inputs = inputs_of(tiny(family))
    model = tiny(family).model(torch.float32)
    policy = Policy(model, Scheme(16, 16), storage=torch.float32)
    policy.freeze(random_theta(policy))
    torch.testing.assert_close(speak(policy, "Q", inputs), speak(policy, "D", inputs), rtol=0, atol=2e-4)


def test_q_without_theta_refuses_to_speak(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("llama").policy("W4A8")
    with pytest.raises(RuntimeError, match="no theta"):
        speak(policy, "Q", inputs_of(tiny("llama")))


def test_speaking_ends_with_its_block_even_when_the_block_fails(tiny: Callable[[str], Tiny]) -> None:
    policy = tiny("llama").policy("W4A8")
    with policy.speaking("Q"):
        with policy.speaking("D"):
            assert not policy.switch.quantized
        assert policy.switch.quantized
    with pytest.raises(ZeroDivisionError), policy.speaking("Q"):
        raise ZeroDivisionError
    assert not policy.switch.quantized


# --- what is wrapped ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_decoder_s_seven_linears_and_two_norms_are_wrapped(tiny: Callable[[str], Tiny], family: str) -> None:
    model = tiny(family).model(torch.float32)
    decoder = find_structure(model).decoder
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    before = dict(model.named_modules())
    policy = Policy(model, Scheme.parse("W4A8"))
    after = dict(model.named_modules())

    wrapped = {name for name in before if after[name] is not before[name]}
    blocks = range(len(policy.structure.blocks))
    linears = {f"{prefix}.layers.{block}.{'.'.join(LINEARS[name])}" for block in blocks for name in LINEARS}
    norms = {f"{prefix}.layers.{block}.{name}" for block in blocks for name in NORMS}
    assert len(LINEARS) == 7
    assert wrapped == linears | norms
    assert {name for name in after if isinstance(after[name], QuantLinear)} == linears
    assert {name for name in after if isinstance(after[name], QuantNorm)} == norms
    assert after.keys() - before.keys() == {f"{name}.inner" for name in norms}
    assert model.get_output_embeddings() is before["lm_head"]  # type: ignore[operator]


@pytest.mark.parametrize("family", FAMILIES)
def test_d_and_q_share_one_copy_of_the_weights(tiny: Callable[[str], Tiny], family: str) -> None:
    model = tiny(family).model(torch.float32)
    before = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    policy = Policy(model, Scheme.parse("W4A8"), storage=tiny(family).source.storage())
    policy.freeze(random_theta(policy))
    speak(policy, "Q", inputs_of(tiny(family)))
    assert {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()} == before
    for block in policy.structure.blocks:
        for name in LINEARS:
            linear = block.child(name)
            assert isinstance(linear, QuantLinear)
            held = [value for value in vars(linear).values() if isinstance(value, Tensor)]
            assert held == [], "no dense copy of Q's weights between forwards, unless asked for"
            assert isinstance(linear.state, Frozen)
            assert linear.state.weight is None
            assert linear.folded().codes.dtype == torch.int8


@pytest.mark.parametrize(("scheme", "dtype"), in_turn(["W4A8", "W4A16", "W8A8"], DTYPES), ids=str)
def test_a_theta_that_is_only_attached_speaks_and_folds_as_a_frozen_one(
    tiny: Callable[[str], Tiny], scheme: str, dtype: torch.dtype
) -> None:
    policy = tiny("qwen2.5-vl").policy(scheme, dtype)
    theta = random_theta(policy)
    (prompt,) = tiny("qwen2.5-vl").encode(policy, 1)
    prefixes = Prefixes(policy, [prompt], max_tokens=4)
    said, pieces = [], []
    for speak in (policy.freeze, policy.attach):
        speak(theta)
        said.append(prefixes.prompt(0, "Q").last)
        pieces.append(dict(policy.folded()))
    assert torch.equal(*said)
    assert all(isinstance(module.state, Live) for module in policy.wrapped)
    for name, piece in pieces[0].items():
        for field, tensor in vars(piece).items():
            other = getattr(pieces[1][name], field)
            assert (tensor is None and other is None) or torch.equal(tensor, other), (name, field)
