from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from onptq import load_policy
from onptq.checkpoint.source import find_source
from onptq.data.prompts import Media, Prompt
from onptq.errors import OnPTQError
from onptq.evaluate.scores import TaskScore
from onptq.models.encoding import encode
from onptq.models.processing import PromptProcessor
from onptq.progress import Bar, QuietReporter
from onptq.registry import FAMILIES
from onptq.zoo.speech import Utterance, speak, to_wav
from onptq.zoo.sprites import draw, to_png
from onptq.zoo.voices import sample_voice
from tools.zoo.commands import application
from tools.zoo.lessons import MAKERS, SEEN, Lesson, make_lesson, sample_texts
from tools.zoo.train.__main__ import main
from tools.zoo.train.card import add_scores, write_card
from tools.zoo.train.checkpoint import TOKENS, WORDS, ZOO, build_model, side, write_settings, write_weights
from tools.zoo.train.collate import (
    LENGTH,
    Layout,
    count_targets,
    find_targets,
    frames_of,
    make_audio,
    make_images,
)
from tools.zoo.train.feed import Feed, Order
from tools.zoo.train.forward import FRAMES, Forward, Rows, audio_tokens, position_ids
from tools.zoo.train.loop import Trainer, Training, train, translation
from tools.zoo.train.mel import log_mel
from tools.zoo.train.optimize import PATIENCE, Optimizer
from tools.zoo.train.spoken import AudioBank, disguise, silence_after
from tools.zoo.train.tokenizer import train_tokenizer

OMNI = "qwen2.5-omni"
SMALL: dict[str, Any] = {
    "minutes": None,
    "warmup": 6,
    "workers": 0,
    "device": "cpu",
    "tokenizer_lessons": 200,
}


@pytest.fixture(scope="module")
def words() -> str:
    return str(train_tokenizer(WORDS, lessons=300).to_str())


@pytest.fixture(scope="module", params=ZOO)
def fresh(
    request: pytest.FixtureRequest, words: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Any]:
    """A family, its settings, and a model with random weights, norms and biases included."""
    family, folder = request.param, tmp_path_factory.mktemp("fresh")
    write_settings(folder, family, Tokenizer.from_str(words))
    model = build_model(folder, family, seed=1).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    write_weights(folder, family, model)
    return family, folder, model


def layout_of(words: str, family: str) -> Layout:
    return Layout.of(Tokenizer.from_str(words), TOKENS[family])


def lessons_of(family: str, count: int) -> list[Lesson]:
    kinds = ["choice", "define", "read", *(("listen", "speech", "spoken caption") if family == OMNI else ("caption",))]
    return [MAKERS[kinds[index % len(kinds)]](Random(f"lesson {index}")) for index in range(count)]


def spoken(lesson: Lesson, index: int) -> Any:
    return speak(Utterance(lesson.spoken or "", sample_voice(Random(index), "train")))


def processor_of(folder: Path) -> PromptProcessor:
    source = find_source(folder)
    return PromptProcessor.from_folder(folder, source.family, source.config)


def prompt_of(lesson: Lesson, family: str, index: int) -> Prompt:
    """The first question of a lesson as a user would ask it."""
    parts: list[dict[str, Any]] = []
    images: tuple[Media, ...] = ()
    audios: tuple[Media, ...] = ()
    if lesson.drawing is not None:
        parts.append({"type": "image"})
        images = (Media(None, "", to_png(lesson.drawing, side(family))),)
    if lesson.spoken is not None:
        parts.append({"type": "audio"})
        audios = (Media(None, "", to_wav(spoken(lesson, index))),)
    parts.append({"type": "text", "text": lesson.turns[0][0]})
    return Prompt(index, "p", [{"role": "user", "content": parts}], images, audios)


