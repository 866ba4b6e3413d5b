"""Write the 132 of MBPP's tasks 11 to 260 whose prompts have the fewest tokens: those of the README's first table.

PYTHONPATH=.:tests python -m studies.short_tasks MODEL mbpp.jsonl SHORT.jsonl
python -m pipeline mbpp MODEL CARVE --tasks SHORT.jsonl --tokens 256 --run-code
"""

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

from pipeline.mbpp import read_tasks

TASKS, LAST = 132, 260


def main(model, file, short):
    tokenizer, source = AutoTokenizer.from_pretrained(model), Path(file)

    def length(task):
        messages = [{"role": "user", "content": task.prompt}]
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    tasks = [task for task in read_tasks(source) if task.task_id <= LAST]
    chosen = {task.task_id for task in sorted(tasks, key=lambda task: (length(task), task.task_id))[:TASKS]}
    lines = [line for line in source.read_text().splitlines() if json.loads(line)["task_id"] in chosen]
    Path(short).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
