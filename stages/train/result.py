"""What training leaves: the checkpoint, its routers, the record and a picture of the loss."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from models.capture.router_watch import find_routers, selection_bias
from models.families.card import copy_card
from models.families.fold import gate_fold
from models.families.moe import MOE_TARGETS
from models.routing import LinearRouter
from models.shape import Shape
from stages.contracts.job import Job
from stages.contracts.routers import Routers
from stages.train.checkpoint import load_trainable, write_native
from stages.train.plot import write_plot
from stages.train.record import EVENTS, FILE, read_record
from stages.train.report import describe


def keep_result(job: Job, trained: Path, routers: Routers, shape: Shape, spread: float) -> None:
    """Write everything that is published.

    Args:
        job: whose `out` it goes to.
        trained: checkpoint of the last phase.
        routers: those training started from.
        shape: of the carve.
        spread: of the router logits in the end, as scheduled.
    """
    start, model = job.parents["project"] / "checkpoint", load_trainable(trained)
    write_native(model, start, job.out / "checkpoint", getattr(torch, routers.dtype))
    copy_card(start, job.out / "checkpoint", describe(read_record(job.scratch)))
    scale = gate_fold(MOE_TARGETS[routers.target], shape).selection_bias_scale
    found = [read_router(router, scale) for router in find_routers(model)]
    replace(routers, spread=spread).with_layers(found).save(job.out)
    shutil.copyfile(job.scratch / FILE, job.out / FILE)
    if (job.scratch / EVENTS).exists():
        shutil.copytree(job.scratch / EVENTS, job.out / EVENTS)
    write_plot(read_record(job.scratch), job.out)


def read_router(router: nn.Module, bias_scale: float) -> LinearRouter:
    """Rows and bias of a router, the bias in the units of its logits."""
    bias_E = selection_bias(router)
    weight: Tensor = router.weight  # type: ignore[assignment]
    rows_ED = weight.detach().float()
    return LinearRouter.without_bias(rows_ED) if bias_E is None else LinearRouter(rows_ED, bias_E.float() / bias_scale)