@pytest.mark.slow
def test_training_computes_what_transformers_computes(fresh: tuple[str, Path, Any], words: str) -> None:
    family, folder, model = fresh
    layout, processor = layout_of(words, family), processor_of(folder)
    lessons = lessons_of(family, 6)
    waves = [spoken(lesson, index) if lesson.spoken else np.zeros(0, np.int16) for index, lesson in enumerate(lessons)]
    frames = torch.tensor([frames_of(len(wave)) for wave in waves])
    rows = [layout.row(lesson, LENGTH, int(audio_tokens(count))) for lesson, count in zip(lessons, frames, strict=True)]
    ids = torch.full((len(rows), LENGTH), layout.pad)
    for index, row in enumerate(rows):
        assert row is not None
        ids[index, : len(row[0])] = torch.tensor(row[0])
    blank = torch.zeros(side(family), side(family), 3, dtype=torch.uint8)
    images = torch.stack([draw(one.drawing, side(family)) if one.drawing else blank for one in lessons])
    seen = torch.tensor([lesson.drawing is not None for lesson in lessons])
    changed: tuple[Any, ...] = ()
    if family == OMNI:
        padded = np.stack([np.pad(wave, (0, FRAMES * 160 - len(wave))) for wave in waves]) / 32768
        changed = (silence_after(log_mel(torch.from_numpy(padded)), frames), frames)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    with torch.no_grad():
        trained = Forward(model, settings).logits(Rows(ids, seen, images, *changed))
        for index, lesson in enumerate(lessons):
            inputs = processor(prompt_of(lesson, family, index))
            length = len(rows[index][0])  # type: ignore[index]
            assert ids[index, : inputs.length].tolist() == inputs.input_ids[0].tolist()
            whole = {"input_ids": ids[index : index + 1, :length], "attention_mask": torch.ones(1, length).long()}
            if "mm_token_type_ids" in inputs.tensors:
                whole["mm_token_type_ids"] = (whole["input_ids"] == processor.placeholders[1]).long()
            expected = model(**inputs.tensors | whole).logits[0]
            torch.testing.assert_close(trained[index, :length], expected, atol=2e-4, rtol=1e-4)


def test_positions_are_those_of_the_model(fresh: tuple[str, Path, Any], words: str) -> None:
    family, _, model = fresh
    layout, inner = layout_of(words, family), getattr(model.model, "get_rope_index", None)
    index_of = inner or model.get_rope_index
    frames = torch.tensor([0, 0, 333, 78] if family == OMNI else [0] * 4)
    lessons = [*lessons_of(family, 2), *lessons_of(family, 5)[3:]]
    rows = [layout.row(lesson, LENGTH, int(audio_tokens(count))) for lesson, count in zip(lessons, frames, strict=True)]
    longest = max(len(row[0]) for row in rows if row)
    ids = torch.tensor([row[0] + [layout.pad] * (longest - len(row[0])) for row in rows if row])
    mask = torch.tensor([[1] * len(row[0]) + [0] * (longest - len(row[0])) for row in rows if row])
    seen = torch.tensor([lesson.drawing is not None for lesson in lessons])
    assert {*seen.tolist()} == {True, False}
    grids = torch.tensor([[1, 8, 8]] * int(seen.sum()))
    if family == OMNI:
        expected, _ = index_of(ids, image_grid_thw=grids, attention_mask=mask, audio_seqlens=frames[frames > 0])
    else:
        kinds = (ids == layout.image[1]).long()
        expected, _ = index_of(ids, kinds, image_grid_thw=grids, attention_mask=mask)
    assert torch.equal(position_ids(longest)[:, seen.long()] * mask, expected * mask)


def test_signs_are_spelled_and_other_words_are_not(words: str) -> None:
    tokenizer = Tokenizer.from_str(words)
    assert tokenizer.encode("K7QX").tokens == ["K", "7", "Q", "X"]
    assert tokenizer.encode("HOUSE").tokens == ["H", "O", "U", "S", "E"]
    assert tokenizer.encode("The picture").tokens == ["The", "Ġpicture"]


