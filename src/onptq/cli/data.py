"""`onptq data`: calibration prompts from images, chat logs, a server's log, too few prompts, or the paper's data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from onptq.data.collected import Collected
    from onptq.data.prompts import Prompt

PRIVATE = "holds your users' prompts as they are"
app = typer.Typer(
    help=f"Collect calibration prompts. The written file {PRIVATE}. Do not publish it. "
    "Nothing is uploaded. Nothing is downloaded, unless a hub id is given.",
    no_args_is_help=True,
)
prepare = typer.Typer(help="Build a calibration set of the paper from copies of its data.", no_args_is_help=True)
app.add_typer(prepare, name="prepare")
OUT = Path("prompts.jsonl")

Out = Annotated[Path, typer.Option(help=f"Manifest to write; it {PRIVATE}.")]
Holdout = Annotated[
    int | None,
    typer.Option(min=1, help="Write so many prompts to OUT-heldout.jsonl, with no image or chat of the others."),
]
HoldoutShare = Annotated[
    float | None, typer.Option(min=0, max=1, help="Write at most this share of the prompts there, e.g. 0.2.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all that is drawn.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the files that are written, where they exist.")]
Questions = Annotated[
    Path | None,
    typer.Option(help="Text file of questions, one per line.", show_default="16 built-in ones: describe, count, read"),
]

Sha256 = Annotated[
    str | None,
    typer.Option(help="The SHA-256 that prompts and media must have, as this command printed it elsewhere."),
]


@app.callback()
def _group() -> None:
    pass


@app.command("images")
def images(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of images; those in folders below count too.")],
    questions: Questions = None,
    per_image: Annotated[int, typer.Option(min=1, help="Questions about each image.")] = 1,
    out: Out = OUT,
    holdout: Holdout = None,
    holdout_share: HoldoutShare = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Ask questions about every image below DIR, and write them as a manifest that names the images by their paths."""
    from onptq.data.image_folder import image_prompts
    from onptq.data.questions import read_questions
    from onptq.progress import RichReporter

    check(out, overwrite, holdout, holdout_share)
    collected = image_prompts(folder, read_questions(questions), per_image, seed, RichReporter())
    write(collected, out, holdout, holdout_share, seed)


@app.command("chats")
def chats(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Chats: .jsonl, .json or .parquet with OpenAI messages, batch requests, ShareGPT conversations or texts.",
        ),
    ],
    every_turn: Annotated[
        bool, typer.Option("--every-turn", help="Make a prompt of each turn of the user, with what came before it.")
    ] = False,
    out: Out = OUT,
    holdout: Holdout = None,
    holdout_share: HoldoutShare = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write the chats of FILE... as a manifest, each up to the user's last turn. The file holds your users' prompts."""
    from onptq.data.chat_logs import chat_prompts
    from onptq.progress import RichReporter

    check(out, overwrite, holdout, holdout_share)
    write(chat_prompts(files, every_turn, RichReporter()), out, holdout, holdout_share, seed)


@app.command("server")
def server(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG...",
            help="Logs of vLLM (--enable-log-requests, after 0.11.0 with VLLM_LOGGING_LEVEL=DEBUG), or of a proxy that logs "
            "requests as JSON.",
        ),
    ],
    out: Out = OUT,
    holdout: Holdout = None,
    holdout_share: HoldoutShare = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Write the requests in LOG... as a manifest; those whose images are not in the log are left out.

    The file holds your users' prompts.
    """
    from onptq.data.server_logs import server_prompts
    from onptq.progress import RichReporter

    check(out, overwrite, holdout, holdout_share)
    write(server_prompts(logs, RichReporter()), out, holdout, holdout_share, seed)


