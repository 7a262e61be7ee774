"""Starts programs with the Python of a real environment as forks of one process, see ``forked.py``."""

import json
import os
import select
import signal
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Forks:
    """Use it as a context; the process is started by the first program."""

    def __init__(self, python):
        clean = {key: value for key, value in os.environ.items() if key not in ("CLUSTERCTL_CHECKPOINT", "RANK")}
        mine = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        mine |= {"DEEPSPEED_LOG_LEVEL": "warning", "HF_HUB_OFFLINE": "1"}
        mine["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else torch compiles in other processes, which forks would share
        self.python = python
        self.env = dict(clean, CUDA_VISIBLE_DEVICES="", **mine)
        self._process = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process:
            with self._process:
                self._process.stdin.close()

    def run(self, *argv, cwd, ranks=1, env=None, timeout=900):
        """A program to its end."""
        if self._process is None:
            pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            argv_of_server = [str(self.python), str(HERE / "forked.py")]
            self._process = subprocess.Popen(argv_of_server, env=self.env, start_new_session=True, **pipe)
        argv = [str(word) for word in argv]
        with tempfile.TemporaryDirectory() as folder:
            output = [str(Path(folder) / name) for name in ("stdout", "stderr")]
            request = {"argv": argv, "cwd": str(cwd), "env": env or {}, "output": output, "ranks": ranks}
            self._process.stdin.write(json.dumps(request) + "\n")
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)
            answer = self._process.stdout.readline()
            if not answer:
                self._process.wait()
                self._process = None
            stdout, stderr = (Path(path).read_text() for path in output)
        assert answer, f"{argv} did not end in {timeout} s:\n{stdout}\n{stderr}"
        return subprocess.CompletedProcess(argv, int(answer), stdout, stderr)