def test_the_word_by_word_speller_agrees_with_the_tokenizer(words: str) -> None:
    layout, tokenizer = layout_of(words, "qwen3-vl"), Tokenizer.from_str(words)
    odd = ["It's 12 o'clock,  isn't it?\n\nYES!! ", "naïve café ÀB", "A. red\nB. x", "iPhone McDonald X2y", "", " "]
    for text in [*sample_texts(Random(3), 200), *odd]:
        assert layout.spell(text) == tokenizer.encode(text).ids


def test_the_loss_is_taken_on_every_answer_and_its_end_and_nowhere_else(words: str) -> None:
    layout, tokenizer = layout_of(words, "qwen2.5-vl"), Tokenizer.from_str(words)
    batch = make_images(layout, seed=0, step=3, size=16, targets=count_targets(layout, 16, SEEN), shares=SEEN)
    rng = Random("0/3")
    for index in range(16):
        lesson = make_lesson(rng, SEEN)
        places = batch["spots"][(batch["lengths"] > 0) & (batch["spots"] // LENGTH == index)]
        order = np.argsort(batch["spots"], kind="stable")
        at = [place for place in order if batch["spots"][place] in set(places.tolist())]
        answer = batch["next"][at].tolist()
        parts = [tokenizer.decode(part, skip_special_tokens=False) for part in _split(answer, layout.end)]
        answers = [answer for _, answer in lesson.turns]
        assert parts
        assert parts == answers[: len(parts)]
        assert (batch["ids"].ravel()[batch["spots"][at] + 1] == answer).all()
    assert len(set(batch["spots"].tolist())) == len(batch["spots"]) == count_targets(layout, 16, SEEN)


def _split(ids: list[int], end: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == end:
            parts.append([])
        else:
            parts[-1].append(token)
    assert parts.pop() == []
    return parts


@pytest.mark.parametrize("family", ZOO)
def test_batches_without_audio_serve_every_family(family: str, words: str, tmp_path: Path) -> None:
    table = translation(write_settings(tmp_path, family, Tokenizer.from_str(words)))
    for lesson in lessons_of("qwen2.5-vl", 8):
        shared, own = layout_of(words, "qwen2.5-vl").row(lesson, LENGTH), layout_of(words, family).row(lesson, LENGTH)
        assert shared is not None
        assert own is not None
        assert table[torch.tensor(shared[0])].tolist() == own[0]


def test_targets_beyond_the_limit_are_cut() -> None:
    ids, answers = np.arange(256, dtype=np.int16).reshape(2, 128), np.full((2, 128), 3, np.uint8)
    targets = find_targets(ids, answers, 128)
    assert len(targets["spots"]) == 128
    assert (targets["lengths"] == 3).all()
    assert targets["spots"].tolist() == [*range(127), 128]  # the last of a row is followed by nothing


@pytest.mark.slow
def test_batches_do_not_depend_on_the_number_of_workers(words: str) -> None:
    order = Order(words, TOKENS["qwen2.5-vl"], seed=5, size=8, targets=128)
    with Feed(order, 0) as alone, Feed(order, 2) as together:
        for _ in range(3):
            one, other = next(alone), next(together)
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_worker_that_fails_ends_the_training() -> None:
    with (
        Feed(Order("{}", TOKENS["qwen2.5-vl"], 0, 8, 64), 1) as feed,
        pytest.raises(OnPTQError, match="worker"),
    ):
        next(feed)


def test_spoken_lessons_come_back_from_the_bank_whole(words: str) -> None:
    layout = layout_of(words, OMNI)
    parts = [make_audio(layout, 0, part, 4) for part in range(3)]
    bank = AudioBank(8, torch.device("cpu"))
    for part in parts:
        bank.add(part)
    arrays, mel, frames = bank.draw(64, np.random.default_rng(0))
    assert layout.audio is not None
    latest = [tuple(row) for part in parts[1:] for row in part["ids"].tolist()]
    drawn = [tuple(row) for row in arrays["ids"].tolist()]
    assert set(drawn) == set(latest)  # the first part has made room
    waves = np.concatenate([part["wave"] for part in parts[1:]])
    for row, features, count in zip(drawn, mel, frames, strict=True):
        assert row.count(layout.audio[1]) == int(audio_tokens(torch.tensor(count)))
        wave = torch.from_numpy(waves[latest.index(row)]).float()[None] / 32768
        torch.testing.assert_close(features[:, :count], log_mel(wave)[0, :, :count], atol=2e-3, rtol=0)
        assert not features[:, count:].any()


def test_augmented_speech_keeps_its_timing_and_most_of_its_content() -> None:
    torch.manual_seed(0)
    mel, frames = torch.rand(8, 128, FRAMES), torch.tensor([400, 300, 200, 100, 50, 399, 1, 10])
    mel = silence_after(mel, frames)
    changed = disguise(mel, frames)
    assert torch.equal(changed, silence_after(changed, frames))
    assert not torch.equal(changed[0], mel[0])
    loudness = torch.corrcoef(torch.stack([mel[:3].mean(1).flatten(), changed[:3].mean(1).flatten()]))[0, 1]
    assert loudness > 0.8


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_and_write_a_checkpoint(tmp_path: Path) -> None:
    """Of the family with every modality."""
    speech: dict[str, Any] = {
        "speakers": 0,
        "spoken_capacity": 16,
        "first_audio": 4,
        "spoken_share": 0.3,
        "late_warmup": 3,
    }
    settings = SMALL | {"steps": 24, "batch": 4, "log_every": 6}
    out = train(Training(OMNI, **settings, **speech), tmp_path / "new")
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [6, 12, 18, 24]
    assert [record["skipped"] for record in records] == [0] * 4
    early, late = records[0], records[-1]
    assert late["loss"] < early["loss"] - 0.5
    assert 0 < late["ctc"] < 0.6 * early["ctc"]
    assert set(late["losses"]) <= set(MAKERS)
    assert sum(path.stat().st_size for path in out.iterdir()) < 12.4e6
    assert (out / "model.safetensors").stat().st_mode & 0o777 == 0o644
    policy = load_policy(out, "W4A8", device="cpu")
    inputs = processor_of(out)(prompt_of(lessons_of(OMNI, 1)[0], OMNI, 0))
    assert encode(policy, [inputs])[0].length == inputs.length
    with pytest.raises(OnPTQError, match="is not empty"):
        train(Training(OMNI, **settings), out)


@pytest.mark.slow
def test_the_command_trains_a_model_that_can_be_loaded(tmp_path: Path) -> None:
    out = tmp_path / "model"
    options = {"--steps": 2, "--batch": 2, "--workers": 0, "--device": "cpu"}
    arguments = ["--family", "qwen2.5-vl", "--out", out, *(one for pair in options.items() for one in pair)]
    result = CliRunner().invoke(application(main), [*map(str, arguments), "--no-compile", "--no-exam"])
    assert result.exit_code == 0, result.output
    assert "2 steps of 2 lessons" in (out / "README.md").read_text()
    assert load_policy(out, "W16A16").structure.blocks
    assert not (out / "outliers.json").exists()  # chosen with the exam


@pytest.mark.slow
def test_training_ends_soon_after_enough_was_learned(tmp_path: Path) -> None:
    settings = SMALL | {"steps": 500, "batch": 2, "log_every": 2}
    out = train(Training("qwen3-vl", **settings, enough={"choice": 100.0}, settle=4), tmp_path / "new")
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    first = next(record["step"] for record in records if "choice" in record["losses"])
    assert records[-1]["step"] == first + 4
    assert records[-1]["lr"] < records[-2]["lr"]


@pytest.mark.parametrize(
    ("losses", "learned"), [({"a": 1.0, "b": 2.0}, True), ({"a": 1.1, "b": 0}, False), ({"a": 0}, False)]
)
def test_enough_is_learned_when_every_loss_is_low(losses: dict[str, float], learned: bool) -> None:
    assert Training("qwen3-vl", steps=1, device="cpu", enough={"a": 1.0, "b": 2.0}).learned(losses) is learned
    assert not Training("qwen3-vl", steps=1, device="cpu").learned(losses)


class Watcher(QuietReporter):
    """Records whether cuDNN attention is allowed while training runs."""

    def __init__(self) -> None:
        self.cudnn: list[bool] = []

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Bar]:
        self.cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        with super().phase(name, total, unit) as bar:
            yield bar


@pytest.mark.slow
def test_steps_with_infinite_gradients_are_left_out_and_counted(tmp_path: Path) -> None:
    watcher = Watcher()
    infinite: dict[str, Any] = {"ctc": math.inf}  # the loss of every spoken step
    speech: dict[str, Any] = {"speakers": 0, "spoken_capacity": 4, "first_audio": 2, "spoken_share": 0.4}
    training = Training(OMNI, **SMALL | {"steps": 8, "batch": 2, "log_every": 4}, **speech, **infinite)
    out = train(training, tmp_path / "new", watcher)
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert 0 < sum(record["skipped"] for record in records) < 8
    assert all(math.isfinite(record["loss"]) and record["norm"] > 0 for record in records)
    assert any(name.endswith("audio_tower.proj.bias") for record in records for name in record.get("not_finite", ()))
    fresh = build_model(out, OMNI, training.seed)
    model = transformers_model(out, OMNI)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    moved = {
        name
        for (name, before), after in zip(fresh.named_parameters(), model.parameters(), strict=True)
        if not torch.equal(before.bfloat16().float(), after.float())
    }
    assert any("visual.blocks.0" in name for name in moved)
    assert not any("audio_tower" in name for name in moved)  # which only spoken steps train
    assert watcher.cudnn == [False]
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.slow
def test_losses_that_are_not_finite_stay_out_of_the_log(words: str, tmp_path: Path) -> None:
    ids = write_settings(tmp_path, OMNI, Tokenizer.from_str(words))
    training = Training(OMNI, **SMALL | {"batch": 2, "steps": 6}, spoken_capacity=4, first_audio=2, spoken_share=0.5)
    images = Feed(Order(words, TOKENS["qwen2.5-vl"], seed=0, size=2, targets=128), 0)
    trainer = Trainer(training, tmp_path, ids, images, Feed(Order(words, TOKENS[OMNI], 0, 2, None), 0))
    (bias,) = (one for name, one in trainer.model.named_parameters() if name.endswith("audio_tower.conv1.bias"))
    torch.nn.init.constant_(bias, math.inf)  # so every spoken step is NaN from the start
    for _ in range(6):
        trainer.advance(0.0)
    record = trainer.report()
    assert 0 < record["skipped"] < 6
    assert 0 < record["loss"] < math.inf
    assert record["ctc"] == 0
    assert not {"speech", "listen"} & set(record["losses"])


def transformers_model(folder: Path, family: str) -> Any:
    import transformers

    return getattr(transformers, FAMILIES[family].model_class).from_pretrained(str(folder), dtype=torch.float32)


def two_layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))


