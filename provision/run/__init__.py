"""A training run: what is to be started, what travels with it, and what the nodes know about it afterwards."""

from provision.run.config import travel
from provision.run.files import LIMIT, WORK, Entry, Travel, tar_stream
from provision.run.job import Job
from provision.run.spec import Facts, Launch, RunSpec, Worker, new_run_id, plan_name, world_size

__all__ = [
    "LIMIT",
    "WORK",
    "Entry",
    "Facts",
    "Job",
    "Launch",
    "RunSpec",
    "Travel",
    "Worker",
    "new_run_id",
    "plan_name",
    "tar_stream",
    "travel",
    "world_size",
]
