"""Train an embedded model: `python -m tools.zoo.train --family qwen2.5-vl --out DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tools.zoo.commands import run_command

MINUTES = 8.0


def main(
    family: Annotated[str, typer.Option(help="qwen2.5-vl, qwen3-vl or qwen2.5-omni")],
    out: Annotated[Path, typer.Option(help="new folder for the checkpoint")],
    minutes: Annotated[float, typer.Option(help="most minutes of training")] = MINUTES,
    steps: Annotated[int | None, typer.Option(help="most steps", show_default="those of the published model")] = None,
    batch: Annotated[int, typer.Option(help="lessons in a step")] = 512,
    lr: Annotated[float, typer.Option(help="peak learning rate")] = 2e-3,
    workers: Annotated[int, typer.Option(help="processes that make lessons")] = 4,
    speakers: Annotated[int, typer.Option(help="processes that synthesize speech, for qwen2.5-omni")] = 3,
    spoken_share: Annotated[float, typer.Option(help="share of spoken lessons in the steps of qwen2.5-omni")] = 0.2,
    seed: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option(help="cuda, or cpu for a try")] = "cuda",
    compile: Annotated[bool, typer.Option(help="compile the blocks, on a GPU")] = True,
    exam: Annotated[bool, typer.Option(help="choose outliers and write the scores into the model card")] = True,
    items: Annotated[int | None, typer.Option(help="per task in the exam; the whole test split unless given")] = None,
) -> None:
    """Train an embedded model from scratch and write its checkpoint folder."""
    from onptq.progress import RichReporter
    from tools.zoo.train.checkpoint import check_family
    from tools.zoo.train.curricula import CURRICULA
    from tools.zoo.train.finish import finish
    from tools.zoo.train.loop import Training, train

    reporter = RichReporter()
    check_family(family)
    training = Training(
        family=family,
        minutes=minutes,
        steps=CURRICULA[family].steps if steps is None else steps,
        batch=batch,
        lr=lr,
        workers=workers,
        speakers=speakers,
        spoken_share=spoken_share,
        seed=seed,
        device=device,
        compiled=compile,
        enough=CURRICULA[family].enough,
    )
    train(training, out, reporter)
    if exam:
        finish(out, items, reporter)
    reporter.note(f"{out}: checkpoint of {family}, training log in log.jsonl")


if __name__ == "__main__":
    run_command(main)
