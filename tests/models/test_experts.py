"""Mixtures of experts: their linears one by one, routers that follow their norm, and who decides where a token goes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import Tiny
from naive import Scene, random_theta, without_ties
from random_classes import SPARSE, write_class
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_classes import SHORT, TORCHVISION, Interrupted
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeDecoderLayer, Qwen3MoeExperts
from transformers.utils import is_torchvision_available

import onptq
from onptq.bank import Trajectory
from onptq.check.examine import examine
from onptq.check.probes import probe_prompt
from onptq.checkpoint.folder import read_folder
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import find_source, open_checkpoint
from onptq.cycle.branch import branch
from onptq.cycle.compare import compare
from onptq.cycle.objective import Targets, UpdateSequences, measure
from onptq.data.audio import read_audio
from onptq.data.media import decode_image
from onptq.engine.prefixes import Prefixes, whole_prompts
from onptq.errors import OnPTQError
from onptq.evaluate.comparison import compare_models
from onptq.kernels.grid import OFF_TIE
from onptq.methods import run
from onptq.methods.awq import awq, scale_grid
from onptq.methods.experts import LEAST_TOKENS
from onptq.methods.gptq import gptq_on, greedy_codes
from onptq.methods.layerwise import answered_sequences
from onptq.methods.linears import dense_weight
from onptq.methods.masquant import masquant
from onptq.methods.mbq import mbq, smoothing_grid
from onptq.methods.search import RATIOS, search_on
from onptq.methods.signround import signround_on
from onptq.methods.smoothquant import smoothquant
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.experts import OWN, Experts, linearize, observing_routes, routed
from onptq.models.language_model import Side
from onptq.models.processing import PromptProcessor
from onptq.models.structure import EXPERTS, find_structure
from onptq.quantizer.modules import QuantFollower, QuantLinear
from onptq.quantizer.policy import Policy
from onptq.quantizer.proof import prove
from onptq.quantizer.theta import Theta, log_scales_in, log_scales_out
from onptq.quantizer.weights import smoothed
from onptq.recipe import Recipe
from onptq.run import final_theta
from onptq.schemes import Scheme

CPU = torch.device("cpu")
NAMES = [pytest.param(name, marks=TORCHVISION) if one.torchvision else name for name, one in SPARSE.items()]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    known: dict[str, Tiny] = {}

    def get(name: str) -> Tiny:
        if name not in known:
            folder = write_class(name, tmp_path_factory.mktemp(name))
            if name == "qwen3_vl_moe":
                store_as_published(folder)
            source = find_source(folder)
            known[name] = Tiny(folder, source, PromptProcessor.from_folder(folder, source.family, source.config))
        return known[name]

    return get


def store_as_published(folder: Path) -> None:
    """Qwen3-VL-MoE's experts as its checkpoints have them, [E, H, 2 I] and [E, I, H]; transformers saves them transposed."""
    tensors = load_file(folder / "model.safetensors")
    fused = [name for name in tensors if ".experts." in name]
    assert len(fused) == 4
    tensors |= {name: tensors[name].transpose(1, 2).contiguous() for name in fused}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# --- linears of their own -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPARSE)
def test_the_model_computes_bit_for_bit_what_its_class_does(name: str, tmp_path: Path) -> None:
    folder = write_class(name, tmp_path)
    family = find_source(folder).family
    expected = getattr(transformers, family.model_class).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, 500, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = expected(input_ids=ids).logits
        assert torch.equal(load_model(find_source(folder), torch.float32)(input_ids=ids).logits, logits)


