"""`onptq verify`: static checks, reload in transformers, schemes, logits, and one question per modality.

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

from onptq.check.findings import Check
from onptq.check.reload import Verification, check_modules, compare_with_graph, quantized_modules
from onptq.check.static import check_folder
from onptq.check.trial import (
    EXPLAINED,
    UNRELATED,
    Agreement,
    Answer,
    Question,
    ask,
    check_logits,
    compare_logits,
    judge_answers,
    questions,
    teacher_forced,
)
from onptq.checkpoint.load import load_model
from onptq.checkpoint.names import matches, too_deep
from onptq.checkpoint.source import Source, open_checkpoint
from onptq.errors import OnPTQError
from onptq.models.family import Family
from onptq.models.processing import PromptProcessor
from onptq.schemes import Scheme


@dataclass(frozen=True)
class Examination:
    """All checks of a checkpoint with their outcomes."""

    folder: Path
    checks: Sequence[Check]
    agreements: Mapping[str, Agreement] = field(default_factory=dict)  # by modality, where there is a dense model

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        record = {
            "folder": str(self.folder),
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "agreement": {name: asdict(one) for name, one in self.agreements.items()},
        }
        return record | ({"least_correlation": UNRELATED, "explained": EXPLAINED} if self.agreements else {})


@dataclass(frozen=True)
class DenseAnswers:
    """The dense model's answer to every question, and its logits over question and answer, [states, V] each."""

    answers: Sequence[Answer]
    logits: Sequence[Tensor]


def examine(
    folder: str | Path,
    against: str | Path | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    note: Callable[[str], None] = lambda text: None,
) -> Examination:
    """Check a checkpoint of any maker; `against` is the dense model it was made from, to compare with."""
    source = open_checkpoint(str(folder))
    dense = None if against is None else open_checkpoint(str(against))
    if dense is not None and dense.family != source.family:
        raise OnPTQError(
            f"{against} is a {dense.family.name} model, {folder} a {source.family.name} model: no comparison"
        )
    note("reading files and tensors")
    checks = check_folder(source.folder, None if dense is None else dense.folder)
    # With too many layers even the tokenizer's loader would not end.
    deep = too_deep(source.config, len(source.checkpoint.modules)) is not None
    if deep or any(check.name == "tensors" and not check.passed for check in checks):
        return Examination(source.folder, checks)
    try:
        processor = PromptProcessor.from_folder(source.folder, source.family, source.config)
        probes = questions(processor)
    except OnPTQError as error:
        return Examination(source.folder, [*checks, Check("processor", False, str(error))])
    reference = None
    if dense is not None:
        note("running the dense model")
        reference = _answer_dense(dense, probes, processor.tokenizer, dtype, device)
    note("running the checkpoint")
    model, loading = _reload(source, dtype, device)
    checks += loading
    if model is None:
        return Examination(source.folder, checks)
    answers = ask(model, probes, processor.tokenizer, source.eos())
    logit_checks, agreements = _check_all_logits(model, probes, answers, reference)
    judged = judge_answers(answers, reference.answers if reference else ())
    return Examination(source.folder, [*checks, *logit_checks, *judged], agreements)


def verify_export(
    folder: Path,
    source: Source,
    processor: PromptProcessor,
    inputs: Sequence[Mapping[str, Tensor]],
    expected: Sequence[Tensor],
    dense: Sequence[Answer],
    *,
    dtype: torch.dtype,
    device: torch.device,
    scheme: Scheme | None = None,
) -> tuple[Verification, list[Check]]:
    """The checks that a run ends with. Everything that is wrong with the checkpoint raises.

    Bad answers to the questions do not: a coarse scheme may spoil them without any fault of the export.
    """
    checks = check_folder(folder, source.folder)
    for check in checks:
        if not check.passed:
            raise OnPTQError(f"{folder}: {check.name}: {check.seen}")
    model = load_model(open_checkpoint(str(folder)), dtype, device)
    check_modules(model, source.family.ignore, source.family.linears, scheme)
    checks.append(check_schemes(model, source.family))
    verification = compare_with_graph(model, folder, inputs, expected, dtype=dtype)
    answers = ask(model, questions(processor), processor.tokenizer, source.eos())
    return verification, [*checks, *judge_answers(answers, dense)]


def check_schemes(model: Any, family: Family) -> Check:
    """The modules that compute with quantized weights or activations; none outside the language model may."""
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
    """The model as a user loads it. Where that fails, with a repaired ignore list, so that the other checks can run."""
    try:
        model = load_model(source, dtype, device)
        return model, [Check("reload", True, f"{type(model).__name__} in {dtype}"), check_schemes(model, source.family)]
    except Exception as error:  # a quantizer is a package of its own and may raise anything
        failed = " ".join(str(error).split())[:300]
    try:
        model = load_model(source, dtype, device, repair=True)
    except OnPTQError:
        return None, [Check("reload", False, failed)]
    repaired = "; loads when linears that are dense on disk stay dense: the ignore list does not name them as transformers does"
    return model, [Check("reload", False, failed + repaired), check_schemes(model, source.family)]


def _answer_dense(
    dense: Source, probes: Sequence[Question], tokenizer: Any, dtype: torch.dtype, device: torch.device
) -> DenseAnswers:
    model = load_model(dense, dtype, device, repair=True)
    answers = ask(model, probes, tokenizer, dense.eos())
    logits = [teacher_forced(model, probe.inputs, one.tokens) for probe, one in zip(probes, answers, strict=True)]
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return DenseAnswers(answers, logits)


def _check_all_logits(
    model: Any, probes: Sequence[Question], answers: Sequence[Answer], reference: DenseAnswers | None
) -> tuple[list[Check], dict[str, Agreement]]:
    """Checks of the logits over the dense model's answers; without a dense model, over the model's own."""
    if reference is None:
        pairs = zip(probes, answers, strict=True)
        return [check_logits(one.modality, teacher_forced(model, one.inputs, own.tokens)) for one, own in pairs], {}
    checks, agreements = [], {}
    for one, answer, dense in zip(probes, reference.answers, reference.logits, strict=True):
        check, agreement = compare_logits(one.modality, dense, teacher_forced(model, one.inputs, answer.tokens))
        checks.append(check)
        if agreement is not None:
            agreements[one.modality] = agreement
    return checks, agreements
