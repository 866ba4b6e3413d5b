"""Rules in a setting's metadata are enforced; all errors are reported at once."""

from dataclasses import dataclass, field

from pipeline.check import field_errors


@dataclass
class Node:
    method: str = field(default="rank", metadata={"choices": ("rank", "random")})
    share: float = field(default=0.25, metadata={"above": 0, "maximum": 1})
    layers: list[int] = field(default_factory=list, metadata={"minimum": 0})
    free: int = -1


@dataclass
class Root:
    seed: int | None = field(default=None, metadata={"minimum": 0})
    node: Node = field(default_factory=Node)


def test_every_broken_rule_is_reported():
    assert list(field_errors(Root())) == []
    errors = list(field_errors(Root(seed=-1, node=Node("randon", 0.0, [3, -4]))))
    assert [(error.what, error.do) for error in errors] == [
        ("seed=-1 must be at least 0", "seed=null"),
        ("node.method=randon is none of rank, random", "node.method=random"),
        ("node.share=0.0 must be above 0", "node.share=0.25"),
        ("node.layers=-4 must be at least 0", "node.layers=[]"),
    ]
    assert [error.do for error in field_errors(Node(share=1.5))] == ["share=0.25"]
