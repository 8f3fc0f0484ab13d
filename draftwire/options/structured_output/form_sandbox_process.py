"""The process of a `FormSandbox`: compiles forms in forks of itself, with limits. Neither torch nor gRPC is loaded.

    python -m draftwire.options.structured_output.form_sandbox_process

Standard input and output are lines of JSON. The first line read is a `FormVocabulary`; then {"id", "form", "texts",
"cpu_seconds", "memory_bytes"} asks for a form, within limits, and {"kill": id} ends it. {"id", "cpu_s", "memory_bytes",
"trial_s", "reason"} answers, with what compiling the form and then following random texts of it took: `reason` is what
is wrong with the form, or empty; null in the place of the numbers says that the limits were exceeded. The process ends
with its standard input.
"""

import asyncio
import gc
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from draftwire.errors import InvalidRequestError
from draftwire.options.structured_output.grammar_automaton import FormCompiler, FormVocabulary, check_mask_costs
from draftwire.requests.structured_output import Form, StructuredOutput

MAX_LINE_BYTES = 64 * 2**20
"""Longest line: that of the vocabulary."""
MAX_REASON = 500
"""Characters of a reason, so that an answer is written at once (4,096 bytes)."""
NICENESS = 5
"""Running completions go before forms."""


class SandboxProcess:
    """Forks for each form. Runs on an event loop."""

    def __init__(self) -> None:
        self._compiler: FormCompiler
        self._forks: dict[int, int] = {}  # id of the form by process

    async def run(self) -> None:
        """Reads the vocabulary, answers until the end of standard input, and kills what is left."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        lines = asyncio.StreamReader(MAX_LINE_BYTES)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        self._compiler = FormCompiler(FormVocabulary(**json.loads(await lines.readline())))
        gc.freeze()  # so that forks share its pages
        while line := await lines.readline():
            request = json.loads(line)
            if "kill" in request:
                self._kill(request["kill"])
            else:
                self._fork(request)
        for process in self._forks:
            os.kill(process, signal.SIGKILL)

    def _fork(self, request: dict[str, Any]) -> None:
        process = os.fork()
        if process == 0:
            try:
                _limit(request["cpu_seconds"], request["memory_bytes"])
                wanted = StructuredOutput(Form(request["form"]), tuple(request["texts"]))
                _write({"id": request["id"], **_measured(self._compiler, wanted)})
                os._exit(0)
            finally:  # never back to the loop of the parent
                os._exit(1)
        self._forks[process] = request["id"]

    def _kill(self, form_id: int) -> None:
        for process, running in self._forks.items():
            if running == form_id:
                os.kill(process, signal.SIGKILL)

    def _reap(self) -> None:
        while self._forks:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            form_id = self._forks.pop(process, None)
            if form_id is not None and status != 0:
                _write({"id": form_id, "cpu_s": None, "memory_bytes": None, "trial_s": None, "reason": ""})


def _limit(cpu_seconds: int, memory_bytes: int) -> None:
    """Limits what this process may take. Exceeding it ends the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library's last words may quote the form
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    most = _memory_bytes()[0] + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _measured(compiler: FormCompiler, wanted: StructuredOutput) -> dict[str, Any]:
    """Compiles a form, follows random texts of it, and returns what it took."""
    resident = _memory_bytes()[1]
    started, reason = time.process_time(), ""
    try:
        compiled = compiler.compile(wanted)
    except InvalidRequestError as error:
        compiled, reason = None, str(error)[:MAX_REASON]
    cpu_s = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if compiled is not None:
        try:
            check_mask_costs(compiled)
        except InvalidRequestError as error:
            reason = str(error)[:MAX_REASON]
    trial_s = time.process_time() - started - cpu_s
    return {"cpu_s": cpu_s, "memory_bytes": max(0, peak - resident), "trial_s": trial_s, "reason": reason}


def _memory_bytes() -> tuple[int, int]:
    """Returns the address space of this process, and what of it is resident."""
    size, resident = Path("/proc/self/statm").read_text().split()[:2]
    return int(size) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _write(answer: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def main() -> int:
    """Serves one `FormSandbox`."""
    os.nice(NICENESS)
    asyncio.run(SandboxProcess().run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
