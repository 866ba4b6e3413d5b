"""A process that dumps until it is stopped: python dumping.py FOLDER [LIMIT_BYTES]."""

import resource
import sys
from itertools import count
from pathlib import Path

from unit.instruments.tensor_dump.small_model import Small, inputs

from instruments.errors import UserError
from instruments.tensor_dump import writer
from instruments.tensor_dump.config import DumpConfig
from instruments.tensor_dump.tensor_dump import TensorDump


def main(folder, limit):
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    writer.SHARD_BYTES = 2**20
    model = Small(features=512, hidden=300)
    with TensorDump(model, folder, DumpConfig(memory_mib=8), environment={}) as dump:
        for step in count():
            loss = model(inputs(step, 256, 512))
            loss.backward()
            dump.step(loss)
            sys.stdout.write(f"{step}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
