"""What shells are offered, and how soon."""

import json
import subprocess
import sys

from typer.testing import CliRunner

from draftwire.cli.__main__ import app


def complete(line: str) -> set[str]:
    """What bash is offered for the last word of a line."""
    environment = {
        "_DRAFTWIRE_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    return set(CliRunner(env=environment).invoke(app, [], prog_name="draftwire").stdout.split())


COMPLETED = {
    "draftwire cha": {"chat"},
    "draftwire generate x --rejection-sample-method t": {"token", "typical"},
    "draftwire chat --rejection-sample-method c": {"coupled"},
    "draftwire generate x --color ": {"auto", "always", "never"},
    "draftwire health ": {"drafter", "gateway", "verifier"},
    "draftwire serve g": {"gateway"},
    "draftwire generate --num-s": {"--num-speculative-tokens"},
}


def test_words_are_completed() -> None:
    assert {line: complete(line) for line in COMPLETED} == COMPLETED


def test_script_of_a_shell_is_shown() -> None:
    for shell in ("bash", "zsh", "fish"):
        environment = {"_DRAFTWIRE_COMPLETE": f"source_{shell}"}
        result = CliRunner(env=environment).invoke(app, [], prog_name="draftwire")
        assert result.exit_code == 0, result.output
        assert f"_DRAFTWIRE_COMPLETE=complete_{shell}" in result.stdout.replace("env ", "").replace('"', "")


def test_options_that_install_completion_are_there() -> None:
    text = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--help"]).stdout
    assert all(option in text for option in ("--install-completion", "--show-completion"))


def test_help_starts_without_what_only_running_needs() -> None:
    code = (
        "import json, sys; sys.argv = ['draftwire', 'generate', '--help']\n"
        "from draftwire.cli.__main__ import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'grpc', 'google.protobuf', 'torch', 'transformers', 'asyncio'}\n"
        "print(json.dumps(sorted(heavy & set(sys.modules))))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(result.stdout.splitlines()[-1]) == []
