"""Compare: D and Q at the same prefix. Which decisions changed, or are close to it (Eqs. 3-7)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onptq import kernels
from onptq.bank import AGREE, MISMATCH, NEAR_MISS, States, Trajectory
from onptq.cycle.divergence import js_divergence, kl_divergence
from onptq.engine.prefixes import Prefixes
from onptq.models.encoding import PromptBatch
from onptq.models.language_model import LanguageModel

LOGIT_BYTES = 256 * 2**20  # at most this much of [states x vocabulary] in fp32 lives at a time
KERNEL_ROWS = 8192  # states per launch where no logits exist


@dataclass(frozen=True)
class Decisions:
    """What two rows of logits say about a state, each [S]."""

    reference: Tensor
    competitor: Tensor
    quantized: Tensor
    margin_dense: Tensor
    margin_quant: Tensor
    js: Tensor
    kl: Tensor

    @property
    def erosion(self) -> Tensor:
        """e = [m_D - m_Q]_+ (Eq. 6)."""
        return (self.margin_dense - self.margin_quant).clamp(min=0)


def decide(z_dense: Tensor, z_quant: Tensor) -> Decisions:
    """Eqs. 3-5 and 7 on logits [S, V]. Ties go to the lowest id in both models, so a mismatch always has erosion."""
    reference = z_dense.argmax(-1)
    quantized = z_quant.argmax(-1)
    competitor = z_quant.scatter(-1, reference[:, None], -torch.inf).argmax(-1)
    return Decisions(
        reference,
        competitor,
        quantized,
        pair_margin(z_dense, reference, competitor),
        pair_margin(z_quant, reference, competitor),
        js_divergence(z_dense, z_quant),
        kl_divergence(z_dense, z_quant),
    )


def decide_hidden(policy: LanguageModel, dense: Tensor, quant: Tensor) -> Decisions:
    """The same from residual streams [S, d]; on a GPU without a row of logits."""
    if kernels.fit(dense, quant, policy.structure.head.weight):
        from onptq.kernels.decisions import decide_states

        return Decisions(*decide_states(*head_inputs(policy, dense, quant)))
    return decide(policy.logits(dense), policy.logits(quant))


def head_inputs(policy: LanguageModel, dense: Tensor, quant: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the kernels multiply: normed states [S, d] of both models, head [V, d] and bias."""
    norm, head = policy.structure.decoder.norm, policy.structure.head
    return norm(dense), norm(quant), head.weight, head.bias  # type: ignore[operator]


def pair_margin(logits: Tensor, reference: Tensor, competitor: Tensor) -> Tensor:
    """m = z(a^R) - z(a^C) (Eq. 5), [S, V] to [S]."""
    pair = logits.gather(-1, torch.stack((reference, competitor), dim=-1))
    return pair[..., 0] - pair[..., 1]


def state_rows(vocabulary: int, models: int = 2) -> int:
    """How many states' logits fit into LOGIT_BYTES at once."""
    return max(1, LOGIT_BYTES // (4 * models * vocabulary))


@torch.no_grad()
def compare(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    *,
    near_miss_tol: float = 0.0,
    advance: Callable[[int], None] = lambda prompts: None,
) -> States:
    """One teacher-forced forward of D and one of Q per trajectory; one row per visited state."""
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}

    def compare_batch(index: int) -> States:
        batch = prefixes.batches[index]
        response = padded_responses(batch, by_prompt)
        dense = prefixes.teacher_force(index, "D", response)[1]
        quant = prefixes.teacher_force(index, "Q", response)[1]
        rows, steps = _visited(batch, by_prompt)
        columns = [
            _decide_chunk(prefixes, dense[rows[chunk], steps[chunk]], quant[rows[chunk], steps[chunk]])
            for chunk in _chunks(len(rows), _rows_at_once(prefixes.policy))
        ]
        decisions = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
        return _states(batch, rows, steps, response, decisions, near_miss_tol)

    parts = []
    for part in prefixes.map_batches(compare_batch):
        parts.append(part)
        advance(len(np.unique(part.prompt)))
    return States.concatenate(parts)


def padded_responses(batch: PromptBatch, by_prompt: dict[int, Trajectory]) -> Tensor:
    """[B, T], shorter responses filled up with token 0; what follows a response is never a state."""
    responses = [by_prompt[prompt.ordinal].tokens for prompt in batch.prompts]
    width = max(len(response) for response in responses)
    return torch.tensor(
        [[*response, *[0] * (width - len(response))] for response in responses], device=batch.embeds.device
    )


def _visited(batch: PromptBatch, by_prompt: dict[int, Trajectory]) -> tuple[Tensor, Tensor]:
    """Row and 0-based step of every state that exists."""
    pairs = [
        (row, step) for row, prompt in enumerate(batch.prompts) for step in range(len(by_prompt[prompt.ordinal].tokens))
    ]
    rows, steps = torch.tensor(pairs, device=batch.embeds.device).unbind(1)
    return rows, steps


def _rows_at_once(policy: LanguageModel) -> int:
    """Kernels hold no logits, so that memory does not bound them."""
    return KERNEL_ROWS if kernels.fit(policy.structure.head.weight) else state_rows(policy.vocabulary)


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _decide_chunk(prefixes: Prefixes, dense: Tensor, quant: Tensor) -> dict[str, np.ndarray]:
    found = decide_hidden(prefixes.policy, dense, quant)
    return {
        "reference": found.reference.int().cpu().numpy(),
        "competitor": found.competitor.int().cpu().numpy(),
        "quantized": found.quantized.int().cpu().numpy(),
        "margin_dense": found.margin_dense.cpu().numpy(),
        "margin_quant": found.margin_quant.cpu().numpy(),
        "erosion": found.erosion.cpu().numpy(),
        "js": found.js.cpu().numpy(),
        "kl": found.kl.cpu().numpy(),
    }


def _states(
    batch: PromptBatch,
    rows: Tensor,
    steps: Tensor,
    response: Tensor,
    decisions: dict[str, np.ndarray],
    tolerance: float,
) -> States:
    ordinals = np.array([prompt.ordinal for prompt in batch.prompts], np.int32)
    mismatch = decisions["quantized"] != decisions["reference"]
    near_miss = ~mismatch & (decisions["erosion"] > tolerance)
    return States.compared(
        prompt=ordinals[rows.cpu().numpy()],
        t=steps.int().cpu().numpy() + 1,
        token=response[rows, steps].int().cpu().numpy(),
        kind=np.where(mismatch, MISMATCH, np.where(near_miss, NEAR_MISS, AGREE)).astype(np.int8),
        **decisions,
    )
