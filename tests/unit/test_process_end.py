"""How the end of a process is said, and where the kernel counts what it killed for want of memory."""

from pathlib import Path

import pytest

from draftwire.cli.process_end import ProcessEnd, num_memory_kills


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (ProcessEnd(0), "ended with status 0"),
        (ProcessEnd(-15), "was killed by SIGTERM"),
        (ProcessEnd(-9), "was killed by SIGKILL"),
        (ProcessEnd(-9, memory_ran_out=True), "was killed by SIGKILL, by the kernel's out-of-memory killer"),
        (ProcessEnd(-11, memory_ran_out=True), "was killed by SIGSEGV"),
        (ProcessEnd(1, memory_ran_out=True), "ended with status 1, after the kernel's out-of-memory killer had killed"),
        (ProcessEnd(-35), "was killed by signal 35"),
    ],
)
def test_end_is_said_with_its_signal_or_status(ending: ProcessEnd, words: str) -> None:
    assert str(ending).startswith(words)
    assert ("memory" in str(ending)) == ("memory" in words)


@pytest.mark.parametrize(
    ("group", "file", "content"),
    [
        ("0::/a/b", "sys/fs/cgroup/a/b/memory.events", "low 0\noom 9\noom_kill 3\noom_group_kill 0\n"),
        ("0::/of/the/host", "sys/fs/cgroup/memory.events", "oom_kill 3\n"),
        ("4:memory:/a", "sys/fs/cgroup/memory/a/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"),
        ("4:cpu,memory:/x", "sys/fs/cgroup/memory/memory.oom_control", "oom_kill 3\n"),
        ("0::/", "proc/vmstat", "nr_free_pages 8\noom_kill 3\n"),
    ],
)
def test_kills_are_counted_where_the_kernel_counts_them(tmp_path: Path, group: str, file: str, content: str) -> None:
    for path, text in (("proc/self/cgroup", f"5:devices:/\n{group}\n"), (file, content)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert num_memory_kills(tmp_path) == 3
    (tmp_path / file).unlink()
    assert num_memory_kills(tmp_path) == 0


def test_this_machine_can_be_asked() -> None:
    assert num_memory_kills() >= 0
