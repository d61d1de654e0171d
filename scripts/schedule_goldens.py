#!/usr/bin/env python3
"""Writes tests/pipeline/schedules/torch/*.csv: orders of torch.distributed.pipelining's schedules as PipelineScheduleMulti
writes them, for the tests that compare ours. made_by.txt beside them names torch's version.

usage: schedule_goldens.py [FOLDER]
Needs torch. No stage and no process group is made: the functions that compute an order read a few numbers of the schedule.
"""
import csv
import pathlib
import sys

import torch
from torch.distributed.pipelining import schedules

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "tests" / "pipeline" / "schedules" / "torch"

# (file's first word, class, [(stages, micro-batches, chunks on a rank)])
CASES = [
    ("gpipe", "ScheduleGPipe", [(2, 3, 1), (4, 8, 1)]),
    ("1f1b", "Schedule1F1B", [(2, 3, 1), (4, 8, 1)]),
    ("interleaved", "ScheduleInterleaved1F1B", [(2, 4, 2), (4, 8, 2), (4, 8, 3)]),
    ("looped-bfs", "ScheduleLoopedBFS", [(2, 3, 2), (4, 8, 2)]),
    ("zero-bubble", "ScheduleInterleavedZeroBubble", [(3, 5, 1), (4, 8, 1), (4, 8, 2)]),
    ("zbv", "ScheduleZBVZeroBubble", [(2, 3, 2), (4, 4, 2), (4, 8, 2)]),
]


def order(name, stages, micro_batches, chunks):
    """Returns pipeline_order of the class, whose constructor normally needs stages of a running process group."""
    schedule = object.__new__(getattr(schedules, name))
    schedule._n_microbatches = micro_batches
    schedule._num_stages = schedule.num_stages = stages * chunks
    schedule._stages = [None] * chunks
    schedule.pp_group_size = stages
    schedule.n_local_stages = chunks
    schedule.number_of_rounds = max(1, micro_batches // stages)
    schedule.microbatches_per_round = micro_batches // schedule.number_of_rounds
    if hasattr(schedule, "_get_pipeline_order"):  # one chunk per rank
        return schedule._get_pipeline_order()
    schedule.pipeline_order = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(stages)}
    if hasattr(schedule, "_add_bubbles_to_actions"):
        schedule.pipeline_order = schedule._add_bubbles_to_actions(stages * chunks)
    return schedule.pipeline_order


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for word, name, sizes in CASES:
        for stages, micro_batches, chunks in sizes:
            with open(folder / f"{word}-{stages}-{micro_batches}-{chunks}.csv", "w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file, lineterminator="\n")
                for actions in order(name, stages, micro_batches, chunks).values():
                    # Schedules with one chunk contain torch's reductions of gradients, which do not belong to a compute order.
                    writer.writerow("" if a is None else str(a) for a in actions if a is None or a.is_compute_op)
    (folder / "made_by.txt").write_text(f"scripts/schedule_goldens.py with torch {torch.__version__}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
