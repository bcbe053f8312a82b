"""System calls that a contained program may make, by name, with their numbers on x86_64 and on aarch64.

What isn't here fails with "operation not permitted": sockets, mounts, namespaces, tracing, other processes' memory and
priorities, shared memory, message queues, keys, clocks, io_uring, bpf, anonymous files. A program that needs one is
the reason to add it, with a thought about what else it opens. `setsid` and `setpgid` stay out: a program's whole tree
is killed by its process group.
"""

from __future__ import annotations

_ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 preadv:295:69 pwritev:296:70
preadv2:327:286 pwritev2:328:287 open:2:- openat:257:56 close:3:57 close_range:436:436 stat:4:- fstat:5:80 lstat:6:-
newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44 access:21:- faccessat:269:48 faccessat2:439:439
lseek:8:62 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 brk:12:214 madvise:28:233 mincore:27:232
msync:26:227 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
rt_sigtimedwait:128:137 sigaltstack:131:132 fcntl:72:25 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
select:23:- pselect6:270:72 poll:7:- ppoll:271:73 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21
epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 timerfd_create:283:85
timerfd_settime:286:86 timerfd_gettime:287:87 sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121
sched_getscheduler:145:120 sched_get_priority_max:146:125 sched_get_priority_min:147:126 nanosleep:35:101
clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153
getitimer:36:102 setitimer:38:103 alarm:37:- timer_create:222:107 timer_settime:223:110 timer_gettime:224:108
timer_getoverrun:225:109 timer_delete:226:111 getpid:39:172 getppid:110:173 gettid:186:178 getpgid:121:155
getpgrp:111:- getsid:124:156 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getresuid:118:148
getresgid:120:150 getgroups:115:158 getrusage:98:165 getrlimit:97:163 setrlimit:160:164 uname:63:160 sysinfo:99:179
umask:95:166 getcwd:79:17 chdir:80:49 fchdir:81:50 mkdir:83:- mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35
rename:82:- renameat:264:38 renameat2:316:276 link:86:- linkat:265:37 symlink:88:- symlinkat:266:36 readlink:89:-
readlinkat:267:78 truncate:76:45 ftruncate:77:46 fallocate:285:47 fsync:74:82 fdatasync:75:83 getdents:78:-
getdents64:217:61 sendfile:40:71 copy_file_range:326:285 flock:73:32 fork:57:- vfork:58:- execve:59:221 exit:60:93
exit_group:231:94 wait4:61:260 waitid:247:95 kill:62:129 tgkill:234:131 tkill:200:130 set_tid_address:218:96
set_robust_list:273:99 rseq:334:293 futex:202:98 futex_waitv:449:449 membarrier:324:283 arch_prctl:158:-
getrandom:318:278 getcpu:309:168 restart_syscall:219:128 pause:34:- fadvise64:221:223 sendto:44:206 recvfrom:45:207
sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockopt:55:209 getsockname:51:204 getpeername:52:205
getpriority:140:141
"""
"""`name:x86_64:aarch64`; `-` where an architecture hasn't got it."""

_PRETENDED = """
chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utime:132:- utimes:235:- futimesat:261:- utimensat:280:88
chown:92:- lchown:94:- fchown:93:55 fchownat:260:54
"""
"""Landlock doesn't see these, so they could change files outside: they do nothing and return success."""

_CHECKED = """
clone:56:220 clone3:435:435 prlimit64:302:261 ioctl:16:29 prctl:157:167 socketpair:53:199
"""
"""Their arguments are checked, see `confine.py`."""

_CONFINING = """
setpgid:109:154 landlock_create_ruleset:444:444 landlock_add_rule:445:445 landlock_restrict_self:446:446
"""
"""A forked process confines itself with these, and two options of `prctl`; then they are refused, too."""

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column and audit architecture by `os.uname().machine`."""


def _numbers(table: str, column: int) -> dict[str, int]:
    rows = (entry.split(":") for entry in table.split())
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def allowed(column: int) -> dict[str, int]:
    """Return the calls that are allowed whatever their arguments."""
    return _numbers(_ALLOWED, column)


def pretended(column: int) -> dict[str, int]:
    """Return the calls that do nothing and succeed."""
    return _numbers(_PRETENDED, column)


def checked(column: int) -> dict[str, int]:
    """Return the calls that are allowed with some arguments."""
    return _numbers(_CHECKED, column)


def confining(column: int) -> dict[str, int]:
    """Return the calls that a process may make until it is confined."""
    return _numbers(_CONFINING, column)
