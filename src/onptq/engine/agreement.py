"""A check that the engine computes what a model's own forward computes, for families that were found by structure."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch

from onptq.data.prompts import Prompt
from onptq.engine.prefixes import whole_prompts
from onptq.errors import OnPTQError
from onptq.models.encoding import PromptBatch, encode
from onptq.models.language_model import LanguageModel
from onptq.models.processing import PromptProcessor

STATES = 8  # the last of the prompt
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the logits' deviation
COARSE = 0.1  # in 16 bits, where two orders of summation differ


@torch.no_grad()
def check_agreement(model: LanguageModel, processor: PromptProcessor, prompts: Sequence[Prompt]) -> None:
    """Refuse a model whose forward does more than its embeddings, blocks, norm and head do one after another.

    Blocks may pass every other check while the forward around them scales embeddings or caps logits. One prompt is
    compared, with media where there is one, and only in families that no file describes."""
    if not processor.family.derived or not prompts:
        return
    inputs = processor(next((prompt for prompt in prompts if prompt.images or prompt.audios), prompts[0]))
    tensors = {name: tensor.to(model.device) for name, tensor in inputs.tensors.items()}
    few = {"logits_to_keep": STATES} if "logits_to_keep" in inspect.signature(model.model.forward).parameters else {}
    with model.speaking("D"):
        expected = model.model(**tensors, use_cache=False, **few).logits[0, -STATES:].float()
        hidden = model.run(whole_prompts(PromptBatch.of(encode(model, [inputs]))))
        logits = model.logits(hidden[0, -STATES:]).float()
    difference, deviation = float((logits - expected).abs().mean()), float(expected.std())
    if not difference <= TOLERANCES.get(model.dtype, COARSE) * deviation:
        raise OnPTQError(
            f"{type(model.model).__name__} computes more than its decoder's layers, norm and head: logits of its own forward "
            f"differ by {difference:.3g} from those of {type(model.structure.decoder).__name__}, whose deviation is "
            f"{deviation:.3g}"
        )
