"""Every reader of files that others made, with a file it reads: the table of all fuzzers."""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from guarded import Read
from PIL import Image

from onptq.bank import States, Trajectory, load_bank, load_trajectories, read_trajectories, write_trajectories
from onptq.checkpoint.exportable import check_exportable
from onptq.checkpoint.source import find_source
from onptq.cycle.calibrate import Progress
from onptq.data.audio import read_audio
from onptq.data.chat_logs import chat_prompts
from onptq.data.manifest import check_media, load_manifest
from onptq.data.media import decode_image
from onptq.data.prompts import Media, Prompt
from onptq.data.server_logs import server_prompts
from onptq.errors import OnPTQError
from onptq.evaluate.sample_logs import read_arm
from onptq.models.processing import PromptProcessor
from onptq.overrides import parse_override
from onptq.quantizer.theta import Free, Settled, Theta
from onptq.recipe import Recipe
from onptq.run import LOG, RECORD, SUMS, Run
from onptq.schemes import Scheme
from onptq.zoo.random import write_random

LOGS = Path(__file__).parents[1] / "evaluate" / "sample_logs" / "dense"
IDENTITY = {"recipe": Recipe().model_dump(), "model": {"source": "m", "sha256": "0" * 64}, "versions": {"torch": "2"}}
HELLO = Prompt(0, "a", [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}])


class Reader(NamedTuple):
    seed: Callable[[], bytes]
    read: Read


# --- prompts and media ----------------------------------------------------------------------------------------------


def image_bytes(form: str, mode: str = "RGB", **options: Any) -> bytes:
    buffer = io.BytesIO()
    ramp = np.arange(24 * 20 * 3, dtype=np.uint8).reshape(20, 24, 3)
    Image.fromarray(ramp).convert(mode).save(buffer, form, **options)
    return buffer.getvalue()


def gif() -> bytes:
    frames = [Image.new("P", (16, 16), colour) for colour in range(3)]
    return image_bytes("GIF", save_all=True, append_images=frames, duration=50)


def sound_bytes(form: str, rate: int = 16_000) -> bytes:
    import soundfile

    buffer = io.BytesIO()
    soundfile.write(buffer, np.sin(np.arange(rate // 8) / 9).astype(np.float32), rate, format=form)
    return buffer.getvalue()


def records() -> list[dict[str, Any]]:
    pixel = base64.b64encode(image_bytes("PNG")).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{pixel}"}}
    return [
        {"id": "a", "text": "What is it?", "task": "read"},
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "And this?"}]}]},
        {"conversations": [{"from": "human", "value": "<image>\nWhy?"}], "image": f"data:image/png;base64,{pixel}"},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
    ]


def jsonl() -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records()).encode()


def parquet() -> bytes:
    buffer = io.BytesIO()
    rows = [{"id": str(n), "text": "Why?", "image": {"bytes": image_bytes("PNG"), "path": None}} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


def server_log() -> bytes:
    request = {"messages": [{"role": "user", "content": "Hello"}], "model": "m"}
    rendered = "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"
    text = f"INFO 1 Received request c-1: prompt: '{rendered}', params: SamplingParams(n=1)\n"
    return (text + f"POST {json.dumps({'body': json.dumps(request)})}\n{json.dumps(request)}\n").encode()


def read_manifest(suffix: str, data: bytes, folder: Path) -> None:
    path = folder / f"prompts{suffix}"
    path.write_bytes(data)
    load_manifest(path, bad=[])


def read_picture(data: bytes, folder: Path) -> None:
    check_media("image", "a", data, Media(None, ""))
    decode_image(data, "a")


def read_sound(data: bytes, folder: Path) -> None:
    read_audio(data, "a", 16_000, longest=30.0)


def read_log(read: Callable[[list[Path]], object], data: bytes, folder: Path) -> None:
    path = folder / "log.jsonl"
    path.write_bytes(data)
    read([path])


# --- models ---------------------------------------------------------------------------------------------------------


@cache
def model() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="onptq-fuzz-model-"))
    return write_random(
        "qwen2.5-vl", folder, prompts=1, hidden=64, heads=2, kv_heads=1, ffn=128, vocab=512, image_size=56
    )