def test_each_token_gets_the_weighted_sum_of_its_experts() -> None:
    """Token by token and expert by expert, in float64."""
    draw = torch.Generator().manual_seed(0)
    experts, hidden, inner, tokens = 5, 8, 6, 11
    config = Qwen3MoeConfig(hidden_size=hidden, num_experts=experts, moe_intermediate_size=inner)
    fused = Qwen3MoeExperts(config).double()
    for weight in (fused.gate_up_proj, fused.down_proj):
        weight.data = torch.randn(weight.shape, generator=draw).double()
    layer = linearize(torch.nn.ModuleDict({"experts": fused}))["experts"]
    assert isinstance(layer, Experts)
    x = torch.randn(tokens, hidden, generator=draw).double()
    index = torch.stack([torch.randperm(experts - 1, generator=draw)[:2] for _ in range(tokens)])  # the last has none
    weights = torch.rand(tokens, 2, generator=draw).double()
    expected = np.zeros((tokens, hidden))
    for token in range(tokens):
        for expert, weight in zip(index[token].tolist(), weights[token].tolist(), strict=True):
            both = fused.gate_up_proj[expert].detach().numpy() @ x[token].numpy()
            gate, up = both[:inner], both[inner:]
            middle = gate / (1 + np.exp(-gate)) * up
            expected[token] += weight * (fused.down_proj[expert].detach().numpy() @ middle)
    out = layer(x, index, weights)
    assert np.allclose(out.detach().numpy(), expected, atol=1e-12)
    out.sum().backward()
    assert layer.get_parameter("0.up_proj.weight").grad is not None
    assert layer.get_parameter(f"{experts - 1}.up_proj.weight").grad is None


def test_experts_that_gate_otherwise_are_left_alone() -> None:
    class Clamped(Qwen3MoeExperts):
        def _apply_gate(self, both: Tensor) -> Tensor:
            gate, up = both.chunk(2, dim=-1)
            return self.act_fn(gate).clamp(max=7) * up  # type: ignore[no-any-return]

    config = Qwen3MoeConfig(hidden_size=8, num_experts=2, moe_intermediate_size=6)
    layer = linearize(torch.nn.ModuleDict({"usual": Qwen3MoeExperts(config), "clamped": Clamped(config)}))
    assert isinstance(layer["usual"], Experts)
    assert isinstance(layer["clamped"], Clamped)


def test_experts_have_names_of_their_own_however_they_are_stored(made: Callable[[str], Tiny]) -> None:
    tiny = made("qwen3_vl_moe")
    checkpoint, parameters = tiny.source.checkpoint, dict(load_model(tiny.source, torch.bfloat16).named_parameters())
    stored = {name: tensor.shape for name, tensor in checkpoint.stored.items() if ".experts." in name}
    assert set(stored.values()) == {(4, 64, 192), (4, 96, 64)}
    experts = [name for name in checkpoint.tensors if ".experts." in name]
    assert len(experts) == 2 * 4 * 3
    for name, tensor in checkpoint.read(experts):
        assert tensor.shape == checkpoint.tensors[name].shape
        assert torch.equal(tensor, parameters[name])


def test_a_router_follows_its_norm_and_stays_16_bit(made: Callable[[str], Tiny]) -> None:
    policy = made("qwen3_vl_moe").policy("W4A8")
    block = policy.structure.blocks[0]
    assert policy.unfolded == ()
    assert block.followers("norm_gate_up") == ("mlp.gate",)
    assert isinstance(block.child("mlp.gate"), QuantFollower)
    assert sum(isinstance(module, QuantLinear) for module in policy.wrapped) == 2 * (4 + 4 * 3)
    theta = random_theta(policy)
    policy.freeze(theta)
    folded = dict(policy.folded())
    dense = block.module.get_parameter("mlp.gate.inner.weight").float()
    expected = (dense * theta.smoothing["layers.0.norm_gate_up"].exp()).to(torch.bfloat16)
    assert torch.equal(folded["layers.0.mlp.gate"].weight, expected)  # type: ignore[union-attr]


def test_a_norm_does_not_fold_past_a_router_that_does_not_follow(made: Callable[[str], Tiny]) -> None:
    structure = find_structure(load_model(made("qwen3_vl_moe").source, torch.float32))
    proven, unfolded = prove(structure)
    assert unfolded == ()
    assert sorted(proven.blocks[0].producers) == sorted(structure.blocks[0].producers)
    blind = tuple(replace(block, following={}) for block in structure.blocks)
    proven, (sentence,) = prove(replace(structure, blocks=blind))
    assert sentence.startswith("post_attention_layernorm -> mlp.experts.0.gate_proj, mlp.experts.0.up_proj, ")
    swapped = {f"{EXPERTS}0.up_down": f"{EXPERTS}1.up_proj", f"{EXPERTS}1.up_down": f"{EXPERTS}0.up_proj"}
    wrong = tuple(replace(block, producers={**block.producers, **swapped}) for block in structure.blocks)
    proven, unfolded = prove(replace(structure, blocks=wrong))
    assert len(unfolded) == 4, "the pairs of all experts are tried at once"
    assert not any(pair.startswith(EXPERTS) for pair in proven.blocks[0].producers)


