"""Follow by vLLM: Q is exported, a server writes the responses by the kernels that will serve, and their ids come back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onptq.bank import Trajectory
from onptq.checkpoint.folder import CONFIG
from onptq.checkpoint.source import Source
from onptq.checkpoint.write import write_checkpoint
from onptq.cycle.inputs import Inputs
from onptq.data.prompts import Prompt
from onptq.engine.budget import give_back_memory
from onptq.engine.sampling import Sampling
from onptq.errors import OnPTQError
from onptq.progress import Reporter
from onptq.run import Run, remove
from onptq.serving.client import Client
from onptq.serving.process import KEY, REPLY, Server, free_port, tail
from onptq.serving.token_ids import GREEDY, Question, Response, Writer
from onptq.serving.vllm import ENGINE, Launch, Vllm

PATIENCE = 1800.0  # seconds until a server of a large model must be ready
ENDING = 3.0  # seconds that a server which dies takes to be gone
SAME = "then give the same command again: it goes on from here"


@dataclass(frozen=True)
class ServedPolicy:
    """Who writes the rollouts of Q in place of the engine: vLLM, of the model `source`, to `prompts` as they were given."""

    source: Source
    prompts: Sequence[Prompt]
    vllm: Vllm

    def follow(
        self,
        inputs: Inputs,
        run: Run,
        name: str,
        sampling: Sampling | None,
        reporter: Reporter,
        advance: Callable[[int], None],
    ) -> list[Trajectory]:
        """Q's responses to the calibration prompts, by ordinal. Working files are in the folder `name` of the run.

        The first rank alone exports, serves and asks."""
        for side in ("Q", "D"):  # whose memory the server may need; D's prefixes are computed again
            inputs.forget(side)  # type: ignore[arg-type]
        give_back_memory()

        def written() -> list[list[Any]]:
            questions = self._questions(inputs, sampling)
            responses = self._written(inputs, run, name, questions, reporter, advance)
            return [[each.number, list(each.tokens), each.finished] for each in responses]

        rows = inputs.ranks.lead(written)
        return [Trajectory(number, tuple(tokens), finished) for number, tokens, finished in sorted(rows)]

    def _questions(self, inputs: Inputs, sampling: Sampling | None) -> list[Question]:
        given, encoded = {prompt.ordinal: prompt for prompt in self.prompts}, inputs.prompts
        return [
            Question(ordinal, given[origin], ids, GREEDY if sampling is None else drawn(sampling, ordinal))
            for ordinal, origin, ids in zip(encoded.ordinals, encoded.origins, encoded.ids, strict=True)
        ]

    def _written(
        self,
        inputs: Inputs,
        run: Run,
        name: str,
        questions: Sequence[Question],
        reporter: Reporter,
        advance: Callable[[int], None],
    ) -> list[Response]:
        policy, longest = inputs.policy, max(len(question.ids) for question in questions)
        most = inputs.prefixes.max_tokens
        launch = Launch.of(policy.scheme, policy.dtype, policy.device, longest + most, self._media())
        if launch.computes is not None:
            reporter.warn(
                f"{ENGINE}: of {policy.scheme} vLLM computes {launch.computes} here: docs/schemes.md says why"
            )
        folder, log = run.file(name, ".policy"), run.file(name, ".vllm.log")
        if not (folder / CONFIG).is_file():
            self._export(inputs, folder)
        if self.vllm.endpoint is not None:
            client = Client(self.vllm.endpoint, key=os.environ.get(KEY) or None, timeout=REPLY)
            try:
                model = served_model(client, folder, longest + most)
            except OnPTQError as error:
                line = launch.to_type(folder.resolve(), client.port, self.vllm.arguments)
                raise OnPTQError(f"{error}. Serve what has been exported:\n  {line}\n{SAME}") from None
            responses = Writer(client, model, most, policy.eos).write_all(questions, advance)
            run.log("server", endpoint=self.vllm.endpoint, model=model)
        else:
            responses, started_in = self._by_own_server(launch, folder, log, most, policy.eos, questions, advance)
            run.log("server", started_in=round(started_in, 1), options=[*launch.options, *self.vllm.arguments])
        remove(folder)
        remove(log)
        return responses

    def _by_own_server(
        self,
        launch: Launch,
        folder: Path,
        log: Path,
        most: int,
        eos: frozenset[int],
        questions: Sequence[Question],
        advance: Callable[[int], None],
    ) -> tuple[list[Response], float]:
        """The responses, and the seconds until the server was ready."""
        port = free_port()
        server = Server(launch.command(self.vllm, folder, port), port, log, launch.additions(), PATIENCE)
        code = None
        try:
            with server:
                try:
                    responses = Writer(server.client, str(folder), most, eos).write_all(questions, advance)
                    return responses, server.started_in
                except OnPTQError:
                    code = exit_code(server)
                    raise
        except OnPTQError as error:
            ended = "" if code is None else f"; vLLM ended with exit code {code}"
            raise OnPTQError(f"{ENGINE}: {error}{ended}. The end of {log}:\n{tail(log)}") from error

    def _export(self, inputs: Inputs, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        write_checkpoint(self.source, folder, inputs.policy.folded(), inputs.policy.scheme)

    def _media(self) -> dict[str, int]:
        """The most media of each kind that a prompt has. Videos are in none."""
        most = {
            "image": max((len(prompt.images) for prompt in self.prompts), default=0),
            "audio": max((len(prompt.audios) for prompt in self.prompts), default=0),
        }
        media = {kind: count for kind, count in most.items() if kind in self.source.family.modalities}
        return media | ({"video": 0} if "image" in media else {})


def served_model(client: Client, folder: Path, length: int) -> str:
    """The name under which the server has the checkpoint in `folder`, for prompts and responses of so many tokens."""
    listed = client.models()
    for one in listed:
        if Path(str(one.get("root"))).resolve() == folder.resolve():
            context = one.get("max_model_len")
            if isinstance(context, int) and context < length:
                raise OnPTQError(
                    f"{client.url} takes {context} tokens; expected {length}, of the longest prompt and its response"
                )
            return str(one["id"])
    shown = client.safe(", ".join(str(one.get("root") or one["id"]) for one in listed)) or "nothing"
    raise OnPTQError(f"{client.url} serves {shown}; expected the quantized model of this round, {folder.resolve()}")


def drawn(sampling: Sampling, ordinal: int) -> Mapping[str, Any]:
    """A request's fields for one response drawn as `sampling` says; the seed depends on both alone."""
    seed = int(np.random.default_rng((sampling.seed, ordinal)).integers(2**31))
    return {
        "temperature": sampling.temperature,
        "top_k": (sampling.top_k or -1) if sampling.top_p else 1,  # servers take no top_p of 0
        "top_p": sampling.top_p or 1.0,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": seed,
    }


def exit_code(server: Server) -> int | None:
    """That of a server that is about to end, or has ended; None if it goes on."""
    until = time.monotonic() + ENDING
    while server.exit_code is None and time.monotonic() < until:
        with suppress(InterruptedError):
            time.sleep(0.1)
    return server.exit_code
