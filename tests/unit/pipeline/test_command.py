"""Commands in remedies can be pasted."""

from pipeline.overrides import command_line


def test_changed_settings_replace_typed_ones():
    typed = ["stage=all", "data.path=/my texts", "experts=3"]
    assert command_line(typed, stage="scan", fresh="true") == (
        "python -m pipeline 'data.path=/my texts' experts=3 stage=scan fresh=true"
    )