def sharded() -> bytes:
    from safetensors import safe_open

    with safe_open(model() / "model.safetensors", "pt") as file:
        return json.dumps({"weight_map": dict.fromkeys(file.keys(), "model.safetensors")}).encode()


def read_model(name: str, data: bytes, folder: Path) -> None:
    copy = folder / "model"
    copy.mkdir()
    for file in model().iterdir():
        if file.is_file() and file.name != name:
            os.link(file, copy / file.name)
    (copy / name).write_bytes(data)
    source = find_source(copy)
    check_exportable(source)
    source.eos()
    source.storage()
    for _ in source.checkpoint.require_whole().read(list(source.checkpoint.tensors)[:2]):
        pass
    if not name.startswith("model.safetensors"):
        PromptProcessor.from_folder(copy, source.family, source.config)(HELLO)


def of_model(name: str) -> Reader:
    return Reader(lambda: (model() / name).read_bytes(), partial(read_model, name))


# --- recipes and runs -----------------------------------------------------------------------------------------------


def written(write: Callable[[Path], object]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        write(path)
        return path.read_bytes()


def states() -> States:
    count = 6
    integers = {name: np.arange(count, dtype=np.int32) for name in ("prompt", "t", "token", "reference", "competitor")}
    floats = {name: np.ones(count, np.float32) for name in ("margin_dense", "margin_quant", "erosion", "js", "kl")}
    kind = np.array([0, 1, 2, 0, 1, 2], np.int8)
    return States.compared(**integers, quantized=integers["token"], **floats, kind=kind)


def theta() -> Theta:
    settled = Settled(torch.zeros(4, 1), torch.ones(4, 8, dtype=torch.int8), torch.ones(4, 1))
    linears: dict[str, Any] = {"layers.0.mlp.up": Free(torch.zeros(4, 1)), "layers.0.mlp.down": settled}
    return Theta({"layers.0/norm_qkv": torch.zeros(8)}, linears)


def progress() -> Progress:
    free = Theta({"layers.0/norm_qkv": torch.zeros(8)}, {"layers.0.mlp.up": Free(torch.zeros(4, 1))})
    return Progress(free, 3, {"0/step": torch.ones(())}, free.clone(), 0.5, 2)


def record() -> bytes:
    with tempfile.TemporaryDirectory() as folder, Run.open(Path(folder) / "out", IDENTITY) as run:
        return run.file(RECORD).read_bytes()


def read_recipe(data: bytes, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_bytes(data)
    Recipe.from_yaml(path).to_yaml()


def read_override(data: bytes, folder: Path) -> None:
    text = data.decode(errors="surrogateescape")
    name, value = parse_override(text)
    Recipe.preset("default", {name: value})


def read_scheme(data: bytes, folder: Path) -> None:
    Scheme.parse(data.decode(errors="surrogateescape"))


def read_record(data: bytes, folder: Path) -> None:
    home = folder / "out" / "onptq"
    home.mkdir(parents=True)
    (home / RECORD).write_bytes(data)
    with Run.open(folder / "out", IDENTITY):
        pass


def read_of_run(name: str, read: Callable[[Path], object], data: bytes, folder: Path) -> None:
    """A file that has no sum, or whose sum fits its damage."""
    with Run.open(folder / "out", IDENTITY) as run:
        run.file(name).write_bytes(data)
        run.read(name, read)


def sums() -> bytes:
    with tempfile.TemporaryDirectory() as folder, Run.open(Path(folder) / "out", IDENTITY) as run:
        run.write_json({"a": 1}, "a.json")
        return run.file(SUMS).read_bytes()


def read_sums(data: bytes, folder: Path) -> None:
    with Run.open(folder / "out", IDENTITY) as run:
        run.write_json({"a": 1}, "a.json")
        run.file(SUMS).write_bytes(data)
        run.read_json("a.json")
        run.finish({})


def read_events(data: bytes, folder: Path) -> None:
    with Run.open(folder / "out", IDENTITY) as run:
        run.file(LOG).write_bytes(data)
        run.log("open")
        list(run.events())
        run.seconds()


def read_public(load: Callable[[Path], object], data: bytes, folder: Path) -> None:
    path = folder / "file.parquet"
    path.write_bytes(data)
    load(path)


def read_samples(data: bytes, folder: Path) -> None:
    path = folder / "task_samples.jsonl"
    path.write_bytes(data)
    read_arm(path)


def samples() -> bytes:
    return b"".join((LOGS / "mmmu_val.jsonl").read_bytes().splitlines(keepends=True)[:6])


def bank_bytes() -> bytes:
    return written(states().write)


def rollout_bytes() -> bytes:
    return written(partial(write_trajectories, [Trajectory(0, (1, 2, 3), True), Trajectory(1, (4,), False)]))


EVENTS = b'{"time": "2026", "event": "phase", "phase": "Load", "state": "end", "seconds": 0.5}\n' * 3

READERS: Mapping[str, Reader] = {
    "JSONL manifest": Reader(jsonl, partial(read_manifest, ".jsonl")),
    "parquet manifest": Reader(parquet, partial(read_manifest, ".parquet")),
    "server log": Reader(server_log, partial(read_log, server_prompts)),
    "chat log": Reader(jsonl, partial(read_log, chat_prompts)),
    "WAV": Reader(partial(sound_bytes, "WAV"), read_sound),
    "FLAC at 96 kHz": Reader(partial(sound_bytes, "FLAC", 96_000), read_sound),
    "OGG": Reader(partial(sound_bytes, "OGG"), read_sound),
    "PNG": Reader(partial(image_bytes, "PNG"), read_picture),
    "16-bit PNG": Reader(partial(image_bytes, "PNG", "I;16"), read_picture),
    "JPEG": Reader(partial(image_bytes, "JPEG", "CMYK"), read_picture),
    "animated GIF": Reader(gif, read_picture),
    "TIFF": Reader(partial(image_bytes, "TIFF", compression="tiff_lzw"), read_picture),
    "WebP": Reader(partial(image_bytes, "WEBP"), read_picture),
    "BMP": Reader(partial(image_bytes, "BMP"), read_picture),
    "safetensors": of_model("model.safetensors"),
    "shard index": Reader(sharded, partial(read_model, "model.safetensors.index.json")),
    "config.json": of_model("config.json"),
    "generation_config.json": of_model("generation_config.json"),
    "tokenizer_config.json": of_model("tokenizer_config.json"),
    "tokenizer.json": of_model("tokenizer.json"),
    "preprocessor_config.json": of_model("preprocessor_config.json"),
    "chat template": of_model("chat_template.jinja"),
    "recipe": Reader(lambda: Recipe().to_yaml(comments=True).encode(), read_recipe),
    "override": Reader(lambda: b"branch.horizon=8", read_override),
    "scheme": Reader(lambda: b"W4A16-g128-asym", read_scheme),
    "run record": Reader(record, read_record),
    "run log": Reader(lambda: EVENTS, read_events),
    "SHA256SUMS": Reader(sums, read_sums),
    "bank": Reader(bank_bytes, partial(read_of_run, "bank.parquet", States.read)),
    "public bank": Reader(bank_bytes, partial(read_public, load_bank)),
    "trajectories": Reader(rollout_bytes, partial(read_of_run, "t.parquet", read_trajectories)),
    "public trajectories": Reader(rollout_bytes, partial(read_public, load_trajectories)),
    "theta": Reader(lambda: written(theta().save), partial(read_of_run, "theta.safetensors", Theta.load)),
    "progress": Reader(
        lambda: written(progress().save), partial(read_of_run, "p.safetensors", partial(Progress.load, device="cpu"))
    ),
    "sample log": Reader(samples, read_samples),
}


def readable(name: str) -> bytes:
    """The seed of a reader, which it reads."""
    seed = READERS[name].seed()
    with tempfile.TemporaryDirectory() as folder:
        try:
            READERS[name].read(seed, Path(folder))
        except OnPTQError as error:
            raise AssertionError(f"{name} refuses its seed: {error}") from error
    return seed
