"""docs/bundle.md tells how to open a bundle by hand; what it says is done here."""

import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "bundle.md"
MISSING = [tool for tool in ("tar", "zstd", "python3") if shutil.which(tool) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"not installed here: {' '.join(MISSING)}")
def test_the_page_opens_a_bundle(packed, prefix, tmp_path, helpers):
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", PAGE.read_text().split("## Members")[0], re.MULTILINE)
    script = "".join(textwrap.dedent(block) for block in blocks if block.strip())
    folder = tmp_path / "by hand"
    folder.mkdir()
    packed.rename(folder / "llm.ccb")
    subprocess.run(["sh", "-euc", script], cwd=folder, check=True, capture_output=True)
    found = helpers.tree(folder / "env")
    for path, what in helpers.tree(prefix).items():
        if found[path] != what:  # only the time of large files is not kept
            assert path.endswith("big.bin")
            assert found[path][-1] == what[-1]