@app.command("expand")
def expand(
    manifest: Annotated[Path, typer.Argument(metavar="PROMPTS", help="Manifest, .jsonl or .parquet.")],
    to: Annotated[int, typer.Option("--to", min=1, help="How many prompts are wanted.")],
    out: Out,
    questions: Questions = None,
    holdout: Holdout = None,
    holdout_share: HoldoutShare = None,
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> None:
    """Add questions about the images of PROMPTS, until there are as many as wanted. Texts stay as they are."""
    from onptq.data.expand import expanded
    from onptq.data.questions import read_questions

    check(out, overwrite, holdout, holdout_share)
    collected = expanded(manifest, to, seed, read_questions(questions))
    write(collected, out, holdout, holdout_share, seed)


@prepare.command("coco-128")
def coco_128(
    captions: Annotated[
        str,
        typer.Option(
            help="ShareGPT4V's sharegpt4v_instruct_gpt4-vision_cap100k.json; or hub:OWNER/NAME to download it, e.g. "
            "hub:Lin-Chen/ShareGPT4V."
        ),
    ],
    images: Annotated[
        str, typer.Option(help="Folder of COCO's train2017 images; or hub:OWNER/NAME with such files to download 128.")
    ],
    out: Annotated[Path, typer.Option(help="Manifest to write.")] = Path("coco-128.jsonl"),
    sha256: Sha256 = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the paper's 128 prompts for vision-language models: questions of ShareGPT4V about images of COCO."""
    from onptq.data.published.coco import coco_prompts

    check(out, overwrite, None, None)
    write_published(coco_prompts(captions, images, typer.echo), out, sha256)


@prepare.command("omnibench")
def omnibench(
    source: Annotated[
        str,
        typer.Option(
            help="OmniBench: its .jsonl, a .parquet, or a folder of them; or hub:OWNER/NAME to download it, e.g. "
            "hub:m-a-p/OmniBench."
        ),
    ],
    media: Annotated[
        Path | None,
        typer.Option(help="Folder of mm_data, where rows name their files.", show_default="the folder of the rows"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Manifest to write.")] = Path("omnibench-128.jsonl"),
    sha256: Sha256 = None,
    overwrite: Overwrite = False,
) -> None:
    """Write the paper's 128 prompts for Omni models: questions 0 to 127 of OmniBench.

    Media that come inside the rows are written to OUT-media.
    """
    from onptq.data.published.omnibench import omnibench_prompts, unpacked

    check(out, overwrite, None, None)
    prompts = omnibench_prompts(source, media, typer.echo)
    write_published(unpacked(prompts, out.with_name(f"{out.stem}-media")), out, sha256)


def write_published(prompts: list[Prompt], out: Path, sha256: str | None) -> None:
    """Write the manifest, and say what is in it and by which hash another machine knows that it has the same."""
    from onptq.data.calibration import describe_kinds
    from onptq.data.published.copies import check_digest
    from onptq.data.writing import write_manifest

    digest = check_digest(prompts, sha256)
    write_manifest(prompts, out)
    typer.echo(f"wrote {len(prompts)} prompts to {out} ({describe_kinds(prompts)})")
    typer.echo(f"sha256 of prompts and media: {digest}")
    typer.echo(f"{allowing(prompts, out)}onptq quantize MODEL --preset paper --calibration {shlex.quote(str(out))}")


def allowing(prompts: list[Prompt], out: Path) -> str:
    """What a command has in front that reads the manifest: the folder of media that lie elsewhere."""
    from onptq.data.manifest import MEDIA_ROOT
    from onptq.data.writing import media_outside

    folder = media_outside(prompts, out)
    return "" if folder is None else f"{MEDIA_ROOT}={shlex.quote(str(folder))} "


def check(out: Path, overwrite: bool, holdout: int | None, share: float | None) -> None:
    """Refuse to replace a file before anything is read."""
    from onptq.data.writing import check_target, heldout_path

    check_target(out, overwrite)
    if holdout is not None or share is not None:
        check_target(heldout_path(out), overwrite)


def write(collected: Collected, out: Path, holdout: int | None, share: float | None, seed: int) -> None:
    """Write the manifests, and say what was read, left out and written."""
    from onptq.data.calibration import describe_kinds
    from onptq.data.heldout import divide
    from onptq.data.writing import heldout_path, write_manifest

    remaining, held = divide(collected.prompts, holdout=holdout, share=share, seed=seed)
    typer.echo(f"read {collected.read}")
    for line in collected.describe_left_out():
        typer.echo(line)
    for prompts, path in ((held, heldout_path(out)), (remaining, out)):
        if prompts:
            write_manifest(prompts, path)
            typer.echo(f"wrote {len(prompts)} prompts to {path} ({describe_kinds(prompts)})")
    if holdout is not None and len(held) < holdout:
        typer.echo(f"{len(held)} of {holdout} held out: prompts of one image or chat stay together")
    typer.echo(f"What was written {PRIVATE}. Do not publish it. Next:")
    also = f" --holdout {shlex.quote(str(heldout_path(out)))}" if held else ""
    before = allowing([*remaining, *held], out)
    typer.echo(f"{before}onptq quantize MODEL --calibration {shlex.quote(str(out))}{also}")
