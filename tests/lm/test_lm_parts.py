"""Parts of a model with their own rates, frozen parts, and rates that grow with the number of ranks."""

import json
import struct
from array import array

import pytest

ENGINES = ("plain", "fsdp", "zero0", "zero1", "zero2", "zero3")
RATES = ["--projector-lr", "3e-3", "--vision-lr", "3e-5"]
PARTS = {
    "rates": RATES,
    "projector": ["--parts", "projector", *RATES[:2]],
    "tops": ["--parts", "vision,language", *RATES[2:]],
}
TWO = ["--batch-size", 2, "--accumulation", 2]


@pytest.fixture(scope="module")
def alone(gpt):
    """Trainings of one process, by name."""
    runs = dict(PARTS)
    runs |= {"same": [], "all": ["--parts", "vision,projector,language"]}
    runs["small"] = [*RATES, "--optimizer", "adamw-bf16"]
    runs["muon"] = ["--optimizer", "muon", "--parts", "vision,projector", *RATES]
    for name in ("projector", "rates"):
        runs[f"{name} again"] = ["--resume", f"alone {name}/iter_3"]
    runs["bfloat16"] = ["--dtype", "bfloat16", *PARTS["projector"]]
    runs["changed"] = ["--resume", "alone projector/iter_3", "--parts", "all"]
    runs["next"] = ["--init", "alone projector/iter_6", "--parts", "language", "--max-iters", 1]
    argv = [["--batch-size", 8, *more, "--out", f"alone {name}"] for name, more in runs.items()]
    return dict(zip(runs, gpt.session(argv, program="parted.py"), strict=True))


@pytest.fixture(scope="module")
def together(gpt, alone):
    """Trainings of two processes: each engine with parts, and resumed from one process."""
    assert alone
    runs = {f"{name} {engine}": ["--engine", engine, *argv] for name, argv in PARTS.items() for engine in ENGINES}
    for engine in ENGINES:
        runs[f"{engine}>"] = ["--engine", engine, "--resume", "alone projector/iter_3"]
        runs[f">{engine}"] = ["--engine", "plain", "--resume", f"two projector {engine}/iter_3"]
    argv = [[*TWO, *more, "--out", f"two {name}"] for name, more in runs.items()]
    return dict(zip(runs, gpt.session(argv, ranks=2, program="parted.py"), strict=True))