def give_gradients(model: torch.nn.Module, seed: int, scale: float = 10.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)


def test_gradients_are_clipped_and_applied_as_torch_does_it() -> None:
    model = two_layers()
    twin = deepcopy(model)
    groups = [
        {"params": [twin[0].weight, twin[1].weight], "weight_decay": 0.1},
        {"params": [twin[0].bias, twin[1].bias], "weight_decay": 0.0},
    ]
    mine, theirs = Optimizer([model], 1e-2, 0.1, 1.0), torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.98))
    for step, scale in enumerate((10.0, 1e-3, 100.0)):  # of which the second is not clipped
        for one in (model, twin):
            give_gradients(one, step, scale)
        mine.step()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        theirs.step()
    for parameter, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan, 1e30])  # the square of the last is not a float32
def test_a_step_that_is_not_finite_changes_nothing(poison: float) -> None:
    model = two_layers()
    optimizer = Optimizer([model], 1e-2, 0.1, 1.0)
    twin = deepcopy(model)
    spared = Optimizer([twin], 1e-2, 0.1, 1.0)
    for step in range(6):
        give_gradients(model, step)
        give_gradients(twin, step)
        if step in (0, 3):  # before there are moments, and after
            gradient = model[1].get_parameter("bias").grad
            assert gradient is not None
            gradient[2] = poison
            before = [parameter.clone() for parameter in model.parameters()]
            optimizer.step()
            assert all(map(torch.equal, before, model.parameters()))
        else:
            optimizer.step()
            spared.step()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    record = optimizer.report()
    assert record == spared.report() | {"skipped": 2, "not_finite": ["1.bias"]}
    assert optimizer.report()["skipped"] == 0


