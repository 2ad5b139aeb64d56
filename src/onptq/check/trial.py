"""Trials of a loaded model: one question per modality, and agreement of its logits with the dense model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from onptq.check.findings import Check
from onptq.check.probes import probe_prompt
from onptq.check.reload import logits_of, place
from onptq.models.family import TEXT
from onptq.models.processing import ModelInputs, PromptProcessor

QUESTIONS = {
    "image": "What do you see in this picture? Answer in one sentence.",
    "audio": "What do you hear in this recording? Answer in one sentence.",
    "text": "Which color is the sky on a clear day?",
}
TOKENS = 24
STUCK = 8  # times the same token at the end of an answer
SHOWN = 48  # characters of an answer
# Of the embedded models, W4A6 by RTN lies above 0.9, and W2A16 by RTN, which destroys them, at 0.1 to 0.15.
UNRELATED = 0.25  # correlation below which a model is broken
EXPLAINED = (
    "The logits are of built-in probes: one question per modality, about a drawn image, a tone, or text alone. They are "
    "compared at every text token of the question and of the dense model's answer. A check is ok where the correlation "
    f"is at least {UNRELATED} and the models choose the same token more often than by chance: it finds broken checkpoints, "
    "not small losses. A run's figures on held-out prompts differ: they are of the quantized model's own answers to prompts "
    "like the calibration set, and count no token of a question, where choices are close and change most easily."
)


def endless(tokens: Sequence[int]) -> bool:
    """Whether an answer ends with one token many times."""
    return len(tokens) >= STUCK and len(set(tokens[-STUCK:])) == 1


@dataclass(frozen=True)
class Answer:
    """A model's greedy answer to one question."""

    modality: str
    tokens: tuple[int, ...]  # without the token that ended it
    text: str
    finite: bool  # every logit that decided it

    @property
    def fault(self) -> str | None:
        if not self.finite:
            return "logits that are not finite"
        if not self.text.strip():
            return "an empty answer"
        if endless(self.tokens):
            return f"one token over and over: {shortened(self.text)}"
        return None


@dataclass(frozen=True)
class Agreement:
    """Logits of two models at the same states: the text tokens of a prompt and of the dense model's answer to it."""

    states: int
    correlation: float  # of the changes from state to state; 0 for a model with the same logits at every state
    kl: float  # mean KL(dense || quantized), nats
    argmax: float  # share of states that choose the same token
    chance: float  # the share that would, were the choices shuffled

    @property
    def broken(self) -> bool:
        return not self.correlation >= UNRELATED or self.argmax <= self.chance < 0.5

    def __str__(self) -> str:
        return (
            f"{self.states} states: correlation {self.correlation:.4f}, KL {self.kl:.4g} nats, same choice {self.argmax:.1%} "
            f"(chance {self.chance:.1%})"
        )


@dataclass(frozen=True)
class Question:
    """The question of one modality, as the model takes it."""

    modality: str
    inputs: ModelInputs


def questions(processor: PromptProcessor) -> list[Question]:
    """One question per modality, each with its own generated image or audio; text last."""
    probes = []
    for modality in (name for name in QUESTIONS if name in processor.family.modalities):
        prompt = probe_prompt(frozenset({modality}))
        media = [{"type": modality}] if modality != "text" else []
        content = [*media, {"type": "text", "text": QUESTIONS[modality]}]
        prompt = replace(prompt, id=f"a question about {modality}", messages=[{"role": "user", "content": content}])
        probes.append(Question(modality, processor(prompt)))
    return probes


def ask(model: Any, probes: Sequence[Question], tokenizer: Any, eos: Sequence[int]) -> list[Answer]:
    """The model's answers, greedy whatever the checkpoint's generation_config.json has about sampling."""
    return [_answer(model, question, tokenizer, eos) for question in probes]


