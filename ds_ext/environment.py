"""Variables of the launcher, and files of /proc: read here and nowhere else. Imports nothing of ds_ext.

psutil, which takes 30 ms to import, has no thread states, capabilities, control groups and namespaces, and its times
of processes are seconds off on virtual machines that adjust their clock. Without Linux's /proc, or for a process
that has exited, text and lists are empty.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_GPU_FILES = "nvidiactl", "kfd", "dxg"  # of NVIDIA, AMD and WSL
_PROC = Path("/proc")
# Variables that the launcher sets for one rank. Programs between the launcher and the rank inherit all of them.
_OF_RANK = ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_OF_RANK += ("SLURM_PROCID", "SLURM_STEP_ID")
_USE_TORCH = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")  # set by torchrun and by DeepSpeed's launcher
_GROUP, _STARTED = 2, 19  # fields of /proc/PID/stat, counted from the state (proc(5))

# --- launcher: torchrun's name of a variable first, then the one of DeepSpeed's launcher ------------------------------


def rank() -> int:
    return _number("RANK") or 0


def world_size() -> int:
    return _number("WORLD_SIZE") or 1


def local_rank() -> int:
    return _number("LOCAL_RANK") or 0


def local_world_size(world: int | None = None) -> int:
    """Return the number of ranks on this host. A launcher that does not set it has started all ranks here.

    ``world`` is the number of ranks of the job; None: from the launcher.
    """
    return max(1, _number("LOCAL_WORLD_SIZE", "LOCAL_SIZE") or world or world_size())


def num_hosts(world: int | None = None) -> int:
    """Return the number of hosts of the job, which may have different numbers of ranks.

    ``world`` is the number of ranks of the job; None: from the launcher.
    """
    world = world or world_size()
    return max(1, _number("GROUP_WORLD_SIZE", "CROSS_SIZE") or -(-world // local_world_size(world)))


def host_number(rank: int, world: int) -> int:
    """Return the number of this host in the launcher's order, for a rank of a job with ``world`` ranks."""
    number = _number("GROUP_RANK", "CROSS_RANK")
    return rank // local_world_size(world) if number is None else min(max(0, number), num_hosts(world) - 1)


def spans_hosts() -> bool:
    return local_world_size() < world_size()


def master_address() -> str:
    return os.environ.get("MASTER_ADDR") or "127.0.0.1"


def master_port() -> int | None:
    """Return the port of the rendezvous store on the host of rank 0; None without a launcher."""
    return _number("MASTER_PORT")


def store_address() -> tuple[str, int] | None:
    port = master_port()
    return (master_address(), port) if port and os.environ.get("MASTER_ADDR") else None


def agent_serves_store() -> bool:
    """Return whether torchrun's agent serves the store, which then keeps its keys when torchrun restarts the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def restart_count() -> int:
    """Return how often the launcher on this host has restarted the ranks."""
    return _number("TORCHELASTIC_RESTART_COUNT") or 0


def max_restarts() -> int | None:
    """Return how often the launcher restarts the ranks; None if it never does."""
    return _number("TORCHELASTIC_MAX_RESTARTS")


def chosen_devices() -> str:
    """Return the numbers of the devices that DeepSpeed's launcher uses on this host, such as ``2,3``; else empty."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "") if "CROSS_RANK" in os.environ else ""


def is_on_cpu() -> bool:
    """Return whether the job runs on CPUs: by DS_ACCELERATOR, else if a launched rank sees no GPU."""
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen:
        return chosen == "cpu"
    return "RANK" in os.environ and not any(Path("/dev", name).exists() for name in _GPU_FILES)


def host_gpus() -> int:
    """Return the number of NVIDIA's GPUs of this host."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def host_devices() -> int:
    """Return the number of GPUs of this host; without any, the number of cores that this process may use."""
    return host_gpus() or len(os.sched_getaffinity(0))


def chosen_port() -> int | None:
    """Return ``--master_port`` of the launcher; None without a launcher, or if ``torchrun --standalone`` chose it."""
    is_set = os.environ.get("TORCHELASTIC_RUN_ID") == "none" or "CROSS_RANK" in os.environ
    return master_port() if is_set else None


def error_file() -> Path | None:
    """Return the file from which torchrun reads this rank's error; None without torchrun."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def find_launcher() -> tuple[int, int] | None:
    """Return (child, launcher): the launcher of this rank, and the program that it started for the rank.

    The child is the rank itself, or a wrapper such as a shell script, numactl or a profiler. Without launcher or /proc,
    the launcher is the parent. None: the launcher has exited.
    """
    own = {f"{name}={os.environ[name]}" for name in _OF_RANK if name in os.environ}
    uses_torch = any(name in os.environ for name in _USE_TORCH) and (_PROC / "self/maps").exists()

    def launched(process: int) -> tuple[int, int] | None:
        child = process
        while parent := parent_of(child):
            if uses_torch and _has_no_memory(
                parent
            ):  # killed, and about to lose its children: the next is not it
                return None
            of_rank = bool(own) and own <= set(variables_of(parent))
            if not of_rank and (has_loaded(parent, "/libtorch") or not uses_torch):
                return child, parent
            child = parent
        # The launcher of a rank in a container with its own process ids is outside.
        outside = not uses_torch or child == process or own <= set(variables_of(child))
        return (process, os.getppid()) if outside else None

    if (pair := launched(os.getpid())) is not None or not uses_torch:
        return pair
    # A profiler may have detached the rank from the program that the launcher started, which is older.
    pairs = (launched(process) for process in processes() if own <= set(variables_of(process)))
    latest = start_ticks(os.getpid())
    return next((pair for pair in pairs if pair is not None and start_ticks(pair[0]) <= latest), None)