# --- the cycle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_sees_what_the_class_sees_and_branches_as_it_would(name: str, made: Callable[[str], Tiny]) -> None:
    with without_ties():
        scenery = Scene(made(name), "W4A16", torch.float32, ordinals=(0, 4))
        policy = scenery.policy
        lengths = [one.length for one in scenery.inputs.values()]
        trajectories = [scenery.rollout(ordinal, 2) for ordinal in scenery.ordinals]
        prefixes = Prefixes(policy, scenery.encoded(policy), max_tokens=2, batch_tokens=3 * max(lengths) + 9)
        states = compare(prefixes, trajectories)
        for row in range(len(states)):
            expected = scenery.state(int(states.prompt[row]), int(states.t[row]))
            assert (states.reference[row], states.quantized[row]) == (expected.reference, expected.quantized)
            assert states.kl[row] == pytest.approx(expected.kl, abs=1e-5)
        found = branch(prefixes, trajectories, states, horizon=3, everywhere=True)
        fork = scenery.fork(int(states.prompt[-1]), int(states.t[-1]), 3)
        assert found.consequence[len(states) - 1] == pytest.approx(fork.consequence(3, ()), abs=1e-5)


def test_routes_replace_the_choice_of_a_router_and_not_its_weights() -> None:
    config = Qwen3MoeConfig(
        hidden_size=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8, num_attention_heads=2
    )
    torch.manual_seed(0)
    layer = linearize(Qwen3MoeDecoderLayer(config, 0))
    torch.nn.init.normal_(layer.mlp.gate.weight)
    x = torch.randn(5, 16)
    logits, _, own = layer.mlp.gate(x)
    given = torch.tensor([[[0, 5], [OWN, OWN], [3, 1], [4, 2], [OWN, OWN]]])
    with routed(layer, given):
        _, weights, index = layer.mlp.gate(x)
    assert torch.equal(index, torch.where(given[0] == OWN, own, given[0]))
    chosen = logits.softmax(-1).gather(1, index)
    if config.norm_topk_prob:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    assert torch.allclose(weights, chosen)
    assert torch.equal(layer.mlp.gate(x)[2], own)


@contextmanager
def recorded(policy: Policy) -> Iterator[dict[int, list[Tensor]]]:
    """The experts that tokens go to, by block and forward."""
    seen: dict[int, list[Tensor]] = {}
    layers = [block.module for block in policy.structure.blocks]
    with observing_routes(layers, lambda place, index: seen.setdefault(place, []).append(index)):
        yield seen


def test_d_decides_for_the_anchor_and_q_for_the_response(made: Callable[[str], Tiny]) -> None:
    tiny = made("qwen3_vl_moe")
    policy = tiny.policy("W2A8")  # coarse: Q's routers would choose otherwise
    prompts = tiny.encode(policy, 2)
    policy.attach(random_theta(policy))
    trajectories = [replace(Trajectory(0, (5, 6, 7), False), prompt=one.ordinal) for one in prompts]
    states = compare(Prefixes(policy, prompts, max_tokens=3), trajectories)
    states = states.with_columns(
        critical=np.ones(len(states), np.bool_), weight=np.full(len(states), 1 / len(states), np.float32)
    )
    items = UpdateSequences(policy, prompts, trajectories, states)
    targets = Targets(policy, None)
    with recorded(policy) as seen:
        measure(policy, items[:2], targets)
    width = max(item.sequence.length for item in items)
    differ = 0
    for block in range(2):
        dense, quantized = seen[block][:2], seen[block][2].view(2, width, -1)
        for row, item in enumerate(items):
            anchored = (item.anchor > 0).nonzero()[:, 0]
            assert torch.equal(quantized[row, anchored].sort(-1)[0], dense[row][anchored].sort(-1)[0])
        with recorded(policy) as own, policy.speaking("Q"), torch.no_grad():
            policy.run(whole_prompts(PromptBatch.of([items[0].sequence])))
        free, length = own[block][0], items[0].sequence.length
        differ += int((free.sort(-1)[0] != quantized[0, :length].sort(-1)[0]).any(-1).sum())
    assert differ, "left alone, Q's routers choose otherwise"


