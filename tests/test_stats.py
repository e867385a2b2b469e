"""Counters and the snapshot made of them."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from offload.stats import LINKS, Counters, LinkStats, Stats


def snapshot(links: dict[str, LinkStats]) -> Stats:
    zero = {"device": 0, "cpu": 0, "nvme": 0}
    return Stats(
        step=0,
        skipped_steps=0,
        links=links,
        hits=0,
        misses=0,
        stalls=0,
        stall_seconds=0.0,
        update_chunks=0,
        update_stalls=0,
        update_seconds=0.0,
        update_stall_seconds=0.0,
        early_units=0,
        early_units_dropped=0,
        commits=0,
        commit_seconds=0.0,
        record_bytes=0,
        used_bytes=zero,
        peak_bytes=zero,
        budget_bytes=zero,
        loss_scale=1.0,
    )


def test_bandwidth_is_bytes_over_busy_seconds() -> None:
    assert LinkStats(3_000_000_000, 1.5).bandwidth_gb_s == 2.0
    assert LinkStats(0, 1.5).bandwidth_gb_s == 0.0
    assert LinkStats(5, 0.0).bandwidth_gb_s == 0.0


@pytest.mark.parametrize("link", LINKS)
def test_the_busiest_link_binds(link: str) -> None:
    counters = Counters()
    for name in LINKS:
        counters.add(name, size_bytes=10**9, seconds=1.0)
    counters.add(link, seconds=0.25)
    assert snapshot(counters.links()).binding_link == link


def test_counts_add_up_and_snapshots_stay() -> None:
    counters = Counters()
    counters.add("h2d", size_bytes=5, seconds=0.5)
    before = counters.links()
    counters.add("h2d", size_bytes=7)
    counters.add("compute", seconds=2.0)
    assert before["h2d"] == LinkStats(5, 0.5)
    assert counters.links() == {
        name: {"h2d": LinkStats(12, 0.5), "compute": LinkStats(0, 2.0)}.get(name, LinkStats(0, 0.0)) for name in LINKS
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        before["h2d"].bytes = 9  # type: ignore[misc]


def test_unknown_links_are_a_mistake() -> None:
    with pytest.raises(KeyError):
        Counters().add("pcie", size_bytes=1)


def test_counting_from_several_threads_loses_nothing() -> None:
    counters = Counters()
    start = threading.Barrier(4)

    def count() -> None:
        start.wait()
        for _ in range(2000):
            counters.add("d2h", size_bytes=3, seconds=0.25)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.links()["d2h"] == LinkStats(4 * 2000 * 3, 4 * 2000 * 0.25)  # exact in binary
