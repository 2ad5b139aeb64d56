"""Kernels as the library calls them, and on a GPU with the shapes of a 7B model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from checks_decisions import states_and_head
from kernel_support import DEVICE, GRADIENTS, close, normal
from torch import Tensor

import onptq.kernels.activations
import onptq.kernels.codes
import onptq.kernels.decisions
import onptq.kernels.descent
import onptq.kernels.norms
import onptq.kernels.products
import onptq.kernels.weights
from onptq.bank import Trajectory
from onptq.checkpoint.load import load_policy
from onptq.checkpoint.source import find_source
from onptq.cycle.compare import Decisions, compare, decide
from onptq.cycle.objective import Targets, UpdateSequences, measure
from onptq.data.manifest import load_manifest
from onptq.engine.prefixes import Prefixes
from onptq.kernels.decisions import decide_states, kl_of_states
from onptq.models.encoding import encode
from onptq.models.processing import PromptProcessor
from onptq.quantizer.norms import plain_norm, rms_norm
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.quantizer.weights import fake_quantize_weight
from onptq.schemes import Scheme

if DEVICE == "cuda":

    def test_a_7b_models_shapes_agree_with_the_twins(choose: Callable[[str], None]) -> None:
        dense, start, head, _ = states_and_head((300, 3584, 152064), torch.bfloat16)
        z_dense, z_quant = (torch.mm(rows, head.T, out_dtype=torch.float32) for rows in (dense, start))
        results, exact = Decisions(*decide_states(dense, start, head, None)), decide(z_dense, z_quant)
        for field in fields(Decisions):
            values, expected = getattr(results, field.name), getattr(exact, field.name)
            torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4, msg=field.name)
        again = Decisions(*decide_states(dense, start, head, None))
        assert all(torch.equal(getattr(results, field.name), getattr(again, field.name)) for field in fields(Decisions))
        quant = start.clone().requires_grad_()
        kl_of_states(dense, quant, head, None).sum().backward()
        slope = (z_quant.softmax(-1) - z_dense.softmax(-1)).bfloat16()
        close(quant.grad, slope @ head, 1e-2)

        weight, grad = (normal(3584, 18944, seed=seed).bfloat16() for seed in (20, 24))
        start_theta = normal(18944, seed=25) / 4, normal(3584, seed=26) / 4, -normal(3584, 1, seed=27).abs() / 8
        learned: dict[str, list[Tensor | None]] = {}
        gradients: dict[str, list[Tensor | None]] = {}
        x, hidden = normal(16384, 18944, seed=21).bfloat16(), normal(4000, 3584, seed=28).bfloat16()
        outs = {}
        for which in ("kernels", "twins"):
            choose(which)
            theta = [tensor.clone().requires_grad_() for tensor in start_theta]
            normed = [tensor.bfloat16().requires_grad_() for tensor in (hidden.clone(), theta[1].detach() + 1)]
            rms_norm(normed[0], normed[1], 1e-6).backward(hidden.flip(0))
            log_in, log_out, ratio = theta
            dtype = torch.bfloat16
            rounded = fake_quantize_weight(weight, log_in, log_out, ratio, None, Scheme(4), dtype, dtype)
            rounded.backward(grad)
            outs[which] = rounded.detach(), fake_quantize_activations(x, 8)
            learned[which] = [tensor.grad for tensor in theta]
            gradients[which] = [tensor.grad for tensor in normed]
        assert all(torch.equal(kernel, twin) for kernel, twin in zip(outs["kernels"], outs["twins"], strict=True))
        for kernel, twin in zip(learned["kernels"], learned["twins"], strict=True):
            close(kernel, twin, 1e-5)
        for kernel, twin in zip(gradients["kernels"], gradients["twins"], strict=True):
            close(kernel, twin, GRADIENTS[torch.bfloat16])


pytest_plugins = ["kernel_choice"]


@pytest.mark.parametrize("scheme", ["W4A8", "W4A16"])
def test_the_cycle_computes_the_same_with_kernels_and_without(
    small: Path, choose: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    ran: set[str] = set()
    functions = {"decide_states", "kl_of_states", "margin_of_states", "fake_quantize_rows"}
    if scheme == "W4A8":  # a norm's last bit decides between two codes of the largest activation
        functions |= {"fake_quantize_tokens"}
        monkeypatch.setattr(onptq.kernels.norms, "rms_norm_rows", plain_norm)
    else:
        functions |= {"rms_norm_rows"}
    for module in (onptq.kernels.activations, onptq.kernels.decisions, onptq.kernels.norms, onptq.kernels.weights):
        for name in functions:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _recording(getattr(module, name), name, ran))
    source = find_source(small)
    processor = PromptProcessor.from_folder(small, source.family, source.config)
    policy = load_policy(source, scheme, device=DEVICE, dtype=torch.float32)
    prompts = []
    for prompt in load_manifest(small / "prompts.jsonl")[:2]:
        inputs = processor(prompt)
        prompts.append(encode(policy, [inputs], [prompt.ordinal])[0])
    trajectories = [Trajectory(prompt.ordinal, (3, 5, 7 + prompt.ordinal), False) for prompt in prompts]
    results = {}
    for which in ("twins", "kernels"):
        choose(which)
        theta = random_theta(policy)
        policy.freeze(theta)
        states = compare(Prefixes(policy, prompts, max_tokens=4), trajectories)
        states = states.with_columns(weight=np.full(len(states), 1 / len(states), np.float32))
        parameters = [tensor.requires_grad_() for part in (theta.smoothing, theta.ratio) for tensor in part.values()]
        policy.attach(theta)
        items = UpdateSequences(policy, prompts, trajectories, states)
        terms = measure(policy, items, Targets(policy, None))
        torch.stack(list(terms.named().values())).sum().backward()
        results[which] = states, terms, [parameter.grad for parameter in parameters]
        assert bool(ran) == (which == "kernels")
    assert ran == functions
    (states, terms, grads), (twin_states, twin_terms, twin_grads) = results["kernels"], results["twins"]
    for name in states.__dataclass_fields__:
        np.testing.assert_allclose(
            getattr(states, name), getattr(twin_states, name), rtol=1e-4, atol=1e-5, err_msg=name
        )
    torch.testing.assert_close(terms.named(), twin_terms.named(), rtol=1e-4, atol=1e-6)
    for grad, twin in zip(grads, twin_grads, strict=True):
        close(grad, twin, 1e-4)


def random_theta(policy: Policy) -> Theta:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    for seed, u in enumerate(theta.smoothing.values()):
        u.copy_(normal(*u.shape, seed=seed) / 4)
    for seed, c in enumerate(theta.ratio.values()):
        c.copy_(-normal(*c.shape, seed=seed).abs() / 8)
    return theta


def _recording(function: Callable[..., object], name: str, ran: set[str]) -> Callable[..., object]:
    def recorded(*arguments: object) -> object:
        ran.add(name)
        return function(*arguments)

    return recorded
