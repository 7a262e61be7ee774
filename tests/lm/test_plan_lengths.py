"""The lengths that the plan counts are those of LLaMA-Factory's own samples."""

import json
import shutil
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHAT = [
    {"from": "human", "value": "What colour is the sky?"}, {"from": "gpt", "value": "The sky is blue."},
    {"from": "human", "value": "And the apple?"}, {"from": "gpt", "value": "The apple is red."},
]  # fmt: skip


ALPACA = [
    {"instruction": "What colour is the sky?", "input": "", "output": "The sky is blue."},
    {"instruction": "And these?", "input": "the apple, the sky", "output": "The apple is red. " * 3},
    {"instruction": "Short.", "input": "", "output": "Yes.", "system": "The apple is red."},
]
DATA = {
    "alpaca": (ALPACA, {"columns": {"prompt": "instruction", "query": "input", "response": "output",
                                    "system": "system"}}),
    "sharegpt": ([{"conversations": CHAT}, {"conversations": CHAT[:2]}], {"formatting": "sharegpt"}),
}  # fmt: skip


@pytest.mark.parametrize("kind", DATA)
def test_lengths_differ_by_a_token_at_most(forks, lab_project, tmp_path, kind):
    folder = tmp_path / "project"
    shutil.copytree(lab_project, folder)
    records, entry = DATA[kind]
    (folder / "data/tiny.json").write_text(json.dumps(records * 4))
    (folder / "data/dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json", **entry}}))
    config = folder / "train.yaml"
    config.write_text(config.read_text().replace("cutoff_len: 64", "cutoff_len: 512"))
    done = forks.run(HERE / "lengths.py", config, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]
    says = [json.loads(row[5:]) for row in done.stdout.splitlines() if row.startswith("SAYS ")]
    found = {each["name"]: each for each in says}
    assert found["plan"]["exact"]
    pairs = list(zip(found["plan"]["tokens"], found["factory"]["tokens"], strict=True))
    assert len(set(pairs)) > 1
    assert all(abs(plan - factory) <= 1 for plan, factory in pairs), pairs
