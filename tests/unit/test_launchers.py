"""Launchers: plans of runs, and refusals. Whole plans are in ``tests/golden/launchers``."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path, PurePosixPath

import pytest

from provision import launchers
from provision.errors import ClusterctlError, PreflightError, UsageError
from provision.launchers.kit.plans import saving_to
from provision.model import Node
from provision.run import Facts, Job, RunSpec, Worker, new_run_id, plan_name
from trainer.agent.contract.plan import Copies, Resume


def worker(number=0, *, gpus=None, **facts):
    """A node; ``gpus`` is the inventory's value."""
    name = f"gpu0{number + 1}"
    message = {"ip": f"10.0.0.{number + 1}", "interface": "eth0", "boot_id": f"boot-{number}", "gpus": 8, "cpus": 64}
    return Worker(Node(name, f"10.0.0.{number + 1}", gpus=gpus), Facts(rank=number, **(message | facts)))


def spec(*workers, **fields):
    given = {
        "id": "20261121-071500-sft-3f2a",
        "workers": workers or (worker(0), worker(1)),
        "prefix": PurePosixPath("/data/releases/0123456789ab"),
        "folder": PurePosixPath("/data/runs/20261121-071500-sft-3f2a"),
        "config": "sft.yaml",
        "master": "10.0.0.1",
        "port": 29500,
    }
    return RunSpec(**(given | fields))


def launch_filled(spec):
    """What the nodes run in the first attempt."""
    launched = launchers.launch(spec)
    plans = launchers.filled(launched.plans, {each.node.name: each.facts.interface for each in spec.workers})
    return replace(launched, plans=tuple(plans))


def envs(spec):
    return [plan.env for plan in launch_filled(spec).plans]


# --- argv ----------------------------------------------------------------------------------------


def test_no_argument_is_ever_split():
    folder = PurePosixPath("/data/our runs/$HOME")
    argv = launch_filled(spec(prefix=PurePosixPath("/data/my envs/r"), folder=folder)).plans[1].argv
    argv = list(argv)
    assert argv[0] == "/data/my envs/r/bin/python"
    assert argv[argv.index("--log-dir") + 1] == "/data/our runs/$HOME/logs/node1/ranks"
    assert argv[-4:] == ["-m", "llamafactory.launcher", "sft.yaml", "run_name=20261121-071500-sft-3f2a"]


def test_ranks_continue_from_node_to_node():
    plans = launch_filled(spec(worker(0, gpus=2), worker(1, gpus=4), worker(2))).plans
    assert [plan.first_rank for plan in plans] == [0, 2, 6]
    assert [plan.env["NPROC_PER_NODE"] for plan in plans] == ["2", "4", "8"]


@pytest.mark.parametrize(("gpus", "found", "processes"), [(None, 0, 1), (None, 4, 4), (2, 8, 2), (2, 0, 2)])
def test_processes(gpus, found, processes):
    assert Worker(Node("n", "n", gpus=gpus), Facts(gpus=found)).processes == processes


def test_nodes_may_share_the_run_folder():
    first, second = launch_filled(spec()).plans
    assert first.logs != second.logs
    assert plan_name(0) != plan_name(1)


# --- environment ---------------------------------------------------------------------------------


def test_each_node_has_its_own_interface():
    one, two = envs(spec(worker(0, interface="ens1f0"), worker(1, interface="ens2f0")))
    assert (one["NCCL_SOCKET_IFNAME"], one["GLOO_SOCKET_IFNAME"]) == ("=ens1f0", "ens1f0")
    assert (two["NCCL_SOCKET_IFNAME"], two["GLOO_SOCKET_IFNAME"]) == ("=ens2f0", "ens2f0")


