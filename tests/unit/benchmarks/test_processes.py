"""What /proc says of a process."""

import os

import pytest

from rows.processes import BenchError, parse_usage, read_usage

STAT = "42 (a (strange) name) S 1 42 42 0 -1 4194304 5 6 0 0 150 50 0 0 20 0 1 0 9 10 11"
STATUS = (
    "Name:\tx\nVmPeak:\t 9 kB\nVmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n"
    "RssAnon:\t 512 kB\nRssFile:\t 500 kB\nThreads:\t1\n"
)


def test_cpu_time_and_memory_are_read():
    usage = parse_usage(STAT, STATUS)
    assert usage.cpu_s == 200 / os.sysconf("SC_CLK_TCK")
    assert usage.rss_bytes == 1024 * 1024
    assert usage.peak_rss_bytes == 2048 * 1024
    assert usage.private_bytes == 512 * 1024


def test_our_own_process_can_be_measured():
    usage = read_usage(os.getpid())
    assert 0 < usage.rss_bytes <= usage.peak_rss_bytes
    assert usage.cpu_s > 0


def test_a_process_that_is_gone_is_told_of():
    with pytest.raises(BenchError, match="cannot be measured"):
        read_usage(2**31 - 1)
