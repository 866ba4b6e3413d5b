"""The parameter-level scanner against training without it, and writing its record."""

import tempfile
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.timing import Task, compute_clock, divide, take_turns, task_within
from benchmarks.workbench import Workbench

from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.parameter_scan.writer import MscanWriter

EVERY = 8


def measure_scanner(bench: Workbench, repetitions: int) -> list[Row]:
    """Scanner on frozen weights ÷ training step, and training with it ÷ without, for the batch and for one sequence.

    Also training of which every eighth step is measured ÷ training without the scanner.
    """
    rows = []
    for part in [bench, bench.first_sequence()]:
        tasks = {
            "training": Task(part.train_step, part.thaw, part.freeze),
            "scanner, frozen": scanner_task(part, training=False),
            "scanner, training": scanner_task(part, training=True),
        }
        found = take_turns(tasks, repetitions, part.device, compute_clock(part.device))
        size = f"batch {len(part.batch.names)}"
        frozen = divide(found["scanner, frozen"], found["training"])
        training = divide(found["scanner, training"], found["training"])
        # The target is for the batch.
        bound = 1.05 if part is bench else None
        rows.append(Row(f"parameter scanner, weights frozen ÷ training step, {size}", frozen, at_most=bound))
        rows.append(Row(f"training with the parameter scanner ÷ without, {size}", training))
    tasks = {
        "training": Task(lambda: [bench.train_step() for _ in range(EVERY)], bench.thaw, bench.freeze),
        "scanner": scanner_task(bench, training=True, steps=EVERY),
    }
    found = take_turns(tasks, repetitions, bench.device, compute_clock(bench.device))
    one_of = divide(found["scanner"], found["training"])
    return [*rows, Row(f"training with the parameter scanner at one step of {EVERY} ÷ without", one_of, at_most=1.05)]


def measure_mscan(bench: Workbench, repetitions: int) -> list[Row]:
    """Seconds to write a batch's record to the disk ÷ seconds to scan the batch."""
    with ParameterTensorScanner(bench.model) as scanner:
        bench.train_step()
        record = scanner.collect()[0]
    with tempfile.TemporaryDirectory() as folder:
        writers = {
            encoding: MscanWriter(
                Path(folder) / f"{encoding}.mscan",
                scanner.parameters,
                model=bench.name,
                block_width=scanner.parameters[0].block_width,
                encoding=encoding,
            )
            for encoding in ("f32", "log16")
        }

        def write(encoding: str) -> None:
            writers[encoding].add(record)
            writers[encoding].seal()

        tasks = {encoding: Task(lambda encoding=encoding: write(encoding)) for encoding in writers}
        found = take_turns({"scan": scanner_task(bench, training=False), **tasks}, repetitions, bench.device)
        for writer in writers.values():
            writer.close()
    size = f"{len(record.sequences)} sequences a segment"
    return [
        Row(f".mscan write of a sequence, {encoding} ÷ its scan", divide(found[encoding], found["scan"]), note=size)
        for encoding in writers
    ]


def scanner_task(bench: Workbench, *, training: bool, steps: int = 1) -> Task:
    """Forward and backward of some steps and the record of the first, with the scanner already entered."""

    def run(scanner: ParameterTensorScanner) -> None:
        for _ in range(steps):
            bench.train_step()
        assert len(scanner.collect()) == 1

    prepare = bench.thaw if training else bench.freeze
    return task_within(lambda: ParameterTensorScanner(bench.model, every_steps=steps), run, prepare, bench.freeze)