def test_user_overrides_every_variable_except_the_ranks():
    given = {"OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "0", "PYTHONPATH": "/mine", "NODE_RANK": "7", "MASTER_PORT": "1"}
    launch = launch_filled(spec(env=given))
    env = launch.plans[1].env
    assert (env["OMP_NUM_THREADS"], env["HF_HUB_OFFLINE"], env["PYTHONPATH"]) == ("3", "0", "/mine")
    assert (env["NODE_RANK"], env["MASTER_PORT"]) == ("1", "29500")
    assert any("NODE_RANK, MASTER_PORT" in notice.text for notice in launch.notices)


@pytest.mark.parametrize(("cpus", "processes", "threads"), [(64, 8, "8"), (2, 8, "1"), (7, 2, "3")])
def test_threads(cpus, processes, threads):
    assert envs(spec(worker(gpus=processes, cpus=cpus)))[0]["OMP_NUM_THREADS"] == threads


def test_caches_are_of_this_user_and_this_release():
    plan = launch_filled(spec(worker(uid=1234))).plans[0]
    assert plan.env["TRITON_CACHE_DIR"] == "/tmp/clusterctl-1234/0123456789ab/triton"
    assert list(plan.private) == ["/tmp/clusterctl-1234", "/tmp/clusterctl-1234/0123456789ab"]


def test_optimized_torch_can_be_switched_off_as_in_llamafactory():
    assert envs(spec())[0]["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in envs(spec(env={"OPTIM_TORCH": "0"}))[0]


def test_checkpoints_of_cpu_processes_can_be_read_on_nodes_without_gpus():
    one, two = envs(
        spec(worker(0, gpus=None), replace(worker(1), facts=Facts(ip="10.0.0.2")), env={"PYTHONPATH": "/mine"})
    )
    assert one["PYTHONPATH"] == "/mine"
    assert two["PYTHONPATH"] == "/data/runs/20261121-071500-sft-3f2a/hooks:/mine"


def test_ranks_that_save_on_sigterm_get_the_hook_with_gpus_too():
    asked = replace(spec(worker(0, gpus=None)), settings={"enable_jit_checkpoint": True})
    assert envs(asked)[0]["PYTHONPATH"] == "/data/runs/20261121-071500-sft-3f2a/hooks"


def test_command_line_overrides_the_inventory():
    job = Job("script", "train.py", env={"OMP_NUM_THREADS": "5"})
    given = spec(job=job, env={"OMP_NUM_THREADS": "3", "X": "1"})
    env = launch_filled(given).plans[0].env
    assert (env["OMP_NUM_THREADS"], env["X"]) == ("5", "1")


def test_nccl_log_file_is_not_set_if_the_user_sets_nccl_debug():
    assert envs(spec())[0]["NCCL_DEBUG_FILE"].endswith("/logs/node0/nccl-%p.log")
    asked = envs(spec(env={"NCCL_DEBUG": "WARN"}))[0]
    assert {name for name in asked if name.startswith("NCCL_DEBUG")} == {"NCCL_DEBUG"}


def test_every_value_is_text():
    for env in envs(spec()):
        assert all(isinstance(value, str) for value in env.values())


# --- refusals ------------------------------------------------------------------------------------


def test_one_node_may_use_loopback():
    assert envs(spec(worker(interface="lo", ip="127.0.0.1")))[0]["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_container_bridge_is_pointed_out():
    (notice,) = [
        each
        for each in launch_filled(spec(worker(0), worker(1, interface="docker0"))).notices
        if each.level == "warning"
    ]
    assert "gpu02" in notice.text
    assert "docker0" in notice.text


def test_llamafactory_v1_is_refused():
    with pytest.raises(UsageError, match="USE_V1"):
        launch_filled(spec(env={"USE_V1": "1"}))


# --- LLaMA-Factory -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packages", "settings", "message"),
    [
        ((), {}, ["run_name=20261121-071500-sft-3f2a"]),
        (("torch", "tensorboard", "wandb"), {"run_name": "mine"}, ["report_to=[tensorboard,wandb]"]),
        (("tensorboardx",), {"run_name": "mine"}, ["report_to=[tensorboard]"]),
        (("wandb",), {"run_name": "mine", "report_to": "none"}, []),
    ],
)
def test_loggers_are_those_installed_in_the_environment(packages, settings, message):
    argv = launch_filled(spec(worker(packages=packages), settings=settings)).plans[0].argv
    assert list(argv[argv.index("sft.yaml") + 1 :]) == message


def test_tensorboard_writes_where_the_config_says():
    assert envs(spec())[1]["TENSORBOARD_LOGGING_DIR"].endswith("/logs/node1/tensorboard")
    assert envs(spec(settings={"logging_dir": "tb"}))[1]["TENSORBOARD_LOGGING_DIR"] == "tb"


def test_checkpoint_is_passed_to_llamafactory():
    plan = launch_filled(spec(progress="job/out/trainer_log.jsonl")).plans[1]
    assert plan.resume == Resume(
        "job/out",
        ('resume_from_checkpoint="{checkpoint}"', "overwrite_output_dir=false"),  # which keeps the log
        {"CLUSTERCTL_CHECKPOINT": "{checkpoint}"},
    )


@pytest.mark.parametrize("settings", [{"stage": "ppo"}, {"stage": "rm", "finetuning_type": "full"}])
def test_stages_that_llamafactory_cannot_resume_are_not_resumed(settings):
    given = spec(settings=settings, progress="job/out/trainer_log.jsonl")
    assert launch_filled(given).plans[0].resume is None
    with pytest.raises(UsageError, match="cannot be resumed"):
        launch_filled(replace(given, resuming=True))
    assert any("first step" in notice.text for notice in launch_filled(replace(given, restarts=2)).notices)


# --- scripts and modules -------------------------------------------------------------------------

SCRIPT = Job("script", "train.py", ("--x", "a b"))


def test_there_is_a_file_for_every_launcher():
    assert launchers.names() == ("accelerate", "deepspeed", "llamafactory", "plain", "torchrun")


@pytest.mark.parametrize("words", [["sft.yaml"], ["t.py"], ["t.py", "--deepspeed", "d"], ["t.py", "--lr", "1"]])
def test_at_most_one_launcher_claims_a_job(words):
    job = launchers.from_words(words)
    assert sum(launchers.get(name).suits(job) for name in launchers.names()) <= 1


def test_two_launchers_recognise_no_common_command():
    commands = [command for name in launchers.names() for command in launchers.get(name).COMMANDS]
    assert len(commands) == len(set(commands))


# A launcher as a contributor would add it: one file, and no other change.
ADDED = """
from provision.launchers import torchrun
from provision.launchers.kit import NODE_RANK, Command, Options, names, parse_options

NAME = "horovod"
ABOUT = "horovodrun"
COMMANDS = ("horovodrun",)
KINDS = ("script",)
REQUIRES = ("horovod",)
OPTIONS = Options(values=names("np cycle_time_ms"), used={"np": "total"})
CONFIG = "Horovod's own configuration."


def suits(job):
    return "--horovod" in job.args


def parse(command, words):
    return parse_options(NAME, OPTIONS, words)


def command(spec, rank):
    return Command(["horovod", "--rank", NODE_RANK, *spec.job.launcher_args, spec.config, *spec.job.args], {"HVD": "1"})
"""
USED = """
import json
from dataclasses import replace
from provision import launchers
from provision.cli.train import train_command
from provision.model import Node
from provision.run import Facts, RunSpec, Worker
from pathlib import PurePosixPath
job = launchers.from_words(["horovodrun", "--np", "2", "--cycle-time-ms", "5", "t.py", "--lr", "1"])
workers = tuple(Worker(Node(name, name), Facts(packages=("horovod",))) for name in ("a", "b"))
spec = RunSpec("r", workers, PurePosixPath("/p"), PurePosixPath("/f"), "t.py", "a", 1, job=job)
plans = launchers.launch(spec).plans
(choice,) = [each.type.choices for each in train_command.params if each.name == "launcher"]
print(json.dumps({
    "named": launchers.choose(job),
    "claimed": launchers.choose(launchers.from_words(["t.py", "--horovod"])),
    "choice": "horovod" in choice,
    "option": "--horovod-config" in {word for each in train_command.params for word in each.opts},
    "argv": [plan.argv for plan in launchers.filled(plans, {})],
    "hvd": plans[0].env["HVD"],
    "left": launchers.filled(launchers.arranged(plans[1:], "b"), {})[0].argv,
}))
"""


@pytest.fixture
def copy(tmp_path, copy_tree):
    """A copy of the tree; it runs a program, and gives its exit code, output and last line of errors."""
    copy_tree(tmp_path)

    def run(program):
        argv = [sys.executable, "-B", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{program}"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stdout, (done.stderr.splitlines() or [""])[-1]

    run.folder = tmp_path / "provision/launchers"
    return run


def test_new_file_is_a_launcher(copy):
    (copy.folder / "horovod.py").write_text(ADDED)
    code, out, error = copy(USED)
    assert (code, error) == (0, "")
    words = ["--cycle-time-ms", "5", "t.py", "--lr", "1"]
    assert json.loads(out) == {
        "named": "horovod",
        "claimed": "horovod",
        "choice": True,
        "option": True,
        "hvd": "1",
        "argv": [["horovod", "--rank", "0", *words], ["horovod", "--rank", "1", *words]],
        "left": ["horovod", "--rank", "0", *words],
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("REQUIRES = (", "NEEDS = ("), "it does not define REQUIRES"),
        (("def suits(", "def fits("), "it does not define suits"),
        (('KINDS = ("script",)', 'KINDS = "script"'), "it does not define KINDS"),
        (('NAME = "horovod"', 'NAME = "hvd"'), "its NAME is hvd, not horovod"),
    ],
)
def test_missing_name_in_a_launcher_file_is_named(copy, change, reason):
    (copy.folder / "horovod.py").write_text(ADDED.replace(*change))
    code, _, error = copy("from provision import launchers; launchers.from_words(['t.py'])")
    assert code == 1
    assert error.endswith(f"horovod.py is not a launcher: {reason}")


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate", "plain"])
@pytest.mark.parametrize("job", [SCRIPT, Job("module", "pkg.train", ("--x", "a b"))])
def test_every_launcher_starts_scripts_and_modules(launcher, job):
    plans = launch_filled(spec(job=job, launcher=launcher, config=job.target)).plans
    for plan in plans:
        assert list(plan.argv[-3:]) == [job.target, "--x", "a b"]
        assert ("29500" in plan.argv) != plan.each_rank  # the starter of the ranks gives them the port
        assert (plan.port, plan.each_rank) == (29500, launcher == "plain")
        assert "PYTHONSAFEPATH" not in plan.env  # a script imports the modules beside it


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "accelerate", "plain"])
def test_a_script_that_keeps_checkpoints(launcher):
    job = replace(SCRIPT, resume_arg="--resume {checkpoint}")
    plan = launch_filled(spec(job=job, launcher=launcher, output="job/out")).plans[0]
    assert plan.resume.output == "job/out"
    assert plan.resume.argv == ("--resume", "{checkpoint}")


