"""MASQuant, full: smoothing of its own for each modality and linear, and a low-rank branch for pictures and sounds.

Scales are trained as in `masquant`, with Q(x_m / s_m) Q(W diag(s_m))^T for the tokens of modality m. Then one quantized weight is
kept, the text's, and every other modality gets a branch of low rank, x_m / s_m @ down @ up, that stands for
W diag(s_m) - Q(W diag(s_text)); it is fitted in the metric of the inputs that the quantized block sees. down_proj has neither
scales nor a branch.

The graph is changed: scales depend on the token and branches run beside the linears, so nothing of this folds and no checkpoint
holds it. It is only ever simulated, by `ModalityQuantized.attached`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onptq.methods.layerwise import Answer, Stream, quantized_linear, replaced
from onptq.methods.linears import dense_weight, rounded_weight
from onptq.methods.masquant import (
    COUNTS,
    EPOCHS,
    SMOOTHED,
    advance_and_measure,
    modality_of,
    open_each,
    smoothquant_scales,
    train_scales,
)
from onptq.models.encoding import EncodedPrompt
from onptq.models.family import TEXT
from onptq.models.structure import NORMS, Block
from onptq.quantizer.modules import QuantNorm
from onptq.quantizer.numerics import fake_quantize_activations
from onptq.quantizer.policy import Policy
from onptq.quantizer.theta import PAIR_INTO, PAIRS, Theta

MEASURED_ON = {"norm_qkv": "q_proj", "v_o": "o_proj", "norm_gate_up": "up_proj"}  # the others copy its first scales
RANK_RATIO = 0.1
LEAST_RANK = 32


@dataclass(frozen=True)
class ModalityLinear:
    """One quantized weight, Q(W diag(s_text)), behind scales of the token's own modality; a branch x / s_m @ down @ up makes up
    for the rest where the modality has one."""

    scales: Tensor  # [3, I]
    weight: Tensor  # [O, I]
    bias: Tensor | None
    bits: int | None  # of the activations
    branches: dict[int, tuple[Tensor, Tensor]]  # modality -> down [I, r], up [r, O]

    def __call__(self, x: Tensor, modality: Tensor) -> Tensor:
        x = (x / self.scales[modality]).to(x.dtype)
        out = F.linear(x if self.bits is None else fake_quantize_activations(x, self.bits), self.weight, self.bias)
        for kind, (down, up) in self.branches.items():
            here = modality == kind
            out[here] += x[here] @ down @ up
        return out


@dataclass(frozen=True)
class ModalityQuantized:
    """MASQuant's full form: what the linears of every block are, by path."""

    linears: dict[str, ModalityLinear]
    label: ClassVar[str] = "graph changed"

    @contextmanager
    def attached(self, policy: Policy, prompts: Sequence[EncodedPrompt]) -> Iterator[None]:
        """Within it, Q is this model, for text and for the pictures and sounds of these prompts, which it knows by their
        embeddings. D stays D. Q cannot be given a theta meanwhile, and there is nothing to export."""
        table = {_bytes(row): int(kind) for prompt in prompts for row, kind in _media(prompt)}
        now = [torch.zeros(0, dtype=torch.long)]

        def listen(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            kinds = [[table.get(_bytes(row), TEXT) for row in rows] for rows in args[0].detach()]
            now[0] = torch.tensor(kinds, device=args[0].device)

        def answer(quantized: ModalityLinear, dense: nn.Module) -> Answer:
            return lambda x: quantized(x, now[0]) if policy.switch.quantized else dense(x)

        with ExitStack() as stack:
            for block in policy.structure.blocks:
                names = [name for _, consumers in PAIRS.values() for name in consumers]
                stand: dict[str, Answer] = {
                    name: answer(self.linears[block.path(name)], block.child(name)) for name in names
                }
                for name in NORMS:
                    norm = block.child(name)
                    assert isinstance(norm, QuantNorm)
                    stand[name] = norm.norm  # scales are applied behind it, token by token
                stack.enter_context(replaced(block, stand))
            first = policy.structure.blocks[0].module
            stack.callback(first.register_forward_pre_hook(listen).remove)
            policy.switch.generation += 1
            try:
                yield
            finally:
                policy.switch.generation += 1


def _media(prompt: EncodedPrompt) -> Iterator[tuple[Tensor, Tensor]]:
    here = prompt.modality != TEXT
    yield from zip(prompt.embeds[here], prompt.modality[here], strict=True)


def _bytes(row: Tensor) -> bytes:
    return row.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def masquant_full(
    policy: Policy,
    prompts: Sequence[EncodedPrompt],
    advance: Callable[[int], None] = lambda blocks: None,
    *,
    epochs: int = EPOCHS,
    rank_ratio: float = RANK_RATIO,
) -> ModalityQuantized:
    theta = Theta.rtn(policy.structure.blocks, policy.scheme, policy.device)
    dense, quantized = open_each(policy, prompts), open_each(policy, prompts)
    present = {int(kind) for prompt in prompts for kind in prompt.modality.unique()}
    made = ModalityQuantized({})
    with torch.no_grad(), policy.speaking("D"):
        for block in policy.structure.blocks:
            scales = _modality_scales(block, advance_and_measure(dense, block), present)

            def answers(
                modality: Tensor, block: Block = block, scales: dict[str, Tensor] = scales
            ) -> dict[str, Answer]:
                own = {
                    name: _own_weights(policy, theta, block, name, scale, modality) for name, scale in scales.items()
                }
                return own | {"down_proj": quantized_linear(policy, theta, block, "down_proj")}

            train_scales(block, scales.values(), answers, quantized, dense, epochs)
            scales = {name: scale.detach() for name, scale in scales.items()}
            width = dense_weight(block, "down_proj").shape[1]
            scales["down_proj"] = torch.ones(len(COUNTS), width, device=policy.device)
            seen = _inputs(block, answers, quantized)
            for name, scale in scales.items():
                share = {} if name == "down_proj" else seen[PAIR_INTO[name]]
                linear = _fit_branches(policy, theta, block, name, scale, share, rank_ratio)
                made.linears[block.path(name)] = linear
            for stream in quantized:
                stand = {name: _bound(made.linears[block.path(name)], modality_of(stream)) for name in scales}
                with replaced(block, stand):
                    stream.advance(block)
            advance(1)
    return made


def _bound(linear: ModalityLinear, modality: Tensor) -> Answer:
    return lambda x: linear(x, modality)


def _modality_scales(block: Block, largest: dict[str, Tensor], present: set[int]) -> dict[str, Tensor]:
    """SmoothQuant's scales of each modality, [3, I] for each of the six linears; an absent modality has the text's."""
    scales = {}
    for pair, x_max in largest.items():
        w_max = dense_weight(block, MEASURED_ON[pair]).abs().amax(0).float()
        known = torch.stack([x_max[kind if kind in present else TEXT] for kind in COUNTS])
        for name in PAIRS[pair][1]:
            scales[name] = smoothquant_scales(known, w_max)
    return scales


def _own_weights(policy: Policy, theta: Theta, block: Block, name: str, scales: Tensor, modality: Tensor) -> Answer:
    """sum_m Q(x_m / s_m) Q(W diag(s_m))^T."""
    kinds = modality.unique().tolist()
    linears = {kind: quantized_linear(policy, theta, block, name, scales[kind].log()) for kind in kinds}

    def answer(x: Tensor) -> Tensor:
        parts = [torch.where((modality == kind)[..., None], linear(x), 0) for kind, linear in linears.items()]
        return torch.stack(parts).sum(0)

    return answer


def _inputs(
    block: Block, answers: Callable[[Tensor], dict[str, Answer]], streams: Sequence[Stream]
) -> dict[str, dict[int, Tensor]]:
    """What enters each pair's consumers in the quantized block: pair -> modality other than text -> [n, I]."""
    found: dict[str, dict[int, list[Tensor]]] = {pair: {} for pair in SMOOTHED}
    for stream in streams:
        modality = modality_of(stream)
        with replaced(block, answers(modality)):
            entering = stream.entering(block)
        for pair, kinds in found.items():
            for kind in set(modality.unique().tolist()) - {TEXT}:
                kinds.setdefault(kind, []).append(entering[pair][modality == kind])
    return {pair: {kind: torch.cat(parts) for kind, parts in kinds.items()} for pair, kinds in found.items()}


def _fit_branches(
    policy: Policy,
    theta: Theta,
    block: Block,
    name: str,
    scales: Tensor,
    seen: dict[int, Tensor],
    rank_ratio: float,
) -> ModalityLinear:
    dense = dense_weight(block, name)
    weight = rounded_weight(policy, theta, block, name, scales[TEXT].log())
    rank = min(*dense.shape, max(LEAST_RANK, round(rank_ratio * min(dense.shape))))
    branches = {}
    for kind, x in seen.items():
        missing = dense.float() * scales[kind] - weight.float()
        down, up = low_rank(missing, x.float() / scales[kind], rank)
        branches[kind] = down.to(policy.dtype), up.to(policy.dtype)
    bits = policy.scheme.activation_bits if policy.scheme.quantizes_activations else None
    bias: Tensor | None = block.child(name).bias  # type: ignore[assignment]
    return ModalityLinear(scales, weight, bias, bits, branches)


def low_rank(matrix: Tensor, inputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """down [I, r] and up [r, O] such that x down up is nearest to x matrix^T over the inputs [n, I], in least squares.

    With C = E[x x^T] = T T^T that error is |(matrix - approximation) T|^2, so the approximation is the truncated SVD of
    matrix T, with T undone.
    """
    x = inputs.double()
    energy, axes = torch.linalg.eigh(x.T @ x / len(x))
    root = energy.clamp(min=float(energy.max()) * 1e-9).clamp(min=torch.finfo(torch.float32).tiny).sqrt()
    left, values, right = torch.linalg.svd(matrix.double() @ (axes * root), full_matrices=False)
    down = (axes / root) @ right[:rank].T
    return down, (left[:, :rank] * values[:rank]).T