def test_gradients_reach_experts_through_checkpointed_blocks_under_given_routes(made: Callable[[str], Tiny]) -> None:
    tiny = made("qwen3_moe")
    policy = tiny.policy("W4A8")
    prompts = tiny.encode(policy, 2)
    gradients = []
    for checkpointed in (False, True):
        theta = random_theta(policy)
        for u in theta.smoothing.values():
            u.requires_grad_()
        policy.attach(theta)
        items, targets = UpdateSequences(policy, prompts, [], None), Targets(policy, None)
        with torch.enable_grad():
            loss = measure(policy, items[:2], targets, checkpointed=checkpointed).anchor
        with policy.speaking("Q"):
            loss.backward()
        gradients.append({key: u.grad for key, u in theta.smoothing.items()})
    for key, gradient in gradients[0].items():
        again = gradients[1][key]
        assert gradient is not None, key
        assert again is not None, key
        assert torch.allclose(gradient, again), key


# --- methods ------------------------------------------------------------------------------------------------------------


def shortened(prompt: EncodedPrompt, tokens: int) -> EncodedPrompt:
    """The first tokens of a prompt of text."""
    parts = {name: getattr(prompt, name)[:tokens] for name in ("ids", "embeds", "modality")}
    return replace(prompt, positions=prompt.positions[:, :tokens], **parts)


def test_search_fits_each_expert_on_its_own_tokens_and_leaves_those_with_few_alone(made: Callable[[str], Tiny]) -> None:
    policy = made("qwen3_moe").policy("W4A8")
    prompts = made("qwen3_moe").encode(policy, 2)
    theta = search_on(policy, prompts)
    assert all(theta.ratio[path].any() for path in theta.ratio if path.endswith("down_proj"))
    few = search_on(policy, [shortened(prompts[0], LEAST_TOKENS - 1)])
    for path, ratio in few.ratio.items():
        assert bool(ratio.any()) is (EXPERTS not in path), path
    assert not any(u.any() for key, u in few.smoothing.items() if EXPERTS in key)


def test_an_experts_ratios_are_best_for_the_tokens_that_it_reads(made: Callable[[str], Tiny]) -> None:
    """Not for those of the layer: every row's error over them, by the definition, is least under its ratio."""
    policy = made("qwen3_moe").policy("W4A16")
    prompt = made("qwen3_moe").encode(policy, 1)[0]
    theta = search_on(policy, [prompt])
    block, name = policy.structure.blocks[0], f"{EXPERTS}1.up_proj"
    log_in, log_out = log_scales_in(theta, block, name), log_scales_out(theta, block, name)
    assert log_in is not None
    assert log_out is not None
    x, weight = (
        read_by_expert(policy, prompt, name, "D") / log_in.double().exp(),
        smoothed(dense_weight(block, name), log_in, log_out).double(),
    )
    errors = []
    for ratio in (1.0, *RATIOS):
        scale = (ratio * weight.abs().amax(1, keepdim=True) * OFF_TIE / 7.5).to(torch.bfloat16).double()
        rounded = (weight / scale).round().clamp(-8, 7) * scale
        errors.append(((rounded - weight) @ x.T).square().sum(1))
    chosen = theta.ratio[block.path(name)][:, 0].exp()
    index = (torch.tensor((1.0, *RATIOS))[:, None] - chosen).abs().argmin(0)
    every = torch.stack(errors)
    assert (every.gather(0, index[None])[0] <= 1.01 * every.amin(0)).all(), "but for the last bit of a float32"


def test_signround_leaves_the_codes_of_experts_without_tokens_as_they_are(made: Callable[[str], Tiny]) -> None:
    policy = made("qwen3_moe").policy("W4A8")
    short = shortened(made("qwen3_moe").encode(policy, 1)[0], 1)  # two experts of four
    theta = signround_on(policy, [short], steps=20)
    moved = [bool(offset.any()) for path, offset in theta.offset.items() if "layers.0" in path and EXPERTS in path]
    assert sum(moved) == 6, "the linears of two experts"


def read_by_expert(policy: Policy, prompt: EncodedPrompt, name: str, side: Side) -> Tensor:
    """What a linear of the first layer reads of a prompt, [n, I], in float64."""
    inputs: list[Tensor] = []
    hook = policy.structure.blocks[0].child(name).register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))
    with policy.speaking(side), torch.no_grad():
        policy.run(whole_prompts(PromptBatch.of([prompt])))
    hook.remove()
    return inputs[0].double()


