import json
import random
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))  # for trainings; last, so that it hides no module


@pytest.fixture(scope="session")
def forks(lab_env):
    """Runs programs with the rehearsal environment's Python."""
    from forks import Forks  # pytest rewrites its asserts only after this file

    with Forks(lab_env / "bin/python") as made:
        yield made


@pytest.fixture(scope="session")
def data_sets(forks, tmp_path_factory):
    """A folder with two small data sets."""
    from trainings import Trainings

    folder = tmp_path_factory.mktemp("data")
    drawn = random.Random(0)
    for name, known in (
        ("first", "the king and queen said that they would not go to sea again"),
        ("second", "zoo of exams"),
    ):
        lines = (" ".join(drawn.choice(known.split()) for _ in range(9)) for _ in range(1200))
        (folder / f"{name}.txt").write_text("\n".join(lines))
    made = Trainings(forks, folder)
    # One vocabulary for both: the second has letters that the first has not.
    (folder / "both.txt").write_text((folder / "first.txt").read_text() + (folder / "second.txt").read_text())
    made.program("prepare", "both.txt", "--out", "both")
    for name in ("first", "second"):
        made.program("prepare", f"{name}.txt", "--out", name, "--vocabulary", "both")
    return folder


@pytest.fixture(scope="module")
def gpt(forks, data_sets, tmp_path_factory):
    """Runs the trainer's programs with the rehearsal environment's Python, in a new folder with the data sets."""
    from trainings import Trainings

    folder = tmp_path_factory.mktemp("gpt")
    shutil.copytree(data_sets, folder, dirs_exist_ok=True)
    return Trainings(forks, folder)


@pytest.fixture(scope="module")
def of_configs(forks, tmp_path_factory):
    """Runs a program of this folder on configurations by name: the JSON objects that it prints, by their names."""

    def run(program, configs):
        folder = tmp_path_factory.mktemp(Path(program).stem)
        (folder / "configs.json").write_text(json.dumps(configs))
        done = forks.run(HERE / program, folder / "configs.json", cwd=folder)
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(row[5:]) for row in done.stdout.splitlines() if row.startswith("SAYS ")]
        return {line["name"]: line for line in lines}

    return run
