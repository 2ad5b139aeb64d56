"""Options that several commands share, with their help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from onptq.schemes import NAMED

EMBEDDED_HELP = "; named models bring their own: zoo:mix of all tasks, or zoo:captions."

DEVICE_HELP = "auto, cpu, cuda or cuda:N."
Device = Annotated[str | None, typer.Option(help=DEVICE_HELP)]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print progress and results as JSON lines.")]

Scheme = Annotated[
    str | None,
    typer.Option(
        help="W4A16, W8A8, W4A8, W4A6, any WbAb; -gN, and -asym with A16; "
        f"{', '.join(NAMED)}; +kv8 for a KV cache of 8 bits.",
        show_default="W4A8",
    ),
]
Mix = Annotated[
    str | None,
    typer.Option(
        help="Other schemes for some linears: PATTERN=SCHEME, or =dense, with commas between them; the last match counts. "
        "Or the mix.json of `onptq mix`.",
        show_default="one scheme",
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        help="onptq; its controls static (gamma 0), uniform (no risk) and offpolicy (the dense model's rollouts); or a "
        "base method: `onptq list methods`.",
        show_default="onptq",
    ),
]
INIT_HELP = "The base method that calibration starts from: `onptq list methods`."
Init = Annotated[
    str | None,
    typer.Option(help=INIT_HELP, show_default="the preset's: search+signround; search in light and paper"),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="light, default, best, risk, paper or zoo (few prompts and one round: two minutes on two cores).",
        show_default="zoo for models of the zoo, else default",
    ),
]
Recipe = Annotated[Path | None, typer.Option("--recipe", help="Recipe YAML instead of a preset.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change any field of the recipe; repeatable, wins over other options."
    ),
]

Holdout = Annotated[
    Path | None, typer.Option(help="Manifest of held-out prompts, instead of some of the calibration prompts.")
]
OnBadPrompt = Annotated[
    str, typer.Option(metavar="fail|skip", help="Stop at prompts that cannot be used, or leave them out and say which.")
]
Items = Annotated[
    int | None, typer.Option(min=1, help="Items per task.", show_default="400 in all, e.g. 100 of 4 tasks")
]

PolicyEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="With follow.engine=vllm: a server that writes the rollouts, e.g. http://localhost:8000/v1.",
    ),
]
VllmPython = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="With follow.engine=vllm: the Python whose vLLM is started to write the rollouts.",
        show_default="ONPTQ_VLLM_PYTHON, else this one",
    ),
]

ServedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="What the servers call their model.",
        show_default="the one that each of them serves",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key-env",
        metavar="NAME",
        help="Environment variable with the API key, which is sent to all servers.",
    ),
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for one answer of a server.")]
TIMEOUT = 300.0
