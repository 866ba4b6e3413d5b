"""Time to write the parameter-level record, relative to the scan that produces it."""

import tempfile
from pathlib import Path

from benchmarks.rows import Row
from benchmarks.scanner_speed import scanner_task
from benchmarks.timing import Task, divide, take_turns
from benchmarks.workbench import Workbench

from instruments.parameter_scan.scanner import ParameterTensorScanner
from instruments.parameter_scan.writer import MscanWriter


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
