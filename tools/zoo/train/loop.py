"""Training from scratch: data from worker processes, images drawn on the device, a schedule that ends in time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from onptq.errors import OnPTQError
from onptq.models.attention import trusted_attention
from onptq.progress import QuietReporter, Reporter
from onptq.zoo.sprites import render
from onptq.zoo.tokens import OMNI, QWEN
from tools.zoo.train.card import write_card
from tools.zoo.train.checkpoint import VOCAB, WORDS, build_model, check_family, side, write_settings, write_weights
from tools.zoo.train.clock import Clock
from tools.zoo.train.collate import KINDS, LENGTH, Arrays, Layout, count_targets
from tools.zoo.train.curricula import CURRICULA
from tools.zoo.train.feed import Feed, Order
from tools.zoo.train.forward import Forward, Rows
from tools.zoo.train.optimize import Optimizer
from tools.zoo.train.spoken import AudioBank, Transcriber, disguise
from tools.zoo.train.tokenizer import train_tokenizer

SAVE_SECONDS = 120.0
SPOKEN_PART = 64  # lessons a speaker makes at a time


@dataclass(frozen=True)
class Training:
    """Settings of a training. The schedule follows steps or minutes, whichever end first. Once all losses are as low as
    `enough` says, the learning rate falls to zero within `settle` steps."""

    family: str
    minutes: float | None = 9.0
    steps: int | None = None
    batch: int = 512
    lr: float = 2e-3
    warmup: int = 300
    decay: float = 0.05
    clip: float = 1.0
    balance: float = 0.5  # an answer of n tokens has weight n ** (1 - balance)
    workers: int = 4
    seed: int = 0
    device: str = "cuda"
    compiled: bool = True
    spoken_share: float = 0.2  # of Omni's steps, once there are spoken lessons; images take longer to learn
    speakers: int = 3  # worker processes that synthesize speech
    spoken_capacity: int = 120_000  # spoken lessons on the device
    first_audio: int = 50_000  # spoken lessons before the first is used; with images learned, speech is learned fast
    late_warmup: int = 100  # spoken steps until the audio tower, which only they train, has the full learning rate
    ctc: float = 0.3
    tokenizer_lessons: int = 4000
    log_every: int = 50  # steps
    enough: Mapping[str, float] = field(default_factory=dict)  # loss by kind of lesson, all of them to be reached
    settle: int = 600

    def __post_init__(self) -> None:
        check_family(self.family)
        if self.minutes is None and self.steps is None:
            raise OnPTQError("training without end: expected steps, minutes or both")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise OnPTQError(
                f"device {self.device!r}: this machine has no usable GPU; expected --device cpu, which is slow"
            )

    def learned(self, losses: Mapping[str, float]) -> bool:
        return bool(self.enough) and all(losses.get(kind, inf) <= most for kind, most in self.enough.items())

    def clock(self, began: float) -> Clock:
        return Clock(self.steps, None if self.minutes is None else began + 60 * self.minutes, self.settle)


def train(training: Training, out: Path, reporter: Reporter | None = None) -> Path:
    """Train a model and write its checkpoint folder, with log.jsonl beside the weights."""
    reporter = reporter or QuietReporter()
    if out.exists() and any(out.iterdir()):
        raise OnPTQError(f"{out} is not empty; expected a new folder for the checkpoint")
    began = time.monotonic()
    words = train_tokenizer(WORDS, lessons=training.tokenizer_lessons)
    plain = words.to_str()
    ids = write_settings(out, training.family, words)
    with ExitStack() as stack:
        stack.enter_context(trusted_attention())
        order = partial(Order, plain, seed=training.seed)
        shares = CURRICULA[training.family].shares
        targets = count_targets(Layout.of(Tokenizer.from_str(plain), QWEN), training.batch, shares)
        images = order(QWEN, size=training.batch, targets=targets, shares=shares)
        feed = stack.enter_context(Feed(images, training.workers))
        speech = None
        if training.family == "qwen2.5-omni":
            spoken = order(OMNI, size=min(SPOKEN_PART, training.first_audio), targets=None)
            speech = stack.enter_context(Feed(spoken, training.speakers))
        trainer = Trainer(training, out, ids, feed, speech)
        log = stack.enter_context((out / "log.jsonl").open("w", encoding="utf-8"))
        for record in _run(trainer, began, out, reporter):
            log.write(json.dumps(record) + "\n")
            log.flush()
    seconds = time.monotonic() - began
    write_weights(out, training.family, trainer.model)
    device = torch.cuda.get_device_name() if training.device.startswith("cuda") else "CPU"
    write_card(out, training.family, asdict(training), trainer.step, seconds, device, trainer.parameters)
    return out


def _run(trainer: Trainer, began: float, out: Path, reporter: Reporter) -> Iterator[dict[str, Any]]:
    """Step until the end of the schedule; yield a record every `log_every` steps."""
    training, clock = trainer.training, trainer.training.clock(began)
    saved = marked = time.monotonic()
    with reporter.phase(f"training {training.family}", 1000, "per mille") as bar:
        shown = 0
        while (progress := clock.progress(trainer.step)) < 1:
            trainer.advance(progress)
            if trainer.step == 1:
                trainer.wait()  # the clock starts after compilation
                clock.start()
                marked = time.monotonic()
            if trainer.step % training.log_every == 0:
                record = trainer.report()
                now = time.monotonic()
                record["seconds"] = round(now - began, 2)
                record["samples_per_second"] = round(training.log_every * training.batch / (now - marked))
                marked = now
                if training.learned(record["losses"]):
                    clock.settle(trainer.step)
                yield record
                step = int(1000 * progress) - shown
                shown += step
                bar.advance(step, loss=record["loss"], samples_per_second=record["samples_per_second"])
                if trainer.step % (10 * training.log_every) == 0:
                    reporter.note(f"{training.family}: {json.dumps(record)}")
            if time.monotonic() - saved > SAVE_SECONDS:
                write_weights(out, training.family, trainer.model)
                saved = time.monotonic()
        trainer.wait()


class Trainer:
    """The model, its optimizer and its data."""

    def __init__(self, training: Training, out: Path, ids: dict[str, int], feed: Feed, speech: Feed | None) -> None:
        self.training = training
        self.device = torch.device(training.device)
        self.step = 0
        self._cuda = self.device.type == "cuda"
        torch.set_float32_matmul_precision("high")
        self.model = build_model(out, training.family, training.seed).to(self.device).train()
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        settings = json.loads((out / "preprocessor_config.json").read_text(encoding="utf-8"))
        self.forward = Forward(self.model, settings, compiled=training.compiled and self._cuda)
        self._side = side(training.family)
        self._feed, self._speech = feed, speech
        self._translate = translation(ids).to(self.device)
        self._rng = np.random.default_rng(training.seed)
        self._bank = self._transcriber = None
        modules, late = [self.model], []
        if speech is not None:
            assert self.forward.audio is not None
            self._bank = AudioBank(training.spoken_capacity, self.device)
            self._transcriber = Transcriber(self.model.get_input_embeddings().embedding_dim, WORDS).to(self.device)
            modules.append(self._transcriber)
            late = [self.forward.audio.tower, self._transcriber]
        self._optimizer = Optimizer(modules, training.lr, training.decay, training.clip, late)
        self._spoken_steps = 0
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(4, len(KINDS), device=self.device)  # loss and tokens by kind; CTC loss and its steps

    def advance(self, progress: float) -> None:
        """One step at this part of the schedule."""
        self._optimizer.set_rate(*self._rates(progress))
        self._listen()
        spoken = self._wants_speech()
        with torch.autocast("cuda", torch.bfloat16) if self._cuda else nullcontext():
            loss = self._spoken_loss() if spoken else self._image_loss(next(self._feed))
        loss.backward()
        self._optimizer.step()
        self.step += 1
        self._spoken_steps += spoken

    def report(self) -> dict[str, Any]:
        """Losses since the last report; waits for the device."""
        sums = self._sums.cpu()
        tokens = sums[1].clamp(min=1)
        loss = float(sums[0].sum() / sums[1].sum().clamp(min=1))
        kinds = {kind: round(float(sums[0, i] / tokens[i]), 4) for i, kind in enumerate(KINDS) if sums[1, i] > 0}
        record: dict[str, Any] = {"step": self.step, "loss": round(loss, 4), "losses": kinds}
        if self._bank is not None:
            record |= {"sounds": self._bank.count, "ctc": round(float(sums[2, 0] / sums[3, 0].clamp(min=1)), 4)}
        record["lr"] = round(self._optimizer.lr, 7)
        self._clear()
        return record | self._optimizer.report()

    def wait(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()

    def _rates(self, progress: float) -> tuple[float, float]:
        """Learning rates of the model and of what only spoken steps train."""
        lr = self.training.lr * min((self.step + 1) / self.training.warmup, 1) * max(1 - progress, 0.0)
        return lr, lr * min((self._spoken_steps + 1) / self.training.late_warmup, 1)

    def _listen(self) -> None:
        """Add the finished lessons of the speakers."""
        if self._speech is None or self._bank is None:
            return
        while (part := self._speech.poll()) is not None:
            self._bank.add(part)
            if len(self._bank) >= self.training.first_audio:
                break

    def _wants_speech(self) -> bool:
        if self._bank is None or len(self._bank) < self.training.first_audio:
            return False
        return float(self._rng.random()) < self.training.spoken_share

    def _image_loss(self, arrays: Arrays) -> Tensor:
        batch = self._move(arrays)
        losses, _ = self.forward.losses(self._rows(batch), batch["spots"], self._ids(batch["next"]))
        return self._weighted(losses, batch)

    def _spoken_loss(self) -> Tensor:
        assert self._bank is not None
        assert self._transcriber is not None
        arrays, mel, frames = self._bank.draw(self.training.batch, self._rng)
        lengths = torch.from_numpy(frames).to(self.device, non_blocking=True)
        texts = arrays.pop("transcript"), arrays.pop("words")
        batch = self._move(arrays)
        rows = self._rows(batch, disguise(mel, lengths), lengths)
        losses, audio = self.forward.losses(rows, batch["spots"], batch["next"].long())
        assert audio is not None
        aligned: Tensor = self._transcriber(audio, frames, *texts)
        self._sums[2, 0] += aligned.detach().nan_to_num(posinf=0)
        self._sums[3, 0] += aligned.detach().isfinite()
        return self._weighted(losses, batch) + self.training.ctc * aligned

    def _weighted(self, losses: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """The mean over the tokens of answers, with less weight on each token of a long answer."""
        lengths = batch["lengths"].float()
        counted = lengths > 0
        weights = counted * lengths.clamp(min=1) ** -self.training.balance
        kinds = batch["kinds"].long()[batch["spots"] // LENGTH]
        finite = counted & losses.detach().isfinite()
        self._sums[0].index_add_(0, kinds, torch.where(finite, losses.detach(), 0))
        self._sums[1].index_add_(0, kinds, finite.float())
        return (losses * weights).sum() / weights.sum()

    @torch.no_grad()
    def _rows(self, batch: dict[str, Tensor], mel: Tensor | None = None, frames: Tensor | None = None) -> Rows:
        ids = batch["ids"].long() if mel is not None else self._ids(batch["ids"])
        return Rows(ids, batch["seen"], render(batch["sprites"], batch["background"], self._side), mel, frames)

    def _ids(self, ids: Tensor) -> Tensor:
        return self._translate[ids.long()]

    def _move(self, arrays: Arrays) -> dict[str, Tensor]:
        return {name: self._to_device(array) for name, array in arrays.items()}

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self._cuda else tensor


def translation(ids: dict[str, int]) -> Tensor:
    """Batches without audio spell special tokens as the VL models do; this gives each id the family's own."""
    table = torch.arange(VOCAB)
    if "<|IMAGE|>" in ids:
        pairs = (
            ("<|vision_start|>", "<|vision_bos|>"),
            ("<|image_pad|>", "<|IMAGE|>"),
            ("<|vision_end|>", "<|vision_eos|>"),
        )
        for name, own in pairs:
            table[WORDS + QWEN.special.index(name)] = ids[own]
    return table
