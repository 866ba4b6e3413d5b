"""What a watched training is held to."""

from dataclasses import dataclass, field


@dataclass
class WatchConfig:
    """Thresholds of the monitor, and how much it says."""

    # L2 norm below which a layer's gradient, or that of all layers together, vanishes ...
    vanishing: float = field(default=1e-6, metadata={"minimum": 0})
    # ... and above which it explodes; before clipping, after unscaling.
    exploding: float = field(default=100.0, metadata={"above": 0})
    # A layer is dead whose gradient norm is no more than this share of the median layer's.
    dead: float = field(default=1e-6, metadata={"minimum": 0, "maximum": 1})
    # Look at the outputs of modules: where the first NaN or inf is, how close values are to the end of their format.
    activations: bool = True
    # Share of the largest number of an output's format (float16: 65504) above which its values are too close to it.
    near_limit: float = field(default=0.5, metadata={"above": 0, "maximum": 1})
    # Loss scale below which gradients underflow easily, and at which scaling no longer does anything.
    low_scale: float = field(default=128.0, metadata={"above": 0})
    lost_scale: float = field(default=1.0, metadata={"above": 0})
    # So many falls of the loss scale in a row are no search for its place any more.
    falls: int = field(default=5, metadata={"minimum": 1})
    # Steps after which a finding that lasts is said again.
    repeat_steps: int = field(default=100, metadata={"minimum": 1})
    # Steps between two lines of the log that hold the norm of every layer.
    layer_steps: int = field(default=10, metadata={"minimum": 1})