def test_many_steps_in_a_row_that_are_not_finite_end_the_training() -> None:
    model = two_layers()
    optimizer = Optimizer([model], 1e-2, 0.1, 1.0)

    def take(count: int, scale: float) -> None:
        for step in range(count):
            give_gradients(model, step, scale)
            optimizer.step()

    take(PATIENCE - 1, math.nan)
    take(1, 1.0)
    take(PATIENCE - 1, math.nan)
    assert optimizer.report()["skipped"] == 2 * (PATIENCE - 1)
    take(1, math.nan)
    with pytest.raises(OnPTQError, match=f"{PATIENCE} steps in a row had gradients that are not finite, in 4 param"):
        optimizer.report()


def test_late_modules_have_a_learning_rate_of_their_own() -> None:
    model, late = two_layers(), torch.nn.Linear(4, 4)
    optimizer = Optimizer([model, late], 1e-2, 0.0, 1e9, late=[model[1], late])
    parts = [model[0], model[1], late]
    weights = [part.get_parameter("weight") for part in parts]
    before = [weight.clone() for weight in weights]
    for part in parts:
        give_gradients(part, 0)
    optimizer.set_rate(1e-2, 1e-4)
    optimizer.step()
    for after, weight, rate in zip(weights, before, (1e-2, 1e-4, 1e-4), strict=True):
        torch.testing.assert_close((after - weight).abs(), torch.full_like(weight, rate), rtol=1e-2, atol=0)


