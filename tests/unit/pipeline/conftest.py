import pytest
from unit.pipeline.served_carves import write_carve


@pytest.fixture(scope="module")
def carve(tmp_path_factory):
    return write_carve(tmp_path_factory.mktemp("carve"), "qwen2_moe", "qwen2", 64)
