import subprocess
import sys
from pathlib import Path

from models.targets.tiny_onn import CODE_FILES, copy_code


def test_all_the_code_that_is_imported_is_copied(tmp_path):
    copy_code(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(CODE_FILES)
    for path in tmp_path.iterdir():
        lines = path.read_text().splitlines()
        wanted = [line.split()[1].removeprefix(".") + ".py" for line in lines if line.startswith("from .")]
        assert set(wanted) <= set(CODE_FILES)
        assert not [line for line in lines if line.startswith(("from models", "import models", "from jaxtyping"))]


def test_writing_a_checkpoint_needs_no_torch():
    script = "import sys, models.targets.config, models.targets.config_json; print({'torch'} & set(sys.modules))"
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