def _number(*names: str) -> int | None:
    for name in names:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[name])
    return None


# --- processes -------------------------------------------------------------------------------------------------------


def process_state(process: int) -> tuple[str, int]:
    """Return (state letter, parent) of a process; ("", 0) if it exited."""
    fields = stat_fields(process)
    return (fields[0], int(fields[1])) if fields else ("", 0)


def is_running(process: int) -> bool:
    return process_state(process)[0] not in ("Z", "X", "")


def stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if the process exited."""
    return _after_name(f"{process}/stat")


def parent_of(process: int) -> int:
    return os.getppid() if process == os.getpid() else process_state(process)[1]


def group_of(process: int) -> int:
    """Return the process that leads a process's group; 0 if it is unknown."""
    return int((stat_fields(process) or ["0"] * 3)[_GROUP])


def start_ticks(process: int) -> int:
    """Return the start of a process, in clock ticks since the start of this host; 0 if it is unknown."""
    return int((stat_fields(process) or ["0"] * (_STARTED + 1))[_STARTED])


def words_of(process: int) -> list[str]:
    """Return the command line of a process."""
    return proc_text(f"{process}/cmdline").split("\0")[:-1]


def variables_of(process: int) -> list[str]:
    """Return the variables with which a process started, as NAME=VALUE."""
    return proc_text(f"{process}/environ").split("\0")[:-1]


def children_of(process: int) -> list[int]:
    """Return the processes that the main thread of a process has started."""
    return list(map(int, proc_text(f"{process}/task/{process}/children").split()))


def processes() -> Iterator[int]:
    yield from map(int, filter(str.isdigit, os.listdir(_PROC)))


def has_loaded(process: int, library: str) -> bool:
    """Return whether a process has mapped a file whose path contains ``library``."""
    return library in proc_text(f"{process}/maps")


def _has_no_memory(process: int) -> bool:
    """Return whether a process has freed its memory, because it is ending; False if that is unknown."""
    try:
        return not (_PROC / str(process) / "maps").read_text(errors="replace")
    except OSError:
        return False


def has_bf16_instructions() -> bool:
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(proc_text("cpuinfo").split())


def data_bytes() -> int:
    """Return the bytes of private memory that this process has, which RLIMIT_DATA limits; 0 if unknown."""
    return 1024 * int(_value_in("self/status", "VmData:") or 0)


def thread_states() -> dict[int, str]:
    """Return the state letter of every thread of this process, by its native id."""
    fields = {int(task): _after_name(f"self/task/{task}/stat") for task in os.listdir(_PROC / "self/task")}
    return {task: words[0] for task, words in fields.items() if words}


def open_files() -> list[int]:
    return list(map(int, os.listdir(_PROC / "self/fd")))


def path_of(descriptor: int) -> Path:
    """Return a path that opens an open file of this process again."""
    return _PROC / f"self/fd/{descriptor}"


# --- host ------------------------------------------------------------------------------------------------------------


def has_proc() -> bool:
    return (_PROC / "self/fd").is_dir()


def control_groups() -> str:
    """Return the control groups of this process: lines ``number:controllers:path``; that of version 2 starts with 0."""
    return proc_text("self/cgroup") or "0::/"


def namespace(kind: str) -> str:
    """Return the identity of a namespace of this process, such as ``net:[4026531840]`` for "net". Raises OSError."""
    return os.readlink(_PROC / "self/ns" / kind)


def process_age_s() -> float:
    start = start_ticks(os.getpid())
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start / os.sysconf("SC_CLK_TCK") if start else 0.0


def started_s() -> float:
    """Return the start of this process in seconds since 1970."""
    return time.time() - process_age_s()


def available_bytes() -> int:
    """Return the memory of this host that processes can still allocate."""
    return 1024 * int(_value_in("meminfo", "MemAvailable:") or "0")


def has_capability(number: int) -> bool:
    """Return whether this process has a capability (capabilities(7))."""
    return bool(int(_value_in("self/status", "CapEff:") or "0", 16) >> number & 1)


def interface_addresses() -> list[tuple[str, Address]]:
    """Return (interface, address) for this thread's network namespace, IPv4 first."""
    import psutil

    texts = [
        (name, address.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    parsed = [(name, ipaddress.ip_address(text)) for name, text in texts]
    return sorted(parsed, key=lambda pair: pair[1].version)


def file_system_of(path: Path) -> str:
    """Return the type of the file system of a path, such as ``nfs4``; empty if unknown."""
    import psutil

    mounts = psutil.disk_partitions(all=True)
    above = [mount for mount in reversed(mounts) if path.absolute().is_relative_to(mount.mountpoint)]
    return max(above, key=lambda mount: len(mount.mountpoint)).fstype if above else ""


def proc_text(name: str) -> str:
    with contextlib.suppress(OSError):
        return (_PROC / name).read_text(errors="replace")
    return ""


def _value_in(name: str, label: str) -> str:
    """Return the word after a label in a file of /proc; empty if it is missing."""
    lines = (line.split() for line in proc_text(name).splitlines() if line.startswith(label))
    return next(lines, ["", ""])[1]


def _after_name(name: str) -> list[str]:
    """Return the words of a stat file after the program's name, which may contain spaces and parentheses."""
    return proc_text(name).rpartition(")")[2].split()


# --- packages --------------------------------------------------------------------------------------------------------


@functools.cache
def package_version(name: str) -> str | None:
    """Return the version of an installed package, without importing it; None if it is not installed."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None
