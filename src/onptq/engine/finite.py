"""Where the activations of a model stop being numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from onptq.engine.prefixes import whole_prompts
from onptq.models.encoding import EncodedPrompt, PromptBatch
from onptq.models.language_model import LanguageModel


@torch.no_grad()
def broken_block(model: LanguageModel, sequence: EncodedPrompt) -> int | None:
    """Run a sequence; return the first block whose output is not finite, None where all outputs are."""
    finite: list[Tensor] = []
    model.run(
        whole_prompts(PromptBatch.of([sequence])), observe=lambda _, hidden: finite.append(hidden.isfinite().all())
    )
    flags = torch.stack(finite).tolist()
    return None if all(flags) else flags.index(False)