@torch.inference_mode()
def _answer(model: Any, question: Question, tokenizer: Any, eos: Sequence[int]) -> Answer:
    out = model.generate(
        **place(question.inputs.tensors, model),
        max_new_tokens=TOKENS,
        do_sample=False,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        eos_token_id=list(eos) or None,
        pad_token_id=eos[0] if eos else 0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    finite = all(bool(torch.isfinite(logits).all()) for logits in out.logits)
    emitted = out.sequences[0, question.inputs.length :].tolist()
    tokens = tuple(emitted[: next((at for at, token in enumerate(emitted) if token in eos), len(emitted))])
    return Answer(question.modality, tokens, tokenizer.decode(tokens, skip_special_tokens=True), finite)


def judge_answers(answers: Sequence[Answer], dense: Sequence[Answer] = ()) -> list[Check]:
    """A check per answer. A fault of the dense model excuses the same of the quantized one; NaN excuses nothing."""
    excused = {one.modality for one in dense if one.fault is not None and one.finite}
    checks = []
    for one in answers:
        name = f"question: {one.modality}"
        if one.fault is None:
            checks.append(Check(name, True, shortened(one.text)))
        elif one.finite and one.modality in excused:
            checks.append(Check(name, True, f"{one.fault}; so does the dense model"))
        else:
            checks.append(Check(name, False, f"gives {one.fault}"))
    return checks


def teacher_forced(model: Any, inputs: ModelInputs, answer: Sequence[int]) -> Tensor:
    """Logits [states, V] at the text tokens of a prompt and of the answer that is fed to the model."""
    added = torch.tensor([list(answer)], dtype=torch.long)
    tensors = dict(inputs.tensors)
    tensors["input_ids"] = torch.cat([tensors["input_ids"], added], dim=1)
    tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    if "mm_token_type_ids" in tensors:
        tensors["mm_token_type_ids"] = torch.cat([tensors["mm_token_type_ids"], torch.zeros_like(added)], dim=1)
    text = torch.cat([inputs.modality == TEXT, torch.ones(len(answer), dtype=torch.bool)])
    return logits_of(model, tensors)[0][text]


def check_logits(modality: str, logits: Tensor) -> Check:
    """The check of the model alone: logits are finite, not flat, and not the same at every state."""
    name = f"logits: {modality}"
    if not bool(torch.isfinite(logits).all()):
        return Check(
            name, False, f"not finite at {int((~torch.isfinite(logits)).any(-1).sum())} of {len(logits)} states"
        )
    spread = logits.std(-1).min().item()
    moved = (logits - logits[:1]).abs().max().item()
    if spread == 0 or moved == 0:
        return Check(name, False, "flat: every token is as likely" if spread == 0 else "the same at every state")
    return Check(name, True, f"finite at {len(logits)} states, largest {logits.abs().max().item():.1f}")


def compare_logits(modality: str, dense: Tensor, logits: Tensor) -> tuple[Check, Agreement | None]:
    """The same check, and the agreement with the dense model's logits."""
    alone = check_logits(modality, logits)
    if not alone.passed:
        return alone, None
    if dense.shape != logits.shape:
        seen = f"{list(logits.shape)} against the dense model's {list(dense.shape)}"
        return Check(alone.name, False, seen), None
    agreed = agreement(dense, logits)
    seen = f"unrelated to the dense model's: {agreed}" if agreed.broken else str(agreed)
    return Check(alone.name, not agreed.broken, seen), agreed


def agreement(dense: Tensor, quantized: Tensor) -> Agreement:
    """The agreement over states [S, V]."""
    first, second = (logits - logits.mean(-1, keepdim=True) for logits in (dense.double(), quantized.double()))
    moving = [each - each.mean(0) for each in (first, second)]
    norm = (moving[0].square().sum() * moving[1].square().sum()).sqrt()
    correlation = ((moving[0] * moving[1]).sum() / norm).item() if norm > 0 else 0.0
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()
    chosen = [each.argmax(-1) for each in (first, second)]
    share = [torch.bincount(each, minlength=dense.shape[1]) / len(each) for each in chosen]
    same = (chosen[0] == chosen[1]).double().mean().item()
    return Agreement(len(dense), correlation, kl, same, float((share[0] * share[1]).sum()))


def shortened(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= SHOWN else line[: SHOWN - 3] + "...")
