"""The filter of system calls in a sandbox, as a program for the kernel (seccomp, classic BPF).

Calls that change namespaces, mounts, the kernel or other processes are refused, and so are those
that hold memory which no limit of a process counts. A call that is newer than `LAST` does not exist
there. A program of another architecture, 32-bit ones included, is killed at its first call.
"""

import errno
import platform
import struct
from dataclasses import dataclass

from midflight.errors import SandboxUnavailable

LAST = 462
"""The newest call of this list (mseal, Linux 6.10). From 424 on a call has one number everywhere.
x32, which marks its calls by a high bit, lies above too.
"""
DENIED = {
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "nfsservctl": (180, 42),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "sysfs": (139, None),
    "ustat": (136, None),
    # memory that belongs to no process, and that of other processes
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmctl": (31, 195),
    "shmat": (30, 196),
    "shmdt": (67, 197),
    "semget": (64, 190),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "semop": (65, 193),
    "msgget": (68, 186),
    "msgctl": (71, 187),
    "msgrcv": (70, 188),
    "msgsnd": (69, 189),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # keys and programs of the kernel
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "lookup_dcookie": (212, 18),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "get_kernel_syms": (177, None),
    "query_module": (178, None),
    "syslog": (103, 116),
    # the machine, and the processors that a program is bound to
    "reboot": (169, 142),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "_sysctl": (156, None),
    "sched_setaffinity": (203, 122),
}
"""The calls that are refused with EPERM, with their numbers on x86-64 and on arm64. None: that has
no such call.
"""
CLONE3 = 435
"""Its flags lie in memory, which a filter cannot read. Without it, libraries take `clone`."""
NEW_NAMESPACES = 0x7E020000
"""The flags of `clone` for a new namespace: of users, mounts, processes, network, IPC, names and
cgroups.
"""
UNIX = 1
INTERNET = (2, 10)
NETLINK = 16
TRANSPORTS = (0, 6, 17)
"""The protocols of internet sockets: by default, TCP, UDP. Others would load modules."""
INPUT_CALLS = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX, by which a program types into a terminal."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A kind of processor: its number for the kernel, and the numbers of its calls."""

    audit: int
    column: int
    clone: int
    ioctl: int
    socket: int


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 0, clone=56, ioctl=16, socket=41),
    "aarch64": Architecture(0xC00000B7, 1, clone=220, ioctl=29, socket=198),
}

NUMBER = 0
ARCHITECTURE = 4
"""The places of a call's number and of its architecture in what a filter reads."""
LOAD = 0x20
IF_EQUAL = 0x15
IF_GREATER = 0x25
IF_ANY_BIT = 0x45
RETURN = 0x06
ALLOW = 0x7FFF0000
KILL = 0x80000000
FAIL = 0x00050000


def _argument(index: int) -> int:
    """The place of the lower half of an argument, which is all that the kernel looks at in those
    that are asked for here.
    """
    return 16 + 8 * index


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction. The last two are how many instructions a jump leaves out."""
    return struct.pack("<HBBI", code, then, otherwise, value)


REFUSE = _op(RETURN, FAIL | errno.EPERM)
UNKNOWN = _op(RETURN, FAIL | errno.ENOSYS)
PASS = _op(RETURN, ALLOW)


def call_filter(machine: str = "") -> bytes:
    """The filter for this machine, or for another kind. Raises `SandboxUnavailable` for a kind
    that this has no numbers for.
    """
    machine = machine or platform.machine()
    found = ARCHITECTURES.get(machine)
    if found is None:
        raise SandboxUnavailable(
            f"environment.sandbox cannot filter system calls on {machine}, only on "
            f"{' and '.join(ARCHITECTURES)}; name a kind of sandbox that runs programs elsewhere "
            "in environment.sandbox.kind."
        )
    words = [_op(LOAD, ARCHITECTURE), _op(IF_EQUAL, found.audit, 1, 0), _op(RETURN, KILL)]
    words += [_op(LOAD, NUMBER)]
    words += [_op(IF_GREATER, LAST, 0, 1), UNKNOWN]
    words += [_op(IF_EQUAL, CLONE3, 0, 1), UNKNOWN]
    for numbers in DENIED.values():
        number = numbers[found.column]
        if number is not None:
            words += [_op(IF_EQUAL, number, 0, 1), REFUSE]
    words += _of_call(found.clone, _clone())
    words += _of_call(found.ioctl, _ioctl())
    words += _of_call(found.socket, _socket())
    words.append(PASS)
    return b"".join(words)


def _of_call(number: int, words: list[bytes]) -> list[bytes]:
    """Instructions for one call. They end by a return."""
    return [_op(IF_EQUAL, number, 0, len(words)), *words]


def _clone() -> list[bytes]:
    return [_op(LOAD, _argument(0)), _op(IF_ANY_BIT, NEW_NAMESPACES, 0, 1), REFUSE, PASS]


def _ioctl() -> list[bytes]:
    words = [_op(LOAD, _argument(1))]
    for command in INPUT_CALLS:
        words += [_op(IF_EQUAL, command, 0, 1), REFUSE]
    return [*words, PASS]


def _socket() -> list[bytes]:
    """Sockets of Unix, of the internet, and of the kernel's list of interfaces are allowed. Others
    reach past the network's namespace (vsock), or into parts of the kernel (alg, packet).
    """
    words = [_op(LOAD, _argument(0)), _op(IF_EQUAL, UNIX, 0, 1), PASS]
    routes = [_op(LOAD, _argument(2)), _op(IF_EQUAL, 0, 0, 1), PASS, REFUSE]
    words += _of_call(NETLINK, routes)
    transports = [_op(LOAD, _argument(2))]
    for protocol in TRANSPORTS:
        transports += [_op(IF_EQUAL, protocol, 0, 1), PASS]
    transports.append(REFUSE)
    for family in INTERNET:
        words += _of_call(family, transports)
    return [*words, REFUSE]
