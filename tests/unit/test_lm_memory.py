"""The host memory that a training can get: the node's, or less if a control group limits it."""

import pytest

from trainer.lm.memory import available_memory

MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8_192_000_000),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.max": "max\n"}, 8_192_000_000),
        (
            {  # the limit of a group above counts, and pages of files can be freed
                "proc/self/cgroup": "0::/job/step\n",
                "sys/fs/cgroup/job/memory.max": "5000\n",
                "sys/fs/cgroup/job/memory.current": "3000\n",
                "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 700\n",
            },
            2700,
        ),
        (
            {  # version 1
                "proc/self/cgroup": "3:cpu:/x\n9:memory:/y\n",
                "sys/fs/cgroup/memory/y/memory.limit_in_bytes": "4000\n",
                "sys/fs/cgroup/memory/y/memory.usage_in_bytes": "5000\n",
            },
            0,
        ),
    ],
)
def test_the_lowest_limit_counts(tmp_path, files, expected):
    write(tmp_path, {"proc/meminfo": MEMINFO, **files})
    assert available_memory(tmp_path) == expected


def test_unknown_memory_is_none(tmp_path):
    assert available_memory(tmp_path) == 0
