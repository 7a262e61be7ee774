from __future__ import annotations

import base64
import hashlib
import hmac
import threading

import pytest

from provision.ssh.hostkeys import fingerprint, host_name, look_up, pin

KEY = base64.b64encode(b"key one").decode()
OTHER = base64.b64encode(b"key two").decode()


@pytest.fixture
def known(tmp_path):
    def write(*lines, name="known_hosts"):
        file = tmp_path / name
        file.write_text("\n".join(lines) + "\n")
        return file

    return write


def blobs(name, *files):
    return [key.blob for key in look_up(name, files)]


def hashed(name):
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return "|1|" + base64.b64encode(salt).decode() + "|" + base64.b64encode(digest).decode()


def test_names_and_ports():
    assert host_name("GPU1", 22) == "gpu1"
    assert host_name("10.0.0.1", 2222) == "[10.0.0.1]:2222"
    assert host_name("fe80::1", 22) == "fe80::1"


def test_the_fingerprint_is_openssh_s():
    assert fingerprint(b"") == "SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"


@pytest.mark.parametrize(
    ("patterns", "name", "found"),
    [
        ("gpu1", "gpu1", True),
        ("GPU1", "gpu1", True),
        ("gpu1", "gpu10", False),
        ("gpu1,10.0.0.1", "10.0.0.1", True),
        ("gpu?", "gpu1", True),
        ("*.example.org", "a.example.org", True),
        ("*,!gpu1", "gpu1", False),
        ("*,!gpu1", "gpu2", True),
        ("[10.0.0.1]:2222", "[10.0.0.1]:2222", True),
        ("[10.0.0.1]:2222", "1:2222", False),
        ("[gpu*]:2222", "[gpu7]:2222", True),
        (hashed("gpu1"), "gpu1", True),
        (hashed("gpu1"), "gpu2", False),
        ("|1|broken", "gpu1", False),
        ("|1|!!|!!", "gpu1", False),
    ],
)
def test_patterns(known, patterns, name, found):
    assert blobs(name, known(f"{patterns} ssh-ed25519 {KEY} comment")) == ([b"key one"] if found else [])


def test_invalid_lines_are_skipped(known):
    file = known(
        "", "# gpu1 ssh-rsa AAAA", "gpu1", "gpu1 ssh-rsa", "gpu1 ssh-rsa !!!", f"@cert-authority gpu1 ssh-rsa {KEY}",
        f"@new gpu1 ssh-rsa {KEY}", f"  gpu1\tssh-rsa  {OTHER}",
    )  # fmt: skip
    assert blobs("gpu1", file) == [b"key two"]


def test_first_file_with_the_host_is_used(known, tmp_path):
    mine, user = known(f"gpu1 a {KEY}", name="mine"), known(f"gpu1 a {OTHER}", f"gpu2 a {OTHER}", name="user")
    assert blobs("gpu1", mine, user) == [b"key one"]
    assert blobs("gpu2", tmp_path / "nothing", mine, user) == [b"key two"]
    assert blobs("gpu3", mine, user) == []


def test_a_key_that_any_file_revokes_is_revoked(known):
    mine, user = known(f"gpu1 a {KEY}", name="mine"), known(f"@revoked * a {KEY}", name="user")
    assert [(key.blob, key.revoked, key.file) for key in look_up("gpu1", [mine, user])] == [
        (b"key one", False, mine),
        (b"key one", True, user),
    ]


def test_pinning_keeps_existing_lines(known, tmp_path):
    file = tmp_path / "known_hosts"
    file.write_text("# mine\nbroken line\ngpu1 a AAAA")  # no newline at the end
    file.chmod(0o600)
    pin("gpu2", "a", b"key one", file)
    pin("gpu2", "a", b"key one", file)
    assert file.read_text() == f"# mine\nbroken line\ngpu1 a AAAA\ngpu2 a {KEY}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["known_hosts"]


def test_pinning_creates_file_and_folder(tmp_path):
    pin("gpu2", "a", b"key one", tmp_path / "x/y/known_hosts")
    assert blobs("gpu2", tmp_path / "x/y/known_hosts") == [b"key one"]


def test_pinning_follows_a_link(known, tmp_path):
    real = known("# real", name="real")
    (tmp_path / "link").symlink_to(real)
    pin("gpu2", "a", b"key one", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert blobs("gpu2", real) == [b"key one"]


def test_many_threads_pin_at_once(tmp_path):
    file = tmp_path / "known_hosts"
    threads = [threading.Thread(target=pin, args=(f"gpu{n // 2}", "a", f"{n // 2}".encode(), file)) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line.split()[0] for line in file.read_text().splitlines()) == sorted(f"gpu{n}" for n in range(20))
