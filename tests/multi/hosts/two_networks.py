"""Two hosts in one machine: two network namespaces that a pair of virtual cables joins."""

import ctypes
import os
import pathlib
import signal
import subprocess

ADDRESSES = ("10.177.0.1", "10.177.0.2")
CABLES = ("left", "right")

_NEW_USER, _NEW_NET, _DIE_WITH_PARENT = 0x10000000, 0x40000000, 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
    """Kill this process when its parent ends. A new user namespace cancels an earlier call."""
    _libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def enter(holder: int) -> None:
    """Move this process into the network of the process ``holder``."""
    with open(f"/proc/{holder}/ns/net") as network:
        if _libc.setns(network.fileno(), _NEW_NET):
            raise OSError(ctypes.get_errno(), f"setns: {os.strerror(ctypes.get_errno())}")


def two_networks(rate: str = "") -> int:
    """Put this process and the returned process into two networks with a cable between them.

    ``rate``, in the words of ``tc``, limits both directions. Raise OSError if the kernel refuses
    namespaces, or lacks the cable.
    """
    _own_network()
    ready, tell_ready = os.pipe()
    plugged, tell_plugged = os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            die_with_parent()
            _unshare(_NEW_NET)
            os.write(tell_ready, b"1")
            os.read(plugged, 1)
            _configure(1, rate)
            os.write(tell_ready, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tell_ready)
    if not os.read(ready, 1):
        raise OSError("a second network namespace was refused")
    _run("ip", "link", "add", CABLES[0], "type", "veth", "peer", CABLES[1], "netns", str(holder))
    _configure(0, rate)
    os.write(tell_plugged, b"1")
    if not os.read(ready, 1):
        raise OSError("the second network could not be configured")
    return holder


def _unshare(flags: int) -> None:
    if _libc.unshare(flags):
        raise OSError(ctypes.get_errno(), f"unshare: {os.strerror(ctypes.get_errno())}")


def _own_network() -> None:
    """Make a network namespace for this process: in a new user namespace, or as root."""
    user, group = os.geteuid(), os.getegid()
    try:
        _unshare(_NEW_USER | _NEW_NET)
    except OSError:
        _unshare(_NEW_NET)
        return
    pathlib.Path("/proc/self/setgroups").write_text("deny")
    pathlib.Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    pathlib.Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _configure(side: int, rate: str) -> None:
    cable = CABLES[side]
    _run("ip", "address", "add", f"{ADDRESSES[side]}/24", "dev", cable)
    _run("ip", "link", "set", cable, "up")
    _run("ip", "link", "set", "lo", "up")
    if rate:
        limit = ("rate", rate, "burst", "256kb", "latency", "50ms")
        _run("tc", "qdisc", "add", "dev", cable, "root", "tbf", *limit)