def test_restart_requires_the_folder_of_checkpoints():
    with pytest.raises(UsageError, match="checkpoints") as caught:
        launch_filled(spec(job=SCRIPT, restarts=1))
    assert "--output" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--resume", ("--resume",)),
        ("", ()),
        ("--init_from=resume", ("--init_from=resume",)),
        ("--load_dir {folder} --ckpt_id '{tag}'", ("--load_dir", "{folder}", "--ckpt_id", "{tag}")),
    ],
)
def test_resume_arg_needs_no_path(text, words):
    plans = launch_filled(spec(job=replace(SCRIPT, resume_arg=text), output="job/out")).plans
    assert plans[0].resume.argv == words


@pytest.mark.parametrize(("text", "message"), [("--resume {ckpt}", "{ckpt} is not one of"), ("--a 'b", "quotation")])
def test_invalid_resume_arg(text, message):
    with pytest.raises(UsageError, match=message):
        launch_filled(spec(job=replace(SCRIPT, resume_arg=text), output="job/out"))


def test_the_old_launcher_gives_the_local_rank():
    argv = launch_filled(spec(job=replace(SCRIPT, local_rank=True))).plans[0].argv
    assert argv[2] == "torch.distributed.launch"


@pytest.mark.parametrize(("launcher", "package"), [("deepspeed", "deepspeed"), ("accelerate", "accelerate")])
def test_a_launcher_that_the_environment_lacks(launcher, package):
    given = spec(worker(packages=("torch",)), worker(1), job=SCRIPT, launcher=launcher)
    with pytest.raises(PreflightError, match=f"lacks {package}") as caught:
        launch_filled(given)
    assert list(caught.value.reasons) == ["gpu01"]