@pytest.mark.parametrize("name", [f"{EXPERTS}1.up_proj", f"{EXPERTS}1.down_proj"])
def test_gptq_rounds_each_expert_for_what_it_reads_behind_its_quantized_predecessors(
    name: str, made: Callable[[str], Tiny]
) -> None:
    """The codes are those of GPTQ's rule on X^T X of the tokens that Q's router sends there, in float64."""
    policy = made("qwen3_moe").policy("W4A16")
    prompts = made("qwen3_moe").encode(policy, 2)
    theta = gptq_on(policy, prompts)
    block, path = policy.structure.blocks[0], policy.structure.blocks[0].path(name)
    before = Theta.rtn(policy.structure.blocks, policy.scheme)
    later = ("down_proj",) if name.endswith("down_proj") else ("gate_proj", "up_proj", "down_proj")
    first = [one for one in block.linears if EXPERTS not in one or not one.endswith(later)]
    before.linears.update({block.path(one): theta.linears[block.path(one)] for one in first})
    policy.attach(before)
    x = torch.cat([read_by_expert(policy, prompt, name, "Q") for prompt in prompts])
    weight = dense_weight(block, name)
    scale = (weight.abs().amax(1, keepdim=True) * OFF_TIE / 7.5).to(torch.bfloat16).float().expand_as(weight)
    grid = policy.scheme.weight_grid
    codes = greedy_codes(weight, scale, torch.zeros_like(scale), (x.T @ x).float(), grid, act_order=True)
    plain = (weight / scale).round().clamp(-8, 7)
    errors = [((each * scale - weight).double() @ x.T).square().sum(1) for each in (codes, plain)]
    expected = torch.where((errors[0] < errors[1])[:, None], codes, plain)
    given = (weight / scale + theta.offset[path]).round()
    assert (given != plain).any()
    assert float((given == expected).float().mean()) > 0.99, "but for ties of sums in another order"


def test_awq_smooths_between_up_and_down_by_the_tokens_of_the_expert(made: Callable[[str], Tiny]) -> None:
    policy = made("qwen3_moe").policy("W4A16")
    prompts = made("qwen3_moe").encode(policy, 2)
    responses = [Trajectory(one.ordinal, (5, 6), False) for one in prompts]
    theta = awq(policy, prompts, responses=responses)
    block, name = policy.structure.blocks[0], f"{EXPERTS}1.down_proj"
    answered = answered_sequences(policy, prompts, responses)
    x = torch.cat([read_by_expert(policy, prompt, name, "D") for prompt in answered])
    weight = dense_weight(block, name).double()

    def error(u: Tensor) -> float:
        scaled = weight * u.double().exp()
        scale = (scaled.abs().amax(1, keepdim=True) * OFF_TIE / 7.5).to(torch.bfloat16).double()
        rounded = (scaled / scale).round().clamp(-8, 7) * scale
        return float(((x / u.double().exp()) @ rounded.T - x @ weight.T).square().sum())

    chosen = theta.smoothing[f"layers.0.{EXPERTS}1.up_down"]
    assert error(chosen) <= 1.01 * min(error(u) for u in scale_grid(x.abs().mean(0)))
    assert all(theta.smoothing[f"layers.{layer}.norm_gate_up"].any() for layer in (0, 1))


def test_mbq_weights_the_tokens_of_an_expert_by_their_modality(made: Callable[[str], Tiny]) -> None:
    """The prompt's text counts nothing, so the tokens of the response alone choose the scales."""
    policy = made("qwen3_moe").policy("W4A16")
    prompts = made("qwen3_moe").encode(policy, 1)
    responses = [Trajectory(prompts[0].ordinal, tuple(range(5, 45)), False)]
    theta = mbq(policy, prompts, responses=responses)
    (answered,) = answered_sequences(policy, prompts, responses)
    block, name = policy.structure.blocks[0], f"{EXPERTS}1.down_proj"
    routes: list[Tensor] = []
    with observing_routes([block.module], lambda _, index: routes.append(index)):
        x = read_by_expert(policy, answered, name, "D")
    counts = torch.tensor([bool((row == 1).any()) for row in routes[0]]).nonzero()[:, 0] >= prompts[0].length
    weight = dense_weight(block, name).double()

    def error(u: Tensor) -> float:
        scaled = weight * u.double().exp()
        scale = (scaled.abs().amax(1, keepdim=True) * OFF_TIE / 7.5).to(torch.bfloat16).double()
        rounded = (scaled / scale).round().clamp(-8, 7) * scale
        return float(((x / u.double().exp()) @ rounded.T - x @ weight.T)[counts].abs().sum())

    assert 0 < int(counts.sum()) < len(counts)
    chosen = theta.smoothing[f"layers.0.{EXPERTS}1.up_down"]
    assert error(chosen) <= 1.01 * min(error(u) for u in smoothing_grid(x.abs().mean(0), block, f"{EXPERTS}1.up_down"))


