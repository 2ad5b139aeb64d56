"""Everything `onptq verify` looks at, in order: the folder, the reload, the schemes, the logits, one question per modality.

A run ends with the same checks, against the graph it was folded from.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onptq.check.files import Check, check_folder
from onptq.check.reload import Verification, check_modules, hold_against, quantized_modules
from onptq.check.trial import (
    Agreement,
    Answered,
    Question,
    ask,
    check_logits,
    compare_logits,
    judge_answers,
    questions,
    teacher_forced,
)
from onptq.checkpoint.load import load_model
from onptq.checkpoint.names import matches
from onptq.checkpoint.source import Source, open_checkpoint
from onptq.errors import OnPTQError
from onptq.models.family import Family
from onptq.models.processing import PromptProcessor


@dataclass(frozen=True)
class Examination:
    folder: Path
    checks: Sequence[Check]
    agreements: Mapping[str, Agreement] = field(default_factory=dict)  # by modality, where there is a dense model

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "agreement": {name: asdict(one) for name, one in self.agreements.items()},
        }


@dataclass(frozen=True)
class DenseVoice:
    """What the dense model says to every question, and its logits while saying it, [states, V] each."""

    answers: Sequence[Answered]
    logits: Sequence[Tensor]


def examine(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str], None] = lambda text: None,
) -> Examination:
    """Look at a checkpoint, whoever made it; with `against`, the dense model it was made from, also compare."""
    source = open_checkpoint(str(folder))
    dense = None if against is None else open_checkpoint(str(against))
    if dense is not None and dense.family != source.family:
        raise OnPTQError(
            f"{against} is a {dense.family.name} model, {folder} a {source.family.name} model: no comparison"
        )
    note("reading files and tensors")
    checks = check_folder(source.folder, source.family, None if dense is None else dense.folder)
    if any(check.name == "tensors" and not check.passed for check in checks):
        return Examination(source.folder, checks)
    try:
        processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
        asked = questions(processor)
    except OnPTQError as error:
        return Examination(source.folder, [*checks, Check("processor", False, str(error))])
    voice = None
    if dense is not None:
        note("listening to the dense model")
        voice = _listen(dense, asked, processor.tokenizer, dtype, device)
    note("trying the checkpoint")
    model, loading = _reload(source, dtype, device)
    checks += loading
    if model is None:
        return Examination(source.folder, checks)
    answers = ask(model, asked, processor.tokenizer, source.eos())
    logit_checks, agreements = _try_logits(model, asked, answers, voice)
    return Examination(
        source.folder,
        [*checks, *logit_checks, *judge_answers(answers, voice.answers if voice else ())],
        agreements,
    )


def verify_export(
    folder: Path,
    source: Source,
    processor: PromptProcessor,
    inputs: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Tensor],
    dense: Sequence[Answered],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Verification, list[Check]]:
    """What a run ends with. Raises on everything that is wrong with the checkpoint; whether its answers to the questions
    are any good is in the checks, because a coarse scheme may spoil them without any fault of the export."""
    checks = check_folder(folder, source.family, source.folder)
    for check in checks:
        if not check.passed:
            raise OnPTQError(f"{folder}: {check.name}: {check.seen}")
    model = load_model(open_checkpoint(str(folder)), dtype, device)
    check_modules(model, source.family.ignore)
    checks.append(check_schemes(model, source.family))
    found = hold_against(model, folder, inputs, expected, dtype=dtype)
    answers = ask(model, questions(processor), processor.tokenizer, source.eos())
    return found, [*checks, *judge_answers(answers, dense)]


def check_schemes(model: Any, family: Family) -> Check:
    """Which modules compute with quantized weights or activations; none outside the language model may."""
    quantized = quantized_modules(model)
    outside = sorted(name for name in quantized if any(matches(name, f"re:{tower}") for tower in family.towers))
    if outside:
        return Check(
            "schemes", False, f"{len(outside)} modules outside the language model carry one: {', '.join(outside[:3])}"
        )
    if not quantized:
        return Check("schemes", True, "no module carries a compressed-tensors scheme")
    kinds = sorted({name.rpartition(".")[2] for name in quantized})
    return Check("schemes", True, f"{len(quantized)} modules, all in the language model: {', '.join(kinds)}")


def _reload(source: Source, dtype: torch.dtype, device: torch.device) -> tuple[Any, list[Check]]:
    """As a user loads it. Where that fails, as the reader of evaluations mends it, so that the rest can still be told."""
    try:
        model = load_model(source, dtype, device)
        return model, [Check("reload", True, f"{type(model).__name__} in {dtype}"), check_schemes(model, source.family)]
    except Exception as error:  # a quantizer is a package of its own and may raise anything
        failed = Check("reload", False, " ".join(str(error).split())[:300])
    try:
        model = load_model(source, dtype, device, repair=True)
    except OnPTQError:
        return None, [failed]
    mended = "; loads when linears that are plain on disk are left plain: the ignore list does not name them as transformers does"
    return model, [Check("reload", False, failed.seen + mended), check_schemes(model, source.family)]


def _listen(
    dense: Source, asked: Sequence[Question], tokenizer: Any, dtype: torch.dtype, device: torch.device
) -> DenseVoice:
    model = load_model(dense, dtype, device, repair=True)
    answers = ask(model, asked, tokenizer, dense.eos())
    logits = [teacher_forced(model, one.inputs, said.tokens) for one, said in zip(asked, answers, strict=True)]
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return DenseVoice(answers, logits)


def _try_logits(
    model: Any, asked: Sequence[Question], answers: Sequence[Answered], voice: DenseVoice | None
) -> tuple[list[Check], dict[str, Agreement]]:
    """Both models hear the dense one's answers; without one, the model hears its own."""
    if voice is None:
        pairs = zip(asked, answers, strict=True)
        return [check_logits(one.modality, teacher_forced(model, one.inputs, said.tokens)) for one, said in pairs], {}
    checks, agreements = [], {}
    for one, said, dense in zip(asked, voice.answers, voice.logits, strict=True):
        check, found = compare_logits(one.modality, dense, teacher_forced(model, one.inputs, said.tokens))
        checks.append(check)
        if found is not None:
            agreements[one.modality] = found
    return checks, agreements