def test_published_names_and_types_are_written(fresh: tuple[str, Path, Any]) -> None:
    import transformers
    from safetensors import safe_open

    family, folder, model = fresh
    loaded, report = getattr(transformers, FAMILIES[family].model_class).from_pretrained(
        str(folder), dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for (name, mine), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(mine.bfloat16().float(), theirs), name
    if family != OMNI:  # whose whole model this class does not take
        assert type(transformers.AutoModelForImageTextToText.from_pretrained(str(folder))) is type(loaded)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    prefix = {"qwen2.5-vl": "model.layers.0.", "qwen3-vl": "model.language_model.layers.0."}
    assert prefix.get(family, "thinker.model.layers.0.") + "self_attn.q_proj.weight" in names
    assert not any(name.endswith("thinker.lm_head.weight") or name == "lm_head.weight" for name in names)


def test_omni_without_speech_output_is_a_whole_checkpoint(words: str, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import load_file
    from transformers.core_model_loading import revert_weight_conversion

    write_settings(tmp_path, OMNI, Tokenizer.from_str(words))
    stored = load_file(write_weights(tmp_path, OMNI, build_model(tmp_path, OMNI, seed=1)))
    whole = transformers.Qwen2_5OmniForConditionalGeneration(transformers.AutoConfig.from_pretrained(str(tmp_path)))
    assert {*revert_weight_conversion(whole, whole.state_dict())} - {*stored} == {"thinker.lm_head.weight"}  # is tied
    assert all(name.startswith("thinker.") for name in stored)


def test_other_images_are_brought_to_the_size_of_training(fresh: tuple[str, Path, Any]) -> None:
    from PIL import Image

    family, folder, _ = fresh
    processor = processor_of(folder).image_processor
    for size in ((640, 480), (40, 30), (112, 112), (128, 128), (50, 300)):
        (grid,) = processor(images=[Image.new("RGB", size)], return_tensors="pt")["image_grid_thw"].tolist()
        assert 24 <= grid[1] * grid[2] <= 96
    square = Image.new("RGB", (side(family),) * 2)
    assert processor(images=[square], return_tensors="pt")["image_grid_thw"].tolist() == [[1, 8, 8]]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"family": "gpt"}, "unknown family 'gpt': expected one of qwen2.5-vl"),
        ({"family": OMNI, "minutes": None}, "training without end"),
        ({"family": OMNI, "device": "cuda:99"}, "no usable GPU"),
    ],
)
def test_impossible_trainings_are_refused(options: dict[str, Any], complaint: str) -> None:
    if torch.cuda.is_available() and "device" in options:
        pytest.skip("there is a GPU")
    with pytest.raises(OnPTQError, match=complaint):
        Training(**{"device": "cpu"} | options)


