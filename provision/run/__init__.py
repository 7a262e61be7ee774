"""A training run: the job, the files sent with it, and what the nodes report about it."""

from provision.run.config import config_files
from provision.run.files import LIMIT, WORK, Entry, RunFiles, tar_stream
from provision.run.job import Job
from provision.run.spec import Facts, Launch, RunSpec, Worker, new_run_id, plan_name, world_size

__all__ = [
    "LIMIT",
    "WORK",
    "Entry",
    "Facts",
    "Job",
    "Launch",
    "RunFiles",
    "RunSpec",
    "Worker",
    "config_files",
    "new_run_id",
    "plan_name",
    "tar_stream",
    "world_size",
]