def test_masquant_trains_what_a_norm_feeds_under_the_dense_models_routes(made: Callable[[str], Tiny]) -> None:
    policy = made("qwen3_moe").policy("W4A8")
    prompts = made("qwen3_moe").encode(policy, 2)
    begun, smoothed_alone = masquant(policy, prompts, epochs=0), smoothquant(policy, prompts)
    for key in ("layers.0.norm_qkv", "layers.0.norm_gate_up"):
        assert torch.allclose(begun.smoothing[key], smoothed_alone.smoothing[key], rtol=1e-4, atol=1e-5)
    trained = masquant(policy, prompts)
    assert not torch.equal(trained.smoothing["layers.1.norm_gate_up"], begun.smoothing["layers.1.norm_gate_up"])
    assert not any(u.any() for key, u in trained.smoothing.items() if EXPERTS in key), "down_proj is never smoothed"


@pytest.mark.parametrize("name", ["awq", "gptq", "mbq"])
def test_experts_that_read_too_few_tokens_are_rounded_plainly(name: str, made: Callable[[str], Tiny]) -> None:
    policy = made("qwen3_moe").policy("W4A8")
    short = shortened(made("qwen3_moe").encode(policy, 1)[0], 1)
    theta = run(name, policy, [short], lambda blocks: None, responses=[Trajectory(short.ordinal, (5, 6), False)])
    for path, linear in theta.linears.items():
        changed = bool(linear.ratio.any()) or bool(theta.offset[path].any() if path in theta.offset else False)
        assert changed is False or EXPERTS not in path, path
    assert not any(u.any() for key, u in theta.smoothing.items() if EXPERTS in key)


def test_a_method_that_knows_no_experts_is_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    folder = write_class("qwen3_moe", tmp_path / "model")
    recipe = Recipe.preset("default", SHORT | {"init": "qig"})
    (folder / "model.safetensors").chmod(0o444)
    reason = (
        r"qig does not know experts, and Qwen3MoeForCausalLM has some in layers\.0\.mlp\.experts\.0\.gate_proj; "
        r"expected one of rtn, smoothquant, awq, mbq, masquant, gptq, search, signround, smoothquant\+gptq, search\+gptq, "
        r"search\+signround"
    )
    with pytest.raises(OnPTQError, match=reason):
        onptq.quantize(folder, tmp_path / "out", calibration=folder / "prompts.jsonl", recipe=recipe)
    with pytest.raises(OnPTQError, match=reason):
        compare_models(folder, ["qig:W4A8"], tmp_path / "report", prompts=[probe_prompt(frozenset({"text"}))])


