"""Programs that try to get past a sandbox. Each says in a sentence what it attempts.

A program that gets past prints `ESCAPED`. One that was refused goes on to its end and prints `blocked`, so that a program
which merely fails proves nothing. `limit` names the limit that must end it instead, where there is nothing to refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import dedent

PRELUDE = """
import ctypes, errno, json, mmap, os, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
told = json.loads(sys.stdin.read())

def escaped(what=""):
    print("ESCAPED", what, flush=True)
    os._exit(3)

def call(name, *args):
    number = told["calls"][name] if isinstance(name, str) else name
    if number is None:
        raise OSError(errno.ENOSYS, "no such call")
    ctypes.set_errno(0)
    found = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    if found == -1:
        raise OSError(ctypes.get_errno(), name)
    return found

def refused(attempt, *args):
    try:
        found = attempt(*args)
    except OSError as error:
        return error.errno
    escaped(f"{args} gave {found!r}")

def hold(seconds=60):
    sys.stdout.flush()
    time.sleep(seconds)
"""


@dataclass(frozen=True)
class Escape:
    name: str
    attempt: str
    """What it attempts, in a sentence."""
    body: str
    limit: tuple[str, ...] = ()
    """The limits of which one must end it, if it is not refused."""
    works_outside: bool = False
    """Whether it gets past where there is no sandbox, as the proof that it tries what it says."""
    machines: tuple[str, ...] = ("x86_64", "aarch64")
    options: dict[str, object] = field(default_factory=dict)

    @property
    def program(self) -> str:
        return f"{PRELUDE}\n{dedent(self.body)}\nprint('blocked', flush=True)\n"


MB = 2**20
ESCAPES = [
    # --- Memory ---------------------------------------------------------------------------------------------------
    Escape(
        "memfd",
        "It holds memory in a file without a name, which no process has mapped.",
        """
        refused(call, "memfd_create", b"x", 0)
        refused(lambda: os.memfd_create("x"))
        """,
        works_outside=True,
    ),
    Escape(
        "secret_memory",
        "It holds memory that even the kernel does not map.",
        'refused(call, "memfd_secret", 0)',
    ),
    Escape(
        "sysv_segment",
        "It holds memory in a segment of System V, which outlives its process.",
        """
        refused(call, "shmget", 0, 400 * 2**20, 0o1600)
        refused(call, "shmat", 0, 0, 0)
        """,
        works_outside=True,
    ),
    Escape(
        "sysv_messages",
        "It holds memory in queues of messages and in sets of semaphores of System V.",
        """
        refused(call, "msgget", 0, 0o1600)
        refused(call, "semget", 0, 32000, 0o1600)
        """,
        works_outside=True,
    ),
    Escape(
        "posix_messages",
        "It holds memory in queues of messages of POSIX.",
        'refused(call, "mq_open", b"x", os.O_CREAT | os.O_RDWR, 0o600, None)',
        works_outside=True,
    ),
    Escape(
        "tmpfs_in_nested_namespaces",
        "It makes a user namespace of its own, where it may mount a file system in memory without a size.",
        """
        refused(call, "unshare", 0x10000000 | 0x00020000)
        refused(lambda: subprocess.run(["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/tmp"], check=True).returncode
                if not subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode else refuse())
        """.replace("refuse()", "(_ for _ in ()).throw(OSError(1, 'refused'))"),
        works_outside=True,
    ),
    Escape(
        "one_process",
        "One process takes more memory than all may have.",
        """
        try:
            kept = bytearray(told["memory"] + 2**20)
        except MemoryError:
            pass
        else:
            escaped()
        """,
    ),
    Escape(
        "many_processes",
        "Each of several processes stays below the limit, but together they hold more.",
        """
        for n in range(5):
            if os.fork() == 0:
                kept = b"1" * (told["memory"] // 3)
                hold()
        hold()
        """,
        limit=("memory",),
    ),
    Escape(
        "shared_mappings",
        "It writes to shared memory, and drops the pages from its own count, in several processes.",
        """
        kept = []
        for n in range(4):
            if os.fork() == 0:
                kept.append(mmap.mmap(-1, told["memory"] // 3))
                for at in range(0, len(kept[0]), 4096):
                    kept[0][at] = 1
                kept[0].madvise(mmap.MADV_DONTNEED)
                hold()
        hold()
        """,
        limit=("memory",),
    ),
    Escape(
        "raised_limits",
        "It raises its own limits of memory, files, and processes.",
        """
        import resource
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_NOFILE):
            for wanted in (resource.RLIM_INFINITY, resource.getrlimit(kind)[1] + 1):
                try:
                    resource.setrlimit(kind, (wanted, wanted))
                except (ValueError, OSError):
                    continue
                escaped(kind)
        """,
    ),
    Escape(
        "attributes_of_files",
        "It holds memory in attributes of files, which no size of a folder counts.",
        """
        open("x", "w").close()
        refused(lambda: os.setxattr("x", "user.a", b"0" * 65536))
        """,
    ),
    Escape(
        "io_uring",
        "It makes a ring of requests, through which calls go past a filter.",
        'refused(call, "io_uring_setup", 8, ctypes.create_string_buffer(256))',
    ),
    Escape(
        "aio",
        "It takes rings of asynchronous requests, of which the machine has few.",
        'refused(call, "io_setup", 60000, ctypes.byref(ctypes.c_ulong(0)))',
        works_outside=True,
    ),
    # --- Disk -----------------------------------------------------------------------------------------------------
    Escape(
        "all_folders",
        "It fills every folder that it may write to, each up to the limit.",
        """
        sizes = {}
        for folder in (".", "/tmp", "/var/tmp", "/dev/shm", os.environ["HOME"], "/dev", "/devices", "/run", "/"):
            for n in range(12):
                try:
                    with open(f"{folder}/{len(sizes)}-{n}", "wb") as file:
                        file.write(b"0" * 2**20)
                except OSError:
                    pass
                if os.path.exists(f"{folder}/{len(sizes)}-{n}"):
                    found = os.stat(f"{folder}/{len(sizes)}-{n}")
                    sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
        if sum(sizes.values()) > told["disk"]:
            escaped(sizes)
        """,
    ),
    Escape(
        "many_files",
        "It makes so many empty files that the kernel's notes on them fill the memory.",
        """
        n = 0
        try:
            while n < 2_000_000:
                os.close(os.open(f"/tmp/{n}", os.O_CREAT | os.O_WRONLY))
                n += 1
        except OSError:
            print("blocked at", n)
        else:
            escaped(n)
        """,
        limit=("memory",),
        options={"memory_mb": 96},
    ),
    Escape(
        "large_file",
        "It sets the size of a file beyond its limit, with and without room for it.",
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("x", "wb") as file:
            refused(lambda: file.truncate(told["disk"] * 2))
            refused(lambda: os.posix_fallocate(file.fileno(), 0, told["disk"] * 2))
        """,
        works_outside=False,
    ),
    Escape(
        "deleted_files",
        "It fills files that have no name any more.",
        """
        kept = []
        total = 0
        try:
            for n in range(12):
                kept.append(open(f"/dev/shm/{n}", "wb", buffering=0))
                os.unlink(f"/dev/shm/{n}")
                total += kept[-1].write(b"0" * 2**20)
        except OSError:
            pass
        if total > told["disk"]:
            escaped(total)
        """,
        works_outside=True,
    ),
    # --- Network --------------------------------------------------------------------------------------------------
    Escape(
        "tcp",
        "It connects to a server of the machine.",
        'refused(lambda: socket.create_connection(("127.0.0.1", told["tcp"]), timeout=5))',
        works_outside=True,
    ),
    Escape(
        "udp",
        "It sends a datagram to the machine and beyond.",
        """
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        refused(lambda: sender.sendto(b"escaped", ("192.0.2.1", 9)))
        sender.sendto(b"escaped", ("127.0.0.1", told["udp"]))  # the test looks whether it came
        """,
    ),
    Escape(
        "ipv6",
        "It connects to the world by the other internet protocol.",
        'refused(lambda: socket.create_connection(("2001:db8::1", 9), timeout=2))',
    ),
    Escape(
        "abstract_socket",
        "It connects to a socket of the machine that has no file.",
        """
        client = socket.socket(socket.AF_UNIX)
        refused(lambda: client.connect("\\0" + told["abstract"]))
        """,
        works_outside=True,
    ),
    Escape(
        "socket_file",
        "It connects to a socket file that everybody may use.",
        """
        client = socket.socket(socket.AF_UNIX)
        refused(lambda: client.connect(told["socket"]))
        """,
        works_outside=True,
    ),
    Escape(
        "raw_sockets",
        "It opens raw sockets, of the internet and of the link.",
        """
        refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
        refused(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        """,
        works_outside=True,
    ),
    Escape(
        "netlink",
        "It speaks to parts of the kernel over netlink: the firewall, the audit, devices.",
        """
        for protocol in (4, 9, 12, 15, 16, 19):
            refused(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol))
        """,
        works_outside=True,
    ),
    Escape(
        "interfaces",
        "It adds an interface to its network, and moves its own to the machine's.",
        """
        link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        request = struct.pack("=IHHIIBxHiII", 32, 16, 0x605, 1, 0, 0, 0, 0, 1, 1)
        link.send(request)
        answer = link.recv(4096)
        kind, = struct.unpack_from("=H", answer, 4)
        code, = struct.unpack_from("=i", answer, 16)
        if kind != 2 or code == 0:
            escaped(answer)
        """,
    ),
    Escape(
        "vsock",
        "It calls the machine below this one, which no namespace of networks hides.",
        "refused(lambda: socket.socket(40, socket.SOCK_STREAM))",
        works_outside=False,
    ),
    Escape(
        "kernel_sockets",
        "It opens sockets of rare kinds, whose parts of the kernel few look at.",
        """
        for family in (3, 9, 21, 29, 30, 31, 35, 38, 39, 41, 43, 44):
            refused(lambda: socket.socket(family, socket.SOCK_DGRAM))
            refused(lambda: socket.socket(family, socket.SOCK_SEQPACKET))
        for protocol in (33, 132, 136, 262):
            refused(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol))
        """,
    ),
    # --- Files ----------------------------------------------------------------------------------------------------
    Escape(
        "files_outside",
        "It reads a file of ours, the accounts of the machine, and the run's home.",
        """
        for path in (told["secret"], "/etc/passwd", "/etc/shadow", told["home"] + "/.bashrc", "/var/log/lastlog"):
            refused(lambda: open(path).read())
        """,
        works_outside=True,
    ),
    Escape(
        "root_of_other_processes",
        "It goes to files by way of the root of other processes.",
        """
        for pid in ("1", "2", "self", str(os.getppid()), str(told["pid"])):
            refused(lambda: open(f"/proc/{pid}/root{told['secret']}").read())
            refused(lambda: open(f"/proc/{pid}/cwd/secret").read())
        """,
        works_outside=True,
    ),
    Escape(
        "descriptors",
        "It uses files that somebody left open for it.",
        """
        streams = {os.readlink(f"/proc/self/fd/{n}") for n in ("0", "1", "2")}
        for name in os.listdir("/proc/self/fd"):
            try:
                link = os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue
            if not link.startswith(("pipe:", "socket:", "/proc/")):
                escaped(link)
            if link not in streams and not link.startswith("/proc/"):
                escaped(link)
        """,
    ),
    Escape(
        "system_programs",
        "It changes the system's programs, this Python, and what it is started with.",
        """
        for path in ("/usr/bin/env", "/bin/sh", sys.executable, os.__file__, "/etc/ld.so.preload", "/lib/x.so"):
            refused(lambda: open(path, "ab"))
        refused(lambda: os.remove(os.__file__))
        refused(lambda: os.rename("/usr", "/usr2"))
        """,
    ),
    Escape(
        "links",
        "It makes links to files outside, and opens those.",
        """
        os.symlink(told["secret"], "a")
        refused(lambda: open("a").read())
        os.symlink("../../../../../.." + told["secret"], "b")
        refused(lambda: open("b").read())
        refused(lambda: os.link("/usr/bin/env", "c"))
        """,
    ),
    Escape(
        "by_handle",
        "It opens a file by its number on the disk, past every folder.",
        """
        handle = struct.pack("=Ii", 8, 1) + struct.pack("=II", 2, 0)
        refused(call, "open_by_handle_at", os.open("/usr", os.O_RDONLY), handle, 0)
        """,
    ),
    Escape(
        "memory_of_the_machine",
        "It reads the memory, the ports and the disks of the machine through devices.",
        """
        for path in ("/dev/mem", "/dev/kmem", "/dev/port", "/proc/kcore", "/dev/sda", "/dev/vda", "/dev/kmsg", "/dev/kvm", "/dev/fuse", "/dev/vsock"):
            refused(lambda: open(path, "rb").read(1))
        """,
    ),
    Escape(
        "device_files",
        "It makes a device file for a disk or for the memory.",
        """
        refused(lambda: os.mknod("disk", 0o600 | 0o060000, os.makedev(254, 0)))
        refused(lambda: os.mknod("memory", 0o600 | 0o020000, os.makedev(1, 1)))
        """,
        works_outside=True,
    ),
    Escape(
        "kernel_settings",
        "It changes settings of the kernel: the program for core dumps, names, keys for emergencies.",
        """
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname",
                     "/proc/sys/vm/overcommit_memory", "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger",
                     "/sys/kernel/uevent_helper", "/sys/power/state", "/proc/self/attr/current"):
            refused(lambda: os.write(os.open(path, os.O_WRONLY), b"x"))
        """,
    ),
    Escape(
        "spared_from_memory",
        "It has the kernel end others before itself when memory is short.",
        """
        for score in (b"-1000", b"-1"):
            refused(lambda: os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), score))
        """,
    ),
    Escape(
        "control_groups",
        "It leaves its control group, or changes the group's limits.",
        """
        for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified"):
            refused(lambda: open(f"{folder}/cgroup.procs", "w").write("0"))
            refused(lambda: os.mkdir(f"{folder}/escaped"))
        for kind in (b"cgroup", b"cgroup2"):
            refused(call, "mount", kind, b"/tmp", kind, 0, None)
        """,
    ),
    # --- Processes ------------------------------------------------------------------------------------------------
    Escape(
        "signals",
        "It ends processes of the machine.",
        """
        for pid in (told["pid"], told["parent"], 99999999):
            refused(lambda: os.kill(pid, signal.SIGTERM))
        if os.getppid() in (told["pid"], told["parent"]):
            escaped(os.getppid())
        """,
    ),
    Escape(
        "trace",
        "It takes over its parent as a debugger does.",
        """
        refused(call, "ptrace", 16, os.getppid(), 0, 0)
        refused(call, "ptrace", 0x4206, 1, 0, 0)
        """,
    ),
    Escape(
        "memory_of_others",
        "It reads and writes the memory of other processes.",
        """
        piece = struct.pack("=QQ", 4096, 8)
        refused(call, "process_vm_readv", os.getppid(), piece, 1, piece, 1, 0)
        refused(call, "process_vm_writev", 1, piece, 1, piece, 1, 0)
        refused(lambda: open(f"/proc/{told['pid']}/mem", "r+b"))
        refused(call, "pidfd_getfd", os.pidfd_open(os.getpid()), 0, 0)
        refused(call, "kcmp", os.getpid(), os.getpid(), 0, 0, 0)
        """,
    ),
    Escape(
        "environment_variables",
        "It looks for secrets in its own variables and in those of every process that it sees.",
        """
        found = os.environ.copy()
        if any("secret" in value for value in found.values()):
            escaped(found)
        for pid in os.listdir("/proc"):
            if pid.isdigit():
                try:
                    text = open(f"/proc/{pid}/environ", "rb").read()
                except OSError:
                    continue
                if told["mark"].encode() in text:
                    escaped(text)
        """,
    ),
    Escape(
        "fork_bomb",
        "It starts processes without end.",
        """
        n = 0
        try:
            while n < 1000:
                os.fork() or hold()
                n += 1
        except OSError:
            pass
        if n > told["processes"]:
            escaped(n)
        """,
    ),
    Escape(
        "thread_bomb",
        "It starts threads without end.",
        """
        import threading
        n = 0
        threading.stack_size(65536)
        try:
            while n < 1000:
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
                n += 1
        except RuntimeError:
            pass
        if n > told["processes"]:
            escaped(n)
        print("blocked", flush=True)
        os._exit(0)
        """,
    ),
    Escape(
        "daemon",
        "It leaves a process of another session behind, which has closed all files.",
        """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 100)
                os.execvp("sleep", ["sleep", told["daemon"]])
            os._exit(0)
        time.sleep(0.2)
        """,
    ),
    Escape(
        "open_daemon",
        "It leaves a process behind that holds the output open, so that nobody reads its end.",
        """
        if os.fork() == 0:
            os.setsid()
            os.execvp("sleep", ["sleep", told["daemon"]])
        time.sleep(0.2)
        """,
    ),
    Escape(
        "deaf_to_signals",
        "It ignores every signal, and runs on.",
        """
        for number in range(1, 32):
            try:
                signal.signal(number, signal.SIG_IGN)
            except OSError:
                pass
        os.setsid() if os.getpgrp() != os.getpid() else None
        hold()
        escaped()
        """,
        limit=("time",),
        options={"seconds": 1.5},
    ),
    Escape(
        "output_flood",
        "It writes more than anybody can keep, to both of its outputs.",
        """
        while True:
            os.write(1, b"x" * 65536)
            os.write(2, b"x" * 65536)
        """,
        limit=("output",),
    ),
    Escape(
        "other_processors",
        "It spreads over all processors of the machine.",
        """
        if len(os.sched_getaffinity(0)) > 1:
            escaped(os.sched_getaffinity(0))
        refused(lambda: os.sched_setaffinity(0, range(1024)))
        """,
    ),
    Escape(
        "priority",
        "It takes precedence over the machine's own processes.",
        """
        refused(lambda: os.nice(-5))
        refused(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)))
        """,
        works_outside=True,
    ),
    Escape(
        "typing_into_the_terminal",
        "It types a command into the terminal from which the run was started.",
        """
        import fcntl
        first, second = os.openpty()
        for command in (0x5412, 0x541C, 0x5412 | 1 << 32):
            refused(lambda: libc_ioctl(first, command))
        refused(lambda: os.open("/dev/tty", os.O_RDWR))
        """.replace("libc_ioctl(first, command)", 'call(told["ioctl"], first, command, b"x")'),
    ),
    # --- Rights and namespaces ------------------------------------------------------------------------------------
    Escape(
        "unshare",
        "It makes new namespaces of each kind by itself.",
        """
        for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000, 0x00000080):
            refused(call, "unshare", flag)
        """,
        works_outside=True,
    ),
    Escape(
        "clone",
        "It starts a process in new namespaces, by the older call.",
        """
        for flag in (0x10000000, 0x00020000, 0x20000000, 0x40000000, 0x08000000, 0x04000000, 0x02000000):
            try:
                child = call(told["clone"], flag | signal.SIGCHLD, 0, 0, 0, 0)
            except OSError:
                continue
            if child == 0:
                os._exit(0)
            escaped(flag)
        """,
        works_outside=True,
    ),
    Escape(
        "clone3",
        "It starts a process in a new user namespace by the newer call, whose flags no filter can read.",
        """
        request = struct.pack("=11Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, 0)
        try:
            child = call(435, request, len(request))
        except OSError as error:
            if error.errno != errno.ENOSYS:  # libraries take the older call then, and only then
                escaped(error)
        else:
            if child == 0:
                os._exit(0)
            escaped(child)
        """,
        works_outside=True,
    ),
    Escape(
        "setns",
        "It enters the namespaces of another process.",
        """
        for kind in ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup"):
            for pid in ("1", "self"):
                try:
                    handle = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
                except OSError:
                    continue
                refused(call, "setns", handle, 0)
        refused(call, "setns", os.pidfd_open(os.getpid()), 0x00020000)
        """,
        works_outside=True,
    ),
    Escape(
        "mount",
        "It mounts file systems, and makes read-only ones writable.",
        """
        refused(call, "mount", b"none", b"/tmp", b"tmpfs", 0, None)
        refused(call, "mount", b"none", b"/usr", b"none", 32 | 4096, None)
        refused(call, "mount", b"proc", b"/proc", b"proc", 0, None)
        refused(call, "umount2", b"/usr", 2)
        """,
    ),
    Escape(
        "newer_mount",
        "It mounts by the newer calls.",
        """
        refused(call, "fsopen", b"tmpfs", 0)
        refused(call, "open_tree", -100, b"/", 1)
        refused(call, "move_mount", -100, b"/usr", -100, b"/tmp", 0)
        refused(call, "mount_setattr", -100, b"/usr", 0, b"0" * 32, 32)
        refused(call, 467, -100, b"/usr", 0, b"0" * 32, 32)
        """,
        works_outside=True,
    ),
    Escape(
        "other_root",
        "It changes its root to see more.",
        """
        os.mkdir("new")
        refused(lambda: os.chroot("new"))
        refused(call, "pivot_root", b"new", b"new")
        """,
        works_outside=True,
    ),
    Escape(
        "setuid_programs",
        "It runs programs that make their user root.",
        """
        for path in ("/usr/bin/su", "/usr/bin/mount", "/usr/bin/sudo", "/usr/bin/newuidmap", "/usr/bin/passwd", "/bin/umount"):
            if os.path.exists(path):
                ran = subprocess.run([path, "--version"], capture_output=True)
        status = open("/proc/self/status").read()
        if "NoNewPrivs:\\t1" not in status or "Seccomp:\\t2" not in status:
            escaped(status)
        os.symlink("/usr/bin/env", "env")
        refused(lambda: os.chown("env", 0, 0, follow_symlinks=False))
        """,
    ),
    Escape(
        "other_users",
        "It becomes another user, or root.",
        """
        for user in (0, 1, 1000):
            refused(lambda: os.setresuid(user, user, user))
            refused(lambda: os.setresgid(user, user, user))
        refused(lambda: os.setgroups([0]))
        if os.getuid() == 0 or 0 in os.getgroups():
            escaped(os.getuid())
        """,
        works_outside=True,
    ),
    Escape(
        "capabilities",
        "It takes back privileges that it was started without.",
        """
        status = open("/proc/self/status").read()
        for kind in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
            if f"{kind}:\\t{0:016x}" not in status:
                escaped(kind)
        head = struct.pack("=Ii", 0x20080522, 0)
        refused(call, {"x86_64": 126, "aarch64": 91}[os.uname().machine], head, struct.pack("=6I", *[1 << 21] * 6))
        if libc.prctl(47, 2, 21, 0, 0) == 0:
            escaped("ambient")
        """,
    ),
    # --- The kernel -----------------------------------------------------------------------------------------------
    Escape(
        "keys",
        "It reads and adds keys of the kernel, which no namespace hides.",
        """
        refused(call, "keyctl", 0, -3, 0)
        refused(call, "add_key", b"user", b"x", b"y", 1, -4)
        refused(call, "request_key", b"user", b"x", 0, -4)
        """,
        works_outside=True,
    ),
    Escape(
        "bpf",
        "It loads a program into the kernel.",
        'refused(call, "bpf", 0, ctypes.create_string_buffer(struct.pack("=IIIII", 2, 4, 4, 1, 0), 128), 128)',
    ),
    Escape(
        "performance_counters",
        "It watches the machine through counters of performance.",
        'refused(call, "perf_event_open", ctypes.create_string_buffer(struct.pack("=IIQ", 1, 112, 0), 112), 0, -1, -1, 0)',
        works_outside=True,
    ),
    Escape(
        "page_faults",
        "It stops the kernel in the middle of its work by answering page faults itself.",
        'refused(call, "userfaultfd", 1)',
    ),
    Escape(
        "modules",
        "It loads a module into the kernel, or another kernel.",
        """
        refused(call, "init_module", b"x", 1, b"")
        refused(call, "finit_module", 0, b"", 0)
        refused(call, "delete_module", b"loop", 0o4000)
        refused(call, "kexec_load", 0, 0, None, 0)
        """,
    ),
    Escape(
        "clock_and_power",
        "It sets the clock, and turns the machine off.",
        """
        refused(call, "clock_settime", 0, b"\\xff" * 16)
        refused(call, "settimeofday", b"\\xff" * 16, None)
        refused(call, "reboot", 0, 0, 0, None)
        refused(call, "swapon", b"/tmp/x", 0)
        refused(call, "acct", b"/tmp/x")
        """,
    ),
    Escape(
        "name_of_the_machine",
        "It gives the machine another name.",
        """
        refused(call, "sethostname", b"escaped", 7)
        refused(call, "setdomainname", b"escaped", 7)
        """,
    ),
    Escape(
        "kernel_messages",
        "It reads what the kernel has logged.",
        'refused(call, "syslog", 3, ctypes.create_string_buffer(4096), 4096)',
        works_outside=True,
    ),
    Escape(
        "x32_calls",
        "It makes calls by the numbers of x32, which a list of numbers may have forgotten.",
        """
        refused(call, 0x40000000 | told["calls"]["memfd_create"], b"x", 0)
        refused(call, 0x40000000 | 39)
        """,
        machines=("x86_64",),
    ),
    Escape(
        "calls_of_32_bits",
        "It makes calls as 32-bit programs do, which have other numbers.",
        """
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(b"\\x53\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\x5b\\xc3")  # getpid by int 0x80
        run = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
        child = os.fork()
        if child == 0:
            os._exit(7 if run() > 0 else 8)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            escaped(status)
        """,
        works_outside=True,
        machines=("x86_64",),
    ),
    Escape(
        "unknown_calls",
        "It makes calls that are newer than the filter.",
        """
        for number in (463, 467, 500, 1000, 2**31 - 1):
            if refused(call, number, 0, 0, 0) != errno.ENOSYS:
                escaped(number)
        """,
    ),
    Escape(
        "filter_of_its_own",
        "It adds a filter that allows everything, as if that took back the first one.",
        """
        everything = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000))
        program = struct.pack("=HxxxxxxQ", 1, ctypes.addressof(everything))
        libc.prctl(22, 2, program, 0, 0)
        refused(call, "memfd_create", b"x", 0)
        refused(call, "unshare", 0x10000000)
        """,
        works_outside=True,
    ),
]
