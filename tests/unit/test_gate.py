"""The gate's rounds: refused nodes, dropped nodes, the ranks of the others, and leftovers on the nodes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest

from provision.checks import Answer as Said
from provision.errors import NodesFailedError, PreflightError
from provision.inventory import local_inventory
from provision.model import Inventory, Node, Notice
from provision.run import Facts, RunFiles, config_files
from provision.run.needs import needed
from provision.run.readiness import Content
from provision.session import Failure, Outcome, Session
from provision.ssh.remote import NodeUnreachable
from provision.tasks import gate as gate_module
from provision.tasks.gate import Answer, GateOptions, Question, RefusedError, gate

NODES = tuple(Node(f"node0{number}", f"10.0.0.1{number}") for number in (1, 2, 3, 4))
INVENTORY = Inventory(Path("/x/inventory.yaml"), PurePosixPath("/opt/llm/current"), NODES)
LUGGAGE = RunFiles(Path("sft.yaml"), "sft.yaml", {"job/sft.yaml": b""}, (), there=("/data/llama",),
                 settings={"model_name_or_path": "/data/llama"})  # fmt: skip
STALE = "mount 124 nas:/data /data\nlooked\n"
MODEL = Content("folder", names="n", content="c", files=2)


class Cluster:
    """Nodes that answer from tables; ``asked`` are the nodes of every round."""

    def __init__(self, monkeypatch):
        self.facts = {}  # by node, overrides the usual values
        self.answers = {"fs.stale": {node.name: Said("looked\n") for node in NODES}}
        self.content = {"/data/llama": dict.fromkeys((node.name for node in NODES), MODEL)}
        self.missing = {}
        self.shared = False
        self.prepared = []
        self.questions = []
        self.removed = []
        self.told = []
        monkeypatch.setattr(gate_module, "prepare", self.prepare)
        monkeypatch.setattr(gate_module, "remove_folders", self.remove_folders)
        monkeypatch.setattr(gate_module, "ask", self.ask)

    def prepare(self, session, nodes, _run, files, *, port=None, scratch=""):
        self.prepared.append(([node.name for node in nodes], files is not None, port))
        ok = {node.name: self.answer(node, rank, nodes) for rank, node in enumerate(nodes)}
        failed = {node.name: Failure.of(self.missing[node.name], INVENTORY, node) for node in nodes
                  if node.name in self.missing}  # fmt: skip
        return Outcome(session, {name: one for name, one in ok.items() if name not in failed}, failed)

    def answer(self, node, rank, nodes):
        message = Facts(
            rank=rank, master_ip=nodes[0].address, ip=node.address, interface="eth0", port=20000 if rank == 0 else None,
            disk_free=1 << 40, boot_id=node.name,
        )  # fmt: skip
        return Answer("abc", replace(message, **self.facts.get(node.name, {})), created=not self.shared or rank == 0)

    def ask(self, question, _session):
        self.questions.append(question)
        return gate_module.GateAnswers(answers=self.answers, content=self.content)

    def remove_folders(self, asked, nodes, _run, scratch=""):
        created = {name for name, answer in asked.ok.items() if answer.created}
        created |= {name for name, failure in asked.failed.items() if getattr(failure.error, "created", False)}
        self.removed += [node.name for node in nodes if node.name in created]

    def through(self, *, nodes=NODES[:3], luggage=LUGGAGE, inventory=INVENTORY, **options):
        session = Session(inventory, nodes, emit=self.told.append, connections=object())
        with gate(session, nodes, "run-1", luggage, GateOptions(**options)) as passed:
            return passed

    @property
    def warnings(self):
        return [event.text for event in self.told if isinstance(event, Notice)]


@pytest.fixture
def cluster(monkeypatch):
    return Cluster(monkeypatch)


def ranks(passed):
    return {node.name: passed.answers[node.name].facts.rank for node in passed.nodes}


def test_good_nodes_pass_in_one_round(cluster):
    passed = cluster.through()
    assert ranks(passed) == {"node01": 0, "node02": 1, "node03": 2}
    assert passed.dropped == {}
    assert cluster.warnings == []
    assert cluster.removed == []
    assert len(cluster.prepared) == len(cluster.questions) == 1


def test_question_has_the_port_of_rank_0_and_the_paths(cluster):
    cluster.facts["node01"] = {"link_port": 20001, "gpus": 8}
    cluster.through()
    (question,) = cluster.questions
    assert question.plan.inventory.train.port == 20000
    assert (question.paths, question.link, question.gpus) == (("/data/llama",), 20001, True)
    assert question.folder == "/opt/llm/runs/run-1"


def test_a_bad_node_refuses_all_and_nothing_is_left(cluster):
    cluster.answers["fs.stale"]["node02"] = Said(STALE)
    with pytest.raises(PreflightError) as refused:
        cluster.through()
    assert refused.value.exit_code == 4
    assert list(refused.value.reasons) == ["node02"]
    assert "did not answer within 4 s" in refused.value.reasons["node02"]
    assert "(fs.stale)" in refused.value.reasons["node02"]
    assert refused.value.hint == (
        "to continue with node[01,03]: clusterctl train --exclude-bad; to continue anyway: clusterctl train --force"
    )
    assert cluster.removed == ["node01", "node02", "node03"]


def test_a_package_whose_version_is_wrong_refuses_the_run(cluster):
    versions = {"llamafactory": "0.9.5", "trl": "0.24.0"}
    good = {"packages": tuple(versions), "versions": versions}
    cluster.facts = {node.name: good for node in NODES}
    cluster.facts["node02"] = {**good, "versions": {**versions, "trl": "0.26.1"}}
    wanted = replace(LUGGAGE, needs=needed({}, {}, factory=True, env={}))
    with pytest.raises(PreflightError) as refused:
        cluster.through(luggage=wanted)
    (reason,) = refused.value.reasons.values()
    assert "has trl 0.26.1, but LLaMA-Factory 0.9.5 needs >=0.18.0,<=0.24.0" in reason
    assert "pip install 'trl>=0.18.0,<=0.24.0'" in reason
    assert cluster.through(luggage=wanted, force=True).nodes == NODES[:3]


def test_ranks_are_renumbered_without_bad_nodes(cluster):
    cluster.answers["fs.stale"]["node02"] = Said(STALE)
    passed = cluster.through(exclude_bad=True, asked=3)
    assert ranks(passed) == {"node01": 0, "node03": 1}
    assert list(passed.dropped) == ["node02"]
    assert cluster.removed == ["node02"]
    assert len(cluster.questions) == 1  # rank 0 is the same: nothing has to be asked again
    assert "continuing with 2 of 3 nodes: node[01,03]; node03 is rank 1" in cluster.warnings
    spare = "node04 is not used and could replace them: clusterctl train --exclude node02 --nodes 3"
    assert cluster.warnings[-1] == spare


def test_without_a_number_spare_nodes_are_not_mentioned(cluster):
    cluster.answers["fs.stale"]["node02"] = Said(STALE)
    cluster.through(exclude_bad=True)
    assert not any("could replace" in text for text in cluster.warnings)


def test_when_rank_0_is_bad_the_next_one_is_asked_for_its_port(cluster):
    cluster.answers["fs.stale"]["node01"] = Said(STALE)
    passed = cluster.through(exclude_bad=True)
    assert ranks(passed) == {"node02": 0, "node03": 1}
    assert passed.answers["node02"].facts.port == 20000
    assert [names for names, _, _ in cluster.prepared] == [["node01", "node02", "node03"], ["node02", "node03"]]
    assert [sent for _, sent, _ in cluster.prepared] == [True, False]  # the folder is there already
    assert [[node.name for node in question.nodes] for question in cluster.questions][-1] == ["node02", "node03"]
    assert passed.answers["node02"].created  # and is removed if the launcher refuses


def test_nodes_are_dropped_until_rank_0_is_good(cluster):
    for name in ("node01", "node02"):
        cluster.answers["fs.stale"][name] = Said(STALE)
    cluster.facts["node03"] = {"disk_free": 0}
    passed = cluster.through(nodes=NODES, exclude_bad=True)
    assert ranks(passed) == {"node04": 0}
    assert list(passed.dropped) == ["node01", "node02", "node03"]


def test_dropped_node_does_not_delete_a_shared_folder(cluster):
    cluster.shared = True
    cluster.answers["fs.stale"]["node01"] = Said(STALE)
    cluster.through(exclude_bad=True)
    assert cluster.removed == []


def test_a_run_that_resumes_in_its_folder_never_loses_it(cluster):
    cluster.answers["fs.stale"]["node02"] = Said(STALE)
    with pytest.raises(PreflightError):
        cluster.through(luggage=None)
    assert cluster.removed == []


def test_refusal_of_the_launcher_deletes_the_folders(cluster):
    with (
        pytest.raises(PreflightError, match="no launcher"),
        gate(Session(INVENTORY, connections=object()), NODES[:2], "run-1", LUGGAGE, GateOptions()),
    ):
        raise PreflightError("no launcher", reasons={})
    assert cluster.removed == ["node01", "node02"]


def test_folder_of_a_dry_run_is_always_deleted(cluster):
    cluster.through(scratch="/tmp/x")
    assert cluster.removed == ["node01", "node02", "node03"]


def test_force_continues_and_names_each_finding(cluster):
    cluster.answers["fs.stale"]["node02"] = Said(STALE)
    cluster.facts["node03"] = {"disk_free": 0}
    passed = cluster.through(force=True)
    assert list(ranks(passed)) == ["node01", "node02", "node03"]
    forced = [text for text in cluster.warnings if text.startswith("forced: ")]
    assert [text.split(":")[1] for text in forced] == [" node02", " node03"]
    assert "fs.stale" in forced[0]
    assert "gate.disk" in forced[1]


def test_no_force_helps_a_node_without_an_interface(cluster):
    cluster.facts["node02"] = {"interface": None, "error": "no route to rank 0 at 10.0.0.11: Network is unreachable"}
    with pytest.raises(PreflightError) as refused:
        cluster.through(force=True)
    assert list(refused.value.reasons) == ["node02"]
    assert "--force" not in refused.value.hint


def test_no_remaining_node_is_an_error(cluster):
    cluster.content["/data/llama"] = dict.fromkeys(cluster.content["/data/llama"], Content())
    with pytest.raises(PreflightError) as refused:
        cluster.through(exclude_bad=True)
    assert set(refused.value.reasons.values()) == {
        "model_name_or_path /data/llama is missing; correct the path, or copy the files there (gate.data)"
    }
    assert "--exclude-bad" not in refused.value.hint


def test_a_model_on_one_node_only(cluster):
    for name in ("node02", "node03"):
        cluster.content["/data/llama"][name] = Content()
    with pytest.raises(PreflightError) as refused:
        cluster.through()
    assert list(refused.value.reasons) == ["node02", "node03"]
    assert "model_name_or_path /data/llama is missing; it exists on node" in refused.value.reasons["node02"]


def test_nodes_that_cannot_be_reached(cluster):
    cluster.missing["node02"] = NodeUnreachable(NODES[1], "no answer")
    with pytest.raises(NodesFailedError) as failed:
        cluster.through()
    assert failed.value.reasons == {"node02": "no answer"}
    assert "--exclude node02" in failed.value.hint
    assert cluster.removed == ["node01", "node03"]
    passed = cluster.through(exclude_bad=True)
    assert ranks(passed) == {"node01": 0, "node03": 1}
    assert passed.dropped == {"node02": "no answer"}


def test_rank_0_without_an_environment_is_replaced_first(cluster):
    cluster.missing["node01"] = RefusedError("there is no environment at /opt/llm/current")
    with pytest.raises(PreflightError) as refused:
        cluster.through(force=True)
    assert "clusterctl deploy" in refused.value.hint
    passed = cluster.through(exclude_bad=True)
    assert ranks(passed) == {"node02": 0, "node03": 1}
    assert len(cluster.questions) == 1


def test_warnings_are_reported_once_for_all_nodes(cluster):
    for node in NODES:
        cluster.facts[node.name] = {"disk_free": 1 << 30}
    cluster.through()
    assert len(cluster.warnings) == 1
    assert cluster.warnings[0].startswith("node[01-03]: 1.0 GiB free")


def test_requested_port_is_used_on_rank_0(cluster):
    cluster.through(port=29511)
    assert cluster.prepared[0][2] == 29511
    given = replace(INVENTORY, train=replace(INVENTORY.train, port=29500))
    cluster.through(inventory=given)
    assert cluster.prepared[1][2] == 29500


def test_disabled_check_does_not_run():
    off = replace(INVENTORY, checks=replace(INVENTORY.checks, off=("fs.stale", "net.iface")))
    assert {"fs.stale", "net.iface"} <= set(Question(INVENTORY, NODES, "/x").checks)
    assert not {"fs.stale", "net.iface"} & set(Question(off, NODES, "/x").checks)
    assert not any(each.startswith("gpu.") for each in Question(off, NODES, "/x").checks)
    assert "net.route" not in Question(off, NODES[:1], "/x").checks


# --- for real, on this machine -------------------------------------------------------------------


@pytest.fixture
def here(tmp_path):
    return replace(local_inventory(Path(sys.prefix)), base=PurePosixPath(tmp_path / "data of clusterctl"))


def test_this_machine_alone_passes_without_ssh(here, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    luggage = replace(LUGGAGE, config=tmp_path, there=(str(tmp_path / "model"),))
    with (
        Session(here) as session,
        gate(session, here.nodes, "run-1", luggage, GateOptions(force=True)) as passed,
    ):
        (node,) = passed.nodes
        answer = passed.answers[node.name]
        assert answer.release == gate_module.LOCAL
        assert answer.prefix(here) == here.prefix
        assert (answer.facts.master, answer.facts.interface) == ("127.0.0.1", "lo")
        assert Path(here.root, "runs/run-1/job/sft.yaml").exists()
        failed = {each.check for each in passed.findings if each.verdict == "FAIL" and each.check.startswith("gate.")}
        assert not failed - {"gate.runs"}  # runs of other tests are on this machine too
        assert [each.observed for each in passed.findings if each.check == "gate.data"] == [
            f"{tmp_path / 'model'}: 1 file"
        ]
        assert {"fs.stale", "net.loopback"} <= {each.check for each in passed.findings}


def test_missing_path_refuses_the_run_and_deletes_the_folder(here, tmp_path):
    luggage = replace(LUGGAGE, config=tmp_path)
    with (
        Session(here) as session,
        pytest.raises(PreflightError) as refused,
        gate(session, here.nodes, "run-1", luggage, GateOptions()),
    ):
        pass
    assert "model_name_or_path /data/llama is missing" in next(iter(refused.value.reasons.values()))
    assert not any(Path(here.root, "runs").glob("[!.]*"))


# --- which paths are read on the nodes -----------------------------------------------------------


def config(tmp_path, **settings):
    path = tmp_path / "sft.yaml"
    path.write_text(
        "".join(f"{key}: {value}\n" for key, value in {"stage": "sft", "do_train": "true", **settings}.items())
    )
    return config_files(path)


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ({"model_name_or_path": "/models/llama/"}, ("/models/llama",)),
        ({"model_name_or_path": "/m", "adapter_name_or_path": "/a, /b"}, ("/m", "/a", "/b")),
        ({"model_name_or_path": "/m", "ref_model": "/m", "deepspeed": "/ds/z3.json"}, ("/m", "/ds/z3.json")),
        ({"model_name_or_path": "/m", "dataset": "a", "dataset_dir": "/data"}, ("/m", "/data")),
        ({"model_name_or_path": "/m", "output_dir": "/out", "resume_from_checkpoint": "/out/c"}, ("/m",)),
        (
            {"model_name_or_path": "/m", "tokenized_path": "/cache/tok"},
            ("/m",),
        ),  # the run makes it when it is not there
    ],
)
def test_absolute_paths_of_a_config_are_checked(tmp_path, settings, there):
    assert config(tmp_path, **settings).there == there


def test_sent_files_are_not_checked_and_absolute_dataset_files_are(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.json").write_text("[]")
    info = {"mine": {"file_name": "mine.json"}, "big": {"file_name": "/data/big.json"}, "unused": {"file_name": "/x"}}
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(info))
    packed = config(tmp_path, model_name_or_path="model", dataset="mine,big", dataset_dir="data")
    assert packed.there == ("/data/big.json",)