# --- whole runs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupted_cycle_ends_in_a_checkpoint_that_is_reloaded_exactly(
    name: str, made: Callable[[str], Tiny], tmp_path: Path
) -> None:
    tiny, recipe = made(name), Recipe.preset("default", SHORT | {"init": "search"})
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        onptq.quantize(tiny.folder, out, calibration=tiny.manifest, recipe=recipe, reporter=Interrupted())
    summary = onptq.quantize(tiny.folder, out, calibration=tiny.manifest, recipe=recipe).summary
    assert summary["rounds"]
    assert summary["verification"]["max_abs_difference"] == 0.0
    assert all(check["passed"] for check in summary["verification"]["checks"] if check["name"] in ("reload", "schemes"))
    assert len(summary["experts"]["tokens"]) == (4 if name == "qwen3_5_moe" else 2)
    assert all(len(counts) == 4 and sum(counts) > 0 for counts in summary["experts"]["tokens"].values())

    with safe_open(out / "model.safetensors", "pt") as shard:
        names = set(shard.keys())
    layer = next(one for one in names if one.endswith("layers.1.mlp.experts.0.down_proj.weight_packed"))
    prefix = layer.removesuffix("experts.0.down_proj.weight_packed")
    linears = [f"experts.{expert}.{part}_proj" for expert in range(4) for part in ("gate", "up", "down")]
    assert {f"{prefix}{linear}.weight_packed" for linear in linears} <= names
    assert f"{prefix}gate.weight" in names
    assert not any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in names)
    others, dense = tiny.source.family.other_models, tiny.source.checkpoint
    copied = [name for name in dense.stored if name.startswith(others or ("mtp.",))]
    assert bool(copied) is (name in ("qwen3_omni_moe", "qwen3_5_moe"))
    after = read_folder(out)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(dense.read(copied), after.read(copied), strict=True))
    ignore = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert r"re:.*layers\.\d+\.mlp\.gate(?:\..*)?$" in ignore

    inputs = tiny.processor(probe_prompt(tiny.source.family.modalities)).tensors
    media = {"image": "pixel_values", "audio": "input_features"}
    assert all(media[kind] in inputs for kind in tiny.source.family.modalities - {"text"})
    policy = tiny.policy("W4A8")
    policy.freeze(Theta.load(final_theta(out, 1)))
    loaded = load_model(open_checkpoint(str(out)), torch.float32)
    with torch.inference_mode(), policy.speaking("Q"):
        logits = loaded(**inputs, use_cache=False).logits
        assert torch.equal(logits, policy.model(**inputs, use_cache=False).logits)
    examined = examine(out, tiny.folder, dtype=torch.float32, device=CPU)
    assert [check.name for check in examined.checks if not check.passed and "question" not in check.name] == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W4A16-g32", "FP8", "NVFP4"])
def test_schemes_with_more_scales_are_written_and_reloaded_exactly(
    scheme: str, made: Callable[[str], Tiny], tmp_path: Path
) -> None:
    tiny = made("qwen3_vl_moe")
    recipe = Recipe().with_overrides({"method": "rtn", "scheme": scheme, "data.holdout": 1, "compute.device": "cpu"})
    summary = onptq.quantize(tiny.folder, tmp_path / "out", calibration=tiny.manifest, recipe=recipe).summary
    assert summary["verification"]["max_abs_difference"] == 0.0


def test_experts_have_tensor_scales_of_their_own_shared_by_gate_and_up(made: Callable[[str], Tiny]) -> None:
    policy = Policy(load_scaled(made("qwen3_moe"), f"{EXPERTS}1.gate_proj"), Scheme.parse("NVFP4"))
    block = policy.structure.blocks[0]

    def scale(name: str) -> float:
        linear = block.child(f"{EXPERTS}{name}")
        assert isinstance(linear, QuantLinear)
        assert linear.tensor_scale is not None
        return float(linear.tensor_scale)

    assert scale("1.gate_proj") == scale("1.up_proj")
    assert scale("1.gate_proj") < scale("0.gate_proj") / 16


def load_scaled(tiny: Tiny, name: str) -> torch.nn.Module:
    """The model with one linear of its first layer 64 times as large."""
    model = load_model(tiny.source, torch.float32)
    find_structure(model).blocks[0].child(name).weight.data.mul_(64)  # type: ignore[operator, union-attr]
    return model


@pytest.mark.torchvision
@pytest.mark.skipif(not is_torchvision_available(), reason="the processor needs torchvision")
def test_images_and_clips_of_qwen3_omni_are_those_of_its_own_processor(made: Callable[[str], Tiny]) -> None:
    tiny = made("qwen3_omni_moe")
    own = transformers.AutoProcessor.from_pretrained(tiny.folder)
    own.image_processor = transformers.AutoImageProcessor.from_pretrained(tiny.folder, backend="pil")
    prompt = probe_prompt(tiny.source.family.modalities)
    image = decode_image(prompt.images[0].read(), "image")
    wave = read_audio(prompt.audios[0].read(), "clip", 16_000)
    text = tiny.processor._text(prompt)
    expected = own(text=[text], images=[image], audio=[wave], return_tensors="pt")
    made_here = tiny.processor(prompt).tensors
    assert expected.keys() == made_here.keys()
    for name, tensor in made_here.items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