def test_no_such_launcher():
    with pytest.raises(UsageError, match="unknown launcher mpirun"):
        launch_filled(spec(launcher="mpirun"))


def test_notices_of_the_job_come_first():
    job = replace(SCRIPT, notices=("torchrun --nnodes 2 is left out",))
    assert launch_filled(spec(worker(), job=job)).notices[0].text == "torchrun --nnodes 2 is left out"


# --- DeepSpeed: ranks that it would number wrongly -------------------------------------------------


@pytest.fixture
def said_by_ranks(tmp_path):
    """Starts the ranks of every node like DeepSpeed's launcher (launch.py); returns each one's report."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nprint('!', file=sys.stderr)\n"
        "print(os.environ['RANK'], os.environ['LOCAL_RANK'], sys.argv[1:])\n"
    )

    def start(launch):
        found = {}
        for plan in launch.plans:
            argv = list(plan.argv)
            info = next(word for word in argv if word.startswith("--world_info=")).partition("=")[2]
            world = json.loads(base64.urlsafe_b64decode(info))
            count = len(world[plan.node])
            assert {"--no_python", "--no_local_rank"} <= set(argv[: argv.index("/bin/sh")])
            command = argv[argv.index("/bin/sh") :]
            command[3] = sys.executable
            for rank in range(plan.first_rank, plan.first_rank + count):
                env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank % count)}
                subprocess.run(command, env=env, check=True, cwd=tmp_path)
            logs = Path(plan.rank_logs)
            for path in logs.glob("*/attempt_*/*/stdout.log"):
                rank, local, args = path.read_text().split(maxsplit=2)
                assert path.parent.name == local
                assert (path.parent / "stderr.log").read_text() == "!\n"
                found[int(rank)] = (plan.node, int(local), args.strip())
        return found

    return start


def test_deepspeed_local_ranks_of_unequal_nodes(said_by_ranks, tmp_path):
    job = Job("script", "train.py", ("--deepspeed_config", "it's $HOME.json"))
    workers = (worker(0, gpus=2), worker(1, gpus=4), worker(2, gpus=3))
    message = said_by_ranks(launch_filled(spec(*workers, job=job, config="train.py", folder=tmp_path / "our 'runs'")))
    nodes = ["gpu01"] * 2 + ["gpu02"] * 4 + ["gpu03"] * 3
    locals_ = [0, 1, 0, 1, 2, 3, 0, 1, 2]
    args = ["--deepspeed_config", "it's $HOME.json"]
    assert message == {
        rank: (nodes[rank], locals_[rank], str([f"--local_rank={locals_[rank]}", *args])) for rank in range(9)
    }


def test_deepspeed_omits_the_local_rank_on_request(said_by_ranks, tmp_path):
    job = Job("script", "train.py", launcher="deepspeed", launcher_args=("--no_local_rank", "--bind_cores_to_rank"))
    launch = launch_filled(spec(worker(gpus=1), job=job, config="train.py", folder=tmp_path))
    assert said_by_ranks(launch) == {0: ("gpu01", 0, "[]")}
    assert launch.plans[0].argv.count("--no_local_rank") == 1
    assert "--bind_cores_to_rank" in launch.plans[0].argv


def test_deepspeed_gets_the_gpus_that_may_be_used():
    from provision.launchers.deepspeed import world

    workers = (
        replace(worker(0), devices=("1", "3")),
        replace(worker(1), devices=("GPU-8a56a4bc",)),
        replace(worker(2), wanted=3),
    )
    assert world(spec(*workers)) == {"gpu01": (1, 3), "gpu02": ("GPU-8a56a4bc",), "gpu03": (0, 1, 2)}


# --- accelerate ----------------------------------------------------------------------------------


def accelerate(*workers, settings=None, **job):
    given = Job("script", "train.py", launcher="accelerate", **job)
    return launch_filled(spec(*workers, job=given, config="train.py", settings=settings or {})).plans


def test_accelerate_starts_one_process_per_gpu_of_each_node():
    plans = accelerate(worker(0, gpus=2), worker(1, gpus=4), worker(2, gpus=1))
    counts = [plan.argv[plan.argv.index("--num_processes") + 1] for plan in plans]
    assert [int(count) // 3 for count in counts] == [2, 4, 1]  # accelerate divides by --num_machines
    assert all("--multi_gpu" in plan.argv for plan in plans)


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP", "MEGATRON_LM"])
def test_accelerate_config_is_kept(kind):
    plans = accelerate(worker(0), worker(1), settings={"distributed_type": kind}, launcher_config=Path("a.yaml"))
    argv = plans[0].argv
    assert "--multi_gpu" not in argv  # with it accelerate ignores the config's distributed_type
    assert argv[argv.index("--config_file") + 1] == "/data/runs/20261121-071500-sft-3f2a/accelerate.yaml"
    assert argv[argv.index("--deepspeed_multinode_launcher") + 1] == "standard"


@pytest.mark.parametrize("settings", [{"distributed_type": "XLA"}, {"compute_environment": "AMAZON_SAGEMAKER"}])
def test_accelerates_config_for_other_machines(settings):
    with pytest.raises(UsageError, match="does not start"):
        accelerate(worker(), settings=settings, launcher_config=Path("a.yaml"))


def test_accelerate_of_one_process_is_started_by_torchrun():
    (plan,) = accelerate(worker(gpus=1))
    argv = list(plan.argv)
    inner = argv.index("accelerate.commands.launch")
    assert argv[1:3] == ["-m", "torch.distributed.run"]
    assert argv[inner - 1] == "-m"
    assert argv[inner + 1 :] == [
        *("--num_processes", "1", "--num_machines", "1", "--machine_rank", "0", "--gpu_ids", "all", "train.py")
    ]


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MULTI_GPU"])
def test_accelerate_of_one_process_that_starts_torchrun_itself(kind):
    (plan,) = accelerate(worker(gpus=1), settings={"distributed_type": kind}, launcher_config=Path("a.yaml"))
    assert "torch.distributed.run" not in plan.argv
    assert "--multi_gpu" not in plan.argv  # refused for one process


def test_accelerate_on_nodes_without_gpus():
    plans = accelerate(replace(worker(0), facts=Facts(ip="10.0.0.1")))
    assert plans[0].env["ACCELERATE_USE_CPU"] == "true"
    assert "--cpu" not in plans[0].argv


# --- names ---------------------------------------------------------------------------------------

NOW = datetime(2026, 11, 21, 7, 15, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("sft.yaml", "sft"),
        ("configs/Qwen2.5 LoRA (v2).yml", "qwen2-5-lora-v2"),
        ("$(rm -rf)/../x';.yaml", "x"),
        ("配置.yaml", "run"),
        ("a" * 80 + ".yaml", "a" * 24),
    ],
)
def test_run_ids_are_safe(name, word):
    made = new_run_id(NOW, name)
    stamp, _, rest = made.partition(f"-{word}-")
    assert stamp == "20261121-071500"
    assert len(rest) == 4
    assert set(rest) <= set("0123456789abcdef")


def test_run_ids_are_in_utc_and_differ():
    there = NOW.astimezone(timezone(timedelta(hours=8)))
    assert new_run_id(there, "x").startswith("20261121-071500-x-")
    assert len({new_run_id(NOW, "x") for _ in range(20)}) > 10


# --- facts ---------------------------------------------------------------------------------------


def test_facts_of_a_newer_agent_are_understood():
    facts = Facts.parse('{"error": null, "gpus": 2, "infiniband": [], "something_new": 1}')
    assert facts == replace(Facts(), gpus=2)


@pytest.mark.parametrize("text", ["", "[]", "Welcome to gpu01!", "3"])
def test_invalid_answer(text):
    with pytest.raises(ClusterctlError, match="cannot be read"):
        Facts.parse(text)


def test_nodes_and_processes_in_accelerates_configuration_are_replaced_by_name():
    job = Job("script", "train.py", launcher_config=Path("a.yaml"))
    message = {"distributed_type": "MULTI_GPU", "num_machines": 4, "num_processes": 16, "main_process_ip": "10.0.0.9"}
    launched = launch_filled(spec(job=job, settings=message, launcher="accelerate"))
    assert [notice.text for notice in launched.notices if "a.yaml" in notice.text] == [
        "a.yaml: num_machines 4: replaced by 2",
        "a.yaml: main_process_ip 10.0.0.9: replaced by 10.0.0.1",
    ]


# --- copies and memory ---------------------------------------------------------------------------------------------


def script(*args, **fields):
    job = Job(target="train.py", kind="script", args=args, resume_arg="")
    return spec(config="train.py", job=job, **({"output": "job/runs/out"} | fields))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--output_dir", "runs/out"), ("--output_dir", "{output}")),
        (("--save=./runs/out/", "runs/output"), ("--save={output}", "runs/output")),
    ],
)
def test_memory_takes_the_place_of_the_output_folder(args, words):
    plan = launchers.launch(script(*args, copies=Copies(memory=True))).plans[0]
    assert plan.argv[-2:] == words
    assert plan.resume.output == "job/runs/out"
    assert plan.copies.memory


@pytest.mark.parametrize("words", [("--output_dir", "runs/out"), ("--save=./runs/out/",)])
def test_a_run_resumes_to_memory_and_back_to_the_disk(words):
    plan = launchers.launch(script(*words)).plans[0]
    memory = saving_to(plan, "/runs/r", memory=True)
    assert memory.copies.memory
    assert memory.argv == launchers.launch(script(*words, copies=Copies(memory=True))).plans[0].argv
    assert saving_to(memory, "/runs/r", memory=True) == memory
    disk = saving_to(memory, "/runs/r", memory=False)
    assert disk.argv[-1].rpartition("=")[2] == "/runs/r/job/runs/out"
    assert not disk.copies.memory
    with pytest.raises(UsageError, match="--save-to memory needs the option"):
        saving_to(launchers.launch(script("--lr", "1")).plans[0], "/runs/r", memory=True)


def test_a_config_resumes_to_memory_and_back_to_the_disk():
    plan = launchers.launch(spec(output="job/out")).plans[0]
    memory = saving_to(plan, "/runs/r", memory=True)
    assert memory.argv == launchers.launch(spec(output="job/out", copies=Copies(memory=True))).plans[0].argv
    assert saving_to(memory, "/runs/r", memory=False).argv[-1] == "output_dir=/runs/r/job/out"


def test_memory_is_added_to_a_config():
    plan = launchers.launch(spec(output="out", copies=Copies(memory=True))).plans[0]
    assert plan.argv[-1] == "output_dir={output}"
    assert launchers.launch(spec(output="out")).plans[0].argv[-1] != "output_dir={output}"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"copies": Copies(memory=True)}, "needs the option by which the program gets its output folder"),
        ({"copies": Copies(peers=2)}, "--copies 2: the run has 1 other node for copies"),
        ({"copies": Copies(peers=1), "output": None}, "where this script keeps its checkpoints is not known"),
        ({"copies": Copies(memory=True), "output": None}, "needs the option by which the program gets its output"),
    ],
)
def test_copies_that_cannot_be_made_are_refused_at_the_start(given, why):
    with pytest.raises(UsageError, match=why):
        launchers.launch(script("--lr", "1", **given))
