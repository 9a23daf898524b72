"""What a process may use of its machine, by what the system tells in files."""

import os

import pytest
import torch

from torchremat.planning.budgets import capacity_of, free_on
from torchremat.planning.hosts import HostMachine

GIB = 1 << 30
PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def host(tmp_path):
    write(
        tmp_path, "proc/meminfo", "MemTotal: 99 kB\nMemFree:        1024 kB\nMemAvailable:   4194304 kB\nCached: 9 kB\n"
    )
    return HostMachine(tmp_path)


def write(root, name, text):
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(str(text))


def second(host, folder, *, limit, current=0, numbers=""):
    for name, value in (("max", limit), ("current", current), ("stat", numbers)):
        write(host.root, f"sys/fs/cgroup/{folder}memory.{name}", f"{value}\n")


def first(host, folder, *, limit, usage=0, numbers=""):
    for name, value in (("limit_in_bytes", limit), ("usage_in_bytes", usage), ("stat", numbers)):
        write(host.root, f"sys/fs/cgroup/memory/{folder}memory.{name}", f"{value}\n")


def test_the_cache_of_files_is_free(host):
    # Free was what nothing at all had used, so that after reading a data set plans were made without a fine profile.
    assert host.free_bytes() == 4 * GIB
    assert host.capacity_bytes() == PHYSICAL


def test_without_a_word_of_the_system_free_pages_are_counted(tmp_path):
    assert 0 < HostMachine(tmp_path).free_bytes() < PHYSICAL


def test_a_control_group_has_a_limit(host):
    write(host.root, "proc/self/cgroup", "0::/job/step\n")
    second(host, "job/step/", limit=3 * GIB, current=2 * GIB, numbers="anon 5\ninactive_file 1000\nactive_file 24\n")
    second(host, "job/", limit="max", current=9 * GIB)

    assert host.capacity_bytes() == 3 * GIB
    assert host.free_bytes() == GIB + 1024


def test_the_limits_around_a_group_hold_too(host):
    write(host.root, "proc/self/cgroup", "0::/job/step\n")
    second(host, "job/step/", limit=3 * GIB, current=1 * GIB)
    second(host, "job/", limit=2 * GIB, current=2 * GIB + 1)

    assert host.capacity_bytes() == 2 * GIB
    assert host.free_bytes() == 0


def test_a_container_sees_its_own_group_as_the_root(host):
    write(host.root, "proc/self/cgroup", "0::/docker/0123\n")
    second(host, "", limit=GIB, current=GIB // 4)

    assert host.capacity_bytes() == GIB
    assert host.free_bytes() == 3 * GIB // 4


def test_control_groups_of_the_first_version(host):
    lines = "5:cpu,cpuacct:/job\n4:hugetlb,memory:/job\n1:name=systemd:/job\n0::/job\n"
    write(host.root, "proc/self/cgroup", lines)
    first(host, "job/", limit=2 * GIB, usage=2 * GIB, numbers=f"inactive_file 7\ntotal_inactive_file {GIB}\n")
    first(host, "", limit=9223372036854771712, usage=5 * GIB)

    assert host.capacity_bytes() == 2 * GIB
    assert host.free_bytes() == GIB


def test_a_limit_without_what_is_used_leaves_what_the_system_says(host):
    write(host.root, "proc/self/cgroup", "not a line\n0::/\n")
    write(host.root, "sys/fs/cgroup/memory.max", "1073741824\n")

    assert host.free_bytes() == 4 * GIB


def test_this_machine():
    device = torch.device("cpu")

    assert 0 < free_on(device) <= capacity_of(device) <= PHYSICAL
