"""Each test begins with no model watched: one that an earlier test forgot may die in the middle of this one."""

import pytest

from instruments.training_watch import model_watch


@pytest.fixture(autouse=True)
def _no_model_is_watched():
    model_watch._OPEN.clear()
    model_watch._note_losses()
