"""How to serve a scheme, as a section of the model card: commands, and the kernel of every GPU generation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onptq.checkpoint.serving import FASTEST, FASTEST_ENVIRONMENT, FASTEST_GAIN, TRANSFORMERS, Served, serving
from onptq.schemes import Scheme

EVIDENCE = {
    "run": "run",
    "asked": "the server's own choice, not run",
    "read": "the kernel's list of types",
    "documented": "the server's documentation",
    "untested": "untested",
}
VERDICTS = {"serves": "as the scheme says", "differs": "not the scheme", "doubtful": "doubtful", "refuses": "refused"}


def serving_section(scheme: Scheme, config: Mapping[str, Any], folder: str) -> str:
    rows = [row for row in serving(scheme) if row.server != TRANSFORMERS]
    if scheme.simulated:
        return f"No server is known to run {scheme}: transformers simulates it.\n\n{_table(rows)}"
    parts = [_commands(rows, folder), _warning(rows, scheme), _fastest(scheme, folder), _table(rows)]
    if config.get("model_type") == "qwen2_5_omni_thinker":
        parts.insert(
            0, "This checkpoint holds an Omni model's thinker alone, and vLLM takes full Omni checkpoints only."
        )
    return "\n\n".join(part for part in parts if part)


def _commands(rows: Sequence[Served], folder: str) -> str:
    lines = []
    for switch in dict.fromkeys(row.switch for row in rows):
        computed = {row.computes for row in rows if row.switch == switch and row.verdict in ("serves", "differs")}
        remark = computed.pop() if len(computed) == 1 else "what is multiplied depends on the hardware, see below"
        lines.append(f"{_command(switch, folder)}  # {remark}")
    return "```bash\n" + "\n".join(lines) + "\n```"


def _fastest(scheme: Scheme, folder: str) -> str:
    """Where it was measured: one symmetric step per row."""
    gain = FASTEST_GAIN.get((scheme.weight_bits, scheme.activation_bits))
    if gain is None or scheme.group_size is not None or not scheme.symmetric:
        return ""
    command = " \\\n    ".join((f"{FASTEST_ENVIRONMENT} vllm serve {folder} {FASTEST[0]}", *FASTEST[1:]))
    return (
        f"Fastest for 7B shapes on an H200 (vLLM 0.26 with humming-kernels 0.1.17), where {gain}:\n\n```bash\n"
        f"onptq tune {folder}  # once, on the GPU that will serve, in the server's environment\n{command}\n```\n\n"
        "A forward is padded to the next of the captured sizes: name those of your batches and prompts."
    )


def _command(switch: str | None, folder: str) -> str:
    if switch is None:
        return f"vllm serve {folder}"
    return f"vllm serve {folder} {switch}" if switch.startswith("-") else f"{switch} vllm serve {folder}"


def _warning(rows: Sequence[Served], scheme: Scheme) -> str:
    """Where the default answers without computing the scheme, and what mends that."""
    said = []
    for row in rows:
        if row.switch is None and row.verdict == "differs":
            mends = [
                one.switch for one in rows if one.hardware == row.hardware and one.switch and one.verdict == "serves"
            ]
            said.append((row.hardware, f"`{mends[0]}` does" if mends else "nothing known does"))
    if not said:
        return ""
    by_cure = {cure: [hardware for hardware, mine in said if mine == cure] for _, cure in said}
    cures = "; ".join(f"on {', '.join(hardware)} {cure}" for cure, hardware in by_cure.items())
    return f"Started plainly, the server answers on some hardware without computing {scheme}: {cures}."


def _table(rows: Sequence[Served]) -> str:
    head = ("server", "hardware", "switch", "kernel", "multiplies", "result", "known from")
    lines = [head, ("---",) * len(head), *map(_row, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(row: Served) -> tuple[str, ...]:
    switch = f"`{row.switch}`" if row.switch else "-"
    result = VERDICTS.get(row.verdict, row.verdict) + (f": {row.note}" if row.note else "")
    return row.server, row.hardware, switch, row.kernel or "-", row.computes, result, EVIDENCE[row.evidence]
