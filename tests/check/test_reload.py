"""Folded, written and reloaded by transformers, a calibrated model computes what the training graph computed, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from conftest import MULTIMODAL, Tiny
from naive import extended, make_policy, random_theta
from safetensors import safe_open
from torch import Tensor, nn

from onptq.check.reload import check_modules
from onptq.checkpoint.load import load_model
from onptq.checkpoint.source import open_checkpoint
from onptq.checkpoint.write import write_checkpoint
from onptq.methods.rtn import rtn
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import Theta
from onptq.schemes import NAMED

SCHEMES = ("W8A8", "W4A16", "W4A16-g128-asym", "W4A8", "W4A8-g128", "W4A6")
RICH = 2  # a prompt with a picture, and for Omni with a sound too
RESPONSE = (5, 60, 200, 7, 91, 313)


DTYPES = (torch.float32, torch.bfloat16)
# Every family in W4A8, and every scheme, every named format and both types of numbers in some family.
CASES = [(family, "W4A8", torch.float32) for family in MULTIMODAL]
CASES += [(MULTIMODAL[at % 3], scheme, DTYPES[(at + 1) % 2]) for at, scheme in enumerate(SCHEMES)]
CASES += [("qwen2.5-vl", scheme, DTYPES[at % 2]) for at, scheme in enumerate(NAMED)]
CASES += [("qwen2.5-vl", "NVFP4", torch.bfloat16)]


def export(tiny: Tiny, policy: Policy, theta: Theta, out: Path) -> nn.Module:
    """As the job does: fold, write, reload."""
    policy.freeze(theta)
    write_checkpoint(tiny.source, out, policy.folded(), policy.scheme)
    model = load_model(open_checkpoint(str(out)), policy.dtype)
    check_modules(model, tiny.source.family.ignore)
    return model


@torch.no_grad()
def logits(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    out: Tensor = model(**inputs, use_cache=False).logits[0]
    return out


@pytest.mark.parametrize(("family", "scheme", "dtype"), CASES)
def test_the_reloaded_checkpoint_gives_the_training_graph_s_logits(
    tiny: Callable[[str], Tiny], family: str, scheme: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    checkpoint = tiny(family)
    policy = make_policy(checkpoint, scheme, dtype)
    assert policy.storage == torch.bfloat16
    prompt = checkpoint.inputs(RICH)
    assert {1, 2} & set(prompt.modality.tolist()) == ({1, 2} if family == "qwen2.5-omni" else {1})
    inputs = [extended(prompt, RESPONSE[:count]) for count in (0, len(RESPONSE))]

    theta = random_theta(policy)
    policy.attach(theta)
    with policy.speaking("Q"):
        graph = [logits(policy.model, one) for one in inputs]
    reloaded = export(checkpoint, policy, theta, tmp_path / "out")
    for one, expected in zip(inputs, graph, strict=True):
        found = logits(reloaded, one)
        assert found.dtype == dtype
        assert len(found) == one["input_ids"].shape[1]
        assert (found - expected).abs().max().item() == 0.0
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
    dense = logits(policy.model, inputs[-1])
    assert not torch.equal(dense, graph[-1]), "Q must differ from D, or the comparison shows nothing"


@pytest.mark.parametrize(("family", "scheme"), list(zip(MULTIMODAL, ("W4A8", "W4A16-g128-asym", "W8A8"), strict=True)))
def test_the_exported_graph_is_that_of_plain_rounding(
    tiny: Callable[[str], Tiny], family: str, scheme: str, tmp_path: Path
) -> None:
    checkpoint = tiny(family)
    policy = make_policy(checkpoint, scheme, torch.float32)
    calibrated = export(checkpoint, policy, random_theta(policy), tmp_path / "calibrated")
    plain = export(checkpoint, policy, rtn(policy, ()), tmp_path / "rtn")

    assert tree(calibrated) == tree(plain)
    assert shapes(calibrated.state_dict()) == shapes(plain.state_dict())
    mine, theirs = stored(tmp_path / "calibrated"), stored(tmp_path / "rtn")
    assert mine == theirs
    assert sum(name.endswith("weight_scale") for name in mine) == 7 * policy.blocks
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("calibrated", "rtn")]
    assert configs[0] == configs[1]
    different = [
        name for name, tensor in calibrated.state_dict().items() if not torch.equal(tensor, plain.state_dict()[name])
    ]
    assert different, "the two checkpoints differ in their numbers"
    assert all(".layers." in name for name in different), "and only inside the decoder's blocks"


def tree(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def stored(folder: Path) -> dict[str, tuple[list[int], str]]:
    """Name, shape and dtype of every tensor on disk."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                piece = file.get_slice(name)
                found[name] = (piece.get_shape(), piece.get_dtype())
    return found
