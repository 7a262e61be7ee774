# python -c TEXT listen TOKEN NAME OWN LIFE MASTER...   or   connect TOKEN TIMEOUT (PEER KIND ADDRESS PORT)...
# The same as ports.pl; Python 3.6 is enough. What it prints: provision/checks/kit/measures.py.
import errno
import os
import select
import socket
import sys
import time

MODE, TOKEN, ARGS = sys.argv[1], sys.argv[2], sys.argv[3:]


def say(*words):
    sys.stdout.write(" ".join(str(word) for word in words) + "\n")
    sys.stdout.flush()


def plain(address):  # an IPv4 one also where it came through a socket for both
    host = address[0].partition("%")[0]
    return host[7:] if host.startswith("::ffff:") and "." in host else host


def found(name, port):  # the first address of a name, IPv4 before others
    every = socket.getaddrinfo(name, port, 0, socket.SOCK_STREAM)
    return sorted(every, key=lambda each: each[0] != socket.AF_INET)[0]


def listener(port):
    try:
        sock = socket.socket(socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("::", port))
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
        sock = socket.socket(socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("", port))
    sock.listen(1024)
    return sock


def listen(name, own, life, *wanted):
    try:
        say("self", plain(found(own, 0)[4]))
    except OSError:
        say("self", "-")
    heard = []
    for port in wanted:
        kind = "master" if int(port) else "random"
        try:
            sock = listener(int(port))
        except OSError as error:
            say("listen", kind, port, "busy" if error.errno == errno.EADDRINUSE else error.strerror)
        else:
            heard.append(sock)
            say("listen", kind, sock.getsockname()[1], "open")
    say("ready")
    talking = []
    end = time.time() + int(life)
    while time.time() < end:
        for sock in select.select([0] + heard + talking, [], [], 1)[0]:
            if sock == 0:
                if not os.read(0, 512):
                    return
            elif sock in heard:
                talk, peer = sock.accept()
                talk.sendall("clusterctl {} {} {}\n".format(TOKEN, name, plain(peer)).encode())
                talking.append(talk)
            else:  # the other side closes first, and keeps the port waiting there
                try:
                    over = not sock.recv(512)
                except OSError:
                    over = True
                if over:
                    talking.remove(sock)
                    sock.close()


def failed(what, number):  # by the error of a connection; the kernel's own timeout is longer than ours
    if number == errno.ECONNREFUSED:
        say("tried", *what, "refused")
    elif number == errno.ETIMEDOUT:
        say("tried", *what, "timeout")
    else:
        say("tried", *what, "unreachable", os.strerror(number))


def connect(timeout, *targets):
    going, answers, source = {}, {}, {}
    for start in range(0, len(targets), 4):
        peer, kind, address, port = targets[start : start + 4]
        try:
            family, _, _, _, to = found(address, int(port))
        except OSError:
            say("tried", peer, kind, port, "unreachable", address, "has no address here")
            continue
        sock = socket.socket(family)
        sock.setblocking(False)
        number = sock.connect_ex(to)
        if number not in (0, errno.EINPROGRESS):
            failed((peer, kind, port), number)
        else:
            going[sock] = (peer, kind, port)
    end = time.time() + float(timeout)
    while going and time.time() < end:
        waiting = [sock for sock in going if sock not in source]
        readable, writable, _ = select.select([sock for sock in going if sock in source], waiting, [], 0.5)
        for sock in writable:
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                failed(going.pop(sock), number)
            else:
                source[sock] = plain(sock.getsockname())
        for sock in readable:
            try:
                data = sock.recv(512)
            except OSError:
                data = b""
            answers[sock] = answers.get(sock, b"") + data
            if data and b"\n" not in data:
                continue
            what = going.pop(sock)
            words = answers[sock].decode("ascii", "replace").split()
            if words[:3] == ["clusterctl", TOKEN, what[0]] and len(words) == 4:
                say("tried", *what, "open", words[3], source[sock])
            else:
                say("tried", *what, "foreign")
            sock.close()
    for sock, what in going.items():
        say("tried", *what, "foreign" if sock in source else "timeout")


{"listen": listen, "connect": connect}[MODE](*ARGS)