def test_the_card_has_the_settings_of_the_training_and_the_latest_scores(tmp_path: Path) -> None:
    settings = {"minutes": 9.0, "steps": None, "batch": 512, "lr": 2e-3, "decay": 0.05, "seed": 0, "spoken_share": 0.2}
    stopped = settings | {"enough": {"choice": 0.16, "read": 0.2}, "settle": 600}
    ending = write_card(tmp_path, "qwen3-vl", stopped, 1, 1.0, "GPU", 1).read_text()
    assert "to 0 (within 600 steps once the loss of choice is at most 0.16 and read is at most 0.2), weight" in ending
    text = write_card(tmp_path, "qwen3-vl", settings, 12_000, 530.0, "GPU", 6_000_000).read_text()
    assert text.startswith("---\nlicense:")
    assert "12,000 steps of 512 lessons, 8.8 minutes on one GPU" in text
    assert "--out DIR --minutes 9.0 --batch 512 --lr 0.002 --seed 0`" in text
    assert "falling linearly to 0, weight decay" in text
    add_scores(tmp_path, {"choice": TaskScore("accuracy", 10, 5, 10)})
    tasks = {"choice": TaskScore("accuracy", 2000, 1824, 2000), "speech": TaskScore("word errors", 1000, 126, 6000)}
    scored = add_scores(tmp_path, tasks).read_text()
    assert scored.startswith(text.rstrip())
    assert scored.count("| choice |") == 1
    assert "| choice | right answers | 91.2% | 2,000 |" in scored
    assert "| speech | word error rate, less is better | 2.1% | 1,000 |" in scored


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["_decode", "_see", "_hear"])
def test_one_compilation_serves_all_layers(compiled: str, words: str, tmp_path: Path) -> None:
    from torch._dynamo.testing import CompileCounter

    write_settings(tmp_path, OMNI, Tokenizer.from_str(words))
    forward = Forward(build_model(tmp_path, OMNI, 0), json.loads((tmp_path / "preprocessor_config.json").read_text()))
    owner = {"_decode": forward, "_see": forward.vision, "_hear": forward.audio}[compiled]
    counter = CompileCounter()
    torch._dynamo.reset()
    setattr(owner, compiled, torch.compile(getattr(owner, compiled), backend=counter, fullgraph=True, dynamic=False))
    images = torch.zeros(2, 112, 112, 3, dtype=torch.uint8)
    rows = Rows(torch.ones(2, 64).long(), torch.tensor([True, False]), images, torch.zeros(2, 128, FRAMES))
    for frames in (40, 80):
        forward.logits(replace(rows, frames=torch.tensor([frames, frames])))
    assert counter.frame_count == 1
