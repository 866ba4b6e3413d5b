from models.targets.tiny_onn import CODE_FILES, copy_code


def test_all_the_code_that_is_imported_is_copied(tmp_path):
    copy_code(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(CODE_FILES)
    for path in tmp_path.iterdir():
        lines = path.read_text().splitlines()
        wanted = [line.split()[1].removeprefix(".") + ".py" for line in lines if line.startswith("from .")]
        assert set(wanted) <= set(CODE_FILES)
        assert not [line for line in lines if line.startswith(("from models", "import models", "from jaxtyping"))]
