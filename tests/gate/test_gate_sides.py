"""Two processes in turns: who is asked when, and every way in which one of them can end."""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from optforge.errors import ChildFailed, ChildTimeout, ConfigError, OutOfMemory
from optforge.gate.interleave import alternate
from optforge.gate.side import Side

SLEEPER = """
    import sys, time
    from optforge.gate import serve

    stream = serve.answers()
    print("a stray word on stdout")

    def call():
        with open("order.txt", "a") as file:
            file.write(sys.argv[1])
        time.sleep(float(sys.argv[2]))

    serve.serve(stream, {"candidate": call}, synchronize=lambda: None, batch_s=0.0, ready={"hello": sys.argv[1]})
"""


def side(folder: Path, code: str, *arguments: str, name: str = "A") -> Side:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return Side(name, command, cwd=folder, log=folder / f"{name}.log")


def test_sides_take_turns_and_the_order_swaps(tmp_path: Path) -> None:
    with side(tmp_path, SLEEPER, "a", "0.02") as a, side(tmp_path, SLEEPER, "b", "0.06", name="B") as b:
        assert (a.ready(30)["hello"], b.ready(30)["hello"]) == ("a", "b")
        (tmp_path / "order.txt").unlink()
        slow, fast = alternate([(b, "candidate"), (a, "candidate")], least=4, max_s=0.0, enough=lambda _: False, timeout_s=30)
    # each sample is one untimed call and one timed one
    assert (tmp_path / "order.txt").read_text() == "bbaaaabbbbaaaabb"
    assert len(slow) == len(fast) == 4
    assert min(slow) >= 0.06 and min(fast) >= 0.02 and min(slow) > max(fast) / 2
    assert "a stray word on stdout" in (tmp_path / "A.log").read_text()


def test_rounds_end_when_there_are_enough(tmp_path: Path) -> None:
    with side(tmp_path, SLEEPER, "a", "0") as a:
        a.ready(30)
        looked: list[int] = []

        def enough(samples: list[list[float]]) -> bool:
            looked.append(len(samples[0]))
            return len(samples[0]) >= 12

        (samples,) = alternate([(a, "candidate")], least=4, max_s=60.0, enough=enough, timeout_s=30)
    assert len(samples) == 12 and looked == [4, 8, 12]


@pytest.mark.case("B107")
def test_b107_a_side_that_raises_is_told_with_its_last_lines(tmp_path: Path) -> None:
    with side(tmp_path, "raise RuntimeError('no such kernel')") as a, pytest.raises(ChildFailed, match="no such kernel") as caught:
        a.ready(30)
    assert "side A: the process ended with exit code 1" in str(caught.value) and str(tmp_path / "A.log") in str(caught.value)


@pytest.mark.case("B107")
def test_b107_a_side_that_is_killed_between_two_samples_is_told_at_once(tmp_path: Path) -> None:
    code = SLEEPER.replace(
        "time.sleep(float(sys.argv[2]))", "import os; os.kill(os.getpid(), 9) if open('order.txt').read().count('a') > 4 else 0"
    )
    begun = time.monotonic()
    with side(tmp_path, code, "a") as a, pytest.raises(ChildFailed) as caught:
        a.ready(30)
        for _ in range(5):
            a.sample("candidate", 30)
    assert caught.value.signal == signal.SIGKILL
    assert "was killed by SIGKILL (9)" in str(caught.value)
    assert time.monotonic() - begun < 25


@pytest.mark.case("B107")
def test_b107_an_answer_of_50_mb_arrives(tmp_path: Path) -> None:
    code = "from optforge.gate import serve; serve.tell(serve.answers(), {'protocol': serve.PROTOCOL, 'ready': {'text': 'x' * 50_000_000}})"
    with side(tmp_path, code) as a:
        assert len(a.ready(60)["text"]) == 50_000_000


@pytest.mark.case("B107")
def test_b107_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 5
    with side(tmp_path, f"import os; os.kill(os.getpid(), {number})") as a, pytest.raises(ChildFailed) as caught:
        a.ready(30)
    assert caught.value.signal == number and f"was killed by a signal ({number})" in str(caught.value)


@pytest.mark.case("B107")
def test_b107_a_side_that_hangs_ends_with_its_children(tmp_path: Path) -> None:
    code = """
        import subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open("child.txt", "w").write(str(child.pid))
        time.sleep(600)
    """
    a = side(tmp_path, code)
    with a:
        deadline = time.monotonic() + 60
        while not (tmp_path / "child.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ChildTimeout, match=r"side A: no answer after 0\.5 s"):
            a.ready(0.5)
    child = Path(f"/proc/{(tmp_path / 'child.txt').read_text()}/stat")
    deadline = time.monotonic() + 10  # a busy machine takes a moment to end a process that was killed
    while _runs(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(child)


def _runs(stat: Path) -> bool:
    """Whether the process is there, and no zombie until whoever adopted it looks."""
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ({"failed": "cpu ran out of memory", "kind": "oom"}, OutOfMemory),
        ({"failed": "ValueError: 3", "kind": "crash"}, ChildFailed),
        ({"failed": "", "kind": "user", "problems": [{"where": "recipe", "what": "is missing", "fix": "give one"}]}, ConfigError),
    ],
)
def test_a_failure_keeps_its_kind(tmp_path: Path, told: dict[str, object], kind: type[Exception]) -> None:
    code = f"from optforge.gate import serve; serve.tell(serve.answers(), {{'protocol': serve.PROTOCOL, **{told!r}}})"
    with side(tmp_path, code) as a, pytest.raises(kind, match="side A: "):
        a.ready(30)


def test_another_protocol_is_refused(tmp_path: Path) -> None:
    code = "from optforge.gate import serve; serve.tell(serve.answers(), {'protocol': 99, 'ready': {}})"
    with side(tmp_path, code) as a, pytest.raises(ChildFailed, match="speaks protocol 99"):
        a.ready(30)
