from __future__ import annotations

import json

import pytest

from pipeline.errors import TopologyError
from pipeline.topology import Level, Topology, flat, read_topology, topology_from_json, topology_to_json

TWO_SERVERS = Topology((Level(4, 10e9, 1e-6), Level(2, 1e9, 5e-6, "uplink")), 16e9)


def test_devices_of_one_server_talk_over_its_links_and_others_over_the_network():
    assert TWO_SERVERS.devices == 8
    assert [TWO_SERVERS.level_between(0, d) for d in range(8)] == [-1, 0, 0, 0, 1, 1, 1, 1]
    assert TWO_SERVERS.transfer(0, 3) == (1e-6, 1e-10, (("link", 0, 3),))
    assert TWO_SERVERS.transfer(5, 2) == (5e-6, 1e-9, (("out", 1, 1), ("in", 1, 0)))
    assert TWO_SERVERS.transfer(2, 2) == (0.0, 0.0, ())


def test_transfers_over_a_medium_contend_within_their_component_only():
    topology = Topology((Level(2, 1e9, sharing="medium"), Level(2, 1e9)))
    assert topology.transfer(0, 1)[2] == topology.transfer(1, 0)[2] != topology.transfer(2, 3)[2]


def test_a_ring_is_as_fast_as_its_slowest_link():
    assert TWO_SERVERS.ring_seconds_per_byte([1]) == 0
    assert TWO_SERVERS.ring_seconds_per_byte([1, 2, 3]) == 1e-10
    assert TWO_SERVERS.ring_seconds_per_byte([2, 3, 4]) == 1e-9


def test_a_topology_survives_writing_and_reading(tmp_path):
    (tmp_path / "t.json").write_text(json.dumps(topology_to_json(TWO_SERVERS)))
    assert read_topology(tmp_path / "t.json") == TWO_SERVERS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "lacks the key 'levels'"),
        ({"levels": []}, "at least one level"),
        ({"levels": [{"count": 2}]}, "malformed"),
        ({"levels": [{"count": 0, "bandwidth": 1}]}, "at least 1"),
        ({"levels": [{"count": 2, "bandwidth": 0}]}, "must be positive"),
        ({"levels": [{"count": 2, "bandwidth": 1, "sharing": "bus"}]}, "none, uplink, medium"),
        ({"levels": [{"count": 2, "bandwidth": 1}], "memory_bytes": -1}, "must be positive"),
    ],
)
def test_a_bad_topology_is_an_error_that_says_what_is_wrong(content, message):
    with pytest.raises(TopologyError, match=message):
        topology_from_json(content)


def test_a_device_that_does_not_exist_is_an_error():
    with pytest.raises(TopologyError, match="device 4 does not exist; there are 4"):
        flat(4, 1e9).transfer(0, 4)