def tensors(path):
    """The fp32 tensors of a safetensors file, by name: an array each."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__")
    held = memoryview(content)[8 + length :]
    return {key: array("f", held[slice(*each["data_offsets"])].tobytes()) for key, each in header.items()}


@pytest.fixture(scope="module")
def weights(gpt):
    """The weights of the last checkpoint of a training, by name, once it is exported."""

    def read(run):
        folder = run.out.with_name(f"{run.out.name} exported")
        if not folder.exists():
            gpt.program("export", run.out / "latest", folder)
        return tensors(folder / "model.safetensors")

    return read


def part_of(name):
    return "vision" if ".h.0." in name else "projector" if ".wte." in name else "language"


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_trains_the_same_parts_alike(alone, together, weights, name, engine):
    one, two = alone[name], together[f"{name} {engine}"]
    for key in ("loss", "grad_norm", "lr"):
        assert two.records(key) == pytest.approx(one.records(key), rel=1e-5), key
    evaluated = together[f"{name} plain"].records("eval_loss")  # of as many samples
    assert two.records("eval_loss") == pytest.approx(evaluated, rel=1e-5)
    expected, found = weights(one), weights(two)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        assert found[key] == pytest.approx(tensor, abs=2e-5), key


def test_parts_have_their_own_rates(alone):
    losses = [tuple(alone[name].losses.values()) for name in (*PARTS, "same", "small", "muon")]
    assert len(set(losses)) == len(losses)
    assert all(run.refused is None for name, run in alone.items() if name != "changed")
    assert alone["all"].losses == alone["same"].losses
    assert alone["small"].losses == pytest.approx(alone["rates"].losses, abs=5e-3)


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("projector", {"vision", "language"}),
        ("tops", {"projector"}),
        ("muon", {"language"}),
        ("bfloat16", {"vision", "language"}),
    ],
)
def test_frozen_parts_keep_their_weights(alone, weights, name, frozen):
    start, found = weights(alone["projector"]), weights(alone[name])
    start |= {key: tensor for key, tensor in weights(alone["tops"]).items() if part_of(key) == "projector"}
    pairs = [(part_of(key), zip(found[key], start[key], strict=True)) for key in found]
    changed = {part for part, each in pairs if any(abs(new - old) > 4e-3 * abs(old) for new, old in each)}
    assert not changed & frozen
    assert changed == {"vision", "projector", "language"} - frozen or name in ("projector", "tops")


def test_a_checkpoint_has_all_weights_and_the_averages_of_trained_ones(alone):
    (path,) = (alone["projector"].out / "iter_6").glob("part-*")
    keys = [key.partition("@")[0] for key in tensors(path)]
    averages = [key for key in keys if key.startswith("exp_avg")]
    assert averages == ["exp_avg/embed.weight", "exp_avg_sq/embed.weight"]
    assert len([key for key in keys if key.startswith("weight/")]) == len(keys) - 2 > 20


@pytest.mark.parametrize("name", ["projector", "rates"])
def test_a_resume_is_exact(alone, name):
    for key in ("loss", "grad_norm", "lr"):
        whole, again = alone[name].records(key), alone[f"{name} again"].records(key)
        assert again == {step: whole[step] for step in (4, 5, 6)}
    parts = [(alone[each].out / "iter_6/part-00000-of-00001.safetensors") for each in (name, f"{name} again")]
    assert parts[0].read_bytes() == parts[1].read_bytes()


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_resumes_frozen_parts_from_every_other(alone, together, engine):
    whole = alone["projector"].losses
    for name in (f"{engine}>", f">{engine}"):
        assert together[name].losses == pytest.approx({step: whole[step] for step in (4, 5, 6)}, rel=1e-5)


@pytest.fixture(scope="module")
def sixteen(gpt):
    """Trainings of three processes in 16 bits, so that shares are uneven, and resumed by one process."""
    engines = ("plain", "fsdp", "zero0", "zero2", "zero3")
    fixed = ["--dtype", "bfloat16", "--batch-size", 2, *PARTS["projector"]]
    runs = [[*fixed, "--engine", engine, "--out", f"three {engine}"] for engine in engines]
    whole = gpt.session(runs, ranks=3, program="parted.py")
    more = [
        ["--engine", "plain", "--out", f"three>{engine}", "--resume", f"three {engine}/iter_3"] for engine in engines
    ]
    return dict(zip(engines, zip(whole, gpt.session(more, program="parted.py"), strict=True), strict=True))


def test_frozen_parts_are_the_same_in_sixteen_bits(sixteen, weights):
    expected = weights(sixteen["plain"][0])
    for whole, resumed in sixteen.values():
        assert whole.losses == pytest.approx(sixteen["plain"][0].losses, abs=3e-3)
        assert resumed.losses == pytest.approx({step: whole.losses[step] for step in (4, 5, 6)}, abs=3e-3)
        for run in (whole, resumed):
            found = weights(run)
            assert all(found[key] == expected[key] for key in found if part_of(key) != "projector")


def test_other_parts_need_a_new_training(alone):
    assert alone["changed"].refused["what"] == "--parts all: alone projector/iter_3 has projector"
    assert alone["changed"].refused["fix"] == "remove --parts; or use --init with another --out"
    assert alone["next"].losses[1] == pytest.approx(alone["projector"].records("eval_loss")[6], abs=0.2)


def test_a_plain_decoder_has_one_part(gpt):
    runs = [["--parts", "projector"], ["--vision-lr", "1e-3"], ["--parts", "language"]]
    part, rate, fine = gpt.session([[*argv, "--out", "one part"] for argv in runs])
    assert part.refused["what"] == "--parts projector: the model has no part projector, only language"
    assert rate.refused["what"] == "--vision-lr 0.001: the model has no part vision"
    assert fine.refused is None


@pytest.fixture(scope="module")
def scaled(gpt):
    """Trainings whose rates grow with the number of ranks: of two ranks, resumed by one and by two."""
    linear = ["--learning-rate", "4e-4", "--scale-lr", "linear", "--warmup-iters", 2]
    runs = [[*TWO, *linear, "--out", "rates linear"], [*TWO, "--scale-lr", "sqrt", "--out", "rates sqrt"]]
    found = dict(zip(("linear", "sqrt"), gpt.session(runs, ranks=2), strict=True))
    plain = [*linear[:1], "8e-4", *linear[4:]]
    runs = [
        ["--batch-size", 8, *plain, "--out", "rates eight"],
        ["--resume", "rates linear/iter_3", "--out", "rates one"],
    ]
    runs += [["--resume", "rates one/iter_6", "--out", "rates typed", *linear, "--max-iters", 8]]
    found |= dict(zip(("eight", "one", "typed"), gpt.session(runs), strict=True))
    again = [[*linear, "--resume", "rates one/iter_6", "--max-iters", 8, "--out", "rates again"]]
    return {**found, "again": gpt.session(again, ranks=2)[0]}


def test_rates_grow_with_the_ranks_of_the_start_and_only_once(scaled):
    for key in ("lr", "loss"):
        assert scaled["linear"].records(key) == pytest.approx(scaled["eight"].records(key), rel=1e-5)
        expected = {step: scaled["linear"].records(key)[step] for step in (4, 5, 6)}
        assert scaled["one"].records(key) == pytest.approx(expected, rel=1e-5)
    assert max(scaled["sqrt"].records("lr").values()) == pytest.approx(3e-4 * 2**0.5)
    for name in ("typed", "again"):  # six of eight steps decay less than six of six
        assert scaled[name].records("lr")[7] == pytest.approx(scaled["again"].records("lr")[7])
        assert scaled[name].records("lr")[7] > 8e-4 / 10
    said = "highest learning rate 0.0008 (--scale-lr linear: 2 x the rates of one rank, for 2 ranks)\n"
    assert all(said in (scaled[name].out / "train.log").read_text() for name in ("linear", "one", "again"))
    assert json.loads((scaled["one"].out / "iter_6/complete.json").read_text())["first_world"] == 2
