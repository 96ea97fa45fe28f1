"""What a process that runs a bundle uses and leaves behind: cores, memory, files, reports."""

import gc
import os
import subprocess
import sys

import pytest

from rollkv.runtime.backend import available_threads
from rollkv.runtime.session import Session


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin a process")
def test_on_one_core_it_uses_one_thread_and_says_nothing(bundle):
    code = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from rollkv.runtime import Session
from rollkv.runtime.backend import available_threads
assert available_threads() == 1
before = len(os.listdir("/proc/self/task"))
session = Session(sys.argv[1])
session.prefill(range(1, 12))
session.decode(3)
if len(os.listdir("/proc/self/task")) > before + 1:
    sys.exit("more threads than one")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, bundle("llama").path], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_there_is_a_thread_for_each_core_of_the_process():
    assert 1 <= available_threads() <= (os.cpu_count() or 1)


def test_onnxruntime_reports_nothing_and_leaves_nothing_on_the_disk(bundle, tmp_path):
    code = (
        "import os, sys; from rollkv.runtime import Session; Session(sys.argv[1]).prefill([1, 2]);"
        "print(os.environ['ORT_DISABLE_TELEMETRY'])"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    environment |= {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(bundle("llama").path)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_while_decoding(bundle):
    session = Session(bundle("llama"))
    session.prefill([1])

    def anonymous():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    measured = {}
    for step in range(1, 501):
        if session.position == session.manifest.max_position:
            session.reset()
        session.decode(3, on_limit="roll")
        if step in (50, 500):
            gc.collect()
            measured[step] = anonymous()
    assert measured[500] <= 1.05 * measured[50]
