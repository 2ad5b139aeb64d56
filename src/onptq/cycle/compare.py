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
from onptq.errors import OnPTQError
from onptq.models.encoding import PromptBatch
from onptq.models.language_model import LanguageModel

LOGIT_BYTES = 256 * 2**20  # at most this much of [states x vocabulary] in fp32 lives at a time
KERNEL_ROWS = 8192  # states per launch where no logits exist


@dataclass(frozen=True)
class Decisions:
    """Decisions, margins and divergences of the two models at S states, each [S]."""

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


def decide_hidden(policy: LanguageModel, dense: Tensor, quant: Tensor, other: LanguageModel | None = None) -> Decisions:
    """The same from residual streams [S, d]; on a GPU without a row of logits. `other` is Q where it is a model of its own."""
    if other is None and head_fits(policy, dense, quant):
        from onptq.kernels.decisions import decide_states

        return Decisions(*decide_states(*head_inputs(policy, dense, quant)))
    return decide(policy.logits(dense), (other or policy).logits(quant))


def head_fits(policy: LanguageModel, *rows: Tensor) -> bool:
    """Whether kernels compute what follows from the logits of residual streams, which no cap changes."""
    return policy.structure.cap is None and kernels.fit(*rows, policy.structure.head.weight)


def head_inputs(policy: LanguageModel, dense: Tensor, quant: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The factors of both models' logits: normed states [S, d], head [V, d] and bias."""
    norm, head = policy.structure.decoder.norm, policy.structure.head
    return norm(dense), norm(quant), head.weight, head.bias  # type: ignore[operator]


def pair_margin(logits: Tensor, reference: Tensor, competitor: Tensor) -> Tensor:
    """m = z(a^R) - z(a^C) (Eq. 5), [S, V] to [S]."""
    pair = logits.gather(-1, torch.stack((reference, competitor), dim=-1))
    return pair[..., 0] - pair[..., 1]


def state_rows(vocabulary: int, models: int = 2) -> int:
    """The number of states whose logits fit into LOGIT_BYTES at once."""
    return max(1, LOGIT_BYTES // (4 * models * vocabulary))


@torch.no_grad()
def compare(
    prefixes: Prefixes,
    trajectories: Sequence[Trajectory],
    *,
    quantized: Prefixes | None = None,
    near_miss_tol: float = 0.0,
    advance: Callable[[int], None] = lambda prompts: None,
) -> States:
    """One teacher-forced forward of D and one of Q per trajectory; one row per visited state.

    Q is the quantized side of the policy, or the model of the prefixes `quantized`, with its own embeddings and head.
    """
    by_prompt = {trajectory.prompt: trajectory for trajectory in trajectories}
    other = None if quantized is None else quantized.policy
    if quantized is not None:
        prefixes.batch_like(quantized)

    def compare_batch(index: int) -> dict[str, np.ndarray]:
        batch = prefixes.batches[index]
        response = padded_responses(batch, by_prompt)
        rows, steps = _visited(batch, by_prompt)
        dense = prefixes.teacher_force(index, "D", response)[1][rows, steps]
        quant = (quantized or prefixes).teacher_force(index, "Q", response)[1][rows, steps]
        columns = [
            _columns(decide_hidden(prefixes.policy, dense[chunk], quant[chunk], other))
            for chunk in _chunks(len(rows), _rows_at_once(prefixes.policy, other))
        ]
        decisions = {name: np.concatenate([column[name] for column in columns]) for name in columns[0]}
        return _visits(batch, rows, steps, response, decisions, near_miss_tol)

    parts = []
    for columns in prefixes.map_batches(compare_batch, *(() if quantized is None else (quantized,))):
        parts.append(States.compared(**columns))
        advance(len(np.unique(columns["prompt"])))
    return _finite(States.concatenate(parts))


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


def _rows_at_once(policy: LanguageModel, other: LanguageModel | None) -> int:
    """States per chunk. Kernels hold no logits, so that memory does not bound them."""
    by_kernels = other is None and head_fits(policy)
    return KERNEL_ROWS if by_kernels else state_rows(policy.vocabulary)


def _chunks(total: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, total, size))


def _columns(decisions: Decisions) -> dict[str, np.ndarray]:
    """Tokens as int32, everything else as it is."""
    names = ("reference", "competitor", "quantized", "margin_dense", "margin_quant", "erosion", "js", "kl")
    columns = {name: getattr(decisions, name).cpu() for name in names}
    return {name: (c if c.is_floating_point() else c.int()).numpy() for name, c in columns.items()}


def _visits(
    batch: PromptBatch,
    rows: Tensor,
    steps: Tensor,
    response: Tensor,
    decisions: dict[str, np.ndarray],
    tolerance: float,
) -> dict[str, np.ndarray]:
    """The columns of `States.compared`."""
    ordinals = np.array([prompt.ordinal for prompt in batch.prompts], np.int32)
    mismatch = decisions["quantized"] != decisions["reference"]
    near_miss = ~mismatch & (decisions["erosion"] > tolerance)
    return dict(
        prompt=ordinals[rows.cpu().numpy()],
        t=steps.int().cpu().numpy() + 1,
        token=response[rows, steps].int().cpu().numpy(),
        kind=np.where(mismatch, MISMATCH, np.where(near_miss, NEAR_MISS, AGREE)).astype(np.int8),
        **decisions,
    )


def _finite(states: States) -> States:
    """The states, if every logit they come from was a number."""
    broken = np.flatnonzero(~np.isfinite(states.erosion + states.js))
    if len(broken):
        row = int(broken[0])
        raise OnPTQError(
            f"the model's logits overflow or hold NaN at prompt {states.prompt[row]}, token {states.t[row]}: "
            "its weights or its settings are broken"
        )
    return states
